"""The servers' log: a line for each request, two for each run, and what went wrong.

No headers, no bodies, no query and no program, so no token either.
"""

from __future__ import annotations

import logging
import os
import sys

from ..errors import ConfigError

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def start(
    path: str | None = None, *, quiet: bool = False, only_failures_of_ours: bool = False
) -> None:
    """Write to the file `path`, else to stderr; `quiet` leaves out the lines of what went well.

    `only_failures_of_ours` leaves out programs that failed, too.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path is not None:
        handler = _File(path)
    handler.setFormatter(logging.Formatter(_FORMAT))
    ours = logging.WARNING if quiet else logging.INFO
    for name, level in (
        ("belljar", logging.ERROR if only_failures_of_ours else ours),
        ("uvicorn.error", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


class _File(logging.FileHandler):
    """Appends; a new file is its owner's only, because it tells which caller ran what and when."""

    def __init__(self, path: str) -> None:
        try:
            super().__init__(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError("log", f"{path!r} cannot be written: {error.strerror}") from None

    def _open(self):  # type: ignore[no-untyped-def]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return open(os.open(self.baseFilename, flags, 0o600), "a", encoding=self.encoding)

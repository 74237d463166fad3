"""A temporary directory of the examination's own: what is left in it was left by us.

Everything that the code under test makes goes below it, because it is TMPDIR for as long as it is
there. Other programs, and another examination at the same time, have theirs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PREFIX = "belljar-selftest-"
# A unix socket's name has 107 bytes, and what we and the backends put below takes up to 60.
_LONGEST = 45
_open: list[Path] = []


@contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory, the temporary directory of this process until it is removed.

    Inside of one it is that one: paths grow, and a socket's name must be short.
    """
    if _open:
        yield _open[0]
        return
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_short_place()))
    _open.append(path)
    try:
        path.chmod(0o711)  # guests of another user have to get through
        with temporary_directory(path):
            yield path
    finally:
        _open.clear()
        remove(path)


def _short_place() -> str:
    """The temporary directory, or the usual one if sockets in it would have names too long."""
    here = tempfile.gettempdir()
    too_long = len(os.fsencode(here)) > _LONGEST and os.access("/tmp", os.W_OK | os.X_OK)
    return "/tmp" if too_long else here


@contextmanager
def temporary_directory(path: Path) -> Iterator[None]:
    """Make `path` the temporary directory of this process and of what it starts."""
    before = tempfile.tempdir
    with environment({"TMPDIR": str(path)}):
        tempfile.tempdir = str(path)
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables in our environment, and the old ones again afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def remove(path: Path) -> None:
    """Delete a directory of ours in which a guest may have left anything.

    A run that did not come back in time may still be removing its own part of it.
    """

    def retry(function: Any, name: str, error: object) -> None:
        try:
            os.chmod(os.path.dirname(name), 0o700)
            if not os.path.islink(name):
                os.chmod(name, 0o700)
            function(name)
        except FileNotFoundError:
            return

    if path.exists():
        shutil.rmtree(path, onerror=retry)

"""A file for each run, as `artifacts/executions/<timestamp>_<hash>.json`: program and result.

Which runs get one is the setting `store_code`: `always`, `on_error` (all that did not succeed), or
`never`. The hash is the program's. Nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from .. import log
from ..events import Event, RunFailed, RunFinished
from ..types import Request, Result, clean_text
from . import program

if TYPE_CHECKING:
    from ..config_keys import StoreCode


class Artifacts:
    """A sink of the engine's. A file that cannot be written is a warning in the log, not an error:
    the run is over, and its result is the caller's."""

    def __init__(self, directory: str, policy: StoreCode) -> None:
        self.directory, self.policy = directory, policy

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunFinished):
            if event.request is not None and self._wanted(event.result.success):
                self._store(event.request, _of_result(event.result))
        elif isinstance(event, RunFailed) and event.request is not None and self._wanted(False):
            failure = {"code": event.code, "message": clean_text(event.message)}
            self._store(event.request, {"backend": event.backend, "failure": failure})

    def _wanted(self, success: bool) -> bool:
        return self.policy == "always" or (self.policy == "on_error" and not success)

    def _store(self, request: Request, outcome: dict[str, Any]) -> None:
        import json

        digest = program.sha256(request)
        now = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
        content = {
            "id": request.id,
            "time": stamp,
            "language": None if request.command else request.language,
            "code": None if request.code is None else clean_text(request.code),
            "command": [clean_text(word) for word in request.command] or None,
            "sha256": digest,
            **outcome,
        }
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            path = os.path.join(self.directory, f"{stamp}_{digest[:12]}.json")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            fd = os.open(path, flags, 0o600)
            try:
                with open(fd, "w", encoding="utf-8") as file:
                    json.dump(content, file, allow_nan=False)
                    file.write("\n")
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning(f"the record of run {request.id} could not be written: {error}")


def _of_result(result: Result) -> dict[str, Any]:
    from ..records import replace

    try:
        return {"result": result.to_dict()}
    except (ValueError, TypeError, RecursionError):  # a value that has no form in JSON
        return {"result": replace(result, value=None).to_dict()}

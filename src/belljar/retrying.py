"""When a failed run may be tried elsewhere: it missed a module, and nobody can have noticed it."""

from __future__ import annotations

import re

from .backends.base import Plan
from .events import Emit, Event, Output
from .types import Result, Status

_TRACEBACK = b"Traceback (most recent call last):"
_MOST_KEPT = 1 << 20  # no traceback is longer
_MODULE = re.compile(r"No module named '([^']+)'")


class Unheard:
    """An emit that keeps a traceback to itself until it is known whether it is the last word.

    Anything else that a program says is passed on at once; then it has been heard.
    """

    def __init__(self, forward: Emit) -> None:
        self._forward = forward
        self._kept: list[Output] = []
        self._said = b""
        self._size = 0
        self.heard = False

    def __call__(self, event: Event) -> None:
        if not self.heard and isinstance(event, Output) and event.stream == "stderr":
            self._said = (self._said + event.data)[: len(_TRACEBACK)]
            if _TRACEBACK.startswith(self._said):
                self._kept.append(event)
                self._size += len(event.data)
                if self._size <= _MOST_KEPT:
                    return
                self.release()
                return
        self.release()
        self._forward(event)

    def release(self) -> None:
        """Pass on what was kept, and everything after it."""
        self.heard = True
        kept, self._kept = self._kept, []
        for event in kept:
            self._forward(event)


def missing_module(result: Result, plan: Plan, unheard: Unheard) -> str | None:
    """The module whose absence ended the run before any visible effect; None for any other end.

    "" if it was an import that failed without naming one. Where an effect could not be seen, as
    behind a writable mount or an open network, there may have been one.
    """
    policy, request, error = plan.policy, plan.request, result.error
    if (
        result.status is not Status.ERROR
        or error is None
        or error.type not in ("ImportError", "ModuleNotFoundError")
        or unheard.heard
        or result.usage.stdout_bytes
        or result.stderr.strip() != error.traceback.strip()
        or result.value is not None
        or result.displays
        or result.files
        or policy.network.mode != "off"
        or policy.filesystem.read_write
        or any(mount.mode == "rw" for mount in request.mounts)
    ):
        return None
    named = _MODULE.match(error.message)
    return named[1] if named else ""

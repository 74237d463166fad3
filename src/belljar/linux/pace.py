"""Holds a process tree to a rate of processor time by stopping and continuing it.

For runs without a control group: their watchdog calls `hold` each time it looks. A tree that is
ahead of its rate is stopped until the rate has caught up. A tree that has all of its processes
stopped cannot continue itself, but for timers that send SIGCONT; so one that goes on running while
it is stopped is ended. Times that the kernel throws away (of a child whose parent ignores SIGCHLD)
are counted only as far as a look has seen them.
"""

from __future__ import annotations

import os
import time

from .bare import signal
from .tree import cpu_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_BURST = 0.1  # of the clock's seconds: their share may be saved up, as in a control group's period
_ESCAPED = 0.3  # processor seconds while stopped; being stopped takes much less
_PASSES, _PASS_SECONDS = 20, 0.0005


class Pace:
    """`rate` is in cores. `total` is the processor time seen since it was made, in seconds."""

    def __init__(self, rate: float, members: list[int]) -> None:
        self.total = 0.0
        self._rate = rate
        self._credit = rate * _BURST
        self._last = time.monotonic()
        self._before = cpu_seconds(members)
        self._meanwhile = 0.0
        self._stopped: list[int] = []

    def hold(self, look: Callable[[], list[int]]) -> bool:
        """Stop or continue the processes that `look` lists; False if they do not stay stopped."""
        spent = self._spent(look())
        now = time.monotonic()
        earned = self._rate * (now - self._last)
        self._credit = min(self._rate * _BURST, self._credit + earned - spent)
        self._last = now
        if self._stopped:
            self._meanwhile += spent
            if self._meanwhile > _ESCAPED:
                return False
        if self._credit < 0:
            self._stop(look)
        elif self._stopped:
            self._continue()
        return True

    def _spent(self, members: list[int]) -> float:
        """Since the last look. The sum falls when a process ends that nobody waits for."""
        seconds = cpu_seconds(members)
        spent = max(0.0, seconds - self._before)
        self._before = seconds
        self.total += spent
        return spent

    def _stop(self, look: Callable[[], list[int]]) -> None:
        """Again until nobody runs: what was not stopped yet may have forked or sent SIGCONT."""
        for _ in range(_PASSES):
            running = [pid for pid in look() if _state(pid) not in b"TtZXx"]
            for pid in running:
                # One that the program itself has stopped stays stopped.
                if _send(pid, signal.SIGSTOP) and pid not in self._stopped:
                    self._stopped.append(pid)
            if not running:
                break
            time.sleep(_PASS_SECONDS)
        # What was spent until now, was before they were stopped.
        self._credit -= self._spent(look())

    def _continue(self) -> None:
        for pid in self._stopped:  # also one that has not come to stop yet
            _send(pid, signal.SIGCONT)
        self._stopped.clear()
        self._meanwhile = 0.0


def _state(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0]
    except (OSError, IndexError):  # it is gone
        return b"X"


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # gone; or a set-id tool's own process
        return False
    return True

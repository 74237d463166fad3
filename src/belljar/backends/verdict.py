"""From what the kernel saw to the one word for it. Pure, and the same for every backend."""

from __future__ import annotations

import errno
import os
import signal as signals

from ..records import record
from ..report import Report
from ..types import Limit, Status

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)

_SIGKILL = 9  # Windows has no name for it


@record
class Ending:
    """What ended a run, from the host's side.

    `reason` is empty for a natural end, else why we killed it: timeout, cancelled, oom, pids, cpu,
    disk, fuel. The counters come from the kernel; None where it does not count.
    """

    wait_status: int
    reason: str = ""
    oom_kills: int = 0
    forks_refused: int | None = None


@record
class Verdict:
    status: Status
    exit_code: int | None = None
    signal: int | None = None
    limit_hit: Limit | None = None
    warnings: tuple[str, ...] = ()


_KILLED_BY_US: dict[str, tuple[Status, Limit | None]] = {
    "timeout": (Status.TIMEOUT, None),
    "cpu": (Status.TIMEOUT, None),
    "cancelled": (Status.KILLED, None),
    "oom": (Status.OOM, None),
    "pids": (Status.LIMIT, "pids"),
    "disk": (Status.LIMIT, "disk"),
    "fuel": (Status.FUEL_EXHAUSTED, None),
}


def judge(ending: Ending, report: Report) -> Verdict:
    """The truthful status. The guest's own words (`report`) can only say which limit made it fail:
    they never turn a failure into a success."""
    code, signal = _split(ending.wait_status)
    if ending.reason:
        status, limit = _KILLED_BY_US[ending.reason]
        return Verdict(status=status, signal=signal or _SIGKILL, limit_hit=limit)
    warnings: tuple[str, ...] = ()
    if code == 0:
        if ending.oom_kills:
            warnings = ("the kernel killed a child of the program for want of memory",)
        return Verdict(status=Status.SUCCESS, exit_code=0, warnings=warnings)

    status, limit = Status.ERROR, None
    hint = report.hint
    if ending.oom_kills or hint.memory:
        status = Status.OOM
    elif ending.forks_refused or (ending.forks_refused is None and hint.errno == errno.EAGAIN):
        status, limit = Status.LIMIT, "pids"
    elif hint.errno in (errno.EMFILE, errno.ENFILE):
        status, limit = Status.LIMIT, "fds"
    elif hint.errno in _FULL or signal == getattr(signals, "SIGXFSZ", -1):
        status, limit = Status.LIMIT, "disk"
    elif signal == getattr(signals, "SIGXCPU", -1):
        status = Status.TIMEOUT
    elif signal == _SIGKILL:
        status = Status.KILLED
    return Verdict(status=status, exit_code=code, signal=signal, limit_hit=limit)


def _split(wait_status: int) -> tuple[int | None, int | None]:
    """(exit code, signal): exactly one of them is not None."""
    code = os.waitstatus_to_exitcode(wait_status)
    return (code, None) if code >= 0 else (None, -code)

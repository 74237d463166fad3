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
    disk, fuel. The counters come from the kernel; None where it does not count. `disk_full` and
    `processes_full` are measured when the program has ended: its disk is used up, and there are as
    many processes as it may have.
    """

    wait_status: int
    reason: str = ""
    oom_kills: int = 0
    forks_refused: int | None = None
    disk_full: bool = False
    processes_full: bool = False


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
    """The truthful status. What the guest reports (`report`) says which limit may have made it
    fail: it never turns a failure into a success, and names a limit only if the host confirms it.

    A MemoryError is `oom` in any case, because an allocation that the kernel refuses is counted
    nowhere; a warning says that nothing confirms it. Descriptors are counted nowhere either once
    the process has ended: a program that reports that it has too many open has failed by itself.
    """
    code, signal = _split(ending.wait_status)
    if ending.reason:
        status, limit = _KILLED_BY_US[ending.reason]
        return Verdict(status=status, signal=signal or _SIGKILL, limit_hit=limit)
    warnings: tuple[str, ...] = ()
    if code == 0:
        if ending.oom_kills:
            # The program may have gone on without it; where no control group counts, all of its
            # processes are ended at the limit. The status is the same.
            warnings = ("the kernel killed a child of the program for want of memory",)
            return Verdict(status=Status.OOM, exit_code=0, warnings=warnings)
        return Verdict(status=Status.SUCCESS, exit_code=0, warnings=warnings)

    status, limit = Status.ERROR, None
    number, reports = report.hint.errno, says_disk(ending.wait_status, report)
    unconfirmed = ""
    if ending.oom_kills:
        status = Status.OOM
    elif report.hint.memory:
        status = Status.OOM
        warnings = ("the program ended with MemoryError; the kernel ended nothing for it",)
    elif ending.forks_refused:
        status, limit = Status.LIMIT, "pids"
    elif number == errno.EAGAIN and ending.forks_refused is None:
        if ending.processes_full:
            status, limit = Status.LIMIT, "pids"
        else:
            unconfirmed = "processes"
    elif number in (errno.EMFILE, errno.ENFILE):
        unconfirmed = "open_files"
    elif reports and ending.disk_full:
        status, limit = Status.LIMIT, "disk"
    elif reports:
        unconfirmed = "disk"
    elif signal == getattr(signals, "SIGXCPU", -1):
        status = Status.TIMEOUT
    elif signal == _SIGKILL:
        status = Status.KILLED
    if unconfirmed:
        what = "SIGXFSZ" if number is None else f"{errno.errorcode[number]} ({os.strerror(number)})"
        warnings = (
            f"the program ended with {what}; nothing outside it confirms that it reached the limit"
            f" `{unconfirmed}`",
        )
    return Verdict(status=status, exit_code=code, signal=signal, limit_hit=limit, warnings=warnings)


def says_disk(wait_status: int, report: Report) -> bool:
    """Whether the program ended as one does that is refused more disk: whether to measure it."""
    _, signal = _split(wait_status)
    return report.hint.errno in _FULL or signal == getattr(signals, "SIGXFSZ", -1)


def _split(wait_status: int) -> tuple[int | None, int | None]:
    """(exit code, signal): exactly one of them is not None."""
    code = os.waitstatus_to_exitcode(wait_status)
    return (code, None) if code >= 0 else (None, -code)

"""From the end of a process tree to the one Result: the same for every backend that starts one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ..capture import HeadTail
from ..events import Displayed, Emit
from ..files.collect import bounded
from ..files.copying import NOTHING, Wanted
from ..report import NO_BUDGETS, Budgets, Report, budgets
from ..types import Display, KillProof, Result, Usage
from .verdict import Ending, judge, says_disk

if TYPE_CHECKING:
    from ..files.collect import Collected
    from ..linux.cgroup import Group
    from .base import Plan
    from .supervise import Ended, Watch

NO_CAP = 1 << 40  # of a stream's bytes, where a test has switched the cap off


def notices(disabled: frozenset[str]) -> tuple[str, ...]:
    """What a backend with layers off says in every result."""
    if not disabled:
        return ()
    return (f"layers switched off for a test: {', '.join(sorted(disabled))}",)


def captures(plan: Plan, *, capped: bool) -> dict[str, HeadTail]:
    """What keeps the two streams of a run; `capped` is false where a test has switched that off."""
    cap = plan.policy.limits.output if capped else NO_CAP
    live = plan.request.stream_cap
    return {"stdout": HeadTail(cap, live), "stderr": HeadTail(cap, live)}


def heard(plan: Plan, emit: Emit) -> tuple[Report, list[Display]]:
    """The reader of a run's frames, and the list that its displays are put into as they come."""
    shown: list[Display] = []

    def show(display: Display) -> None:
        shown.append(display)
        emit(Displayed(id=plan.request.id, display=display))

    return Report(budgets=budgets_of(plan), on_display=show), shown


def budgets_of(plan: Plan) -> Budgets:
    """What the guest may make the host keep: the enforcement report says if it is held."""
    held = plan.enforcement.get("value")
    return NO_BUDGETS if held and held.state == "absent" else budgets(plan.policy.limits)


def wanted(plan: Plan) -> Wanted:
    """Which of the run's files are brought out, how much of them, and where to."""
    request, destination = plan.request, plan.destination
    if not request.outputs and destination is None:
        return NOTHING
    total = request.outputs_total
    if total is None and destination is not None:
        # A file with holes may claim any size: no more than what the disk could hold.
        total = plan.policy.limits.disk
    return Wanted(
        globs=request.outputs or ("*",),
        each=request.outputs_each,
        total=total,
        destination=destination,
    )


def of_watch(
    plan: Plan,
    watch: Watch,
    ended: Ended,
    report: Report,
    group: Group | None,
    *,
    found: Collected,
    shown: list[Display],
    disk_full: Callable[[], bool],
    most_processes: int | None = None,
) -> Result:
    """The Result of a run that `supervise.Watch` followed, held by `group` or by none.

    `disk_full` measures, and is called only if the program says so. `most_processes` is what the
    run may have, if that is less than its policy says.
    """
    if group is not None:
        group.confirm()
    peak: int | None = ended.peak_memory
    if group is not None:
        peak = group.peak_memory()
        if peak is None and group.oom_kills():
            peak = plan.policy.limits.memory  # all of it: the kernel ended a process for that
    return of(
        plan,
        Ending(
            wait_status=ended.wait_status,
            reason=watch.reason if ended.reason == "host" else ended.reason,
            oom_kills=group.oom_kills() if group is not None else 0,
            forks_refused=group.forks_refused() if group is not None else None,
            disk_full=says_disk(ended.wait_status, report) and disk_full(),
            processes_full=_many(plan, ended, most_processes),
        ),
        report,
        watch.captured,
        wall=ended.ended - ended.started,
        cpu=ended.cpu,
        peak_memory=peak,
        survivors=ended.survivors,
        kill_seconds=ended.kill_seconds,
        found=found,
        shown=shown,
    )


def _many(plan: Plan, ended: Ended, most: int | None) -> bool:
    """Whether there were about as many processes as there may be when the first one ended.

    The supervisor and other threads count for the kernel, and some may have ended meanwhile: half
    of the number is many enough, and to have that many is the program's own doing.
    """
    allowed = plan.policy.limits.processes if most is None else most
    return 2 * (ended.left + 1) > allowed


def nearly_all(used: int, size: int) -> bool:
    """Whether a disk of `size` bytes is used up: what is refused was not written."""
    return used >= size - size // 16


def file_system_full(directory: int, size: int) -> bool:
    """Whether the memory file system of a directory, which is a run's own, holds `size` bytes or as
    many files as it can."""
    room = os.fstatvfs(directory)
    used = (room.f_blocks - room.f_bfree) * room.f_frsize
    return nearly_all(used, size) or bool(room.f_files and room.f_ffree <= room.f_files // 64)


def directories_full(paths: list[str], size: int) -> bool:
    """Whether directories of the host, which are a run's own, hold `size` bytes."""
    from ..linux.tree import disk_use

    return nearly_all(disk_use(paths, size), size)


def of(
    plan: Plan,
    ending: Ending,
    report: Report,
    captured: Mapping[str, HeadTail],
    *,
    wall: float,
    cpu: float | None,
    peak_memory: int | None,
    survivors: int,
    kill_seconds: float,
    found: Collected,
    shown: list[Display],
    warnings: Iterable[str] = (),
) -> Result:
    """The Result of a run whose processes are gone. Only its timings are for the caller to add."""
    verdict = judge(ending, report)
    stdout, stderr = captured["stdout"], captured["stderr"]
    return Result(
        id=plan.request.id,
        status=verdict.status,
        exit_code=verdict.exit_code,
        signal=verdict.signal,
        limit_hit=verdict.limit_hit,
        stdout=stdout.text(),
        stderr=stderr.text(),
        truncated=stdout.truncated or stderr.truncated or report.truncated or found.truncated,
        value=report.value,
        error=report.error if verdict.exit_code != 0 else None,
        displays=tuple(shown),
        files=found.files,
        changes=tuple(found.changes),
        usage=Usage(
            wall=wall,
            cpu=cpu,
            peak_memory=peak_memory,
            stdout_bytes=stdout.total,
            stderr_bytes=stderr.total,
        ),
        enforcement=plan.enforcement,
        kill=KillProof(
            reason=ending.reason or "ended",
            survivors=survivors,
            seconds=kill_seconds,
        ),
        backend=plan.backend,
        isolation=plan.isolation.value,
        warnings=(
            *plan.warnings, *verdict.warnings, *_explained(plan, report), *warnings,
            *report.warnings, *bounded(found.warnings),
        ),
    )  # fmt: skip


def _explained(plan: Plan, report: Report) -> Iterable[str]:
    """What a program's last error means here, where its own words do not tell."""
    files = plan.policy.filesystem
    shown = plan.request.mounts or plan.request.python or files.read_only or files.read_write
    refused = report.hint.errno in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
    if refused and shown and plan.policy.network.mode == "off":
        yield (
            "with host directories in sight and the network off a program can open no named Unix "
            "socket and no datagram pair (multiprocessing's Manager and forkserver need a name; "
            "pipes, Pool with fork or spawn and stream pairs work): a socket of the host's could "
            "lie there"
        )

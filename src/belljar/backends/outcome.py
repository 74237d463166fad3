"""From the end of a process tree to the one Result: the same for every backend that starts one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..events import Displayed, Emit
from ..report import Report
from ..types import Display, KillProof, Result, Usage
from .verdict import Ending, judge

if TYPE_CHECKING:
    from ..capture import HeadTail
    from ..collect import Collected
    from ..linux.cgroup import Group
    from .base import Plan
    from .supervise import Ended, Watch

NO_CAP = 1 << 40  # of a stream's bytes, where a test has switched the cap off


def notices(disabled: frozenset[str]) -> tuple[str, ...]:
    """What a backend with layers off says in every result."""
    if not disabled:
        return ()
    return (f"layers switched off for a test: {', '.join(sorted(disabled))}",)


def heard(plan: Plan, emit: Emit) -> tuple[Report, list[Display]]:
    """The reader of a run's frames, and the list that its displays are put into as they come."""
    shown: list[Display] = []

    def show(display: Display) -> None:
        shown.append(display)
        emit(Displayed(id=plan.request.id, display=display))

    return Report(max_value=plan.policy.limits.output, on_display=show), shown


def of_watch(
    plan: Plan,
    watch: Watch,
    ended: Ended,
    report: Report,
    group: Group | None,
    *,
    found: Collected,
    shown: list[Display],
) -> Result:
    """The Result of a run that `supervise.Watch` followed, held by `group` or by none."""
    if group is not None:
        group.confirm()
    peak = group.peak_memory() if group is not None else None
    return of(
        plan,
        Ending(
            wait_status=ended.wait_status,
            reason=watch.reason if ended.reason == "host" else ended.reason,
            oom_kills=group.oom_kills() if group is not None else 0,
            forks_refused=group.forks_refused() if group is not None else None,
        ),
        report,
        watch.captured,
        wall=ended.ended - ended.started,
        cpu=ended.cpu,
        peak_memory=peak if peak is not None else ended.peak_memory,
        survivors=ended.survivors,
        kill_seconds=ended.kill_seconds,
        found=found,
        shown=shown,
    )


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
        truncated=stdout.truncated or stderr.truncated or report.truncated,
        value=report.value,
        error=report.error if verdict.exit_code != 0 else None,
        displays=tuple(shown),
        files=found.files,
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
            *plan.warnings, *verdict.warnings, *warnings, *report.warnings, *found.warnings,
        ),
    )  # fmt: skip

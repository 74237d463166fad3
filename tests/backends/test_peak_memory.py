"""`peak_memory` of a run is the kernel's, the watchdog's, or None: never one process's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from belljar.backends import outcome
from belljar.backends.base import Plan
from belljar.files.collect import Collected
from belljar.policy import Isolation, level_policy
from belljar.report import Report
from belljar.types import Request

OF_ONE_PROCESS = 9 << 20


def peak(group: Any) -> int | None:
    policy = level_policy("standard")
    plan = Plan(
        backend="jail", isolation=Isolation.JAIL, request=Request(code="1"), policy=policy,
        enforcement={},
    )  # fmt: skip
    ended = SimpleNamespace(
        wait_status=0, reason="", cpu=0.1, peak_memory=OF_ONE_PROCESS, started=0.0, ended=1.0,
        survivors=0, kill_seconds=0.0, left=0,
    )  # fmt: skip
    watch = SimpleNamespace(reason="", captured=outcome.captures(plan, capped=True))
    result = outcome.of_watch(
        plan, watch, ended, Report(), group, found=Collected(), shown=[], disk_full=lambda: False  # type: ignore[arg-type]
    )  # fmt: skip
    return result.usage.peak_memory


def group(peak: int | None, oom_kills: int = 0) -> Any:
    return SimpleNamespace(
        confirm=lambda: None, peak_memory=lambda: peak, oom_kills=lambda: oom_kills,
        forks_refused=lambda: 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        (group(96 << 20), 96 << 20),
        (group(None), None),
        (group(None, oom_kills=1), level_policy("standard").limits.memory),
        (None, OF_ONE_PROCESS),
    ],
    ids=["counted", "not known", "all of it", "no group: the watchdog's"],
)
def test_the_peak_is_what_is_known(counted: Any, expected: int | None) -> None:
    assert peak(counted) == expected

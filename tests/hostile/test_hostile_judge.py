"""The verdict rules, on canned runs: what is held, what is breached, and what a class may show."""

from __future__ import annotations

from typing import Any

import pytest

from belljar.testing.hostile import Case, Seen
from belljar.testing.hostile.cases import Expect
from belljar.testing.hostile.judge import claimed, program_failures
from belljar.types import Result, Status


def case(**expect: Any) -> Case:
    group = expect.pop("group", "kernel")
    defaults: dict[str, Any] = {"classes": {"jail": "held"}, "asserts": ()}
    return Case(
        id="x-1",
        group=group,
        language="python",
        side="guest",
        tier="fast",
        control="safe",
        code="",
        expect=Expect(**(defaults | expect)),
    )


def ran(stdout: str = "", status: Status = Status.SUCCESS, **seen: Any) -> Seen:
    return Seen(wall=seen.pop("wall", 0.1), result=Result(status=status, stdout=stdout), **seen)


def judged(case: Case, seen: Seen, klass: str = "jail", most: float | None = None) -> list[str]:
    return [failure.check for failure in program_failures(case, klass, seen, most)]


HELD = case(verdict_any=("R:HELD",))


def test_a_matching_verdict_holds() -> None:
    assert judged(HELD, ran("noise\nR:HELD eperm\n")) == []


@pytest.mark.parametrize(
    "stdout",
    ["R:BREACH read it\n", "R:HELD one\nR:BREACH two\n", "R:REACHED kernel\n", "R:LEAK x\n"],
)
def test_any_other_verdict_line_breaches(stdout: str) -> None:
    assert judged(HELD, ran(stdout)) == ["verdict"]


@pytest.mark.parametrize("stdout", ["", "all is well\n", "not at the start R:HELD\n"])
def test_silence_where_a_verdict_is_due_does_not_hold(stdout: str) -> None:
    assert judged(HELD, ran(stdout)) == ["verdict"]


def test_a_refused_run_tested_nothing() -> None:
    assert judged(HELD, ran("R:HELD\n", Status.REFUSED)) == ["run"]
    refused = Seen(wall=0.1, failure="policy_unenforceable: network")
    assert judged(HELD, refused) == ["run"]


def test_a_failure_of_the_host_is_not_held() -> None:
    assert judged(case(), Seen(wall=0.1, failure="untyped KeyError: 'x'")) == ["run"]


def test_the_status_must_be_one_of_the_expected() -> None:
    limited = case(status_in=("timeout", "oom"))
    assert judged(limited, ran(status=Status.TIMEOUT)) == []
    assert judged(limited, ran(status=Status.SUCCESS)) == ["status_in"]


def test_the_wall_time_counts() -> None:
    assert judged(case(), ran(wall=4.9), most=5) == []
    assert judged(case(), ran(wall=5.1), most=5) == ["max_wall_s"]


def test_a_verdict_may_be_any_line_that_the_case_names() -> None:
    before = case(verdict_any=("before",))
    assert judged(before, ran("before\n")) == []
    assert judged(before, ran("after\n")) == ["verdict"]


@pytest.mark.parametrize("klass", ["gvisor", "vm"])
def test_reached_is_allowed_only_where_the_outcome_says_so(klass: str) -> None:
    outcomes = {"jail": "held", "gvisor": "held|reached", "vm": "held|reached|inner"}
    probe = case(verdict_any=("R:HELD",), classes=outcomes)
    assert judged(probe, ran("R:REACHED einval\n"), klass) == []
    assert judged(probe, ran("R:REACHED einval\n"), "jail") == ["verdict"]


def test_inner_lets_the_sandbox_harm_itself() -> None:
    outcomes = {"jail": "held", "vm": "inner", "gvisor": "held"}
    probe = case(verdict_any=("R:HELD",), classes=outcomes)
    assert judged(probe, ran("R:BREACH mounted\n"), "vm") == []
    assert judged(probe, ran("R:BREACH mounted\n"), "gvisor") == ["verdict"]


def test_an_absent_interface_may_end_in_an_error_on_wasm() -> None:
    probe = case(
        verdict_any=("R:HELD",), status_in=("success",), classes={"wasm": "na", "jail": "held"}
    )
    assert judged(probe, ran("ImportError\n", Status.ERROR), "wasm") == []
    assert judged(probe, ran("ImportError\n", Status.ERROR), "jail") == ["verdict", "status_in"]
    assert judged(probe, ran("R:BREACH\n", Status.ERROR), "wasm") == ["verdict"]


def test_a_limit_may_end_a_program_before_its_verdict() -> None:
    probe = case(verdict_any=("R:HELD",), status_in=("success", "oom"), classes={"jail": "limited"})
    assert judged(probe, ran(status=Status.OOM)) == []
    assert judged(probe, ran(status=Status.SUCCESS)) == ["verdict"]
    assert judged(probe, ran(status=Status.TIMEOUT)) == ["verdict", "status_in"]
    assert judged(probe, ran("R:BREACH\n", status=Status.OOM)) == ["verdict"]
    held = case(verdict_any=("R:HELD",), status_in=("success", "oom"))
    assert judged(held, ran(status=Status.OOM)) == ["verdict"]


def test_who_claims_what() -> None:
    memory, kernel = case(group="memory"), case(group="kernel")
    server = case(group="server", classes={"any": "held"})
    assert claimed(memory, "process") and not claimed(kernel, "process")
    assert claimed(kernel, "jail") and not claimed(kernel, "wasm")
    assert not claimed(memory, "inproc")
    assert all(claimed(server, klass) for klass in ("process", "jail", "inproc"))

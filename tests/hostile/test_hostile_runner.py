"""The runner on a scripted backend: what it counts as held, breached, pending, error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from belljar.policy import Isolation
from belljar.testing import FakeBackend, hostile
from belljar.testing.hostile import Case, Outcome, Suite, Verdict
from belljar.testing.hostile.snapshot import PATIENCE
from belljar.testing.hostile.subject import NO_ANSWER
from belljar.types import Request, Result, Status

SUITE = hostile.load()
HELD = "se-005-metadata-files"


def answer(stdout: str, status: Status = Status.SUCCESS) -> Callable[[Request], Result]:
    """Every program gets this answer, but the follow-up run is answered as it should be."""

    def respond(request: Request) -> Result:
        if request.code == "print(2+2)":
            return Result(status=Status.SUCCESS, exit_code=0, stdout="4\n")
        code = 0 if status is Status.SUCCESS else 1
        return Result(status=status, exit_code=code, stdout=stdout)

    return respond


def examine(
    respond: Callable[[Request], Result],
    *cases: Case,
    isolation: Isolation = Isolation.PROCESS,
    repeat: int = 1,
    patience: float = PATIENCE,
) -> list[Outcome]:
    backend = FakeBackend(respond, isolation=isolation)
    suite = Suite(
        cases=cases, limits=SUITE.limits, placeholders=SUITE.placeholders, meta=SUITE.meta
    )
    with hostile.World(suite) as world, hostile.EngineSubject(backend) as subject:
        runner = hostile.Runner(suite, subject, world, patience=patience)
        return runner.run(suite.cases, repeat=repeat)


def asserting(*names: str, case_id: str = HELD) -> Case:
    case = SUITE[case_id]
    return replace(case, expect=replace(case.expect, asserts=names))


def test_a_case_that_says_held_and_leaves_nothing_is_held() -> None:
    (outcome,) = examine(answer("R:HELD\n"), SUITE[HELD])
    assert (outcome.verdict, outcome.reasons) == (Verdict.HELD, ())


def test_a_breach_line_is_a_breach() -> None:
    (outcome,) = examine(answer("R:BREACH /run/secrets\n"), SUITE[HELD])
    assert outcome.verdict is Verdict.BREACHED
    assert any("R:BREACH" in reason for reason in outcome.reasons)


def test_an_assertion_that_nobody_wrote_is_an_error_and_not_a_pass() -> None:
    (outcome,) = examine(answer("R:HELD\n"), asserting("no_breach", "sky_is_blue"))
    assert outcome.verdict is Verdict.ERROR
    assert "sky_is_blue" in outcome.reasons[0]


def test_a_broken_next_run_is_a_breach() -> None:
    def once(request: Request) -> Result:
        if request.code == "print(2+2)" and "case ran" in said:
            return Result(status=Status.ERROR, exit_code=1)
        if request.code != "print(2+2)":
            said.append("case ran")
        return answer("R:HELD\n")(request)

    said: list[str] = []
    (outcome,) = examine(once, asserting("next_run_ok"))
    assert outcome.verdict is Verdict.BREACHED
    assert "next_run_ok" in outcome.reasons[0]


@pytest.mark.parametrize(
    ("slow", "verdict"),
    [
        (0, Verdict.HELD),
        (3, Verdict.HELD),  # as long as a neighbour's burst lasts
        (1, Verdict.BREACHED),  # the next one alone, each time
        (1000, Verdict.BREACHED),  # all of them
    ],
)
def test_a_slow_next_run_counts_unless_the_ones_after_it_become_fast_again(
    slow: int, verdict: Verdict
) -> None:
    left = 0

    def slowed(request: Request) -> Result:
        nonlocal left
        if request.code != "print(2+2)":
            left = slow
        elif left:
            left -= 1
            time.sleep(0.25)
        return answer("R:HELD\n")(request)

    (outcome,) = examine(slowed, asserting("next_run_ok"), patience=0.3)
    assert outcome.verdict is verdict


def test_a_backend_that_raises_is_not_held() -> None:
    def breaks(request: Request) -> Result:
        if request.code != "print(2+2)":
            raise RuntimeError("the sandbox fell over")
        return answer("")(request)

    (outcome,) = examine(breaks, SUITE[HELD])
    assert outcome.verdict is Verdict.BREACHED
    assert "the sandbox fell over" in outcome.reasons[0]


def test_a_case_without_its_surface_is_pending_and_not_run() -> None:
    (outcome,) = examine(answer("R:HELD\n"), SUITE["sv-001-no-token"])
    assert (outcome.verdict, outcome.runs) == (Verdict.PENDING, 0)
    assert "HTTP server" in outcome.reasons[0]


def test_a_case_that_the_class_does_not_claim_is_information() -> None:
    case = SUITE["ke-012-setns"]
    (held,) = examine(answer("R:HELD\n"), case)
    (breached,) = examine(answer("R:BREACH joined\n"), case)
    assert (held.verdict, held.saw) == (Verdict.NOT_CLAIMED, Verdict.HELD)
    assert (breached.verdict, breached.saw) == (Verdict.NOT_CLAIMED, Verdict.BREACHED)


def test_a_dangerous_case_runs_only_where_it_is_claimed() -> None:
    case = SUITE["fs-023-interpreter-poison-persists"]
    (outcome,) = examine(answer("R:HELD\n"), case)
    assert (outcome.verdict, outcome.saw, outcome.runs) == (Verdict.NOT_CLAIMED, None, 0)


def test_the_same_case_is_claimed_by_a_jail() -> None:
    (outcome,) = examine(answer("R:BREACH\n"), SUITE["ke-012-setns"], isolation=Isolation.JAIL)
    assert outcome.verdict is Verdict.BREACHED


def test_without_isolation_only_what_was_written_for_it_runs() -> None:
    written, other = SUITE["pj-001-importlib"], SUITE["pt-005-close-control-fds"]
    first, second = examine(answer("R:BREACH\n"), written, other, isolation=Isolation.NONE)
    assert first.verdict is Verdict.BREACHED
    assert (second.verdict, second.runs) == (Verdict.NOT_CLAIMED, 0)


def test_repeating_keeps_the_worst_verdict() -> None:
    lines = iter(["R:HELD\n", "R:BREACH x\n", "R:HELD\n"])

    def changing(request: Request) -> Result:
        return answer("")(request) if request.code == "print(2+2)" else answer(next(lines))(request)

    (outcome,) = examine(changing, SUITE[HELD], repeat=3)
    assert outcome.verdict is Verdict.BREACHED
    assert (outcome.runs, outcome.held) == (3, 2)


def test_noise_is_tried_again_but_a_lasting_failure_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from belljar.testing.hostile import checks
    from belljar.testing.hostile.scene import Noise

    calls: list[int] = []

    def noisy(scene: object, argument: str) -> str | None:
        calls.append(1)
        return Noise("slow") if len(calls) < failures else None

    monkeypatch.setitem(checks.CHECKS, "no_breach", noisy)
    failures = 3
    (outcome,) = examine(answer("R:HELD\n"), asserting("no_breach"))
    assert (outcome.verdict, outcome.attempts) == (Verdict.HELD, 3)
    calls.clear()
    failures = 99
    (outcome,) = examine(answer("R:HELD\n"), asserting("no_breach"))
    assert (outcome.verdict, outcome.attempts) == (Verdict.BREACHED, 3)


def test_both_halves_of_a_pair_are_in_their_sandboxes_at_the_same_time() -> None:
    import threading

    both = threading.Barrier(2)

    def respond(request: Request) -> Result:
        if request.code != "print(2+2)":
            both.wait(timeout=20)  # breaks, and fails the case, if the other half is not there
        return answer("R:HELD\n")(request)

    pair = [asserting("no_breach", case_id=f"ip-004-abstract-unix-{half}") for half in "wr"]
    outcomes = examine(respond, *pair, isolation=Isolation.JAIL)
    assert [outcome.verdict for outcome in outcomes] == [Verdict.HELD, Verdict.HELD]


class Hanging:
    """A subject that answers nothing but the plain run."""

    name, klass = "hanging", "process"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, job: hostile.Job) -> hostile.Seen:
        self.asked.append(job.code)
        if job.code == "print(2+2)":
            result = Result(status=Status.SUCCESS, exit_code=0, stdout="4\n")
            return hostile.Seen(wall=0.01, result=result)
        return hostile.Seen(wall=0.01, failure=NO_ANSWER, stopped=True)

    def terminal(self, job: hostile.Job) -> bytes:
        return b""

    def clean(self) -> None:
        return None


def test_a_backend_that_hangs_does_not_keep_the_suite_for_hours() -> None:
    subject = Hanging()
    cases = SUITE.select(groups=("secrets",))
    with hostile.World(SUITE) as world:
        outcomes = hostile.Runner(SUITE, subject, world).run(cases)
    assert [outcome.verdict for outcome in outcomes[:3]] == [Verdict.BREACHED] * 3
    assert {outcome.verdict for outcome in outcomes[3:]} == {Verdict.ERROR}
    assert "does not answer" in outcomes[-1].reasons[0]


def test_the_world_puts_everything_back() -> None:
    import os
    import tempfile

    before = (dict(os.environ), tempfile.tempdir)
    with hostile.World(SUITE) as world:
        root = world.root
        assert os.environ["HOST_SECRET"] == world.secret
        assert root.is_dir()
    assert not root.exists()
    assert (dict(os.environ), tempfile.tempdir) == before

"""What each protection is good for: with one removed, named cases breach that held with it."""

from __future__ import annotations

import sys

import pytest

from belljar.policy import Isolation
from belljar.testing import FakeBackend, hostile
from belljar.testing.hostile import Verdict
from belljar.testing.hostile.ablation import GROUPS, Ablated, ablate, layers_of, without
from belljar.types import Request, Result, Status

SUITE = hostile.load()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="layers of the Linux backend")


def subprocess_backend(*off: str) -> object:
    from belljar.backends.subprocess import SubprocessBackend

    return SubprocessBackend(disable=frozenset(off))


def breached(*cases: str, off: tuple[str, ...]) -> set[str]:
    card = hostile.examine(subprocess_backend(*off), suite=SUITE, ids=cases)  # type: ignore[arg-type]
    assert not card.of(Verdict.ERROR), card.text()
    return {outcome.case.id for outcome in card.of(Verdict.BREACHED)}


# Layers switched off -> the cases that then breach. The first of the layers is the one that is
# asked about; the others cover for it and are off in the control arm too.
NEEDED = {
    ("rlimits",): ("fd-004-inotify-epoll", "pr-016-coredump"),
    ("output_cap",): ("ou-001-stdout-flood", "ou-002-stderr-flood", "ou-004-one-line-no-newline"),
    ("subreaper", "namespaces"): ("pr-004-daemonize-survivor",),
    ("watchdog", "cgroup"): ("me-003-spread-over-children",),
    ("namespaces",): ("se-007-host-identity",),
    ("landlock",): ("se-007-host-identity",),
}


@pytest.mark.slow
@pytest.mark.parametrize("off", NEEDED, ids="+".join)
def test_without_the_layer_named_cases_breach_and_with_it_they_hold(off: tuple[str, ...]) -> None:
    cases = NEEDED[off]
    assert breached(*cases, off=off) == set(cases)
    assert breached(*cases, off=off[1:]) == set()


class House(FakeBackend):
    """Opens without its wall, or without door and lock together; the paint holds nothing."""

    layers = ("wall", "door", "lock", "paint")

    def __init__(self, *, disable: frozenset[str] = frozenset()) -> None:
        is_open = "wall" in disable or {"door", "lock"} <= disable

        def respond(request: Request) -> Result:
            if request.code == "print(2+2)":
                return Result(status=Status.SUCCESS, exit_code=0, stdout="4\n")
            verdict = "R:BREACH came in\n" if is_open else "R:HELD\n"
            return Result(status=Status.SUCCESS, exit_code=0, stdout=verdict)

        super().__init__(respond, isolation=Isolation.PROCESS)


def test_the_ablation_finds_what_needs_a_layer_and_who_covers_for_it() -> None:
    case = "se-005-metadata-files"
    found = {layer.layer: layer for layer in ablate(SUITE, House(), [SUITE[case]])}
    assert tuple(found) == House.layers
    assert (found["wall"].breached, found["wall"].also_off) == ((case,), ())
    assert "R:BREACH" in found["wall"].reasons[case][0]
    assert (found["door"].breached, found["door"].also_off) == ((case,), ("lock",))
    assert (found["lock"].breached, found["lock"].also_off) == ((case,), ("door",))
    assert found["paint"].breached == ()


def test_an_ablation_says_what_is_off_and_where_it_is_and_runs_nothing_in_vain() -> None:
    case, said = "se-005-metadata-files", []
    ablate(SUITE, House(), [SUITE[case]], say=said.append)
    assert said == [
        f"without wall: 1/1 {case}",
        f"once more without wall: 1/1 {case}",
        f"compared: with every layer: 1/1 {case}",
        f"without door: 1/1 {case}",
        f"without lock: 1/1 {case}",
        f"without paint: 1/1 {case}",
        # Not again with the wall off, which shows everything already; nor lock and door anew.
        f"without door and lock: 1/1 {case}",
        f"once more without door and lock: 1/1 {case}",
        f"compared: without lock: 1/1 {case}",
        f"once more without door and lock: 1/1 {case}",
        f"compared: without door: 1/1 {case}",
        f"without door and paint: 1/1 {case}",
        f"without lock and paint: 1/1 {case}",
    ]


def test_a_layer_meets_only_cases_that_it_can_matter_for() -> None:
    class Known(House):
        layers = ("output_cap", "seccomp")

    about = {"se-005-metadata-files": "seccomp", "rv-001-pickle-reduce": "output_cap"}
    said: list[str] = []
    ablate(SUITE, Known(), [SUITE[case] for case in about], say=said.append)
    for case, layer in about.items():
        assert [line.split(":")[0] for line in said if case in line] == [f"without {layer}"]


def test_every_known_layer_has_groups_that_exist() -> None:
    groups = {case.group for case in SUITE.cases}
    assert all(named and named <= groups for named in GROUPS.values())


def test_a_layer_that_no_case_needs_is_reported() -> None:
    unneeded = Ablated(layer="decoration", reasons={})
    card = hostile.Card(backend="x", klass="process", outcomes=(), ablation=(unneeded,))
    assert "decoration: no case needs it" in card.text()


def test_a_backend_without_layers_is_told_so() -> None:
    with pytest.raises(hostile.CasesInvalid, match="no layers"):
        layers_of(FakeBackend())


def test_a_layer_switched_off_is_off() -> None:
    backend = without(subprocess_backend(), ["rlimits"])  # type: ignore[arg-type]
    assert "rlimits" in " ".join(backend.probe().notes)

"""The landlock backend against hostile cases without cgroups, and what each layer is good for."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

from belljar.backends.landlock import LandlockBackend
from belljar.linux import probe
from belljar.testing import hostile
from belljar.testing.hostile import Verdict
from belljar.testing.hostile.judge import LANDLOCK_LACKS, claimed

SUITE = hostile.load()
_FOUND = LandlockBackend().probe()
pytestmark = [
    pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason),
    pytest.mark.slow,
]


class Poorer(LandlockBackend):
    """As in a default container: neither user namespaces nor cgroups."""

    def __init__(self, *, disable: frozenset[str] = frozenset()) -> None:
        facts = replace(probe.facts(), userns=False, userns_problem="test", cgroup=None)
        super().__init__(disable=disable, facts=facts)


# What depends on who ends and counts the tree; `test_hostile_backends` runs all groups.
@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", ["process", "memory"])
def test_every_claimed_case_is_held_without_cgroups(group: str) -> None:
    card = hostile.examine(Poorer(), suite=SUITE, groups=(group,), claimed_only=True)
    assert card.of(Verdict.HELD)
    assert not card.failed, card.text()


def test_what_is_not_claimed_is_what_namespaces_are_needed_for() -> None:
    for name in LANDLOCK_LACKS:
        assert claimed(SUITE[name], "jail")
        assert not claimed(SUITE[name], "landlock")
    everything = [case for case in SUITE.cases if claimed(case, "jail")]
    assert sum(claimed(case, "landlock") for case in everything) == len(everything) - 6


# Layers switched off -> the cases that then breach. The first of the layers is the one that is
# asked about; the others cover for it and are off in the control arm too.
NEEDED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("landlock",): (
        "fs-001-read-canary-abs", "fs-007-overwrite-canary-flags", "ps-016-host-pids-visible",
    ),
    ("seccomp",): (
        "ke-010-clone-newuser", "ke-013-keyctl", "ne-010-vsock-local",
        "ne-012-unix-control-sockets",
    ),
    ("rlimits",): ("fd-004-inotify-epoll", "pr-016-coredump"),
    ("output_cap",): ("ou-001-stdout-flood",),
    ("subreaper",): ("pr-004-daemonize-survivor",),
    ("watchdog",): ("me-003-spread-over-children",),
}  # fmt: skip


@pytest.mark.parametrize("off", NEEDED, ids="+".join)
def test_without_the_layer_named_cases_breach_and_with_it_they_hold(off: tuple[str, ...]) -> None:
    cases = NEEDED[off]

    def breached(layers: tuple[str, ...]) -> set[str]:
        card = hostile.examine(Poorer(disable=frozenset(layers)), suite=SUITE, ids=cases)
        assert not card.of(Verdict.ERROR), card.text()
        return {outcome.case.id for outcome in card.of(Verdict.BREACHED)}

    assert breached(off) == set(cases)
    assert breached(off[1:]) == set()

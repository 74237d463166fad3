"""Every backend of this host against the fast tier: what its class claims, it holds."""

from __future__ import annotations

import pytest

from belljar.backends import registry
from belljar.policy import Isolation
from belljar.testing import hostile
from belljar.testing.hostile import Verdict
from belljar.testing.hostile.judge import claimed
from belljar.testing.hostile.pending import missing_surface
from belljar.testing.hostile.subject import class_of

SUITE = hostile.load()


def present() -> list[str]:
    found = []
    for name in registry.names():
        backend = registry.load(name)
        if backend.isolation is not Isolation.NONE and backend.probe().available:
            found.append(name)
        backend.close()
    return found


def batches() -> list[tuple[str, str]]:
    """(backend, group): one test each, so that a failure names both and no test is long."""
    found = []
    for name in present():
        klass = class_of(registry.load(name).isolation)
        cases = SUITE.select(tier="fast")
        mine = [c for c in cases if claimed(c, klass) and missing_surface(c) is None]
        found += [(name, group) for group in dict.fromkeys(case.group for case in mine)]
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("backend", "group"), batches())
def test_every_claimed_case_is_held(backend: str, group: str) -> None:
    card = hostile.examine(backend, suite=SUITE, groups=(group,), claimed_only=True)
    assert card.of(Verdict.HELD)
    assert not card.failed, card.text()


def test_inprocess_is_shown_to_be_no_isolation() -> None:
    card = hostile.examine("inprocess", suite=SUITE, groups=("pyjail",))
    assert card.klass == "inproc"
    assert card.failed
    # What is not breached needs JavaScript, a browser's bridge or a library that refuses by itself.
    assert len(card.of(Verdict.BREACHED)) >= 10
    assert "no isolation" in card.text()


def test_inprocess_runs_nothing_that_would_hit_the_harness_itself() -> None:
    card = hostile.examine("inprocess", suite=SUITE, groups=("protocol", "process"))
    assert all(outcome.runs == 0 for outcome in card.outcomes)

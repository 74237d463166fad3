"""Every backend of this host against the fast tier: what its class claims, it holds."""

from __future__ import annotations

import container_backends
import container_engines
import pytest

from belljar.backends import registry
from belljar.policy import Isolation
from belljar.testing import hostile
from belljar.testing.hostile import Verdict
from belljar.testing.hostile.judge import claimed
from belljar.testing.hostile.pending import missing_surface
from belljar.testing.hostile.subject import class_of

SUITE = hostile.load()
# These ask how much memory or disk the whole host has in use: not two of them at the same time.
MEASURE_THE_HOST = ("memory", "disk", "output")
_AGAIN = 3


def present() -> list[str]:
    found = []
    for name in registry.names():
        if name in container_backends.KINDS:
            found += [name] if not container_backends.why_not(name) else []
            continue
        backend = registry.load(name)
        if backend.isolation is not Isolation.NONE and backend.probe().available:
            found.append(name)
        backend.close()
    return found


def batches() -> list[object]:
    """(backend, group): one test each, so that a failure names both and no test is long."""
    found: list[object] = []
    for name in present():
        klass = class_of(registry.load(name).isolation)
        cases = SUITE.select(tier="fast")
        mine = [c for c in cases if claimed(c, klass) and missing_surface(c) is None]
        for group in dict.fromkeys(case.group for case in mine):
            marks: tuple[pytest.MarkDecorator, ...] = ()
            if name in container_backends.KINDS:
                marks = (container_engines.TOGETHER,)
            elif group in MEASURE_THE_HOST:
                marks = (pytest.mark.xdist_group("measure the host"),)
            found.append(pytest.param(name, group, marks=marks))
    return found


def _measured_on_the_host(card: hostile.Card) -> tuple[str, ...]:
    """The cases that failed, if each did only for what the whole host had in use."""
    failed = card.of(Verdict.BREACHED)
    reasons = [reason for outcome in failed for reason in outcome.reasons]
    only = all(reason.startswith(("host_mem_", "host_disk_")) for reason in reasons)
    only = only and not card.of(Verdict.ERROR)
    return tuple(outcome.case.id for outcome in failed) if only else ()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "group"), batches())
def test_every_claimed_case_is_held(
    backend: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend in container_backends.KINDS:
        container_backends.close_all()
        session = container_engines.session("docker")
        session.images("node", "bash")
        monkeypatch.setenv("DOCKER_HOST", session.host)
    card = hostile.examine(backend, suite=SUITE, groups=(group,), claimed_only=True)
    assert card.of(Verdict.HELD)
    for _ in range(_AGAIN):
        # What a neighbour of ours took is not there again; what the guest took is.
        if not (again := _measured_on_the_host(card)):
            break
        card = hostile.examine(backend, suite=SUITE, ids=again, claimed_only=True)
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

"""The control arms: without a sandbox the detectors fire, as a user that nobody is."""

from __future__ import annotations

import os
import pwd
import tempfile

import pytest

from belljar.testing import hostile
from belljar.testing.hostile import control, snapshot
from belljar.testing.hostile.judge import claimed
from belljar.testing.hostile.pending import missing_surface

SUITE = hostile.load()
needs_root = pytest.mark.skipif(
    control.possible() is not None, reason=control.possible() or "control arms run here"
)
# Raising a hard limit needs a capability that even root may not have.
# The second attacks the collector of files, of which there is none without a sandbox.
CANNOT_FIRE = {"pr-011-raise-rlimits", "rf-016-hard-links-long-names"}

# What the whole host has in use moves by more than these do while others work on it.
NOISY = {"me-010-pipe-buffers", "me-011-mlock"}


def promised(klass: str = "process") -> list[hostile.Case]:
    return [
        case
        for case in SUITE.select(tier="fast")
        if claimed(case, klass) and missing_surface(case) is None
    ]


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nearly_every_detector_fires_without_a_sandbox() -> None:
    found = control.run_controls(SUITE, promised())
    assert len(found.arms) >= 60
    silent = {arm.case.id for arm in found.silent}
    assert silent <= CANNOT_FIRE | NOISY
    assert found.enough and found.ratio >= 0.95


@needs_root
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_nearly_every_detector_of_a_jails_cases_fires_without_a_sandbox() -> None:
    found = control.run_controls(SUITE, promised("jail"), klass="jail")
    assert len(found.arms) >= 150
    # Some ask for what a kernel may lack altogether: vsock, kexec, the x32 ABI.
    assert found.enough, [arm.case.id for arm in found.silent]


@needs_root
def test_the_control_user_is_nobody_and_leaves_nothing() -> None:
    with control.throw_away_user() as uid, control.throw_away_user() as another:
        assert uid != another
    with pytest.raises(KeyError):
        pwd.getpwuid(uid)
    before = snapshot.Snapshot.take()
    cases = [SUITE["pr-018-pid-hopping-comet"], SUITE["me-004-dev-shm-fill"]]
    found = control.run_controls(SUITE, cases)
    assert not found.silent
    assert not snapshot.processes_of(uid)
    assert uid not in {entry.stat().st_uid for entry in os.scandir("/dev/shm")}
    assert not snapshot.leftovers(before)


def test_control_arms_need_a_user_to_throw_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(hostile.CasesInvalid, match="throw-away user"):
        control.run_controls(SUITE, ())


def test_a_silent_detector_is_named_in_the_scorecard() -> None:
    arms = tuple(
        control.Fired(case=case, fired=case.id != "cp-001-busy", reasons=())
        for case in SUITE.select(groups=("cpu-time",))
    )
    controls = control.Controls(arms=arms)
    card = hostile.Card(backend="x", klass="process", outcomes=(), controls=controls)
    assert not controls.enough
    told = card.text()
    assert "cp-001-busy cannot fire" in told
    assert "fewer than 95%" in told


@needs_root
def test_a_place_that_the_throw_away_user_cannot_enter_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="bj-") as closed:
        monkeypatch.setattr(tempfile, "tempdir", closed)
        with pytest.raises(hostile.CasesInvalid, match="may not enter"):
            control.run_controls(SUITE, ())

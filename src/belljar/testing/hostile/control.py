"""The control arms: every safe case without a sandbox, to prove that its detector can fire.

They run as a user that nobody is, so that the worst of them reaches only what is ours: the canaries
belong to that user, everything it started is ended by its uid, and rlimits bound the rest. A few
cases fire only with rights, or with something planted: see `arms`.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import snapshot
from .arms import ARMS, Arm
from .cases import Case, CasesInvalid, Suite
from .judge import Verdict
from .runner import Runner, units
from .unsandboxed import ControlSubject, as_user
from .world import World

ENOUGH = 0.95
_TRIES = 3  # memory is sampled: what lives for a moment only may be missed once
# What is meant to be left behind need not be waited for as long as what is not.
_PATIENCE = 1.5
_TIMEOUT = 2


@dataclass(frozen=True, kw_only=True)
class Fired:
    """Whether the detector of one case fired without a sandbox, and on what."""

    case: Case
    fired: bool
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.case.id, "fired": self.fired, "reasons": list(self.reasons)}


@dataclass(frozen=True, kw_only=True)
class Controls:
    """All control arms of a suite run."""

    arms: tuple[Fired, ...]

    @property
    def silent(self) -> tuple[Fired, ...]:
        return tuple(arm for arm in self.arms if not arm.fired)

    @property
    def ratio(self) -> float:
        return 1 - len(self.silent) / len(self.arms) if self.arms else 0.0

    @property
    def enough(self) -> bool:
        return self.ratio >= ENOUGH

    def to_dict(self) -> dict[str, Any]:
        return {
            "fired": len(self.arms) - len(self.silent),
            "of": len(self.arms),
            "silent": [arm.case.id for arm in self.silent],
            "arms": [arm.to_dict() for arm in self.arms],
        }


def possible() -> str | None:
    """Why control arms cannot run here, or None."""
    if sys.platform != "linux":
        return "control arms need Linux"
    if os.geteuid() != 0:
        return "control arms run as a throw-away user, and only root can become one"
    return None


def run_controls(
    suite: Suite,
    cases: Iterable[Case],
    *,
    klass: str = "process",
    on_case: Callable[[Case], None] = lambda case: None,
) -> Controls:
    """Every `safe` case of `cases` without a sandbox."""
    if problem := possible():
        raise CasesInvalid(problem, fix="run as root, or leave --controls out")
    suite = replace(suite, limits={**suite.limits, "TIMEOUT_S": _TIMEOUT})
    arms: list[Fired] = []
    with ExitStack() as stack:
        uid = stack.enter_context(throw_away_user())
        python = interpreter_for(uid)
        world = stack.enter_context(World(suite, owner=uid, python=python))
        _require_way_to(world.root)
        subject = ControlSubject(world, uid, python, klass)
        runner = Runner(suite, subject, world, klass=klass, attempts=1, patience=_PATIENCE)
        runner.warm_up()
        for unit in units(case for case in cases if case.control == "safe"):
            on_case(unit[0])
            for _ in range(_TRIES):
                tried = _try_out(unit, subject, runner)
                if all(arm.fired for arm in tried):
                    break
            arms += tried
    return Controls(arms=tuple(arms))


def _try_out(unit: tuple[Case, ...], subject: ControlSubject, runner: Runner) -> list[Fired]:
    subject.begin(ARMS.get(unit[0].id, Arm()))
    arms: list[Fired] = []
    for outcome in runner.judge(unit):
        # A slow machine is not what a detector was built for.
        reasons = tuple(r for r in outcome.reasons if not r.startswith("next_run_ok"))
        seen = outcome.saw or outcome.verdict
        fired = seen is Verdict.BREACHED and bool(reasons)
        # What a class may show is still something that the probe has found.
        found = tuple(f"probe: {line}" for line in subject.found if not fired)
        arms.append(
            Fired(
                case=outcome.case,
                fired=fired or (bool(found) and seen is Verdict.HELD),
                reasons=reasons + found[:1],
            )
        )
    return arms


@contextmanager
def throw_away_user() -> Iterator[int]:
    """A user id without a name, without a process, and without another selftest that uses it."""
    for uid in range(64_999, 64_000, -1):
        try:
            pwd.getpwuid(uid)
        except KeyError:
            # Who ends everything that runs as a user must be the only one who does. An abstract
            # name is free again when its holder is gone, however that came.
            with socket.socket(socket.AF_UNIX) as claim:
                try:
                    claim.bind(f"\0belljar-throw-away-user-{uid}")
                except OSError:
                    continue
                if not snapshot.processes_of(uid):
                    yield uid
                    return
    raise CasesInvalid("no user id between 64000 and 65000 is free for the control arms")


def _require_way_to(path: Path) -> None:
    for place in (path, *path.parents):
        if not place.stat().st_mode & stat.S_IXOTH:
            raise CasesInvalid(
                f"the control arms run as another user, who may not enter {place}",
                fix="set TMPDIR to a directory that everybody may enter",
            )


def interpreter_for(uid: int) -> str:
    """A Python that this user may execute: ours may live below somebody's private home."""
    candidates = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")
    for path in candidates:
        try:
            tried = subprocess.run([path, "-I", "-c", ""], **as_user(uid), capture_output=True)
        except OSError:
            continue
        if tried.returncode == 0:
            return path
    raise CasesInvalid("no Python here can be run by an unprivileged user", fix="install python3")

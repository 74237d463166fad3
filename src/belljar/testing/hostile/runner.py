"""Runs cases on a subject and judges them: one at a time, pairs together, noise tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from ...types import Mount
from . import pending, snapshot
from .cases import Case, CasesInvalid, Suite, seconds
from .checks import NotImplementedAssertion, companions, host_failures, require
from .checks.files import runtime_binaries
from .judge import Verdict, claimed, program_failures
from .preparations import prepare
from .scene import Failure, Latency, Scene
from .snapshot import PATIENCE, Snapshot
from .subject import NO_ANSWER, Job, Seen, Subject
from .watch import Watch
from .world import World

# A case that says nothing of time has this long, on any backend.
_CALM_SECONDS = 10.0
_ATTEMPTS = 3
# After so many in a row that hung, the rest would only take hours.
_HANGS = 3
_CHEAP_TIERS = ("fast",)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The answer for one case. `saw` is what a case showed that nobody claims, or None."""

    case: Case
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    saw: Verdict | None = None
    attempts: int = 1
    runs: int = 1
    held: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            "id": self.case.id,
            "group": self.case.group,
            "verdict": self.verdict.value,
            "saw": self.saw and self.saw.value,
            "reasons": list(self.reasons),
            "runs": self.runs,
            "held": self.held,
            "attempts": self.attempts,
            "seconds": round(self.seconds, 3),
        }


class Runner:
    """One subject in one world. `klass` overrides the subject's own class (control arms do);
    `patience` is how long a run's remains may take to go."""

    def __init__(
        self,
        suite: Suite,
        subject: Subject,
        world: World,
        *,
        klass: str = "",
        attempts: int = _ATTEMPTS,
        patience: float = PATIENCE,
    ) -> None:
        self.suite, self.subject, self.world = suite, subject, world
        self.klass = klass or subject.klass
        self._attempts = attempts
        self._patience = patience
        self._latency = Latency()

    def run(
        self,
        cases: Iterable[Case],
        *,
        repeat: int = 1,
        on_case: Callable[[Case], None] = lambda case: None,
    ) -> list[Outcome]:
        """Every case `repeat` times; a case is held only if it was held each time."""
        self.warm_up()
        outcomes: list[Outcome] = []
        hung = 0
        for unit in units(cases):
            on_case(unit[0])
            if hung >= _HANGS:
                outcomes += _all(
                    unit, Verdict.ERROR, "not run: the backend does not answer any more"
                )
                continue
            found = self._repeated(unit, repeat)
            hung = hung + 1 if any(NO_ANSWER in why for o in found for why in o.reasons) else 0
            outcomes += found
        return outcomes

    def warm_up(self) -> None:
        """Learn how long a plain run takes here, before anything hostile has run."""
        job = Job(code="print(2+2)", timeout=_CALM_SECONDS, limits=self.suite.limits)
        for turn in range(4):
            seen = self.subject.run(job)
            if seen.result is None or seen.result.stdout != "4\n":
                why = seen.failure or (seen.result and seen.result.status.value)
                raise CasesInvalid(f"{self.subject.name} cannot run print(2+2): {why}")
            if turn:  # the first one also loads and probes
                self._latency.add(seen.wall)

    def _repeated(self, unit: tuple[Case, ...], repeat: int) -> list[Outcome]:
        first = [self._skipped(case) for case in unit]
        if all(first):
            return [outcome for outcome in first if outcome is not None]
        total: list[Outcome] = []
        # What nobody claims is information: once is enough.
        for _ in range(repeat if any(claimed(case, self.klass) for case in unit) else 1):
            once = self.judge(unit)
            total = [_added(a, b) for a, b in zip(total, once, strict=True)] if total else once
        return total

    def _skipped(self, case: Case) -> Outcome | None:
        """The outcome of a case that is not to be run, or None."""
        surface = pending.missing_surface(case)
        mine = claimed(case, self.klass)
        if surface is not None:
            verdict = Verdict.PENDING if mine else Verdict.NOT_CLAIMED
            return Outcome(case=case, verdict=verdict, reasons=(pending.why(surface),), runs=0)
        if self.klass == "inproc":
            # It runs inside this very process: only what is written for it may be tried.
            if "inproc" in case.expect.classes and case.language == "python":
                return None
            return Outcome(case=case, verdict=Verdict.NOT_CLAIMED, reasons=("not run",), runs=0)
        if not mine and (case.control != "safe" or case.tier not in _CHEAP_TIERS):
            # Without a promise that it holds, it may act on the host: only the harmless ones run.
            return Outcome(case=case, verdict=Verdict.NOT_CLAIMED, reasons=("not run",), runs=0)
        return None

    def judge(self, unit: tuple[Case, ...]) -> list[Outcome]:
        """One run of one case, or of a pair. Failures that may be noise are tried again."""
        start = time.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                found = self.observe(unit)
            except _NoSuchLanguage as error:
                return _all(unit, Verdict.PENDING, str(error))
            except NotImplementedAssertion as error:
                return _all(unit, Verdict.ERROR, f"the assertion {error} is not implemented")
            except Exception as error:  # noqa: BLE001 - the harness broke: that is no verdict
                why = f"the harness failed: {type(error).__name__}: {error}"
                return _all(unit, Verdict.ERROR, why)
            failed = [failure for failures in found for failure in failures]
            if attempt >= self._attempts or not failed or not all(f.noisy for f in failed):
                break
        took = time.monotonic() - start
        return [
            self._outcome(case, failures, attempt, took)
            for case, failures in zip(unit, found, strict=True)
        ]

    def _outcome(self, case: Case, failures: list[Failure], attempts: int, took: float) -> Outcome:
        saw = Verdict.BREACHED if failures else Verdict.HELD
        outcome = Outcome(
            case=case,
            verdict=saw,
            reasons=tuple(map(str, failures)),
            attempts=attempts,
            held=0 if failures else 1,
            seconds=took,
        )
        if claimed(case, self.klass) or self.klass == "inproc":
            return outcome
        return replace(outcome, verdict=Verdict.NOT_CLAIMED, saw=saw)

    def observe(self, unit: tuple[Case, ...]) -> list[list[Failure]]:
        """Run one case, or the two halves of a pair at the same time, and look at everything."""
        for case in unit:
            require(case.expect.asserts)
        self.world.revive_sentinel()
        before = Snapshot.take()
        scenes: list[Scene] = []
        try:
            for case in unit:
                scenes.append(self._scene(case, before))
            for other in scenes[1:]:
                # Two halves of one attack share its names.
                for name in ("TOKEN", "T7"):
                    other.stage.values[name] = scenes[0].stage.values[name]
            for scene in scenes:
                scene.job = self._job(scene)
            with ExitStack() as stack:
                for scene in scenes:
                    self._enter(stack, prepare(scene))
                self._perform(scenes)
                for scene in scenes:
                    _refuse_unknown_language(scene)
                return [self._failures(scene) for scene in scenes]
        finally:
            self.subject.clean()
            snapshot.end_survivors(before)
            for scene in scenes:
                scene.stage.remove()

    def _scene(self, case: Case, before: Snapshot) -> Scene:
        stage = self.world.stage(case, self.klass)
        assertions = case.expect.asserts
        probed = [a for a in assertions if a.startswith("host_port_closed:")]
        port = int(stage.fill(probed[0].partition(":")[2])) if probed else None
        return Scene(
            case=case,
            stage=stage,
            subject=self.subject,
            klass=self.klass,
            job=Job(code="", timeout=1.0, limits=self.suite.limits),
            before=before,
            latency=self._latency,
            watch=Watch(stage.root, connect_to=port),
            hits_before=dict(self.world.listeners.hits),
            signals_before=len(self.world.sentinel.signals),
            patience=self._patience,
            binaries_before=runtime_binaries(),
        )

    def _job(self, scene: Scene) -> Job:
        case, stage = scene.case, scene.stage
        mounts = []
        if case.mentions("RO"):
            mounts.append(Mount(str(stage.read_only), "ro", "ro"))
        if case.mentions("RW"):
            mounts.append(Mount(str(stage.read_write), "rw", "rw"))
        out = case.mentions("OUT")
        timed = case.mentions("TIMEOUT_S")
        return Job(
            code=stage.fill(case.code),
            language=case.language,
            timeout=float(self.suite.limits["TIMEOUT_S"]) if timed else _CALM_SECONDS,
            limits=self.suite.limits,
            mounts=tuple(mounts),
            files={"out/.keep": b""} if out else {},
            outputs=("out/*",) if out else (),
            network={"allow": case.params["allow"]} if "allow" in case.params else None,
        )

    def _perform(self, scenes: list[Scene]) -> None:
        """Run the jobs of all scenes at the same time, with whoever accompanies them."""
        with ExitStack() as stack:
            for scene in scenes:
                for beside in companions(scene.case.expect.asserts):
                    self._enter(stack, beside(scene))
                self._enter(stack, scene.watch)
            threads = [threading.Thread(target=self._play, args=(scene,)) for scene in scenes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _enter(self, stack: ExitStack, context: AbstractContextManager[object]) -> None:
        """Enter `context`; if we are interrupted, the runs end before it is left: it may wait for
        one of them."""
        stack.push(self._cancel_if_interrupted)
        stack.enter_context(context)
        stack.push(self._cancel_if_interrupted)

    def _cancel_if_interrupted(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.subject.cancel()

    def _play(self, scene: Scene) -> None:
        try:
            scene.seen = self.subject.run(scene.job)
        except Exception as error:  # noqa: BLE001 - told by the scene, judged as not held
            scene.seen = Seen(wall=0.0, failure=f"untyped {type(error).__name__}: {error}")

    def _failures(self, scene: Scene) -> list[Failure]:
        limit = scene.case.expect.max_wall_s
        most = None
        if limit is not None:
            most = seconds(limit, scene.stage.values, self.suite.placeholders)
        found = program_failures(scene.case, self.klass, scene.seen, most)
        return [*found, *host_failures(scene)]


class _NoSuchLanguage(LookupError):
    """This host, or Belljar, cannot run the case's language."""


def _refuse_unknown_language(scene: Scene) -> None:
    why = scene.seen.failure
    missing = why.startswith("backend_unavailable") and (
        "is not installed" in why or f"runs no {scene.case.language} programs" in why
    )
    if scene.case.language != "python" and (missing or why.startswith("language_unknown")):
        raise _NoSuchLanguage(why)


def _all(unit: tuple[Case, ...], verdict: Verdict, why: str) -> list[Outcome]:
    return [Outcome(case=case, verdict=verdict, reasons=(why,)) for case in unit]


def units(cases: Iterable[Case]) -> list[tuple[Case, ...]]:
    """The cases as they are run: alone, or both halves of a pair together, the writer first."""
    by_id = {case.id: case for case in cases}
    found: list[tuple[Case, ...]] = []
    for case in by_id.values():
        other = by_id.get(case.pair or "")
        if other is None:
            found.append((case,))
        elif case.id.endswith("-w"):
            found.append((case, other))
    return found


def _added(one: Outcome, other: Outcome) -> Outcome:
    """Two runs of the same case as one outcome: the worse verdict, and all reasons."""
    worse = other if _badness(other) > _badness(one) else one
    return replace(
        worse,
        reasons=tuple(dict.fromkeys((*one.reasons, *other.reasons))),
        attempts=one.attempts + other.attempts,
        runs=one.runs + other.runs,
        held=one.held + other.held,
        seconds=one.seconds + other.seconds,
    )


def _badness(outcome: Outcome) -> int:
    order = (Verdict.HELD, Verdict.PENDING, Verdict.BREACHED, Verdict.ERROR)
    return order.index(outcome.saw or outcome.verdict)

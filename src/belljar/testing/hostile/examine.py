"""One backend through the whole suite: the cases, and on request control arms and ablation."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...backends.base import Backend
from ...config import Settings
from .ablation import Ablated, ablate
from .cases import Case, Suite, Tier, load
from .control import Controls, run_controls
from .judge import Verdict, claimed
from .pending import missing_surface
from .private import private_directory
from .runner import Outcome, Runner
from .scorecard import Card
from .snapshot import no_survivors
from .subject import EngineSubject
from .world import World

Progress = Callable[[str], None]


def examine(
    backend: str | Backend,
    *,
    suite: Suite | None = None,
    settings: Settings | None = None,
    groups: tuple[str, ...] = (),
    ids: tuple[str, ...] = (),
    tier: Tier = "fast",
    repeat: int = 1,
    claimed_only: bool = False,
    controls: bool = False,
    ablation: bool = False,
    command: str = "",
    progress: Progress = lambda text: None,
    so_far: Callable[[Card], None] = lambda card: None,
) -> Card:
    """Examine `backend`, by name or as an object. Nothing is left on the host afterwards.

    Control arms and ablation take long: `so_far` is given the card before each of them.
    """
    suite = suite or load()
    start = time.monotonic()
    with private_directory(), no_survivors(), EngineSubject(backend, settings) as subject:
        cases = suite.select(groups=groups, ids=ids, tier=tier)
        if claimed_only:
            cases = tuple(case for case in cases if claimed(case, subject.klass))
        done = 0

        def tell(case: Case) -> None:
            nonlocal done
            done += 1
            progress(f"{done}/{len(cases)} {case.id}")

        with World(suite) as world:
            outcomes = Runner(suite, subject, world).run(cases, repeat=repeat, on_case=tell)
        promised = tuple(
            case for case in cases if claimed(case, subject.klass) and missing_surface(case) is None
        )

        def card(fired: Controls | None, layers: tuple[Ablated, ...] | None) -> Card:
            return Card(
                backend=subject.name,
                klass=subject.klass,
                outcomes=tuple(
                    # A share of a few cases says nothing about all of them.
                    outcome if groups or ids else _about_the_suite(outcome, fired, layers)
                    for outcome in outcomes
                ),
                repeat=repeat,
                command=command,
                controls=fired,
                ablation=layers,
                seconds=time.monotonic() - start,
            )

        fired = layers = None
        if controls and promised:
            so_far(card(fired, layers))
            fired = run_controls(
                suite,
                promised,
                klass=subject.klass,
                on_case=lambda case: progress(f"control {case.id}"),
            )
        if ablation and promised:
            so_far(card(fired, layers))
            held = {outcome.case.id for outcome in outcomes if outcome.verdict is Verdict.HELD}
            layers = ablate(
                suite,
                subject.backend,
                (case for case in promised if case.id in held),
                say=lambda text: progress(f"ablation {text}"),
            )
        return card(fired, layers)


def _about_the_suite(
    outcome: Outcome, fired: Controls | None, layers: tuple[Ablated, ...] | None
) -> Outcome:
    """The answer to a case that asks about the suite itself, once that was found out."""
    asked = outcome.case.expect.asserts
    if "detector_fires" in asked and fired is not None:
        why = f"detector_fires: {len(fired.silent)} of {len(fired.arms)} do not"
        verdict = Verdict.HELD if fired.enough else Verdict.BREACHED
        return Outcome(
            case=outcome.case,
            verdict=verdict,
            reasons=() if fired.enough else (why,),
            held=int(fired.enough),
        )
    if "matrix_recorded" in asked and layers is not None:
        return Outcome(case=outcome.case, verdict=Verdict.HELD, held=1)
    return outcome

"""One backend through the whole suite: the cases, and on request control arms and ablation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ...backends.base import Backend
from ...config import Settings
from .ablation import ablate
from .cases import Case, Suite, Tier, load
from .control import run_controls
from .judge import claimed
from .pending import missing_surface
from .private import private_directory
from .runner import Runner
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
) -> Card:
    """Examine `backend`, by name or as an object. Nothing is left on the host afterwards."""
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
        card = Card(
            backend=subject.name,
            klass=subject.klass,
            outcomes=tuple(outcomes),
            repeat=repeat,
            command=command,
            controls=run_controls(
                suite,
                promised,
                klass=subject.klass,
                on_case=lambda case: progress(f"control {case.id}"),
            )
            if controls
            else None,
            ablation=ablate(
                suite,
                subject.backend,
                promised,
                say=lambda text: progress(f"ablation {text}"),
            )
            if ablation
            else None,
        )
    return replace(card, seconds=time.monotonic() - start)

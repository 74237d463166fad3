"""What is each protection good for? One layer off at a time, and which cases then breach.

A layer that another one covers shows nothing when it alone is off. Such a layer is tried again with
each other layer off too: it is needed where that one is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...backends.base import Backend
from .cases import Case, CasesInvalid, Suite
from .judge import Verdict
from .runner import Runner
from .subject import EngineSubject
from .world import World


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """`breached` are the cases that hold with `layer` and breach without it; in both, `also_off`
    was off."""

    layer: str
    breached: tuple[str, ...]
    also_off: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "also_off": list(self.also_off),
            "breached": list(self.breached),
        }


Say = Callable[[str], None]


def layers_of(backend: Backend) -> tuple[str, ...]:
    """The layers that can be switched off; CasesInvalid if the backend has none."""
    layers = tuple(getattr(backend, "layers", ()))
    if not layers:
        raise CasesInvalid(f"backend {backend.name!r} has no layers to switch off")
    return layers


def without(backend: Backend, layers: Iterable[str]) -> Backend:
    """A backend like this one, with `layers` switched off."""
    made: Backend = type(backend)(disable=frozenset(layers))  # type: ignore[call-arg]
    return made


def ablate(
    suite: Suite, backend: Backend, cases: Iterable[Case], *, say: Say = lambda text: None
) -> tuple[Ablated, ...]:
    """Each layer of `backend`, and the cases that need it."""
    chosen = tuple(cases)
    layers = layers_of(backend)
    known: dict[frozenset[str], frozenset[str]] = {}

    def breached(off: frozenset[str]) -> frozenset[str]:
        if off not in known:
            say(f"without {', '.join(sorted(off)) or 'nothing'}")
            known[off] = _breached(suite, without(backend, off), chosen)
        return known[off]

    found = []
    for layer in layers:
        needed = breached(frozenset({layer})) - breached(frozenset())
        also: tuple[str, ...] = ()
        for other in layers if not needed else ():
            if other != layer:
                needed = breached(frozenset({layer, other})) - breached(frozenset({other}))
                if needed:
                    also = (other,)
                    break
        found.append(Ablated(layer=layer, breached=tuple(sorted(needed)), also_off=also))
    return tuple(found)


def _breached(suite: Suite, backend: Backend, cases: tuple[Case, ...]) -> frozenset[str]:
    with World(suite) as world, EngineSubject(backend) as subject:
        outcomes = Runner(suite, subject, world).run(cases)
    bad = (Verdict.BREACHED, Verdict.ERROR)
    return frozenset(outcome.case.id for outcome in outcomes if outcome.verdict in bad)

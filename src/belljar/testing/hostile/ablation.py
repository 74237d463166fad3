"""What is each protection good for? One layer off at a time, and which cases then breach.

A layer that another one covers shows nothing when it alone is off. Such a layer is tried again with
each other layer off too: it is needed where that one is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...backends.base import Backend
from .cases import Case, CasesInvalid, Suite
from .judge import Verdict
from .runner import Runner
from .subject import EngineSubject
from .world import World

Reasons = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """`breached` are the cases that hold with `layer` and breach without it, and `reasons` what was
    seen; with and without it, `also_off` was off."""

    layer: str
    reasons: Reasons
    also_off: tuple[str, ...] = ()

    @property
    def breached(self) -> tuple[str, ...]:
        return tuple(sorted(self.reasons))

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "also_off": list(self.also_off),
            "breached": {name: list(self.reasons[name]) for name in self.breached},
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
    known: dict[frozenset[str], Reasons] = {}

    def breached(off: frozenset[str]) -> Reasons:
        if off not in known:
            say(f"without {', '.join(sorted(off)) or 'nothing'}")
            known[off] = _breached(suite, without(backend, off), chosen)
        return known[off]

    def needs(layer: str, also: frozenset[str]) -> Reasons:
        """The cases that breach without `layer`, twice, and hold with it, twice."""
        off = also | {layer}
        suspects = set(breached(off)) - set(breached(also))
        if not suspects:
            return {}
        again = tuple(case for case in chosen if case.id in suspects)
        say(f"once more without {', '.join(sorted(off))}: {len(again)} cases")
        sure = _breached(suite, without(backend, off), again)
        noise = _breached(suite, without(backend, also), again) if sure else {}
        return {name: why for name, why in sure.items() if name not in noise}

    found = []
    for layer in layers:
        reasons = needs(layer, frozenset())
        also: tuple[str, ...] = ()
        for other in layers if not reasons else ():
            if other != layer and (reasons := needs(layer, frozenset({other}))):
                also = (other,)
                break
        found.append(Ablated(layer=layer, reasons=reasons, also_off=also))
    return tuple(found)


def _breached(suite: Suite, backend: Backend, cases: tuple[Case, ...]) -> Reasons:
    with World(suite) as world, EngineSubject(backend) as subject:
        outcomes = Runner(suite, subject, world).run(cases)
    bad = (Verdict.BREACHED, Verdict.ERROR)
    return {o.case.id: o.reasons for o in outcomes if o.verdict in bad}

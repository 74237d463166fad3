"""What is each protection good for? One layer off at a time, and which cases then breach.

A layer that another one covers shows nothing when it alone is off. Only such a layer is tried again
with each other layer off too: it is needed where that one is missing.

No run is wasted: a layer meets the groups of cases that it can matter for, a pair those that both
can, less what breaches without one of them; noise is not tried again at once, because whatever
breaches has to breach a second time, and to hold with the layer on.
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

# What bounds a run, and what keeps it from reaching the host, with the groups that ask about it. A
# layer that is not named, of a backend that we do not know, meets every group.
_BOUNDS = frozenset(
    {
        "cpu-time", "disk", "dos", "fd-exhaustion", "memory", "output", "process", "protocol",
        "result-files", "result-values",
    }
)  # fmt: skip
_REACH = frozenset(
    {
        "disk", "dos", "filesystem", "ipc", "kernel", "memory", "mount-config", "network",
        "proc-sys", "process", "protocol", "pyjail", "race", "result-files", "secrets",
    }
)  # fmt: skip
GROUPS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("cgroup", "rlimits", "watchdog", "subreaper", "descendants"), _BOUNDS),
    "output_cap": _BOUNDS - {"cpu-time", "disk", "fd-exhaustion"},
    **dict.fromkeys(
        (
            "namespaces", "pivot_root", "read_only_mounts", "read_only_root", "landlock", "seccomp",
            "capabilities", "user",
        ),
        _REACH,
    ),
    "network": _REACH - {"disk", "filesystem", "memory"},
    "proc_masks": _REACH - {"disk", "ipc", "memory", "network"},
}  # fmt: skip
# What is meant to be left behind need not be waited for as long as what is not.
_PATIENCE = 1.5


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
    """Each layer of `backend`, and which of `cases` need it; all of them hold with every layer."""
    return _Ablation(suite, backend, tuple(cases), say).matrix()


class _Ablation:
    def __init__(self, suite: Suite, backend: Backend, cases: tuple[Case, ...], say: Say) -> None:
        self._suite, self._backend, self._cases, self._say = suite, backend, cases, say
        self._layers = layers_of(backend)
        self._known: dict[frozenset[str], Reasons] = {frozenset(): {}}

    def matrix(self) -> tuple[Ablated, ...]:
        found = {
            layer: Ablated(layer=layer, reasons=self._needs(layer, frozenset()))
            for layer in self._layers
        }
        for layer in self._layers:
            if not found[layer].reasons:
                found[layer] = self._with_another_off(layer)
        return tuple(found.values())

    def _with_another_off(self, layer: str) -> Ablated:
        # Who covers for it is most likely a layer of its own kind.
        others = [other for other in self._layers if other != layer]
        for other in sorted(others, key=lambda other: -len(self._common({layer, other}))):
            if reasons := self._needs(layer, frozenset({other})):
                return Ablated(layer=layer, reasons=reasons, also_off=(other,))
        return Ablated(layer=layer, reasons={})

    def _needs(self, layer: str, also: frozenset[str]) -> Reasons:
        """The cases that breach without `layer`, twice, and hold with it."""
        off = also | {layer}
        suspects = set(self._breached(off)) - set(self._known[also])
        if not suspects:
            return {}
        again = tuple(case for case in self._cases if case.id in suspects)
        sure = self._run(off, again, "once more ")
        unsure = suspects - set(sure)
        self._known[off] = {n: why for n, why in self._known[off].items() if n not in unsure}
        noise = self._run(also, again, "compared: ", patiently=True) if sure else {}
        return {name: why for name, why in sure.items() if name not in noise}

    def _breached(self, off: frozenset[str]) -> Reasons:
        """What breaches without `off`, and with all of them but one does not."""
        if off not in self._known:
            clear = {name for layer in off for name in self._known.get(off - {layer}, ())}
            asked = tuple(case for case in self._common(off) if case.id not in clear)
            self._known[off] = self._run(off, asked)
        return self._known[off]

    def _common(self, layers: Iterable[str]) -> tuple[Case, ...]:
        """The cases that each of these layers can matter for."""
        groups = [GROUPS[layer] for layer in layers if layer in GROUPS]
        return tuple(case for case in self._cases if all(case.group in each for each in groups))

    def _run(
        self,
        off: frozenset[str],
        cases: tuple[Case, ...],
        what: str = "",
        *,
        patiently: bool = False,
    ) -> Reasons:
        if not cases:
            return {}
        done = 0

        def tell(case: Case) -> None:
            nonlocal done
            done += 1
            without_it = f"without {' and '.join(sorted(off))}" if off else "with every layer"
            self._say(f"{what}{without_it}: {done}/{len(cases)} {case.id}")

        backend = without(self._backend, off)
        how: dict[str, Any] = {} if patiently else {"attempts": 1, "patience": _PATIENCE}
        with World(self._suite) as world, EngineSubject(backend) as subject:
            runner = Runner(self._suite, subject, world, **how)
            outcomes = runner.run(cases, on_case=tell)
        bad = (Verdict.BREACHED, Verdict.ERROR)
        return {o.case.id: o.reasons for o in outcomes if o.verdict in bad}

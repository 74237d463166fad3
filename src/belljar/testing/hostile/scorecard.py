"""The scorecard: what a backend held and what not, for people, documents and programs."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .ablation import Ablated
from .control import ENOUGH, Controls
from .judge import Verdict
from .runner import Outcome

_COLUMNS = (
    Verdict.HELD, Verdict.BREACHED, Verdict.NOT_CLAIMED, Verdict.PENDING, Verdict.ERROR,
)  # fmt: skip
NO_ISOLATION = "no isolation: a hostile program has the rights of the program that runs it"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One backend, examined."""

    backend: str
    klass: str
    outcomes: tuple[Outcome, ...]
    repeat: int = 1
    controls: Controls | None = None
    ablation: tuple[Ablated, ...] | None = None

    def of(self, verdict: Verdict) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.verdict is verdict)

    @property
    def failed(self) -> bool:
        """Whether something was breached or could not be judged."""
        return bool(self.of(Verdict.BREACHED) or self.of(Verdict.ERROR))

    def groups(self) -> dict[str, Counter[Verdict]]:
        found: dict[str, Counter[Verdict]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.case.group, Counter())[outcome.verdict] += 1
        return dict(sorted(found.items()))

    def totals(self) -> Counter[Verdict]:
        return Counter(outcome.verdict for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "class": self.klass,
            "repeat": self.repeat,
            "failed": self.failed,
            "totals": _counts(self.totals()),
            "groups": {name: _counts(counts) for name, counts in self.groups().items()},
            "cases": [outcome.to_dict() for outcome in self.outcomes],
            "controls": self.controls and self.controls.to_dict(),
            "ablation": self.ablation and [layer.to_dict() for layer in self.ablation],
        }

    # -- for people ------------------------------------------------------------------------------

    def text(self) -> str:
        """The scorecard for a terminal."""
        width = max(len(name) for name in (*self.groups(), "total"))
        head = f"{'':<{width}}" + "".join(f"  {column.value:>11}" for column in _COLUMNS)
        lines = [f"backend {self.backend}, class {self.klass}: {self.summary()}", "", head]
        for name, counts in (*self.groups().items(), ("total", self.totals())):
            row = "".join(f"  {counts[column] or '.':>11}" for column in _COLUMNS)
            lines.append(f"{name:<{width}}{row}")
        return "\n".join([*lines, *self._details()])

    def summary(self) -> str:
        if self.klass == "inproc":
            return NO_ISOLATION
        breached, errors = len(self.of(Verdict.BREACHED)), len(self.of(Verdict.ERROR))
        if breached or errors:
            return f"{breached} claimed cases breached, {errors} could not be judged"
        return "every claimed case held"

    def _details(self) -> Iterable[str]:
        for title, verdict in (("breached", Verdict.BREACHED), ("errors", Verdict.ERROR)):
            if found := self.of(verdict):
                yield f"\n{title}:"
                for outcome in found:
                    often = f" ({outcome.held} of {outcome.runs} held)" if outcome.runs > 1 else ""
                    yield f"  {outcome.case.id}{often}: {_short(outcome.reasons)}"
        if information := [o for o in self.of(Verdict.NOT_CLAIMED) if o.saw is not None]:
            open_ones = [o.case.id for o in information if o.saw is Verdict.BREACHED]
            yield (
                f"\nnot claimed, for information: {len(information)} ran, "
                f"{len(information) - len(open_ones)} held, {len(open_ones)} breached"
            )
            yield from _wrapped(open_ones)
        if waiting := self.of(Verdict.PENDING):
            yield "\npending:"
            reasons = Counter(reason for outcome in waiting for reason in outcome.reasons)
            yield from (f"  {count:>3}  {reason}" for reason, count in reasons.most_common())
        yield from self._control_lines()
        yield from self._ablation_lines()

    def _control_lines(self) -> Iterable[str]:
        if self.controls is None:
            return
        told = self.controls.to_dict()
        share = f"{told['fired']} of {told['of']} detectors fire without a sandbox"
        few = "" if self.controls.enough else f": fewer than {ENOUGH:.0%}"
        yield f"\ncontrol arms: {share}{few}"
        for arm in self.controls.silent:
            yield f"  {arm.case.id} cannot fire: {'; '.join(arm.reasons) or 'it ends by itself'}"

    def _ablation_lines(self) -> Iterable[str]:
        if self.ablation is None:
            return
        yield "\nlayers, and the cases that breach without each:"
        for layer in self.ablation:
            off = f" (with {', '.join(layer.also_off)} off too)" if layer.also_off else ""
            yield f"  {layer.layer}{off}: {', '.join(layer.breached) or 'no case needs it'}"

    # -- for documents ---------------------------------------------------------------------------

    def markdown(self) -> str:
        """The scorecard as a section of a page."""
        lines = [
            f"## `{self.backend}` (class {self.klass}): {self.summary()}",
            "",
            "| group | " + " | ".join(column.value for column in _COLUMNS) + " |",
            "|---|" + "---:|" * len(_COLUMNS),
        ]
        for name, counts in (*self.groups().items(), ("**total**", self.totals())):
            row = " | ".join(str(counts[column] or "") for column in _COLUMNS)
            lines.append(f"| {name} | {row} |")
        return "\n".join([*lines, "", *self._markdown_details()])

    def _markdown_details(self) -> Iterable[str]:
        for line in self._details():
            # The same lines as on a terminal, as a heading and a list.
            if line.startswith("\n"):
                text = line.strip()
                yield f"\n**{text[:1].upper()}{text[1:]}**\n"
            else:
                yield f"- {line.strip()}"


def _counts(counter: Counter[Verdict]) -> dict[str, int]:
    return {column.value.replace(" ", "_"): counter[column] for column in _COLUMNS}


def _short(reasons: tuple[str, ...]) -> str:
    """The first reasons; the JSON form has them all."""
    shown = "; ".join(reason[:140] for reason in reasons[:2])
    return shown + (f"; and {len(reasons) - 2} more" if len(reasons) > 2 else "")


def _wrapped(names: list[str], width: int = 96) -> Iterable[str]:
    line = ""
    for name in names:
        if line and len(line) + len(name) + 2 > width:
            yield "  " + line
            line = ""
        line += (", " if line else "") + name
    if line:
        yield "  " + line


def host_facts() -> dict[str, str]:
    """The machine in general terms: enough to read the numbers, nothing that names it."""
    return {
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "machine": platform.machine(),
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
    }


def page(cards: Iterable[Card], command: str) -> str:
    """A whole document."""
    facts = ", ".join(f"{name} {value}" for name, value in host_facts().items())
    shown = tuple(cards)
    runs = shown[0].repeat if shown else 1
    head = f"""# Scorecard

Every backend against the same hostile programs. Made by one command:

    {command}

Each case ran {runs} times on: {facts}. A case is *held* only if it was held every time. *Not
claimed* cases are outside what the backend's isolation class promises; where they are harmless they
ran all the same, for information. *Pending* cases need a part of Belljar that is not built yet.
*Control arms* run the same programs without a sandbox: a detector that cannot fire proves nothing.
"""
    return "\n".join([head, *(card.markdown() + "\n" for card in shown)])

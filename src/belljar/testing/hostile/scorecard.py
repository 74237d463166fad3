"""The scorecard: what a backend held and what not, as data that keeps how it was made."""

from __future__ import annotations

import datetime
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..._version import __version__
from .ablation import Ablated
from .control import Controls
from .judge import Verdict
from .runner import Outcome

COLUMNS = (
    Verdict.HELD, Verdict.BREACHED, Verdict.NOT_CLAIMED, Verdict.PENDING, Verdict.ERROR,
)  # fmt: skip


def host_facts() -> dict[str, str]:
    """The machine in general terms: enough to read the numbers, nothing that names it."""
    return {
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "machine": platform.machine(),
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
        "user": "root" if hasattr(os, "geteuid") and os.geteuid() == 0 else "ordinary",
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


@dataclass(frozen=True, kw_only=True)
class Card:
    """One backend, examined. `command` makes it again, `seconds` is how long that takes."""

    backend: str
    klass: str
    outcomes: tuple[Outcome, ...]
    repeat: int = 1
    controls: Controls | None = None
    ablation: tuple[Ablated, ...] | None = None
    seconds: float = 0.0
    command: str = ""
    date: str = field(default_factory=today)
    version: str = __version__
    host: Mapping[str, str] = field(default_factory=host_facts)

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
            "date": self.date,
            "version": self.version,
            "host": dict(self.host),
            "command": self.command,
            "repeat": self.repeat,
            "seconds": round(self.seconds, 1),
            "failed": self.failed,
            "totals": _counts(self.totals()),
            "groups": {name: _counts(counts) for name, counts in self.groups().items()},
            "cases": [outcome.to_dict() for outcome in self.outcomes],
            "controls": self.controls and self.controls.to_dict(),
            "ablation": self.ablation and [layer.to_dict() for layer in self.ablation],
        }

    def text(self) -> str:
        """The scorecard for a terminal."""
        from .render import text

        return text(self.to_dict())


def key(verdict: Verdict) -> str:
    """A verdict as the name of a count."""
    return verdict.value.replace(" ", "_")


def _counts(counter: Counter[Verdict]) -> dict[str, int]:
    return {key(column): counter[column] for column in COLUMNS}

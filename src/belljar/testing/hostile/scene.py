"""One run of one case with everything around it: what the checks look at."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from .cases import Case
from .snapshot import PATIENCE, Snapshot
from .subject import Job, Seen, Subject
from .watch import Watch
from .world import Stage


@dataclass(frozen=True)
class Failure:
    """One expectation that was not met; if `noisy`, a busy machine may be the cause."""

    check: str
    why: str
    noisy: bool = False

    def __str__(self) -> str:
        return f"{self.check}: {self.why}"


class Noise(str):
    """A complaint that a busy machine can cause too."""

    __slots__ = ()


class Latency:
    """How long `print(2+2)` usually takes on a subject, kept up to date by every run of it."""

    _KEPT = 9

    def __init__(self) -> None:
        self._recent: list[float] = []

    def add(self, seconds: float) -> None:
        self._recent = [*self._recent, seconds][-self._KEPT :]

    @property
    def usual(self) -> float:
        return statistics.median(self._recent) if self._recent else 0.0


@dataclass(kw_only=True)
class Scene:
    """`notes` is where companions leave what they saw during the run, by assertion name."""

    case: Case
    stage: Stage
    subject: Subject
    klass: str
    job: Job
    before: Snapshot
    latency: Latency
    watch: Watch
    hits_before: dict[str, int]
    signals_before: int
    patience: float = PATIENCE
    binaries_before: object = None
    seen: Seen = field(default_factory=lambda: Seen(wall=0.0, failure="it has not run yet"))
    notes: dict[str, Any] = field(default_factory=dict)

    def run(self, code: str, *, timeout: float = 20.0) -> Seen:
        """Another program on the same subject, with the limits of the case."""
        return self.subject.run(Job(code=code, timeout=timeout, limits=self.job.limits))

    def timed(self, code: str) -> tuple[Seen, float]:
        start = time.monotonic()
        seen = self.run(code)
        return seen, time.monotonic() - start

    @property
    def cap(self) -> int:
        """The output limit of the job, in bytes."""
        return self.job.limits["OUT_MB"] << 20

"""Counts of runs in the text format of Prometheus, as a sink of an engine.

Written by hand, because the client library would rename what it is given: a counter called
`sandbox_fuel_consumed` or a gauge with a suffix. The names are part of Belljar's interface.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from ..events import Event, RunFailed, RunFinished, RunStarted
from ..types import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MILLISECONDS = (
    1,
    2.5,
    5,
    10,
    25,
    50,
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    30_000,
    60_000,
    300_000,
)
_FUEL = tuple(10.0**power for power in range(5, 13))


class Histogram:
    """Observations counted by upper bound. Not thread-safe by itself."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            label = "+Inf" if bound is None else f"{bound:g}"
            yield f'{name}_bucket{{le="{label}"}} {total}'
        yield f"{name}_sum {self._sum:.10g}"
        yield f"{name}_count {total}"


class Metrics:
    """A sink: counts every run of the engines that it is given to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._executions: Counter[tuple[str, str]] = Counter()
        self._timeouts = self._oom = self._successes = self._total = 0
        self._duration = Histogram(_MILLISECONDS)
        self._fuel = Histogram(_FUEL)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunFinished):
            result = event.result
            with self._lock:
                self._end(result.id, result.status.value, result.backend)
                self._successes += result.success
                self._timeouts += result.status is Status.TIMEOUT
                self._oom += result.status is Status.OOM
                if result.usage.fuel is not None:
                    self._fuel.observe(result.usage.fuel)
        elif isinstance(event, RunFailed):
            with self._lock:
                self._end(event.id, "failed", event.backend)
        elif isinstance(event, RunStarted):
            with self._lock:
                # A run that is tried again elsewhere starts twice and ends once.
                self._began.setdefault(event.request.id, time.monotonic())

    def _end(self, run: str, status: str, backend: str) -> None:
        self._executions[status, backend] += 1
        self._total += 1
        began = self._began.pop(run, None)
        if began is not None:  # else the program was refused before anything started
            self._duration.observe((time.monotonic() - began) * 1e3)

    def text(self) -> str:
        """Every metric, as `GET /metrics` answers."""
        with self._lock:
            rate = self._successes / self._total if self._total else float("nan")
            return "".join(f"{line}\n" for line in self._lines(rate))

    def _lines(self, rate: float) -> Iterator[str]:
        yield from _head("sandbox_executions_total", "counter", "Runs that ended, by status.")
        for (status, backend), count in sorted(self._executions.items()):
            labels = f'backend="{_label(backend)}",status="{status}"'
            yield f"sandbox_executions_total{{{labels}}} {count}"
        yield from _head(
            "sandbox_execution_duration_ms", "histogram", "From a run's start to its result."
        )
        yield from self._duration.lines("sandbox_execution_duration_ms")
        yield from _head("sandbox_fuel_consumed", "histogram", "Fuel of runs that count it.")
        yield from self._fuel.lines("sandbox_fuel_consumed")
        yield from single(
            "sandbox_timeouts_total", "counter", "Runs that timed out.", self._timeouts
        )
        yield from single(
            "sandbox_oom_failures_total", "counter", "Runs that ran out of memory.", self._oom
        )
        yield from single(
            "sandbox_success_rate", "gauge", "Successful runs over all runs, 0 to 1.", rate
        )


def single(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    """The lines of a metric without labels."""
    yield from _head(name, kind, text)
    yield f"{name} {'NaN' if value != value else f'{value:.10g}'}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

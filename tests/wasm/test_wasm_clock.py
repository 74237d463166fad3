"""The worker's clock: awake while runs come, asleep when they do not, and never too late."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("wasmtime")

from belljar.wasm import worker


class Slept(Exception):
    """The clock has gone to sleep."""


class Time:
    """A time that passes when somebody sleeps; `happens` is what happens meanwhile."""

    def __init__(self, happens: Any) -> None:
        self.now, self.naps, self._happens = 1000.0, 0, happens

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1
        self._happens(self)


def naps(monkeypatch: pytest.MonkeyPatch, happens: Any) -> tuple[int, list[float]]:
    """How often the clock looked until it went to sleep, and when it raised the epoch."""
    raised: list[float] = []
    clock = worker.Clock(lambda: raised.append(time.now))
    time = Time(lambda time: happens(clock, time))
    monkeypatch.setattr(worker, "time", time)

    def wait() -> None:
        raise Slept

    monkeypatch.setattr(clock._wake, "wait", wait)
    with pytest.raises(Slept):
        clock.run()
    return time.naps, raised


def test_an_idle_clock_goes_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, raised = naps(monkeypatch, lambda clock, time: None)
    assert (looked, raised) == (10, [])


def test_runs_that_it_never_sees_keep_it_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_runs(clock: worker.Clock, time: Time) -> None:
        if time.naps <= 50:
            clock.start(1.0)
            clock.stop()

    looked, raised = naps(monkeypatch, short_runs)
    assert looked > 50
    assert raised == []


def test_the_epoch_is_raised_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_long_run(clock: worker.Clock, time: Time) -> None:
        if time.naps == 1:
            clock.start(0.5)
        elif time.now > 1001:
            clock.stop()

    _, raised = naps(monkeypatch, one_long_run)
    assert 1000.5 <= raised[0] <= 1000.6

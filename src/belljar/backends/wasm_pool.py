"""Warm workers of the wasm backend, by what they are. Called from many threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..wasm import cache
from .fleet import Fleet
from .wasm_plan import House
from .wasm_workers import Worker

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

_RUNS_A_WORKER = 5000


class Pool:
    """Idle workers by what they are. `take` one, then `give_back`."""

    def __init__(self, facts: HostFacts, kept: int) -> None:
        self.process = os.getpid()
        self._facts, self._kept = facts, kept
        self._lock = threading.Lock()
        # By identity, which is quicker than by value: equal houses are one object as a rule.
        self._idle: dict[int, list[Worker]] = {}
        self._fleet = Fleet(facts)
        self._closed = False

    def take(self, house: House, prepare: Callable[[], cache.Compiled]) -> Worker:
        """A warm worker if there is one; else a new one, which takes a tenth of a second."""
        while True:
            with self._lock:
                idle = self._idle.get(id(house))
                worker = idle.pop() if idle else None
            if worker is None:
                return start(self._fleet, house, prepare())
            if worker.alive():
                return worker
            worker.end()

    def give_back(self, worker: Worker, *, keep: bool = True) -> None:
        """Keep it for the next run if it is fit for one, else end it."""
        surplus: Worker | None = worker
        if keep and worker.healthy and worker.house.reusable and worker.runs < _RUNS_A_WORKER:
            with self._lock:
                if not self._closed:
                    self._idle.setdefault(id(worker.house), []).append(worker)
                    surplus = self._surplus()
        if surplus is not None:
            surplus.end(keep=keep)

    def _surplus(self) -> Worker | None:
        """One worker of the kind that was not used for longest, if too many are kept."""
        if sum(map(len, self._idle.values())) <= self._kept:
            return None
        house = next(iter(self._idle))
        worker = self._idle[house].pop(0)
        if not self._idle[house]:
            del self._idle[house]
        return worker

    def close(self) -> None:
        if os.getpid() != self.process:
            return  # a fork of the process that owns them
        with self._lock:
            self._closed = True
            workers = [worker for idle in self._idle.values() for worker in idle]
            self._idle.clear()
        for worker in workers:
            worker.end()
        self._fleet.close()


def start(fleet: Fleet, house: House, compiled: cache.Compiled) -> Worker:
    """A new worker that has said that it is ready."""
    jail = fleet.take(house.outer, house.shape)
    if jail.group is not None:
        jail.group.forks_refused()  # keeps a descriptor from its first use on
    worker = Worker(jail, house)
    try:
        worker.begin(compiled)
    except BaseException:
        worker.end()
        raise
    return worker

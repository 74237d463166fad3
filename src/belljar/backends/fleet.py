"""All zygotes of one backend: started when needed, retired after many runs, replaced when dead.

A run asks for a jail and need not know where it comes from. Called from many threads.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from ..errors import BackendFailed
from .jail_plan import Outer, Shape
from .shelves import Jail, ZygoteDied
from .zygotes import Zygote

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

_MOST_ZYGOTES = 8  # each is an interpreter with its libraries
RUNS_A_ZYGOTE = 2000  # its children share address layout and hash seed: not for ever


class Fleet:
    """Zygotes by what they are. A run takes a jail; nobody else needs to know where from.

    `retire` says whether one that has served many runs is replaced by a new one.
    """

    def __init__(self, facts: HostFacts, *, retire: bool = True) -> None:
        self.facts = facts
        self._most_runs = RUNS_A_ZYGOTE if retire else sys.maxsize
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._starting: dict[Outer, threading.Lock] = {}
        self._zygotes: dict[Outer, Zygote] = {}
        self._retired: list[Zygote] = []
        self._closed = False

    def take(self, outer: Outer, shape: Shape) -> Jail:
        """From a warm zygote, which is started if there is none; one that died is replaced once."""
        for attempt in (1, 2):
            zygote = self._zygote(outer)
            try:
                return zygote.take(shape)
            except ZygoteDied:
                self._retire(zygote)
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _zygote(self, outer: Outer) -> Zygote:
        with self._lock:
            self._sweep()
            zygote = self._zygotes.get(outer)
            if zygote is not None and zygote.runs < self._most_runs:
                return zygote
            starting = self._starting.setdefault(outer, threading.Lock())
        with starting:
            with self._lock:
                current = self._zygotes.get(outer)
                if current is not None and current is not zygote:
                    return current  # somebody else has started it meanwhile
            fresh = Zygote(outer, self.facts)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._zygotes[outer] = fresh
                    self._make_room(fresh)
            if closed:
                fresh.close()
                raise BackendFailed("this backend is closed")
        if zygote is not None:
            self._retire(zygote)
        return fresh

    def _make_room(self, fresh: Zygote) -> None:
        """Retire the ones that served least, beyond so many; `_sweep` ends those that are idle."""
        others = sorted(
            (each for each in self._zygotes.values() if each is not fresh and not each.busy),
            key=lambda each: each.runs,
        )
        for idle in others[: max(0, len(self._zygotes) - _MOST_ZYGOTES)]:
            idle.retired = True
            del self._zygotes[idle.outer]
            self._retired.append(idle)

    def _retire(self, zygote: Zygote) -> None:
        with self._lock:
            if zygote.retired:
                return
            zygote.retired = True
            if self._zygotes.get(zygote.outer) is zygote:
                del self._zygotes[zygote.outer]
            self._retired.append(zygote)
            self._sweep()

    def _sweep(self) -> None:
        """Close retired zygotes whose last run is over."""
        for zygote in [each for each in self._retired if each.busy == 0]:
            self._retired.remove(zygote)
            zygote.close()

    def stats(self) -> dict[str, int]:
        from ..linux.tree import resident

        with self._lock:
            zygotes = [*self._zygotes.values(), *self._retired]
        return {
            "fork_servers": len(zygotes),
            "memory": sum(resident(zygote.process.pid) for zygote in zygotes),
            "parked": sum(zygote.parked for zygote in zygotes),
            "running": sum(zygote.busy for zygote in zygotes),
        }

    def close(self) -> None:
        if os.getpid() != self.process:
            return  # a fork of the process that owns them
        with self._lock:
            self._closed = True
            zygotes = [*self._zygotes.values(), *self._retired]
            self._zygotes.clear()
            self._retired.clear()
        for zygote in zygotes:
            zygote.close()

"""Which processors a run may use, where a control group counts its time: so many as its limit.

A library starts a thread for each processor that it sees. The least busy ones are given out, or two
programs that compute would share one while others idle. Called from many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

_lock = threading.Lock()
_busy: dict[int, int] = {}
_turn = 0


def take(count: int, cpus: Sequence[int]) -> tuple[int, ...]:
    """`count` of `cpus`, to be given back by `release`; nothing if that is all of them."""
    global _turn
    if not 0 < count < len(cpus):
        return ()
    with _lock:
        _turn += 1
        size = len(cpus)
        in_turn = [cpus[(_turn + place) % size] for place in range(size)]
        taken = tuple(sorted(in_turn, key=lambda cpu: _busy.get(cpu, 0))[:count])
        for cpu in taken:
            _busy[cpu] = _busy.get(cpu, 0) + 1
    return taken


def release(taken: tuple[int, ...]) -> None:
    with _lock:
        for cpu in taken:
            _busy[cpu] -= 1

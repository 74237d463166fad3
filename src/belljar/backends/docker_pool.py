"""Started containers that wait for a program, each for one; and the removal of used ones.

A container takes a quarter of a second to start and a fraction of a millisecond to use. The pool
follows demand: the first run of a shape starts its own container and leaves nothing behind, so that
a single run costs no more than it must; from the second on, the replacement of a container is
started when that one is taken, up to `size` a shape. A container that waited for `idle` seconds is
removed. Two threads do all that; they start with the first thing there is to do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from ..docker_api import Api
from ..errors import BelljarError
from .docker_container import Container, remove
from .docker_plan import Shape

_THREADS = 2
_SHAPES = 16
_PAUSE = 5.0  # after the engine has failed us
_JOIN_SECONDS = 90.0


class _Shelf:
    """What is known of one shape: how often it was asked for, and what waits for the next time."""

    def __init__(self) -> None:
        self.uses = 0
        self.waiting: list[Container] = []
        self.making = 0
        self.not_before = 0.0


class Pool:
    """Thread-safe. `make` starts a container of a shape."""

    def __init__(self, api: Api, make: Callable[[Shape], Container], size: int, idle: float):
        self.process = os.getpid()
        self._api, self._make, self._size, self._idle = api, make, size, idle
        self._shelves: OrderedDict[Shape, _Shelf] = OrderedDict()
        self._used: list[tuple[float, str]] = []
        self._removing = 0
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def take(self, shape: Shape) -> Container | None:
        """A waiting container, whose use is noted; None if the caller has to start its own."""
        dead: list[Container] = []
        try:
            with self._changed:
                shelf = self._shelves.setdefault(shape, _Shelf())
                self._shelves.move_to_end(shape)
                shelf.uses += 1
                while shelf.waiting:
                    found = shelf.waiting.pop()
                    if found.alive():
                        self._counts["taken"] += 1
                        # Now and not when the run is over: the next run may come before that.
                        self._wake()
                        return found
                    dead.append(found)
                self._counts["cold"] += 1
                return None
        finally:
            for each in dead:
                self._counts["died waiting"] += 1
                self.discard(each)

    def discard(self, container: Container) -> None:
        """Remove a used container and start the next, without anybody having to wait for that."""
        container.close()
        with self._changed:
            self._used.append((0.0, container.id))
            self._wake()

    def metrics(self) -> dict[str, int]:
        """Counts since the beginning, and what there is now."""
        with self._changed:
            return {
                **{name: self._counts[name] for name in _COUNTED},
                "waiting": sum(len(shelf.waiting) for shelf in self._shelves.values()),
                "starting": sum(shelf.making for shelf in self._shelves.values()),
                "to remove": len(self._used) + self._removing,
            }

    def settled(self, timeout: float) -> bool:
        """Wait until there is nothing to do; False if there still was after `timeout`."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout)

    def close(self) -> list[str]:
        """End and remove everything; the ids of containers that could not be removed."""
        with self._changed:
            self._closed = True
            for shelf in self._shelves.values():
                for each in shelf.waiting:
                    if self.process == os.getpid():
                        each.close()
                    self._used.append((0.0, each.id))
                shelf.waiting.clear()
            self._changed.notify_all()
        if self.process != os.getpid():
            return []  # a child of the one who made them: they are not ours to end
        # Garbage collection may run this in one of them, which cannot wait for itself, and may hold
        # the lock that the other one waits for; both end by themselves.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)
        left = []
        for _, id in self._used:
            try:
                remove(self._api, id)
            except BelljarError:  # the next sweep finds it
                left.append(id)
        self._used.clear()
        return left

    # The threads.

    def _wake(self) -> None:
        while not self._closed and len(self._threads) < _THREADS:
            thread = threading.Thread(target=self._work, name="belljar-containers", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._next_job()
                while job is None:
                    if self._closed:
                        return
                    self._changed.wait(self._until_next())
                    job = self._next_job()
            job()

    def _is_settled(self) -> bool:
        busy = self._removing + sum(shelf.making for shelf in self._shelves.values())
        return not busy and not self._used and all(
            len(shelf.waiting) >= self._target(shelf) for shelf in self._shelves.values()
        )  # fmt: skip

    def _target(self, shelf: _Shelf) -> int:
        return min(self._size, shelf.uses - 1)

    def _next_job(self) -> Callable[[], None] | None:
        now = time.monotonic()
        if self._closed:
            return None
        for shape, shelf in self._shelves.items():
            lacking = self._target(shelf) - len(shelf.waiting) - shelf.making
            if lacking > 0 and now >= shelf.not_before:
                shelf.making += 1
                return lambda: self._fill(shape, shelf)
        self._expire(now)
        for index, (when, id) in enumerate(self._used):
            if now >= when:
                del self._used[index]
                self._removing += 1
                return lambda: self._remove(id)
        return None

    def _expire(self, now: float) -> None:
        while len(self._shelves) > _SHAPES:
            _, shelf = self._shelves.popitem(last=False)
            self._expel(shelf, len(shelf.waiting))
        for shelf in self._shelves.values():
            old = sum(now - each.born > self._idle for each in shelf.waiting)
            if old:
                self._expel(shelf, old)
                shelf.uses = 1  # nobody came: from now on only if somebody comes twice

    def _expel(self, shelf: _Shelf, number: int) -> None:
        shelf.waiting.sort(key=lambda each: each.born)
        for each in shelf.waiting[:number]:
            each.close()
            self._counts["expired"] += 1
            self._used.append((0.0, each.id))
        del shelf.waiting[:number]

    def _until_next(self) -> float:
        """Seconds until something is due by itself."""
        now = time.monotonic()
        due = [when for when, _ in self._used]
        for shelf in self._shelves.values():
            due += [each.born + self._idle for each in shelf.waiting]
            if self._target(shelf) > len(shelf.waiting) + shelf.making:
                due.append(shelf.not_before)
        return min(3600.0, max(0.05, min(due, default=now + 3600.0) - now))

    def _fill(self, shape: Shape, shelf: _Shelf) -> None:
        made = None
        with contextlib.suppress(BelljarError):  # whoever runs next is told by its own attempt
            made = self._make(shape)
        with self._changed:
            shelf.making -= 1
            if made is None:
                self._counts["failed"] += 1
                shelf.not_before = time.monotonic() + _PAUSE
            elif self._closed or self._shelves.get(shape) is not shelf:
                made.close()
                self._used.append((0.0, made.id))
            else:
                self._counts["started"] += 1
                shelf.waiting.append(made)
            self._changed.notify_all()

    def _remove(self, id: str) -> None:
        failed = False
        try:
            remove(self._api, id)
        except BelljarError:
            failed = True  # the engine is away; its containers ended with it, and are removed later
        with self._changed:
            self._removing -= 1
            if failed:
                self._used.append((time.monotonic() + _PAUSE, id))
            else:
                self._counts["removed"] += 1
            self._changed.notify_all()


_COUNTED = ("taken", "cold", "started", "expired", "died waiting", "failed", "removed")

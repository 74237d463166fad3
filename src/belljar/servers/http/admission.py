"""How many runs go on at once, how many wait, and for how long: beyond that a run is refused.

A refusal costs nothing and tells the caller when to come back; a queue without bounds would hold
every caller's request in memory and answer none of them in time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .problems import HttpError


class Admission:
    """Places for runs, given in the order of arrival. Of one event loop."""

    def __init__(self, *, running: int, waiting: int, patience: float) -> None:
        self._most_running, self._most_waiting, self._patience = running, waiting, patience
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._usual = 0.1  # seconds that a run takes, averaged
        self.running = 0
        self.refused = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and keep it; HttpError 503 if the queue is full or the wait too long."""
        if self.running < self._most_running:
            self.running += 1
        else:
            await self._wait()
        began = time.monotonic()
        try:
            yield
        finally:
            self._usual += (time.monotonic() - began - self._usual) / 8
            self._hand_on()

    async def _wait(self) -> None:
        if len(self._waiting) >= self._most_waiting:
            raise self._overloaded("the queue of runs is full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as ending:
            if turn.done() and not turn.cancelled():
                self._hand_on()  # the place came while the wait was being ended
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(ending, TimeoutError):
                raise self._overloaded(
                    f"no run ended in the {self._patience:g} s that one may wait"
                ) from None
            raise

    def _hand_on(self) -> None:
        """Give a place to the next in the queue, or free it."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def _overloaded(self, why: str) -> HttpError:
        self.refused += 1
        after = self._usual * (len(self._waiting) + 1) / self._most_running
        return HttpError(
            503,
            "overloaded",
            f"{why}: {self.running} runs go on and {len(self._waiting)} wait",
            retryable=True,
            fix="try again after the seconds in Retry-After",
            headers={"Retry-After": str(min(60, max(1, math.ceil(after))))},
        )

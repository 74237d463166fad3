"""Runs for asyncio: a thread for each run, from a pool of the runner's own; callbacks on the loop.

asyncio's default pool has a few threads and belongs to the caller's program; a run occupies its
thread until the guest is gone. Coroutine callbacks run as one task on the caller's loop, in the
order of the output, and do not delay the thread that holds the guest to its limits.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .backends.base import Cancel
from .errors import RequestError
from .trusted_imports import calls_application

T = TypeVar("T")


def checked_concurrency(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= 10_000:
        raise RequestError("max_concurrency", f"is a whole number of 1 to 10000, not {given!r}")
    return given


def is_async(call: object) -> bool:
    """Whether calling it gives a coroutine; also for an object with an async `__call__`."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - its kind, not whether there is one
    )


class Pool:
    """The threads of one runner; made with the first run. More runs than `size` wait in order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    async def run(
        self, work: Callable[[Mapping[str, Any], Cancel], T], options: Mapping[str, Any]
    ) -> T:
        """`work(options, cancel)` on a thread. Cancelling the task ends the guest first."""
        switch = _Switch()
        callbacks = _Callbacks(asyncio.get_running_loop(), switch.set)
        given = {
            name: callbacks.entry(value)
            if name in ("on_stdout", "on_stderr") and is_async(value)
            else value
            for name, value in options.items()
        }

        def body() -> T:
            with Cancel() as cancel:  # here: a run that waits for a thread has no descriptors
                switch.connect(cancel)
                return work(given, cancel)

        submitted = self._pool().submit(body)
        running = asyncio.wrap_future(submitted)
        try:
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                submitted.cancel()  # if it has not begun, it never does
                switch.set()
                await _until_done(running)
                raise
            except Exception:
                await callbacks.drain()  # what came before the failure
                raise
            await callbacks.drain()
            return result
        finally:
            await callbacks.stop()

    def close(self) -> None:
        """No more runs; those that have begun go on to their end."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="belljar-run")
            return self._threads


async def _until_done(running: asyncio.Future[Any]) -> None:
    """A second cancellation may not leave the guest running either."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # retrieved, otherwise asyncio logs it as lost


class _Switch:
    """Ends a run that may not have begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Cancel | None = None
        self._set = False

    def connect(self, cancel: Cancel) -> None:
        with self._lock:
            self._cancel = cancel
            if self._set:
                cancel.set()

    def set(self) -> None:
        with self._lock:
            self._set = True
            if self._cancel is not None:
                self._cancel.set()


class _Callbacks:
    """Awaits coroutine callbacks one after the other. The first exception ends the run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._loop, self._on_failure = loop, on_failure
        self._waiting: asyncio.Queue[tuple[Callable[[str], Any], str] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def entry(self, call: Callable[[str], Any]) -> Callable[[str], None]:
        """What the run's thread calls instead of `call`."""
        if self._task is None:
            self._task = self._loop.create_task(self._await_all())

        def put(text: str) -> None:
            # What waits is bounded by the policy's output limit: events carry no more than that.
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, (call, text))

        return put

    async def drain(self) -> None:
        """Returns when every callback has been awaited; raises what one of them raised."""
        if self._task is not None:
            self._waiting.put_nowait(None)
            await asyncio.shield(self._task)
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    @calls_application
    async def _await_all(self) -> None:
        while (item := await self._waiting.get()) is not None:
            call, text = item
            try:
                await call(text)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again by `drain`
                self.failure = error
                self._on_failure()
                return

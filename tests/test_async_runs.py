"""Runs for asyncio: threads of their own, and callbacks that are awaited."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from belljar import api
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed, RequestError
from belljar.testing import FakeBackend
from belljar.types import Request, Result, Status

PIECES = [f"line {i}\n" for i in range(20)]


def runner(fake: FakeBackend, **options: Any) -> api.Runner:
    return api.Runner(engine=Engine(Settings(), backends={"fake": fake}), **options)


def say(request: Request) -> Iterator[tuple[Any, bytes]]:
    for piece in PIECES:
        yield "stdout", piece.encode()


class Counting:
    """Answers after all of `together` runs are in it, or after a moment; counts how many were."""

    def __init__(self, together: int = 0) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._gate = threading.Barrier(together) if together else None

    def __call__(self, request: Request) -> Result:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        if self._gate is not None:
            self._gate.wait(60)
        else:
            time.sleep(0.02)
        with self._lock:
            self._now -= 1
        return Result(status=Status.SUCCESS)


async def many(jar: api.Runner, count: int) -> None:
    await asyncio.gather(*(jar.aexecute("1") for _ in range(count)))


def test_forty_runs_go_on_at_a_time() -> None:
    """asyncio's default pool has as many threads as processors, plus four."""
    counting = Counting(together=40)
    with runner(FakeBackend(counting)) as jar:
        asyncio.run(many(jar, 40))
    assert counting.most == 40


def test_max_concurrency_bounds_them() -> None:
    counting = Counting()
    with runner(FakeBackend(counting), max_concurrency=3) as jar:
        asyncio.run(many(jar, 20))
    assert counting.most == 3


@pytest.mark.parametrize("given", [0, -1, True, "8", 1.5])
def test_max_concurrency_is_a_positive_number(given: Any) -> None:
    with pytest.raises(RequestError, match="max_concurrency"):
        api.create_runner(max_concurrency=given)


def test_the_callers_own_threads_are_free_while_runs_go_on() -> None:
    go_on = threading.Event()

    def wait(request: Request) -> Result:
        assert go_on.wait(60)
        return Result(status=Status.SUCCESS)

    async def main(jar: api.Runner) -> None:
        runs = asyncio.ensure_future(many(jar, 40))
        await asyncio.sleep(0)
        await asyncio.to_thread(go_on.set)
        await runs

    with runner(FakeBackend(wait)) as jar:
        asyncio.run(main(jar))


def test_a_run_that_is_cancelled_while_it_waits_for_a_thread_never_starts() -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait(request: Request) -> Result:
        started.set()
        assert go_on.wait(60)
        return Result(status=Status.SUCCESS)

    fake = FakeBackend(wait)

    async def main(jar: api.Runner) -> None:
        first = asyncio.ensure_future(jar.aexecute("1"))
        assert await asyncio.to_thread(started.wait, 60)
        second = asyncio.ensure_future(jar.aexecute("2"))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        await first

    with runner(fake, max_concurrency=1) as jar:
        asyncio.run(main(jar))
    assert [request.code for request in fake.requests] == ["1"]


def test_async_callbacks_are_awaited_in_order_before_the_result_comes() -> None:
    seen: list[str] = []

    async def slow(text: str) -> None:
        await asyncio.sleep(0.001)
        seen.append(text)

    class Object:
        async def __call__(self, text: str) -> None:
            await slow(text)

    with runner(FakeBackend(output=say)) as jar:
        for callback in (slow, Object()):
            seen.clear()
            result = asyncio.run(jar.aexecute("1", on_stdout=callback))
            assert result.success
            assert seen == PIECES


def test_an_async_callback_that_raises_ends_the_run_and_its_exception_is_raised() -> None:
    ended: list[Status] = []

    class Slow(FakeBackend):
        def run(self, plan: Any, emit: Any, cancel: Any) -> Result:
            result = super().run(plan, emit, cancel)
            assert cancel.wait(60), "the run goes on"
            ended.append(Status.KILLED)
            return result

    async def fail(text: str) -> None:
        raise LookupError(text)

    with runner(Slow(output=say)) as jar, pytest.raises(LookupError, match="line 0"):
        asyncio.run(jar.aexecute("1", on_stdout=fail))
    assert ended == [Status.KILLED]


def test_async_callbacks_get_what_came_before_a_failure_of_the_sandbox() -> None:
    seen: list[str] = []

    async def note(text: str) -> None:
        await asyncio.sleep(0.001)
        seen.append(text)

    class Breaking(FakeBackend):
        def run(self, plan: Any, emit: Any, cancel: Any) -> Result:
            super().run(plan, emit, cancel)
            raise BackendFailed("broken")

    with runner(Breaking(output=say)) as jar, pytest.raises(BackendFailed):
        asyncio.run(jar.aexecute("1", on_stdout=note))
    assert seen == PIECES


def test_run_refuses_an_async_callback() -> None:
    async def never_awaited(text: str) -> None:
        raise AssertionError

    with runner(FakeBackend(output=say)) as jar:
        with pytest.raises(RequestError, match="arun"):
            jar.execute("1", on_stdout=never_awaited)
        with pytest.raises(RequestError, match="arun"):
            asyncio.run(jar.aexecute("1", on_stdout=lambda text: never_awaited(text)))

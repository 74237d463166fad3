"""One tool call: checked against the operator's limits, run, and ended with the client's interest.

A call runs as a task of its own. It is cancelled when the client cancels the request, closes its
connection or ends its input, and when the server stops; the guest is dead before the cancellation
goes on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from ... import languages
from ...api import Runner
from ...errors import BelljarError, LanguageUnknown, PolicyError, RequestError
from ...policy_fields import LIMITS
from ...types import Result

Report = Callable[[float, str | None], Awaitable[None]]
SECONDS_TO_END = 10.0
_FIRST_REPORT, _REPORT_EVERY = 0.25, 0.5
_MAX_MESSAGE = 2000


class Gone(BelljarError):
    """The client closed its connection before the answer."""

    code = "client_gone"


class Stopping(BelljarError):
    """The server ends, and its calls with it."""

    code = "server_stopping"


class Calls:
    """The calls of one server. `allowed` names the languages; None is all that are installed."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_timeout: float,
        allowed: tuple[str, ...] | None = None,
        outputs: tuple[str, ...] = (),
    ) -> None:
        self.runner = runner
        self.max_timeout = max_timeout
        self.allowed = allowed
        self._outputs = outputs
        self._running: set[asyncio.Task[Result]] = set()
        self._stopping = False

    async def run(
        self,
        code: str,
        *,
        language: str,
        stdin: str | None = None,
        timeout: float | None = None,
        report: Report | None = None,
        gone: asyncio.Event | None = None,
    ) -> Result:
        """Run `code`; BelljarError if the arguments ask for what the operator does not allow.

        `report` is awaited now and then with the seconds so far and new output.
        """
        self._check_language(language)
        options: dict[str, Any] = {"language": language, "stdin": stdin or ""}
        if timeout is not None:
            options["timeout"] = self._checked_timeout(timeout)
        if self._outputs:
            options["outputs"] = self._outputs
        if report is None:
            return await self._run(code, options, gone)
        news = _News()
        reporting = asyncio.create_task(news.pass_on(report))
        try:
            options |= {"on_stdout": news.add, "on_stderr": news.add}
            return await self._run(code, options, gone)
        finally:
            await _end(reporting)

    def stop(self) -> None:
        """Refuse further calls, and end those that go on."""
        self._stopping = True
        for task in self._running:
            task.cancel()

    async def end_all(self, seconds: float = SECONDS_TO_END) -> None:
        """`stop`, and wait for the guests to be gone, for so long at most."""
        self.stop()
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    async def _run(self, code: str, options: dict[str, Any], gone: asyncio.Event | None) -> Result:
        if self._stopping:
            raise Stopping("the server is being ended")
        task = asyncio.create_task(self.runner.aexecute(code, **options))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        leaving = asyncio.create_task(gone.wait()) if gone is not None else None
        try:
            await asyncio.wait(
                [task, *([leaving] if leaving is not None else [])],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not task.done():
                raise Gone("the client closed its connection; the program was ended")
            if task.cancelled():  # by `stop`: a cancelled call does not get here
                raise Stopping("the server is being ended; the program was ended first")
            return task.result()
        finally:
            await _end(task, leaving)

    def _check_language(self, name: str) -> None:
        known = languages.find(name, self.runner.engine.settings)  # LanguageUnknown lists them
        if self.allowed is not None and not {name, known.name} & set(self.allowed):
            raise LanguageUnknown(
                "language",
                f"{name!r} is not offered here; known: {', '.join(self.allowed)}",
            )

    def _checked_timeout(self, given: float) -> float:
        try:
            seconds: float = LIMITS["timeout"]("timeout", given)
        except PolicyError as error:
            raise RequestError("timeout", error.message.removeprefix("timeout: ")) from None
        if seconds > self.max_timeout:
            raise RequestError(
                "timeout",
                f"{seconds:g} s is more than the maximum of {self.max_timeout:g} s here",
                fix=f"ask for timeout={self.max_timeout:g} or less",
            )
        return seconds


async def _end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel them and wait until they are over; shielded, because anyio cancels at every step."""
    waiting = [task for task in tasks if task is not None]
    for task in waiting:
        task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait(waiting)


class _News:
    """What a program has written since the last report."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._text = ""
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Called from the thread of the run."""
        with self._lock:
            self._text = (self._text + text)[-_MAX_MESSAGE:]

    async def pass_on(self, report: Report) -> None:
        await asyncio.sleep(_FIRST_REPORT)
        while True:
            with self._lock:
                text, self._text = self._text, ""
            await report(time.monotonic() - self._began, text or None)
            await asyncio.sleep(_REPORT_EVERY)

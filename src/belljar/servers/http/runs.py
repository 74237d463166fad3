"""`POST /v1/run`: from a request's body to its answer, one result or a stream of events.

Three things go on at once: the run on a thread of its own, a read of the connection that ends when
the client has gone, and for a stream the writing of events. However a run is abandoned (the client
has gone, the server stops, a run outlasts every limit), its task is cancelled, which kills the
guest and waits until it is gone; only then is its place free for another run.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import Iterable
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from ...async_runs import Pool
from ...backends.base import Cancel
from ...engine import Engine
from ...errors import BelljarError
from ...events import Displayed, Emit, Event, Output, RunStarted
from ...presentation import as_json
from ..remote import Rights
from . import notes, wire
from .admission import Admission
from .notes import Note
from .options import Options
from .problems import HttpError, encoded, failure, problem, status_of

_GRACE_SECONDS = 60.0  # beyond the longest run, for a backend to start and end one
_PARSED_AT_ONCE = 1 << 16  # larger bodies are read on a thread: they would hold up all others
_BODIES = 8  # so many of the largest size may be held at the same time
_GONE = Response(status_code=499)  # for the log: there is no connection to send it on


class Runs:
    """The runs of one server. Of one event loop; `stop` may be called on it at any time."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine, self.options = engine, options
        self._rights: Rights = options.rights
        self._pool = Pool(options.concurrency)
        self._works: set[asyncio.Task[bytes]] = set()
        self._stopping = False
        self._held = 0  # bytes of bodies
        most = engine.settings.ceiling.timeout
        self._longest = None if most is None else options.queue_time + most + _GRACE_SECONDS
        self.admission = Admission(
            running=options.concurrency, waiting=options.queue, patience=options.queue_time
        )

    async def answer(self, request: Request) -> Response:
        if self._stopping:
            return failure(_stopping())
        body = bytearray()
        try:
            if not await self._read(request, body):
                return _GONE
            job = await self._parsed(bytes(body))
            note = notes.of(request.scope)
            note["run"] = job.request.id
            if _wants_stream(request.headers.get("accept", "")):
                return _Stream(self, job, note)
            return await self._result(job, note, request.receive)
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> bool:
        """The body, up to its limits; False if the client has gone."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" or "content-encoding" in request.headers:
            raise HttpError(
                415,
                "media_type_unsupported",
                "the body must be plain JSON",
                fix="send `Content-Type: application/json`, without Content-Encoding",
            )
        try:
            async with asyncio.timeout(self.options.body_time):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        return False
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > self.options.max_body:
                        raise too_large(self.options.max_body)
                    if self._held + len(piece) > _BODIES * self.options.max_body:
                        raise HttpError(
                            503,
                            "overloaded",
                            "the server holds as many bodies of requests as it may",
                            retryable=True,
                            headers={"Retry-After": "1", "Connection": "close"},
                        )
                    self._held += len(piece)
                    body += piece
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise HttpError(
                408,
                "body_too_slow",
                f"the body did not come within {self.options.body_time:g} s",
                retryable=True,
                headers={"Connection": "close"},
            ) from None

    async def _parsed(self, body: bytes) -> wire.Job:
        if len(body) <= _PARSED_AT_ONCE:
            return wire.parse(body, self._engine, self._rights)
        return await asyncio.to_thread(wire.parse, body, self._engine, self._rights)

    async def _result(self, job: wire.Job, note: Note, receive: Receive) -> Response:
        work = self.start(job, None, note)
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait(
                (work, gone), timeout=self._longest, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return self._ended(work, job)
            if gone.done():
                note["client"] = "gone"
                await self.end(work)
                return _GONE
            return failure(_stuck())  # `finally` ends it; waiting for that may take for ever
        finally:
            gone.cancel()
            work.cancel()

    def _ended(self, work: asyncio.Task[bytes], job: wire.Job) -> Response:
        try:
            return Response(work.result(), media_type="application/json")
        except (BelljarError, asyncio.CancelledError) as error:
            told, status = self.explained(error, job)
            return failure(told, status)

    def explained(
        self, error: BelljarError | asyncio.CancelledError, job: wire.Job
    ) -> tuple[BelljarError, int]:
        """What to answer for a run without a result, and the status."""
        if isinstance(error, asyncio.CancelledError):  # only `stop` cancels a run that is awaited
            error = _stopping()
        named = job.backend not in (None, "auto")
        return error, status_of(error, named_backend=named)

    def start(self, job: wire.Job, emit: Emit | None, note: Note) -> asyncio.Task[bytes]:
        """A task whose result is the JSON of the run's result. Cancelling it kills the guest.

        How the run ended, and where it ran, is added to `note`.
        """
        work = asyncio.create_task(self._admitted(job, emit, note))
        self._works.add(work)
        work.add_done_callback(self._forget)
        return work

    def _forget(self, work: asyncio.Task[bytes]) -> None:
        self._works.discard(work)
        if not work.cancelled():
            work.exception()  # retrieved, otherwise asyncio logs it as lost

    async def _admitted(self, job: wire.Job, emit: Emit | None, note: Note) -> bytes:
        def body(_callbacks: object, cancel: Cancel) -> bytes:
            result = self._engine.run(
                job.request,
                level=job.level,
                wishes=job.wishes,
                backend=job.backend,
                emit=emit,
                cancel=cancel,
            )
            note.update(status=result.status.value, backend=result.backend or "none")
            return encoded(as_json(result))

        async with self.admission.place():
            return await self._pool.run(body, {})

    async def end(self, work: asyncio.Task[bytes]) -> None:
        """Cancel it and wait until its guest is gone."""
        work.cancel()
        await asyncio.wait((work,), timeout=self._longest)

    def stop(self) -> None:
        """Accept no more runs, and end those that go on or wait."""
        self._stopping = True
        for work in self._works:
            work.cancel()

    async def close(self) -> None:
        """Wait until every guest is gone."""
        if self._works:
            await asyncio.wait(self._works, timeout=_GRACE_SECONDS)
        self._pool.close()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. Only after its whole body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream(Response):
    """Server-sent events: `started`, then `stdout`, `stderr` and `display` as they come, and last
    `result` or `error`. What is refused before a backend was chosen has its own status instead."""

    def __init__(self, runs: Runs, job: wire.Job, note: Note) -> None:
        self.background, self.body = None, b""
        self.status_code = 200
        self._runs, self._job, self._note = runs, job, note
        self._keep_alive = runs.options.keep_alive
        self._decoders = {
            stream: codecs.getincrementaldecoder("utf-8")("replace")
            for stream in ("stdout", "stderr")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        # What waits here is bounded: events carry no more output and displays than the policy lets
        # a result have.
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def emit(event: Event) -> None:
            if isinstance(event, RunStarted | Output | Displayed):
                loop.call_soon_threadsafe(events.put_nowait, event)

        def wake(_: object) -> None:
            events.put_nowait(None)

        work = self._runs.start(self._job, emit, self._note)
        work.add_done_callback(wake)
        gone = asyncio.create_task(disconnected(receive))
        gone.add_done_callback(wake)
        started = False
        try:
            while True:
                pieces = await self._next(events)
                if work.done():  # all its events were put before, and are in `pieces`
                    await self._finish(work, started, pieces, scope, receive, send)
                    return
                if gone.done():
                    self._note["client"] = "gone"
                    await self._runs.end(work)
                    return
                if not started:
                    started = True
                    await send(_STREAM_START)
                await send({"type": "http.response.body", "body": pieces, "more_body": True})
        finally:
            gone.cancel()
            work.cancel()

    async def _next(self, events: asyncio.Queue[Event | None]) -> bytes:
        """Everything that is there: a comment if nothing came for a while."""
        pieces: list[Event | None] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._keep_alive):
                pieces.append(await events.get())
        while not events.empty():
            pieces.append(events.get_nowait())
        return b"".join(self._frames(pieces)) if pieces else b": keep-alive\n\n"

    def _frames(self, events: Iterable[Event | None]) -> Iterable[bytes]:
        for event in events:
            match event:
                case RunStarted():
                    yield _frame("started", {"id": event.request.id, "backend": event.backend})
                case Output():
                    if text := self._decoders[event.stream].decode(event.data):
                        yield _frame(event.stream, {"text": text})
                case Displayed():
                    yield _frame("display", {"data": dict(event.display.data)})

    async def _finish(
        self,
        work: asyncio.Task[bytes],
        started: bool,
        pieces: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            last = b"event: result\ndata: " + work.result() + b"\n\n"
        except (BelljarError, asyncio.CancelledError) as error:
            told, status = self._runs.explained(error, self._job)
            if not started and not pieces:
                await failure(told, status)(scope, receive, send)
                return
            last = _frame("error", problem(told, status))
        for stream, decoder in self._decoders.items():
            if text := decoder.decode(b"", final=True):
                pieces += _frame(stream, {"text": text})
        if not started:
            await send(_STREAM_START)
        await send({"type": "http.response.body", "body": pieces + last})


_STREAM_START: dict[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"x-accel-buffering", b"no"),  # nginx would collect the events
    ],
}


def _frame(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encoded(data) + b"\n\n"


def _wants_stream(accept: str) -> bool:
    for choice in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        if kind == "text/event-stream":
            return not any(part.replace(" ", "") in ("q=0", "q=0.0") for part in parameters)
    return False


def too_large(most: int) -> HttpError:
    return HttpError(
        413,
        "body_too_large",
        f"the body is larger than {most} bytes",
        fix="send less in `files`, or ask the operator for a larger --max-body",
        headers={"Connection": "close"},
    )


def _stopping() -> HttpError:
    return HttpError(
        503,
        "server_stopping",
        "the server is being stopped; the program was ended",
        retryable=True,
        headers={"Retry-After": "5", "Connection": "close"},
    )


def _stuck() -> HttpError:
    return HttpError(
        504,
        "run_stuck",
        "the run has not ended long after its time limit; the backend does not answer",
        fix="see `belljar doctor` on the server's host",
    )

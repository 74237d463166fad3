"""The process of the HTTP server: its socket, its connections, its signals.

uvicorn parses and writes HTTP. What it does not bound is bounded here, for every connection: the
time and the size of a request's headers, the time of its body also where no route reads it, the
size of what is neither header nor body (trailers, extensions of chunks), the time in which a client
reads nothing of an answer, and the number of connections. A request that comes before the last one
was answered (pipelining) is not read: uvicorn would stop reading, and then not see that the client
has gone. The connection is closed after the first answer, and clients send the rest again, as
RFC 9112 says they must.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import ConfigError
from .options import Options

_BACKLOG = 2048
_STALLED_SECONDS = 60.0
_BODY_GRACE_SECONDS = 2.0  # for a route's own answer that the body was too slow
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: application/problem+json\r\ncontent-length: %d\r\n\r\n%s"
)
_TOO_MANY = (
    b'{"type":"urn:belljar:problem:overloaded","title":"Service Unavailable","status":503,'
    b'"detail":"too many connections","code":"overloaded","retryable":true,"fix":null}'
)
_LARGE_HEADERS = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class Work(Protocol):
    """What a server does for its clients, as far as its end needs to know."""

    def stop(self) -> None:
        """Accept nothing more, and end what goes on."""

    async def close(self) -> None:
        """Wait until all of it is over."""


class Connection(HttpToolsProtocol):
    """One connection. `options` is set on the subclass that `serve` makes."""

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None  # for what the client owes: headers, a body
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._header_bytes = 0
        self._in_headers = True
        self._complete = False
        self._unframed = 0  # bytes since the last piece of a body
        self._surplus = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.options.connections:
            transport.write(_REFUSED % (len(_TOO_MANY), _TOO_MANY))
            transport.close()
            return
        self._in_headers = True
        self._allow(self.options.header_time)

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow(None)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._surplus or self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        else:
            self._unframed += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.options.max_headers:
            self.transport.write(_LARGE_HEADERS)
            self.transport.close()
        elif self._unframed > self.options.max_headers + len(data):
            self.transport.abort()
        elif self._timer is None and self.cycle is not None and self.cycle.response_complete:
            # uvicorn's own timer of an idle connection ends with any byte, such as an empty line.
            self._allow(self.options.header_time)

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._surplus = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self._in_headers, self._complete, self._unframed = True, False, 0
        self._allow(self.options.header_time)

    def on_url(self, url: bytes) -> None:
        if not self._surplus:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers and not self._surplus:  # else a trailer, which is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._surplus:
            return
        self._in_headers = False
        self._header_bytes = 0
        self._allow(self.options.body_time + _BODY_GRACE_SECONDS)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._unframed = 0

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        if not self._surplus:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._surplus:
            return
        self._complete = True
        self._allow(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._complete and not self.transport.is_closing():
            self._allow(self.options.header_time)  # for the rest of a body that was not needed

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(_STALLED_SECONDS, self._check_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _check_stalled(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            self.transport.abort()
            return
        self._unsent = unsent
        self._stall_timer = self.loop.call_later(_STALLED_SECONDS, self._check_stalled)

    def _allow(self, seconds: float | None) -> None:
        """Close the connection after `seconds`, instead of any earlier time; None: do not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self.transport.close)


class Server(uvicorn.Server):
    """Ends its runs on the first signal, and the process on the second."""

    def __init__(self, config: uvicorn.Config, work: Work, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._started()  # not before: until then connections wait

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # Guests die with the process: the kernel closes what their supervisors watch.
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)
            return
        self.should_exit = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._work.stop)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is started; ConfigError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name != "nt":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Now: two servers can bind the same address with SO_REUSEADDR while neither listens.
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            "address",
            f"cannot listen on {host} port {port}: {error.strerror}",
            fix="end what uses it, or choose another with --port",
        ) from None
    return listener


def serve(
    app: ASGIApp,
    work: Work,
    options: Options,
    listener: socket.socket,
    started: Callable[[], None] = lambda: None,
    *,
    lifespan: Literal["on", "off"] = "off",
) -> None:
    """Answer requests until a signal comes; returns when every guest is gone."""
    protocol = type("BoundConnection", (Connection,), {"options": options})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=[("x-content-type-options", "nosniff"), ("cache-control", "no-store")],
        timeout_graceful_shutdown=5,
    )
    server = Server(config, work, started)

    async def whole() -> None:
        await server.serve(sockets=[listener])
        await work.close()

    factory = config.get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(whole())

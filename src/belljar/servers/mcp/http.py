"""Serves MCP over HTTP on loopback: the SDK's application inside the guard of `belljar serve`.

The guard checks Host, Origin and the bearer token. A session of the protocol belongs to the token
that opened it: the SDK answers others as if there were none. When a connection ends, its calls end:
revisions of the protocol before 2026-07-28 leave that to the server, and a guest whose answer has
nowhere to go only costs. Such a client calls again; there is nothing to resume.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth import Token, Tokens
from ..http import listening
from ..http.guard import TOKEN, Guard
from ..http.options import Options
from .calls import Calls
from .tools import GONE, Server

HOST, PORT, PATH = "127.0.0.1", 8766, "/mcp"
_MAX_BODY = 4 << 20


def serve(
    server: Server,
    calls: Calls,
    tokens: Tokens,
    listener: socket.socket,
    started: Callable[[], None],
) -> None:
    """Answer until a signal comes; returns when no guest is left."""
    options = Options(max_body=_MAX_BODY)
    app = _application(server, tokens, options)
    listening.serve(app, _Work(calls), options, listener, started, lifespan="on")


class _Work:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def stop(self) -> None:
        self._calls.stop()

    async def close(self) -> None:
        await self._calls.end_all()


def _application(server: Server, tokens: Tokens, options: Options) -> ASGIApp:
    # The guard has checked Host and Origin: two rules would differ in what they accept.
    checked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    protocol = server.streamable_http_app(
        streamable_http_path=PATH,
        host=HOST,
        max_request_body_size=_MAX_BODY,
        transport_security=checked,
    )

    async def authenticated(scope: Scope, receive: Receive, send: Send) -> None:
        token: Token | None = scope[TOKEN]
        if token is not None:
            known = AccessToken(token=token.id, client_id=token.id, scopes=[])
            scope["user"] = AuthenticatedUser(known)
        gone = scope[GONE] = asyncio.Event()

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
            return message

        await protocol(scope, heard, send)

    guarded = Guard(authenticated, tokens, options)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        inner = protocol if scope["type"] == "lifespan" else guarded
        await inner(scope, receive, send)

    return application

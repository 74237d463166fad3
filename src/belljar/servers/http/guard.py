"""The outermost layer of the HTTP server: what it refuses before any route sees a request.

In this order: a `Host` that is not this server's, a foreign `Origin`, a missing token, a body that
is too large by its own announcement. The first two protect against pages in a browser on the same
machine: such a page can make its own name resolve to 127.0.0.1 (DNS rebinding), and then its
requests carry that name in `Host`. An address is no name that a page could own, so it is accepted.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import BelljarError, ConfigError
from ...log import printable
from ..auth import Token, Tokens
from . import notes
from .options import Options
from .problems import HttpError, failure
from .runs import too_large

logger = logging.getLogger("belljar.http")

# What answers without a token. The same on every server of a version: nothing about this host.
PUBLIC = frozenset({"/", "/docs", "/openapi.json", "/healthz"})
TOKEN = "belljar.token"  # in the scope: the Token of the request, None where none is needed


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, tokens: Tokens, options: Options) -> None:
        self._app, self._tokens, self._options = app, tokens, options
        self._hosts = frozenset(name.lower() for name in options.allow_hosts)
        self._origins = frozenset(origin.lower() for origin in options.allow_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.monotonic(), 0
        note = notes.begin(scope)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
        except BelljarError as error:
            await failure(error)(scope, receive, noted)
        else:
            try:
                await self._app(scope, receive, noted)
            except Exception:
                logger.exception("a request failed")
                if status:
                    raise
                await failure(_internal())(scope, receive, noted)
        token: Token | None = scope.get(TOKEN)
        logger.info(
            "%s %s %d %.1f ms token=%s%s",
            scope["method"],
            _printable(scope["path"]),
            status,
            (time.monotonic() - began) * 1e3,
            token.id if token is not None else "-",
            "".join(f" {name}={_printable(word)}" for name, word in note.items()),
        )

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = _all(headers, b"host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise HttpError(
                421,
                "host_refused",
                "the Host header does not name this server",
                fix="use the server's address, or start it with --allow-host NAME",
            )
        for origin in _all(headers, b"origin"):
            if not self._may_come_from(origin, hosts[0]):
                raise HttpError(
                    403,
                    "origin_refused",
                    "a page of another origin may not use this server",
                    fix="start the server with --allow-origin ORIGIN",
                )
        scope[TOKEN] = self._authenticated(_all(headers, b"authorization"))
        if scope[TOKEN] is None and scope["path"] not in PUBLIC:
            raise _unauthenticated(bool(_all(headers, b"authorization")))
        if _all(headers, b"upgrade") and _has_body(headers):
            # The parser drops the body. Java's client asks for h2c with every request.
            raise HttpError(
                400,
                "upgrade_unsupported",
                "the server speaks HTTP/1.1 only, and cannot read the body of a request to upgrade",
                fix="send no Upgrade header; in Java: HttpClient.newBuilder().version(HTTP_1_1)",
                headers={"Connection": "close"},
            )
        for length in _all(headers, b"content-length"):
            if not length.isdecimal() or int(length[:20]) > self._options.max_body:
                raise too_large(self._options.max_body)

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host)
        return name is not None and (
            name == "localhost"
            or name.endswith(".localhost")
            or name in self._hosts
            or _is_address(name)
        )

    def _may_come_from(self, origin: str, host: str) -> bool:
        """A page of the server itself, or of an origin that the operator allows."""
        if origin.lower() in self._origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()

    def _authenticated(self, given: list[str]) -> Token | None:
        if len(given) != 1:
            return None
        scheme, _, token = given[0].partition(" ")
        if scheme.lower() != "bearer":
            return None
        try:
            return self._tokens.check(token.strip())
        except ConfigError as error:
            logger.error("the file of tokens cannot be used: %s", error)
            raise _internal() from None  # its path is not for a caller without a token


def _all(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for name, value in headers if name == wanted]


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in headers
    )


def _without_port(host: str) -> str | None:
    """The name or address in a Host header, in lower case; None if it is not one."""
    name, port = host.lower(), ""
    if name.startswith("["):
        name, bracket, port = name[1:].partition("]")
        if not bracket:
            return None
        if port and not port.startswith(":"):
            return None
        port = port.removeprefix(":")
    elif ":" in name:
        name, _, port = name.rpartition(":")
    if port and not (port.isdecimal() and len(port) <= 5):
        return None
    return name.removesuffix(".") or None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _unauthenticated(presented: bool) -> HttpError:
    challenge = 'Bearer realm="belljar"'
    if presented:
        challenge += ', error="invalid_token"'
    return HttpError(
        401,
        "token_invalid" if presented else "token_missing",
        "the token is not valid" if presented else "this needs a token",
        fix="`belljar token create` prints one; send `Authorization: Bearer TOKEN`",
        headers={"WWW-Authenticate": challenge, "Connection": "close"},
    )


def _internal() -> HttpError:
    return HttpError(
        500, "internal_error", "the server failed; its log says why", fix="please report it"
    )


def _printable(text: Any) -> str:
    return printable(text, 200)


def of_status(status: int) -> HttpError:
    """The problem for what the router itself refuses."""
    phrase = HTTPStatus(status).phrase
    return HttpError(status, phrase.lower().replace(" ", "_"), phrase)

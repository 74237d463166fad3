"""A small client of the Engine API that Docker and Podman speak on a unix socket.

Our own, over `http.client`, because we need one thing that HTTP libraries do not give: the raw
connection of `attach`, on which a container's input and output flow after the HTTP answer. And it
costs no dependency and no import time. Only unix sockets are spoken to: an engine on another
machine is root on it, and TLS or ssh do that better than we would (forward its socket with
`ssh -L`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import BackendFailed, BackendUnavailable

if TYPE_CHECKING:
    import http.client

# The oldest version that has all we use; Docker 20.10 and Podman 4 speak it, and so do newer ones.
VERSION = "v1.41"
_MOST_JSON = 64 << 20
_INSTALL = "apt-get install docker.io (or podman), start it, then `belljar doctor`"


class ApiError(BackendFailed):
    """The engine answered, and said no. `status` is HTTP's."""

    def __init__(self, status: int, message: str, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.status = status


class Attached:
    """A container's streams after `attach`: what to write to, and what was already read of it."""

    def __init__(self, connection: socket.socket, early: bytes) -> None:
        self.socket, self.early = connection, early


def places(environ: Mapping[str, str] | None = None) -> list[str]:
    """Where engines put their sockets when nobody says where, the usual ones first."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    home = environ.get("HOME", "")
    found = ["/var/run/docker.sock", f"{runtime}/docker.sock"]
    if home:
        found += [f"{home}/.docker/run/docker.sock", f"{home}/.docker/desktop/docker.sock"]
    return [*found, f"{runtime}/podman/podman.sock", "/run/podman/podman.sock"]


def socket_path(docker_host: str | None) -> str:
    """The path in a DOCKER_HOST; BackendUnavailable for what is not a unix socket."""
    given = docker_host or ""
    path = given.removeprefix("unix://")
    if path.startswith("/") and "\0" not in path:
        return path
    raise BackendUnavailable(
        f"{given!r} is not a unix socket, the only kind of engine address that is accepted",
        fix="forward a remote engine's socket: ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock "
        "HOST, then DOCKER_HOST=unix:///tmp/docker.sock",
    )


def connect(docker_host: str | None = None) -> Api:
    """The engine that answers: the given one, $DOCKER_HOST's, or the first at its usual place.

    BackendUnavailable says what was tried and what to do about it.
    """
    named = docker_host or os.environ.get("DOCKER_HOST", "").strip()
    if named:
        api = Api(socket_path(named))
        api.ping()
        return api
    problem: BackendUnavailable | None = None
    for path in places():
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                api = Api(path)
                api.ping()
                return api
        except BackendUnavailable as error:
            problem = problem or error
        except OSError:
            continue
    raise problem or BackendUnavailable(
        f"no Docker or Podman socket was found ({', '.join(places())})", fix=_INSTALL
    )


class Api:
    """One engine behind a socket. A new connection for every call: it costs 0.1 ms, and a call
    may come from any thread."""

    def __init__(self, path: str) -> None:
        self.path = path

    def ping(self) -> None:
        """BackendUnavailable unless an engine answers."""
        try:
            self.json("GET", "/_ping", timeout=10)
        except ApiError as error:
            raise BackendUnavailable(f"the engine at {self.path} does not work: {error}") from error
        except BackendFailed as error:
            raise BackendUnavailable(error.message, fix=error.fix, retryable=True) from error

    def json(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        *,
        ok: tuple[int, ...] = (),
        timeout: float | None = 60.0,
    ) -> Any:
        """The answer's JSON, its text if it is none, or None. ApiError unless the status is 2xx or
        in `ok`; BackendUnavailable or BackendFailed if the engine cannot be talked to."""
        import json as codec

        data = None if body is None else codec.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        connection = self._connection(timeout)
        try:
            response = self._ask(connection, method, _target(path, query), data, headers)
            raw = self._read(response)
        finally:
            connection.close()
        if not 200 <= response.status < 300 and response.status not in ok:
            raise _refusal(response.status, raw)
        try:
            return codec.loads(raw) if raw else None
        except ValueError:
            return raw.decode("utf-8", "replace")

    def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float | None = 600.0,
    ) -> Iterator[dict[str, Any]]:
        """The answer's JSON objects as they come: the progress of a pull, an import, a build.

        `body` may be an iterable of pieces, which are sent as they are made.
        """
        import json as codec

        connection = self._connection(timeout)
        try:
            response = self._ask(connection, method, _target(path, query), body, headers or {})
            if not 200 <= response.status < 300:
                raise _refusal(response.status, self._read(response))
            for line in self._lines(response):
                if line.strip():
                    yield codec.loads(line)
        finally:
            connection.close()

    def attach(self, container: str, *, timeout: float = 60.0) -> Attached:
        """The raw connection to a container's three streams; before `start`, nothing is missed."""
        connection = self._open(timeout)
        try:
            connection.sendall(
                f"POST /{VERSION}/containers/{container}/attach"
                "?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
                "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                "Content-Length: 0\r\n\r\n".encode()
            )
            head = b""
            while b"\r\n\r\n" not in head:
                piece = connection.recv(4096)
                if not piece or len(head) > 1 << 16:
                    raise self._gone("the engine closed the connection")
                head += piece
            head, _, early = head.partition(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status not in (101, 200):
                raise _refusal(status, early)
        except (OSError, ValueError, IndexError) as error:
            connection.close()
            raise self._gone(str(error)) from error
        except BackendFailed:
            connection.close()
            raise
        return Attached(connection, early)

    def _connection(self, timeout: float | None) -> http.client.HTTPConnection:
        import http.client

        connection = http.client.HTTPConnection("localhost", timeout=timeout or None)
        connection.sock = self._open(timeout)
        return connection

    def _open(self, timeout: float | None) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.settimeout(timeout)
        try:
            opened.connect(self.path)
        except OSError as error:
            opened.close()
            raise self._unreachable(error) from error
        return opened

    def _unreachable(self, error: OSError) -> BackendUnavailable:
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR:
                return BackendUnavailable(f"there is no socket at {self.path}", fix=_INSTALL)
            case errno.EACCES | errno.EPERM:
                return BackendUnavailable(
                    f"no permission to use the engine's socket {self.path}",
                    fix="sudo usermod -aG docker $USER, then log in again; or a rootless engine",
                )
            case errno.ECONNREFUSED | errno.EPROTOTYPE | errno.ENOTSOCK:
                return BackendUnavailable(
                    f"nobody listens at {self.path}: the engine is not running",
                    fix="systemctl start docker (or podman.socket)",
                    retryable=True,
                )
        return BackendUnavailable(f"{self.path}: {error}", fix=_INSTALL, retryable=True)

    def _gone(self, why: str) -> BackendFailed:
        return BackendFailed(
            f"the engine at {self.path} went away: {why}",
            fix="see the engine's log, e.g. `journalctl -u docker`; then run it again",
            retryable=True,
        )

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        import http.client

        try:
            # It may refuse a body before it has read it to the end: then its answer says why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body=body, headers=headers)
        except OSError as error:
            raise self._gone(str(error)) from error
        try:
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(str(error) or type(error).__name__) from error

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        import http.client

        try:
            raw = response.read(_MOST_JSON + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(str(error) or type(error).__name__) from error
        if len(raw) > _MOST_JSON:
            raise BackendFailed("the engine's answer is too long")
        return raw

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        import http.client

        try:
            while line := response.readline(_MOST_JSON):
                yield line
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(str(error) or type(error).__name__) from error


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    if not query:
        return f"/{VERSION}{path}"
    from urllib.parse import urlencode

    return f"/{VERSION}{path}?{urlencode(query)}"


def _refusal(status: int, raw: bytes) -> ApiError:
    import json as codec

    text = raw.decode("utf-8", "replace").strip()
    with contextlib.suppress(ValueError, AttributeError):  # not every refusal is JSON
        answer = codec.loads(raw)
        text = answer.get("message") or answer.get("cause") or text
    full = "no space left on device" in text
    return ApiError(
        status,
        f"the engine refused ({status}): {text[:2000]}",
        fix="free disk space where the engine keeps its data (`docker system df`)"
        if full
        else None,
        retryable=full or status >= 500,
    )

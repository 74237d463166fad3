"""What tests of the MCP server share: the real `belljar mcp`, the official client, and who runs."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

import belljar

COMMAND = (sys.executable, "-m", "belljar", "mcp")
# For what must be gone soon. How soon it is is for benchmarks: this machine may be busy.
SOON = 10.0


def environment(**extra: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    source = str(Path(belljar.__file__).parent.parent)
    return {**kept, "PYTHONPATH": source, "LANG": "C.UTF-8", **extra}


# An `era` is "legacy", the handshake of the protocol's revisions until 2025-11-25, or "auto", which
# finds the one since.


class Session:
    """A connected client whose calls block, on an event loop in a thread of its own."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self.portal, self.client = portal, client

    def call(self, tool: str, progress: Any = None, **arguments: Any) -> CallToolResult:
        return self.portal.call(self._call, tool, arguments, progress)

    async def _call(self, tool: str, arguments: dict[str, Any], progress: Any) -> CallToolResult:
        return await self.client.call_tool(tool, arguments, progress_callback=progress)

    def start(self, tool: str, **arguments: Any) -> Any:
        """A future; cancelling it is leaving the call."""
        return self.portal.start_task_soon(self._call, tool, arguments, None)

    def do(self, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
        return self.portal.call(work, self.client)


@contextmanager
def stdio_session(
    *flags: str, era: str = "auto", cwd: Path | None = None, **extra: str
) -> Iterator[Session]:
    """A client that started `belljar mcp` itself."""
    parameters = StdioServerParameters(
        command=COMMAND[0], args=[*COMMAND[1:], *flags], env=environment(**extra), cwd=cwd
    )
    with connected(stdio_client(parameters), era) as session:
        yield session


@contextmanager
def connected(transport: Any, era: str) -> Iterator[Session]:
    with start_blocking_portal() as portal:
        client = Client(transport, mode=era)
        with portal.wrap_async_context_manager(client):
            yield Session(portal, client)


class HttpServer:
    """`belljar mcp --http` on a free port, with a file of tokens of its own."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.tokens = directory / "tokens.json"
        self.process = subprocess.Popen(
            [*COMMAND, "--http", "--port", "0", "--json", "--tokens", str(self.tokens), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        told = json.loads(self.stdout.readline())
        self.url, self.token = told["url"], told["token"]
        self.address = ("127.0.0.1", int(self.url.partition("1:")[2].partition("/")[0]))
        self.bearer = {"Authorization": f"Bearer {self.token}"}

    @contextmanager
    def session(self, era: str) -> Iterator[Session]:
        with start_blocking_portal() as portal:
            web = httpx2.AsyncClient(headers=self.bearer, timeout=60)
            client = Client(streamable_http_client(self.url, http_client=web), mode=era)
            with portal.wrap_async_context_manager(web), portal.wrap_async_context_manager(client):
                yield Session(portal, client)

    def post(self, body: Any, **headers: str) -> httpx2.Response:
        """One message of a client; a header that is empty is left out."""
        given = {"Accept": "application/json, text/event-stream", **self.bearer, **headers}
        given = {name: value for name, value in given.items() if value}
        return httpx2.post(self.url, json=body, headers=given, timeout=60)

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self.stdout.close()


class Raw:
    """`belljar mcp` with nobody's client: lines in, lines out."""

    def __init__(self, *flags: str, **extra: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(**extra),
        )
        streams = self.process.stdin, self.process.stdout, self.process.stderr
        assert all(streams)
        self.stdin, self.stdout, self.stderr = streams

    def write(self, data: bytes) -> None:
        self.stdin.write(data)
        self.stdin.flush()

    def send(self, method: str, params: dict[str, Any], number: int | None = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        if number is not None:
            message["id"] = number
        self.write(json.dumps(message).encode() + b"\n")

    def shake_hands(self) -> None:
        told = {"name": "test", "version": "1"}
        self.send(
            "initialize",
            {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": told},
            1,
        )
        assert self.answer(1)["result"]["serverInfo"]["name"] == "belljar"
        self.send("notifications/initialized", {})

    def call(self, number: int, tool: str, **arguments: Any) -> None:
        self.send("tools/call", {"name": tool, "arguments": arguments}, number)

    def answer(self, number: int) -> dict[str, Any]:
        """The answer with that id; every line before it must be of the protocol, too."""
        while line := self.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            assert message["jsonrpc"] == "2.0", line
            if message.get("id") == number:
                return message
        raise AssertionError(f"the server ended: {self.stderr.read().decode()}")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            with suppress(BrokenPipeError):
                stream.close()


class Sleeper:
    """A command line that sleeps as a guest, and can be seen from the host by its arguments."""

    def __init__(self) -> None:
        self._seconds = f"60.{secrets.randbelow(10**12):012d}"
        self.command = f"sleep {self._seconds} & wait"

    def pids(self) -> list[int]:
        wanted = f"sleep\0{self._seconds}\0".encode()
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and _cmdline(entry) == wanted
        ]

    def wait_started(self) -> None:
        wait_until(self.pids, "the guest started", 60)

    def wait_gone(self) -> None:
        wait_until(lambda: not self.pids(), "the guest is gone")


def wait_until(true: Callable[[], object], what: str, seconds: float = SOON) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""

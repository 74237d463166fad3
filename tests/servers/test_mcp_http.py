"""`belljar mcp --http`: who may call, and what a closed connection or a signal ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp_sessions import COMMAND, SOON, HttpServer, Sleeper, environment

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with HttpServer(tmp_path_factory.mktemp("tokens")) as started:
        yield started


def call(number: int, command: str) -> dict[str, Any]:
    params = {"name": "run_command", "arguments": {"command": command}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def test_the_server_listens_on_loopback_only(server: HttpServer) -> None:
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{server.process.pid}/net/{name}").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{server.address[1]:04X}") and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{server.address[1]:04X}"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer bj_wrong"}, 401),
        ({"Authorization": "Basic dXNlcjpwYXNz"}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
    ],
)
def test_calls_need_a_token_and_come_from_no_page(
    server: HttpServer, headers: dict[str, str], status: int
) -> None:
    answer = server.post(INITIALIZE, **headers)
    assert answer.status_code == status
    assert ("mcp-session-id" in answer.headers) == (status == 200)
    if status == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer")


def test_a_session_belongs_to_its_token_and_ends_with_it(server: HttpServer) -> None:
    made = subprocess.run(
        [*COMMAND[:-1], "token", "create", "--json", "--tokens", str(server.tokens),
         "--name", "other"],
        capture_output=True, check=True, env=environment(),
    )  # fmt: skip
    other = {"Authorization": f"Bearer {json.loads(made.stdout)['token']}"}
    session = server.post(INITIALIZE).headers["mcp-session-id"]
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    assert server.post(ping, **{"Mcp-Session-Id": session}).status_code == 200
    assert server.post(ping, **{"Mcp-Session-Id": session}, **other).status_code == 404
    own = server.post(INITIALIZE, **other).headers["mcp-session-id"]
    assert server.post(ping, **{"Mcp-Session-Id": own}, **other).status_code == 200
    subprocess.run(
        [*COMMAND[:-1], "token", "revoke", "other", "--tokens", str(server.tokens)],
        capture_output=True, check=True, env=environment(),
    )  # fmt: skip
    assert server.post(ping, **{"Mcp-Session-Id": own}, **other).status_code == 401


def modern(message: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The message and its headers, as revision 2026-07-28 has them: without any session."""
    version = "2026-07-28"
    meta = {
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {**message["params"], "_meta": meta}
    headers = {"MCP-Protocol-Version": version, "Mcp-Method": message["method"]}
    return {**message, "params": params}, {**headers, "Mcp-Name": message["params"]["name"]}


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_a_closed_connection_kills_its_guest(server: HttpServer, era: str) -> None:
    sleeper = Sleeper()
    message, headers = call(2, sleeper.command), {}
    if era == "modern":
        message, headers = modern(message)
    else:
        headers = {"Mcp-Session-Id": server.post(INITIALIZE).headers["mcp-session-id"]}
    headers |= {
        "Host": "127.0.0.1",
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        **server.bearer,
    }
    body = json.dumps(message).encode()
    with socket.create_connection(server.address) as connection:
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(["POST /mcp HTTP/1.1", f"Content-Length: {len(body)}", *lines, "", ""])
        connection.sendall(head.encode() + body)
        sleeper.wait_started()
    sleeper.wait_gone()
    assert server.post(INITIALIZE).status_code == 200


def test_a_deleted_session_kills_its_guests(server: HttpServer) -> None:
    import httpx2

    sleeper = Sleeper()
    own = {"Mcp-Session-Id": server.post(INITIALIZE).headers["mcp-session-id"]}
    accept = {"Accept": "application/json, text/event-stream", **server.bearer, **own}
    with httpx2.stream(
        "POST", server.url, json=call(2, sleeper.command), headers=accept, timeout=60
    ):
        sleeper.wait_started()
        assert httpx2.delete(server.url, headers={**server.bearer, **own}).status_code == 200
        sleeper.wait_gone()


def test_malformed_requests_get_an_error_and_not_a_crash(server: HttpServer) -> None:
    for body in ([], {}, "text", 5, None, [call(2, "true")] * 2, {"jsonrpc": "2.0", "id": {}}):
        assert 400 <= server.post(body).status_code < 500
    huge = call(2, "x" * (5 << 20))
    assert server.post(huge).status_code == 413
    assert server.post(INITIALIZE).status_code == 200


def test_a_signal_kills_the_guests_and_ends_the_server(tmp_path: Path) -> None:
    with HttpServer(tmp_path) as server, server.session("legacy") as session:
        sleeper = Sleeper()
        waiting = session.start("run_command", command=sleeper.command)
        sleeper.wait_started()
        server.process.send_signal(signal.SIGTERM)
        sleeper.wait_gone()
        assert "server is being ended" in str(waiting.result(SOON).content)
        assert server.process.wait(SOON) == 0


def test_a_port_that_is_taken_is_a_clear_error(server: HttpServer, tmp_path: Path) -> None:
    words = ["--http", "--port", str(server.address[1]), "--tokens", str(tmp_path / "tokens")]
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == 125 and "cannot listen on 127.0.0.1" in done.stderr
    assert not (tmp_path / "tokens").exists()

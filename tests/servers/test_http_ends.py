"""How runs end that are not waited for: clients that leave, servers that stop, and overload."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Raw, Server, lasting_program, marked, serving, until

ACCEPT = "text/event-stream"
# A busy machine is slow to notice anything; an idle one takes milliseconds.
SOON = 10.0


@pytest.mark.parametrize("accept", ["application/json", ACCEPT])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_disconnects_kills_its_guest(server: Server, accept: str, how: str) -> None:
    code, token = lasting_program()
    with Raw(server) as raw:
        raw.post(code, Accept=accept)
        until(lambda: marked(token))
        if how == "reset":
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
        took = until(lambda: not marked(token), SOON)
    print(f"gone after {took * 1e3:.0f} ms")
    assert server.run("6 * 7")["value"] == 42


def test_a_client_that_stays_keeps_its_guest(server: Server) -> None:
    """The control arm: the kill above is the disconnect's doing."""
    code = "import time; time.sleep(1.5); 'to the end'"
    with Raw(server) as raw:
        raw.post(code, Connection="close")
        assert b"to the end" in raw.read()


def test_a_disconnect_is_seen_behind_a_pipelined_request(server: Server) -> None:
    code, token = lasting_program()
    with Raw(server) as raw:
        raw.post(code)
        until(lambda: marked(token))
        raw.post("1")
        raw.close()
        until(lambda: not marked(token), SOON)


def test_pipelined_requests_get_one_answer_and_a_closed_connection(server: Server) -> None:
    with Raw(server) as raw:
        body = '{"code": "6 * 7"}'
        one = raw.head(Content_Length=str(len(body))) + body
        raw.send(one + one)
        answer = raw.read()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer


def test_a_client_that_leaves_while_it_waits_never_runs(tmp_path: Path) -> None:
    code, token = lasting_program()
    with serving(tmp_path, "--concurrency", "1") as server, Raw(server) as first:
        first.post(code)
        until(lambda: marked(token))
        other, other_token = lasting_program()
        with Raw(server) as second:
            second.post(other)
            until(lambda: server.metric("belljar_runs_queued") == 1)
        until(lambda: server.metric("belljar_runs_queued") == 0)
        first.close()
        until(lambda: server.metric("belljar_runs_in_progress") == 0)
        assert not marked(other_token)
        assert server.metric("sandbox_executions_total") == 1  # the first, which was ended


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ("--concurrency", "1", "--queue", "1", "--queue-time", "500ms")
    with serving(tmp_path_factory.mktemp("small"), *words) as server:
        yield server


def test_a_full_queue_is_503_with_retry_after(small: Server) -> None:
    code, token = lasting_program()
    with Raw(small) as running, small.client() as client:
        running.post(code)
        until(lambda: marked(token))
        waited = threading.Thread(
            target=client.post, args=("/v1/run",), kwargs={"json": {"code": "1"}}
        )
        waited.start()
        until(lambda: small.metric("belljar_runs_queued") == 1)
        with small.client() as other:
            answer = other.post("/v1/run", json={"code": "1"})
        waited.join()
        running.close()
        until(lambda: not marked(token))
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    told = answer.json()
    assert (told["code"], told["retryable"]) == ("overloaded", True)
    assert small.run("6 * 7")["value"] == 42


def test_a_wait_that_is_too_long_is_503_with_retry_after(small: Server) -> None:
    code, token = lasting_program()
    with Raw(small) as running:
        running.post(code)
        until(lambda: marked(token))
        with small.client() as client:
            answer = client.post("/v1/run", json={"code": "1"})
        assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
        assert "Retry-After" in answer.headers
        assert "0.5 s" in answer.json()["detail"]
    until(lambda: small.metric("belljar_runs_in_progress") == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_guests_answers_them_and_exits(tmp_path: Path, number: int) -> None:
    code, token = lasting_program()
    with serving(tmp_path) as server, Raw(server) as plain, Raw(server) as stream:
        plain.post(code)
        stream.post(code, Accept=ACCEPT)
        until(lambda: len(marked(token)) >= 2)
        assert server.stop(number) == 0
        assert not marked(token)
        head, _, body = plain.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503"), head
        assert json.loads(body)["code"] == "server_stopping"
        assert b'event: error\ndata: {"type":"urn:belljar:problem:server_stopping"' in stream.read()
    assert server.log.read_text().count("Traceback") == 0


def test_the_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """The first is held up by a client that does not read its answer."""
    with serving(tmp_path) as server, Raw(server) as stalled:
        stalled.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.post("'x' * (8 << 20)")
        until(lambda: server.metric("sandbox_executions_total") == 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server.port))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == -signal.SIGTERM


def test_guests_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    code, token = lasting_program()
    with serving(tmp_path) as server, Raw(server) as running:
        running.post(code)
        until(lambda: marked(token))
        server.process.kill()
        until(lambda: not marked(token), SOON)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False

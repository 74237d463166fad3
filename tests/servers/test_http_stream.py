"""Server-sent events: in order, as they come, and the result last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Raw, Server, serving

Events = list[tuple[str, Any]]


def frames(text: str) -> Events:
    found: Events = []
    for frame in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":"))
        if lines:
            assert list(lines) == ["event", "data"]
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def stream(server: Server, code: str, **options: Any) -> httpx.Response:
    with server.client() as client:
        headers = {"Accept": "text/event-stream"}
        return client.post("/v1/run", json={"code": code, **options}, headers=headers)


def test_events_come_in_order_and_the_result_is_the_librarys(server: Server) -> None:
    code = """
import sys
for i in range(3):
    print(i)
    print(i, file=sys.stderr)
'done'
"""
    answer = stream(server, code)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = frames(answer.text)
    assert events[0][0] == "started"
    assert events[-1][0] == "result"
    assert events[0][1]["id"] == events[-1][1]["id"]
    for name in ("stdout", "stderr"):
        assert "".join(data["text"] for kind, data in events if kind == name) == "0\n1\n2\n"
        assert events[-1][1][name] == "0\n1\n2\n"
    assert events[-1][1]["value"] == "done"


def test_output_arrives_while_the_program_waits(server: Server) -> None:
    """The program goes on only when it is killed: so what arrives did not wait for its end."""
    code = "import time; print('first', flush=True); time.sleep(200)"
    with Raw(server) as raw:
        raw.post(code, Accept="text/event-stream")
        received = raw.read_until(b"first")
    assert b"event: started" in received
    assert b"event: result" not in received


def test_a_comment_keeps_a_silent_stream_alive(tmp_path: Path) -> None:
    with serving(tmp_path, "--keep-alive", "100ms") as server, Raw(server) as raw:
        raw.post("import time; time.sleep(200)", Accept="text/event-stream")
        raw.read_until(b"event: started")
        raw.read_until(b": keep-alive\n\n")


def test_displays_are_events(server: Server) -> None:
    code = """
class Shown:
    def _repr_html_(self):
        return '<b>x</b>'
display(Shown())
"""
    events = frames(stream(server, code).text)
    shown = [data["data"]["text/html"] for name, data in events if name == "display"]
    assert shown == ["<b>x</b>"]


def test_characters_that_were_split_arrive_whole_and_bad_bytes_replaced(server: Server) -> None:
    code = """
import os, time
for piece in ("é€😀".encode()[i:i + 1] for i in range(9)):
    os.write(1, piece)
    time.sleep(0.01)
os.write(1, b"\\xff\\xc3")
"""
    events = frames(stream(server, code).text)
    assert "".join(data["text"] for name, data in events if name == "stdout") == "é€😀\ufffd\ufffd"


def test_events_carry_as_much_output_as_a_result_keeps(server: Server) -> None:
    events = frames(stream(server, "print('x' * 5_000_000)", output="100K").text)
    sent = sum(len(data["text"]) for name, data in events if name == "stdout")
    assert 100 << 10 <= sent <= 200 << 10  # head and tail, and what filled the tail before
    assert events[-1][1]["truncated"] is True


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"timeout": -1}, 422, "policy_invalid"),
        ({"min_isolation": "vm"}, 422, "policy_unenforceable"),
        ({"require_libraries": ["no_such_library"]}, 422, "libraries_missing"),
        ({"network": "any"}, 403, "not_allowed"),
    ],
)
def test_what_is_refused_before_it_starts_has_its_status(
    server: Server, options: dict[str, Any], status: int, code: str
) -> None:
    answer = stream(server, "1", **options)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_a_program_that_the_lint_refuses_has_a_result(server: Server) -> None:
    events = frames(stream(server, "import os", level="strict").text)
    assert [name for name, _ in events] == ["result"]
    assert events[0][1]["status"] == "refused"


@pytest.mark.parametrize(
    ("accept", "streamed"),
    [
        ("text/event-stream", True),
        ("Text/Event-Stream;q=0.5, application/json;q=0.1", True),
        ("application/json", False),
        ("*/*", False),
        ("text/event-stream;q=0", False),
        ("", False),
    ],
)
def test_events_are_sent_where_they_are_accepted(
    server: Server, accept: str, streamed: bool
) -> None:
    with server.client() as client:
        answer = client.post("/v1/run", json={"code": "1"}, headers={"Accept": accept})
    assert answer.headers["Content-Type"].startswith("text/event-stream") == streamed

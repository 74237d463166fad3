"""What the host keeps of an agent's stream that no honest agent sends."""

from __future__ import annotations

import socket
import threading
import types
from typing import Any

from belljar.backends import agent_link
from belljar.backends.base import never
from belljar.backends.docker_watch import AgentWatch
from belljar.backends.pieces import Pieces
from belljar.capture import HeadTail
from belljar.files.collect import MAX_NAMES
from belljar.guest import agent, protocol
from belljar.report import Report

EXIT = (agent.EXIT, {"status": 0})
DONE = (agent.DONE, {"warnings": []})


def listed(name: str, **more: Any) -> tuple[int, Any]:
    return agent.LISTED, {"path": name.encode().hex(), "size": 3, **more}


def watched(*packets: tuple[int, Any]) -> AgentWatch:
    """A run whose agent sends these packets and hangs up."""
    ours, theirs = socket.socketpair()
    stream = b"".join(
        protocol.encode(kind, data if isinstance(data, bytes) else protocol.dumps(data))
        for kind, data in packets
    )
    container: Any = types.SimpleNamespace(
        socket=ours,
        group=None,
        incoming=agent_link.Incoming(),
        kill=lambda: None,
        ended=lambda: (0, False),
    )

    def send() -> None:
        for at in range(0, len(stream), 1 << 16):
            piece = stream[at : at + (1 << 16)]
            theirs.sendall(bytes((1, 0, 0, 0)) + len(piece).to_bytes(4, "big") + piece)
        theirs.shutdown(socket.SHUT_WR)

    watch = AgentWatch(
        container,
        run="r",
        start=[],
        program=Pieces([]),
        stdin=b"",
        timeout=10.0,
        captured={name: HeadTail(1 << 16) for name in ("stdout", "stderr")},
        report=Report(),
        emit=lambda _: None,
        cancel=never(),
    )
    sender = threading.Thread(target=send)
    sender.start()
    watch.until_gone()
    sender.join()
    ours.close()
    theirs.close()
    return watch


def test_files_are_taken_as_they_come() -> None:
    """The control arm of those below."""
    watch = watched(EXIT, listed("a", data=True), (agent.DATA, b"abc"), listed("b"), DONE)
    assert watch.found.files["a"].data == b"abc"
    assert list(watch.found.files) == ["a", "b"]
    assert watch.found.warnings == []


def test_names_together_take_no_more_than_on_other_backends() -> None:
    names = [f"{number}/" + "n/" * 100_000 + "x" for number in range(20)]
    many = [packet for name in names for packet in (listed(name, data=True), (agent.DATA, b"abc"))]
    watch = watched(EXIT, *many, DONE)
    assert 0 < sum(map(len, watch.found.files)) <= MAX_NAMES
    assert watch.found.truncated
    (warning,) = watch.found.warnings
    assert "names take at most" in warning

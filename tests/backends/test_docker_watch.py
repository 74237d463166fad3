"""What the host keeps of an agent's stream that no honest agent sends."""

from __future__ import annotations

import os
import socket
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from belljar.backends import agent_link, docker_plan
from belljar.backends.base import never
from belljar.backends.docker_watch import AgentWatch
from belljar.backends.pieces import Pieces
from belljar.capture import HeadTail
from belljar.files import collect
from belljar.files.collect import MAX_NAMES
from belljar.files.copying import MAX_HASHED, Wanted
from belljar.files.destination import Destination
from belljar.guest import agent, agent_files, protocol
from belljar.report import Report

EXIT = (agent.EXIT, {"status": 0})
DONE = (agent.DONE, {"warnings": []})
ALL = Wanted(globs=("*",))
GIVEN = frozenset({"given"})


def listed(name: str, **more: Any) -> tuple[int, Any]:
    return agent.LISTED, {"path": name.encode().hex(), "size": 3, **more}


def watched(
    *packets: tuple[int, Any], wanted: Wanted = ALL, given: frozenset[str] = GIVEN
) -> AgentWatch:
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
        wanted=wanted,
        given=given,
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


@pytest.mark.parametrize(
    ("packets", "wanted"),
    [
        ([(agent.LISTED, {"path": b"other".hex(), "deleted": True})], ALL),
        ([(agent.LISTED, {"path": b"given".hex(), "deleted": True})] * 2, ALL),
        ([listed("given"), (agent.LISTED, {"path": b"given".hex(), "deleted": True})], ALL),
        ([listed("a"), listed("a")], ALL),
        ([listed("a", size=-1)], ALL),
        ([listed("a", data=True), (agent.DATA, b"abc")], Wanted(globs=("*",), each=2)),
        ([listed("a", data=True), (agent.DATA, b"abc")], Wanted(globs=("*",), total=2)),
        ([listed("a", data=True), (agent.DATA, b"abcd")], Wanted()),
        ([listed("a", data=True, size=MAX_HASHED + 1), (agent.DATA, b"abc")], Wanted()),
    ],
)
def test_a_stream_with_what_was_not_asked_for_is_given_up(
    packets: list[tuple[int, Any]], wanted: Wanted
) -> None:
    watch = watched(EXIT, *packets, listed("later"), DONE, wanted=wanted)
    assert "later" not in watch.found.files
    assert sum(len(file.data or b"") for file in watch.found.files.values()) <= 2
    control = (agent.LISTED, {"path": b"given".hex(), "deleted": True})
    watch = watched(EXIT, control, listed("a", data=True), (agent.DATA, b"abc"), DONE)
    assert [(change.path, change.kind) for change in watch.found.changes] == [
        ("a", "created"),
        ("given", "deleted"),
    ]


def test_the_agent_and_the_host_collect_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    (work / "deep").mkdir(parents=True)
    (work / "given").write_bytes(b"changed")
    (work / "deep" / "new.bin").write_bytes(os.urandom(1 << 20))
    (work / "large").write_bytes(b"x" * (MAX_HASHED + 1))
    (work / "linked").write_bytes(b"x")
    os.link(work / "linked", tmp_path / "other")
    (work / "link").symlink_to(work / "given")
    (work / "same").write_bytes(b"same")
    monkeypatch.setattr(docker_plan, "WORK", str(work))
    same = (work / "same").stat()
    stamps = {"given": (1, 7), "same": (same.st_mtime_ns, 4), "gone": (1, 1)}
    before = {name: (*stamp, 0) for name, stamp in stamps.items()}
    told = {os.fsencode(name): stamp for name, stamp in stamps.items()}
    for number, globs in enumerate([(), ("*.bin",), ("*",)]):
        for each in (None, 1000):
            found = []
            for side in ("host", "agent"):
                with Destination(str(tmp_path / f"{side}-{number}-{each}"), globs) as into:
                    wanted = Wanted(globs=globs, each=each, total=1 << 30, destination=into)
                    if side == "host":
                        found.append(collect.changed_files(str(work), before, wanted))
                        continue
                    packets: list[tuple[int, Any]] = []
                    warnings = agent_files.send_changed(
                        docker_plan.to_collect(wanted),
                        told,
                        lambda kind, data, to=packets: to.append((kind, data)),
                        agent.LISTED,
                        agent.DATA,
                    )
                    assert [w for w in warnings if "hard link" not in w] == []
                    done = (agent.DONE, {"warnings": warnings})
                    found.append(
                        watched(EXIT, *packets, done, wanted=wanted, given=frozenset(stamps)).found
                    )
            host, sent = found
            assert sent.changes == host.changes
            assert len(host.changes) == 5  # with `gone`, without `same` and the link
            assert sorted(sent.warnings) == sorted(host.warnings)
            for name, file in host.files.items():
                other = sent.files[name]
                assert (other.data, other.truncated) == (file.data, file.truncated)
                assert (other.saved is None) == (file.saved is None)
                if file.saved and other.saved:
                    assert Path(other.saved).read_bytes() == Path(file.saved).read_bytes()

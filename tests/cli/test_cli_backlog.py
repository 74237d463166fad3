"""What waits for a slow reader comes out whole and in order, and memory stays bounded."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from belljar.cli import stream
from belljar.cli.backlog import Backlog
from belljar.events import Output


def drained(backlog: Backlog[str]) -> list[tuple[str, bytes]]:
    backlog.close()
    return list(iter(backlog.get, None))


@pytest.mark.parametrize("in_memory", [0, 10, 1000])
def test_pieces_come_out_in_order_wherever_they_waited(in_memory: int) -> None:
    backlog: Backlog[str] = Backlog(in_memory)
    pieces = [(f"s{i % 2}", b"%d" % i * (i % 5 + 1)) for i in range(200)]
    for key, data in pieces[:150]:
        backlog.put(key, data)
    first = [backlog.get() for _ in range(120)]
    for key, data in pieces[150:]:
        backlog.put(key, data)
    assert [*first, *drained(backlog)] == pieces


def test_memory_is_bounded_and_nothing_is_lost() -> None:
    backlog: Backlog[str] = Backlog(1 << 20)
    tracemalloc.start()
    for i in range(64):
        backlog.put("s", bytes([i]) * (1 << 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert [data[0] for _, data in drained(backlog)] == list(range(64))


def test_a_full_disk_is_the_outputs_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import tempfile

    class Full(Backlog[str]):
        def __init__(self) -> None:
            super().__init__(0)

    monkeypatch.setattr(stream, "Backlog", Full)
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda buffering: Path("/dev/full").open("r+b", buffering)
    )
    broken: list[bool] = []
    output = stream.GuestOutput(raw=True, on_broken=lambda: broken.append(True))
    output(Output(id="1", stream="stdout", data=b"x" * 100))
    output.finish()
    assert broken
    assert output.failure is not None
    assert output.failure.strerror == "No space left on device"


def test_what_is_past_the_most_is_dropped_and_ends_the_run(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    broken: list[bool] = []
    output = stream.GuestOutput(raw=True, on_broken=lambda: broken.append(True), most=10)
    output(Output(id="1", stream="stdout", data=b"12345678"))
    assert not broken
    output(Output(id="1", stream="stdout", data=b"90abc"))
    output(Output(id="1", stream="stdout", data=b"def"))
    output.finish()
    assert capfdbinary.readouterr().out == b"1234567890"
    assert (broken, output.overflowed, output.failure) == ([True], "stdout", None)

"""The peak that a watchdog reports counts what processes share once."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator

import pytest

from belljar.linux import footprint

SIZE = 48 << 20


@pytest.fixture
def family() -> Iterator[list[int]]:
    """Three forks that share pages."""
    shared = mmap.mmap(-1, SIZE)
    shared.write(b"x" * SIZE)
    children = []
    for _ in range(3):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            sum(shared[at] for at in range(0, SIZE, mmap.PAGESIZE))
            os.write(writer, b"1")
            signal.pause()
        os.read(reader, 1)
        os.close(reader)
        os.close(writer)
        children.append(pid)
    yield children
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_shared_pages_are_counted_once(family: list[int]) -> None:
    peak = footprint.Peak()
    resident = footprint.of(family, 1 << 40, 0, own_network=False)
    assert resident > 3 * SIZE
    peak.note(resident, family)
    assert SIZE // 2 < peak.value < resident // 2


def test_of_one_process_the_resident_size_is_the_peak(family: list[int]) -> None:
    peak = footprint.Peak()
    resident = footprint.of(family[:1], 1 << 40, 0, own_network=False)
    peak.note(resident, family[:1])
    assert peak.value == resident

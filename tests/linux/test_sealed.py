"""Sealed memory files: a receiver can only read, and its mapping is private to it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("memory files are Linux's", allow_module_level=True)

import fcntl
import mmap

from belljar.linux import sealed

PAGE = mmap.PAGESIZE
DATA = [b"first", b"", b"x" * (3 * PAGE + 5), b"last"]
SIZES = [len(each) for each in DATA]


def views(pieces: list[bytes]) -> list[memoryview]:
    return [memoryview(piece) for piece in pieces]


def reopened(fd: int) -> None:
    """Another descriptor of the file, to write to it."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        os.write(again, b"y")
    finally:
        os.close(again)


CHANGES: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.pwrite(fd, b"y", 0),
    "write reopened": reopened,
    "grow": lambda fd: os.ftruncate(fd, 1 << 20),
    "shrink": lambda fd: os.ftruncate(fd, 1),
    "allocate": lambda fd: os.posix_fallocate(fd, 0, 1 << 20),
    "map to write": lambda fd: mmap.mmap(fd, PAGE, mmap.MAP_SHARED).close(),
    "other seals": lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_receiver_of_a_sealed_file_cannot_change_it(change: str) -> None:
    fd = sealed.write(views(DATA))
    try:
        with pytest.raises(PermissionError):
            CHANGES[change](fd)
        assert os.pread(fd, 5, 0) == b"first"
    finally:
        os.close(fd)


@pytest.mark.parametrize("change", CHANGES)
def test_without_seals_it_could(change: str) -> None:
    """The control arm."""
    fd = os.memfd_create("open", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, b"x" * (2 * PAGE))
        CHANGES[change](fd)
    finally:
        os.close(fd)


def test_buffers_are_read_as_they_were_written_and_no_descriptor_is_left() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    rooms = sealed.read(sealed.write(views(DATA)), SIZES)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert [room.getvalue() for room in rooms] == DATA


def test_a_write_to_the_mapping_stays_with_the_one_who_wrote() -> None:
    fd = sealed.write(views(DATA))
    mine, other = (sealed.read(os.dup(fd), SIZES)[2].getbuffer() for _ in range(2))
    mine[0] = ord("m")
    assert bytes(mine[:2]) == b"mx"
    assert bytes(other[:2]) == b"xx"
    assert os.pread(fd, PAGE, 0).count(b"m") == 0
    os.close(fd)


def test_the_mapping_goes_with_the_last_buffer() -> None:
    def mapped() -> bool:
        return "memfd:belljar" in Path("/proc/self/maps").read_text()

    rooms = sealed.read(sealed.write(views(DATA)), SIZES)
    view = rooms[2].getbuffer()
    del rooms
    gc.collect()
    assert mapped()
    assert view[0] == ord("x")
    del view
    gc.collect()
    assert not mapped()

"""Memory that is put into huge pages stays what it was, and a place that is none is refused."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own call")
HUGE = 2 << 20


def test_gathered_memory_keeps_its_contents() -> None:
    from belljar.linux import syscalls

    with mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pattern = bytes(range(256)) * (2 * HUGE // 256)
        memory[:] = pattern
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        aligned = -(-start // HUGE) * HUGE
        assert syscalls.gather_pages(aligned, HUGE) in (True, False)  # as this kernel can
        assert memory[:] == pattern


def test_a_place_that_is_not_ours_is_refused() -> None:
    from belljar.linux import syscalls

    assert not syscalls.gather_pages(0, HUGE)

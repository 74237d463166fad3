"""Large data of a run in a sealed memory file, which the host writes once and the guest maps.

The seals forbid every write, every change of size and every change of the seals, whatever process
has the descriptor. A guest maps the file privately: a page that the program writes to is copied and
counts as its memory; all others stay those of the file. The mapping needs no descriptor, so the
guest closes its only one before its program starts, and no child can inherit it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from . import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Below this, making and mapping a file costs more than the copy through a pipe.
LEAST = 1 << 20
_ALIGNMENT = 64  # Arrow's, and enough for any number
_SEALS = ("F_SEAL_WRITE", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class Room:
    """A buffer in a mapped file, with the two methods of BytesIO that readers of buffers use."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def getbuffer(self) -> memoryview:
        return self._view

    def getvalue(self) -> bytes:
        return bytes(self._view)


def places(sizes: Sequence[int]) -> list[int]:
    """Where in a file each of so many bytes begins."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found


def write(buffers: Sequence[memoryview]) -> int:
    """The descriptor of a sealed file with `buffers` at their `places`. OSError where the kernel
    has no such files, or does not allow one."""
    fd = os.memfd_create("belljar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for data, at in zip(buffers, places([len(each) for each in buffers]), strict=True):
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], at + done)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(fd: int, sizes: Sequence[int]) -> list[Room]:
    """The buffers of the file, in memory that this process may write to. Closes the descriptor."""
    try:
        # An object of `mmap` for a file would keep a descriptor of it open. This one is of memory,
        # which the file then takes the place of; when no array uses it any more, it is unmapped.
        whole = mmap.mmap(-1, os.fstat(fd).st_size, mmap.MAP_PRIVATE)
        view = memoryview(whole)
        syscalls.map_in_place_of(view, fd)
    finally:
        os.close(fd)
    return [Room(view[at : at + size]) for at, size in zip(places(sizes), sizes, strict=True)]

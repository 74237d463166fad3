"""What a run's processes hold of memory, for the watchdogs that count where no control group does.

Counted are resident pages, page tables, and what sockets and pipes may hold. How full a socket of
another process is cannot be asked, so each counts as full; filters keep all of them at their first
size, and pipes too. A network namespace of the run's own knows all of its sockets, also those on
their way to another process or not accepted yet. Without one sockets are found as descriptors:
there the filter refuses to send any.

What is cheap comes first: upper bounds, which most runs never reach.
"""

from __future__ import annotations

import os
import resource
import time

from .bare import socket
from .tree import proportional_size

_PIPE = 16 * resource.getpagesize()
_ROOM = 8192  # beside the data of the last packet that passes the limit of a socket
# The most that `namespaces.bound_buffers` lets a TCP socket have for each direction.
LARGEST_TCP_BUFFER = 196_608


def largest_socket() -> int:
    """Bytes that one socket may hold here without having been enlarged.

    A sender may begin a packet as long as there is any room, and a packet may be as large as all
    of it. A TCP socket has two such buffers.
    """
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sizes = [
            unix.getsockopt(socket.SOL_SOCKET, option)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)
        ]
    finally:
        unix.close()
    return 2 * max(*sizes, LARGEST_TCP_BUFFER) + _ROOM


def of(members: list[int], room: int, socket: int, *, own_network: bool) -> int:
    """Bytes held by these processes; no more than is true, if it is more than `room`."""
    found = {task: status for pid in members for task, status in _living(pid)}
    tasks = list(found)
    resident = sum(_pages(status) for status in found.values())
    descriptors = sum(map(_descriptors, tasks))
    sockets = _of_network(found) if own_network else None
    if sockets is None:
        beside = descriptors * max(socket, _PIPE)
    else:
        beside = sockets * socket + descriptors * _PIPE
    if resident + beside <= room:
        return resident
    # Resident sizes count shared pages many times, and descriptors are not all sockets and pipes.
    exact = sum(
        proportional_size(task) + _kilobytes(status, b"VmPTE") for task, status in found.items()
    )
    return exact + _sockets_and_pipes(tasks, socket, sockets)


class Peak:
    """The most memory that a tree was seen to have, each shared page counted once."""

    def __init__(self) -> None:
        self.value = 0
        self._next = 0.0

    def note(self, total: int, members: list[int], files: int = 0) -> None:
        """`total` is what `of` said of them, which may count shared pages many times, and `files`.

        Those are what the tree's memory file systems hold.
        """
        if total <= self.value:
            return
        tasks = [task for pid in members for task, _ in _living(pid)]
        if len(tasks) <= 1:
            self.value = total
            return
        # To ask takes the kernel a walk over every page: seldom enough not to be the load.
        began = time.monotonic()
        if began >= self._next:
            exact = files + sum(map(proportional_size, tasks))
            self.value = max(self.value, min(total, exact))
            ended = time.monotonic()
            self._next = ended + max(0.1, 20 * (ended - began))


def _living(pid: int) -> list[tuple[int, bytes]]:
    """A thread of the process that has its memory still, and its status; nothing if none has.

    A first thread that ended before the others shows none of it.
    """
    status = _status(pid)
    if b"\nVmRSS:" in status:
        return [(pid, status)]
    try:
        others = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it ended while we looked
        return []
    for other in map(int, others):
        if other != pid and b"\nVmRSS:" in (status := _status(other)):
            return [(other, status)]
    return []


def _status(task: int) -> bytes:
    try:
        with open(f"/proc/{task}/status", "rb") as file:
            return file.read()
    except OSError:  # it ended while we looked
        return b""


def _field(status: bytes, name: bytes) -> list[bytes]:
    """The words of a line; none if it is not there."""
    start = status.find(b"\n%s:" % name)
    return status[start : status.find(b"\n", start + 1)].split()[1:] if start >= 0 else []


def _kilobytes(status: bytes, name: bytes) -> int:
    words = _field(status, name)
    return int(words[0]) * 1024 if words else 0


def _pages(status: bytes) -> int:
    return _kilobytes(status, b"VmRSS") + _kilobytes(status, b"VmPTE")


def _descriptors(task: int) -> int:
    """How many a process has, or could have if it hides them."""
    try:
        # Since Linux 6.2 the directory's size is how many there are.
        return os.stat(f"/proc/{task}/fd").st_size or len(os.listdir(f"/proc/{task}/fd"))
    except PermissionError:
        return _most_descriptors(task)
    except OSError:  # it ended while we looked
        return 0


def _most_descriptors(task: int) -> int:
    """Those of a process that ended while we looked cannot be listed either; it has none."""
    if b"\nVmRSS:" not in _status(task):
        return 0
    try:
        return resource.prlimit(task, resource.RLIMIT_NOFILE)[0]
    except ProcessLookupError:
        return 0


def _of_network(found: dict[int, bytes]) -> int | None:
    """How many sockets the run's network namespace has; None if the kernel does not tell.

    Processes of a tool that made the namespace may be outside of it. The guest is inside: it is the
    deepest in pid namespaces.
    """
    for task in sorted(found, key=lambda task: -len(_field(found[task], b"NSpid"))):
        try:
            with open(f"/proc/{task}/net/sockstat", "rb") as file:
                words = file.readline().split()
        except OSError:  # it has ended, and with it its view of the network
            continue
        if words[:2] == [b"sockets:", b"used"]:
            return int(words[2])
    return None


def _sockets_and_pipes(tasks: list[int], socket: int, known: int | None) -> int:
    """What those that the processes have may hold, each once; `known` is the number of sockets."""
    found: set[str] = set()
    hidden = 0
    for task in tasks:
        directory = f"/proc/{task}/fd"
        try:
            names = os.listdir(directory)
        except PermissionError:
            hidden += _descriptors(task)
            continue
        except OSError:  # it ended while we looked
            continue
        for name in names:
            try:
                found.add(os.readlink(f"{directory}/{name}"))
            except PermissionError:  # it hides since then
                hidden += 1
            except OSError:  # closed while we looked
                continue
    pipes = sum(target.startswith("pipe:") for target in found)
    if known is None:
        known = sum(target.startswith("socket:") for target in found) + hidden
        hidden = 0
    return known * socket + (pipes + hidden) * _PIPE

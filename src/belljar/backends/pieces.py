"""What waits to be sent, in pieces. Large ones are a caller's data and never copied together."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable

# As many as the kernel takes at once on any system, and few enough bytes to stay responsive.
_MOST_PIECES = 16
_MOST_BYTES = 1 << 20
_SMALL = 1 << 16


class Pieces:
    """A queue of bytes. False when it is empty.

    `passed`, if any, is a descriptor that has to go with the first of them; `close` closes it.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview], passed: int = -1) -> None:
        self._waiting = deque(memoryview(piece).cast("B") for piece in pieces if len(piece))
        self.passed = passed

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def first(self, most: int = _MOST_BYTES) -> list[memoryview]:
        """The next bytes, for one system call."""
        found: list[memoryview] = []
        size = 0
        for piece in self._waiting:
            if size >= most or len(found) >= _MOST_PIECES:
                break
            found.append(piece[: most - size])
            size += len(found[-1])
        return found

    def sent(self, size: int) -> None:
        """So many of the next bytes are gone."""
        while size:
            piece = self._waiting[0]
            if size < len(piece):
                self._waiting[0] = piece[size:]
                return
            size -= len(piece)
            self._waiting.popleft()

    def write(self, fd: int) -> None:
        """Write what there is room for. Raises what the system call does."""
        if self.passed >= 0:
            self._send_with_descriptor(fd)
        elif hasattr(os, "writev"):
            self.sent(os.writev(fd, self.first()))
        else:  # Windows
            self.sent(os.write(fd, self.first()[0]))

    def _send_with_descriptor(self, fd: int) -> None:
        import socket  # late: takes milliseconds, and most runs pass nothing

        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        try:
            self.sent(socket.send_fds(stream, self.first(), [self.passed], socket.MSG_NOSIGNAL))
        finally:
            stream.detach()
        self.close()

    def after(self, head: bytes) -> Pieces:
        """The same queue, with `head` before it."""
        self._waiting.appendleft(memoryview(head))
        return self

    def take(self, size: int) -> bytes:
        """At most `size` of the next bytes, taken out."""
        piece = b"".join(self.first(size))
        self.sent(len(piece))
        return piece

    def clear(self) -> None:
        self._waiting.clear()

    def close(self) -> None:
        if self.passed >= 0:
            os.close(self.passed)
            self.passed = -1


def gathered(pieces: Iterable[bytes]) -> list[bytes]:
    """The same bytes, with small pieces next to each other copied together."""
    found: list[bytes] = []
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) < _SMALL:
            small.append(piece)
            continue
        found += (b"".join(small), piece)
        small.clear()
    return [*found, b"".join(small)]

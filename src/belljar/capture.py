"""Bounded capture of a stream: the head and the tail are kept, what is between them is counted."""

from __future__ import annotations

from collections import deque


class HeadTail:
    """Keeps at most `cap` bytes of what it is fed, however much that is.

    The first `cap` bytes are also handed back live, for streaming; `rest` gives at the end what a
    live reader has not seen of the kept tail.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.total = 0
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    @property
    def truncated(self) -> bool:
        return self.total > self.cap

    def feed(self, data: bytes) -> bytes:
        """Take `data` in; return the part of it that a live reader should see now."""
        live = data[: max(0, self.cap - self.total)]
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data[-self._tail_cap :])
            self._tail_size += len(self._tail[-1])
            while self._tail_size - len(self._tail[0]) >= self._tail_cap:
                self._tail_size -= len(self._tail.popleft())
        return live

    def rest(self) -> bytes:
        """After the last `feed`: the tail, behind a marker, as far as `feed` did not return it."""
        if not self.truncated:
            return b""
        unseen = self.total - self.cap
        tail = b"".join(self._tail)[-self._tail_cap :]
        if unseen <= len(tail):
            return tail[-unseen:]
        return _marker(unseen - len(tail)) + tail

    def bytes(self) -> bytes:
        """Everything if it fits, else head, a marker with the number of lost bytes, and tail."""
        tail = b"".join(self._tail)[-self._tail_cap :]
        if not self.truncated:
            return bytes(self._head) + tail
        marker = _marker(self.total - self.cap)
        if len(marker) >= len(tail):
            return bytes(self._head) + tail
        # The marker itself is paid for from the tail, so its count grows by its own length.
        marker = _marker(self.total - self.cap + len(marker))
        return bytes(self._head) + marker + tail[len(marker) :]

    def text(self) -> str:
        """`bytes` as text of at most `cap` bytes of UTF-8; undecodable bytes become U+FFFD."""
        text = self.bytes().decode("utf-8", "replace")
        size = len(text.encode("utf-8"))
        if size <= self.cap:
            return text
        # A bad byte became three: drop from the middle until the whole fits again.
        keep = self.cap // 6
        return text[:keep] + text[len(text) - keep :]


def _marker(dropped: int) -> bytes:
    return b"\n[... %d bytes dropped ...]\n" % dropped

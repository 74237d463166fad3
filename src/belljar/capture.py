"""Bounded capture of a stream: the head and the tail are kept, what is between them is counted."""

from __future__ import annotations


class HeadTail:
    """Keeps at most `cap` bytes of what it is fed, however much that is.

    The first `live` bytes (never fewer than `cap`) are also handed back live, for streaming; `rest`
    gives at the end what a live reader has not seen of the kept tail.
    """

    def __init__(self, cap: int, live: int = 0) -> None:
        self.cap = cap
        self._live = max(cap, live)
        self.total = 0
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def truncated(self) -> bool:
        return self.total > self.cap

    def feed(self, data: bytes) -> bytes:
        """Take `data` in; return the part of it that a live reader should see now."""
        live = data[: max(0, self._live - self.total)]
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            # One buffer, however small the pieces are: a list of them would cost more than they.
            self._tail += data[-self._tail_cap :]
            del self._tail[: max(0, len(self._tail) - self._tail_cap)]
        return live

    def rest(self) -> bytes:
        """After the last `feed`: the tail, behind a marker, as far as `feed` did not return it."""
        if self.total <= self._live:
            return b""
        unseen, tail = self.total - self._live, bytes(self._tail)
        if unseen <= len(tail):
            return tail[-unseen:]
        return _marker(unseen - len(tail)) + tail

    def bytes(self) -> bytes:
        """Everything if it fits, else head, a marker with the number of lost bytes, and tail."""
        head, tail = bytes(self._head), bytes(self._tail)
        if not self.truncated:
            return head + tail
        dropped = self.total - self.cap
        # The marker itself is paid for from the tail, so its count grows by its own length.
        marker = _marker(dropped + len(_marker(dropped)))
        marker = _marker(dropped + len(marker))
        return head + marker + tail[len(marker) :] if len(marker) < len(tail) else head + tail

    def text(self) -> str:
        """`bytes` as text of at most `cap` bytes of UTF-8.

        Undecodable bytes become U+FFFD, or "?" where that would not fit.
        """
        text = self.bytes().decode("utf-8", "replace")
        if len(text.encode("utf-8")) <= self.cap:
            return text
        # A bad byte became three: write it as one, so that the whole fits again.
        return text.replace("\ufffd", "?")


def _marker(dropped: int) -> bytes:
    return b"\n[... %d bytes dropped ...]\n" % dropped

"""A queue of output that waits for its reader: some in memory, the rest in a nameless file."""

from __future__ import annotations

import threading
from collections import deque
from typing import IO, Generic, TypeVar

Key = TypeVar("Key")

_IN_MEMORY = 8 << 20  # bytes


class Backlog(Generic[Key]):
    """First in, first out, between two threads: `put` never waits, `get` does.

    Memory is bounded by `in_memory`, whatever waits. `put` raises OSError when the file cannot hold
    more.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._room = in_memory
        self._pieces: deque[tuple[Key, bytes]] = deque()
        self._filed: deque[tuple[Key, int]] = deque()  # all of it came after what is in memory
        self._file: IO[bytes] | None = None
        self._written = self._read = 0
        self._closed = self._discarding = False
        self._changed = threading.Condition()

    def put(self, key: Key, data: bytes) -> None:
        with self._changed:
            if self._discarding:
                return
            if self._filed or len(data) > self._room:
                self._put_into_file(key, data)
            else:
                self._pieces.append((key, data))
                self._room -= len(data)
            self._changed.notify()

    def get(self) -> tuple[Key, bytes] | None:
        """The next piece; None when the queue is closed and empty."""
        with self._changed:
            while not self._pieces and not self._filed:
                if self._closed:
                    return None
                self._changed.wait()
            if self._pieces:
                key, data = self._pieces.popleft()
                self._room += len(data)
                return key, data
            key, size = self._filed.popleft()
            assert self._file is not None
            self._file.seek(self._read)
            data = self._file.read(size)
            self._read += size
            if not self._filed:
                self._close_file()
            return key, data

    def close(self) -> None:
        """Nothing more will be put; `get` hands out what is left."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def discard(self) -> None:
        """Forget what waits and what comes: there is no reader."""
        with self._changed:
            self._discarding = True
            self._pieces.clear()
            self._filed.clear()
            self._close_file()

    def _put_into_file(self, key: Key, data: bytes) -> None:
        if self._file is None:
            import tempfile

            self._file = tempfile.TemporaryFile(buffering=0)
        self._file.seek(self._written)
        left = memoryview(data)
        while left:  # a raw file may take less than it is given
            left = left[self._file.write(left) :]
        self._written += len(data)
        self._filed.append((key, len(data)))

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._written, self._read = None, 0, 0

"""Carries the guest's bytes to our stdout and stderr while the run goes on.

A reader that stalls (a pager, Ctrl-S) must not stall the loop that holds the guest to its time, so
a thread of its own does the writing. What waits for it is kept in a `Backlog`: a few MiB in memory,
the rest in a file without a name. The thread starts with the first output: until then the process
has one thread, which lets a backend fork.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Literal, TextIO

from ..events import Event, Output
from .backlog import Backlog
from .terminal import Neutraliser, is_terminal, write_all

Stream = Literal["stdout", "stderr"]

MOST_PASSED_ON = 1 << 30  # bytes of one stream


class GuestOutput:
    """An `emit` for the engine. `on_broken` is called once, when our own output can take no more;
    `failure` then says why. It is called too when a stream is longer than `most` bytes; what is
    past them is dropped, and `overflowed` names the stream."""

    def __init__(
        self, *, raw: bool, on_broken: Callable[[], None], most: int = MOST_PASSED_ON
    ) -> None:
        self.failure: OSError | None = None
        self.overflowed: Stream | None = None
        self._room: dict[Stream, int] = {"stdout": most, "stderr": most}
        self._on_broken = on_broken
        self._filters: dict[Stream, Neutraliser | None] = {
            "stdout": _filter(sys.stdout, raw),
            "stderr": _filter(sys.stderr, raw),
        }
        self._backlog: Backlog[Stream] = Backlog()
        self._thread: threading.Thread | None = None
        self._mid_line: dict[Stream, bool] = {"stdout": False, "stderr": False}

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Output):
            return
        stream, data = event.stream, event.data
        if len(data) > self._room[stream]:
            data = data[: self._room[stream]]
            if self.overflowed is None:
                self.overflowed = stream
                self._on_broken()
        self._room[stream] -= len(data)
        self._put(stream, data, final=False)

    def finish(self, patience: float | None = None) -> None:
        """Flush what a filter held back and wait until everything is written; at most `patience`
        seconds, if its reader may have stalled."""
        for stream in self._filters:
            self._put(stream, b"", final=True)
        if self._thread is not None:
            self._backlog.close()
            self._thread.join(patience)

    @property
    def mid_line(self) -> bool:
        """Whether a terminal's cursor was left in the middle of a line."""
        return any(
            mid and is_terminal(getattr(sys, stream)) for stream, mid in self._mid_line.items()
        )

    def _put(self, stream: Stream, data: bytes, *, final: bool) -> None:
        neutraliser = self._filters[stream]
        if neutraliser is not None:
            data = neutraliser.feed(data, final=final)
        if not data:
            return
        self._mid_line[stream] = not data.endswith(b"\n")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="guest-output", daemon=True)
            self._thread.start()
        try:
            self._backlog.put(stream, data)
        except OSError as error:  # the file of what waits is full
            self._fail(error)

    def _write(self) -> None:
        # A signal that the kernel hands to this thread would not wake the main thread's poll.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        descriptors = {"stdout": 1, "stderr": 2}
        try:
            while (item := self._backlog.get()) is not None:
                if self.failure is None:
                    write_all(descriptors[item[0]], item[1])
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = error
        self._backlog.discard()
        self._on_broken()


def _filter(stream: TextIO | None, raw: bool) -> Neutraliser | None:
    if raw or stream is None or not is_terminal(stream):
        return None
    return Neutraliser(stream.encoding or "ascii")

"""One poll loop over all that a run can say: output, frames, supervisor, clock and cancel."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from ..capture import HeadTail
from ..errors import BackendFailed, Partial, SetupFailed
from ..events import Emit, Output
from ..linux.bare import socket
from ..records import record
from ..report import Report
from .base import Cancel
from .pieces import Pieces

_START_SECONDS = 30.0  # a supervisor that has not started its guest by then is broken
_KILL_SECONDS = 10.0  # and so is one that has not reported the end of a killed guest
_DRAIN_SECONDS = 2.0  # after the end everything is already in the pipes
_PIECE = 1 << 18


@record
class Ended:
    """The supervisor's last word: what the kernel told it."""

    wait_status: int
    cpu: float
    peak_memory: int
    started: float
    ended: float
    survivors: int
    kill_seconds: float
    reason: str
    left: int = 0  # processes when the program ended by itself, where no control group counts them


class Watch:
    """Runs the loop until the guest's tree is gone and its output read to the end.

    Owns the descriptors it is given and closes them. `on_kill` is called once, before the kill of
    a guest that has started.
    """

    def __init__(
        self,
        *,
        run: str,
        control: socket.socket,
        frames: socket.socket | None,
        program: Pieces,
        stdout: int,
        stderr: int,
        stdin: int | None,
        data: bytes,
        timeout: float,
        captured: dict[str, HeadTail],
        report: Report,
        emit: Emit,
        cancel: Cancel,
        on_kill: Callable[[], None],
    ) -> None:
        self.run_id = run
        self.captured = captured
        self.reason = ""
        self.ended: Ended | None = None
        self._control, self._frames = control, frames
        self._outgoing: dict[int, Pieces] = {}
        self._timeout = timeout
        self._report, self._emit, self._cancel, self._on_kill = report, emit, cancel, on_kill
        self._lines = b""
        self._started = False
        self._told = False
        self._deadline = time.monotonic() + _START_SECONDS
        self._poll = select.poll()
        self._readers: dict[int, Callable[[int], None]] = {}
        # A guest that owns its pipes can open them to read, and be there before us.
        for fd in (stdout, stderr):
            os.set_blocking(fd, False)
        self._read(stdout, lambda fd: self._output(fd, "stdout"))
        self._read(stderr, lambda fd: self._output(fd, "stderr"))
        self._read(control.fileno(), self._supervisor_says)
        if frames is not None:
            frames.setblocking(False)
            self._read(frames.fileno(), self._frame)
            if program:
                self._outgoing[frames.fileno()] = program
                self._poll.modify(frames.fileno(), select.POLLIN | select.POLLOUT)
        if stdin is not None:
            os.set_blocking(stdin, False)
            self._outgoing[stdin] = Pieces([data])
            self._poll.register(stdin, select.POLLOUT)
        self._poll.register(cancel.fileno(), select.POLLIN)

    @property
    def control(self) -> int:
        return self._control.fileno()

    def _read(self, fd: int, reader: Callable[[int], None]) -> None:
        self._readers[fd] = reader
        self._poll.register(fd, select.POLLIN)

    def until_gone(self) -> Ended:
        """Returns what the kernel saw; BackendFailed if the supervisor broke."""
        try:
            while self._readers:
                left = self._deadline - time.monotonic()
                if left <= 0 and self._out_of_time():
                    break
                # A long time is waited for in pieces: poll takes no more than 24 days.
                for fd, events in self._poll.poll(min(max(0.0, left), 3600) * 1000):
                    self._handle(fd, events)
        finally:
            self._close()
        self._emit_rest()
        if self.ended is None:
            raise self._failure("the run's supervisor ended without a word")
        return self.ended

    def _emit_rest(self) -> None:
        """The end of output that was cut; once, when no more will come."""
        if self._told:
            return
        self._told = True
        for name, captured in self.captured.items():
            if rest := captured.rest():
                self._emit(Output(id=self.run_id, stream=name, data=rest))  # type: ignore[arg-type]

    def _handle(self, fd: int, events: int) -> None:
        if fd in self._outgoing and events & ~select.POLLIN:
            self._send(fd)
        elif fd in self._readers:
            self._readers[fd](fd)
        elif fd == self._cancel.fileno():
            self._poll.unregister(fd)
            self._kill("cancelled")

    def _out_of_time(self) -> bool:
        """The deadline of the present phase has passed. True if there is nothing to wait for."""
        if self.ended is not None:
            return True  # drained long enough: somebody outside holds the pipe
        if not self._started:
            raise self._failure(f"the guest did not start within {_START_SECONDS:.0f} s")
        if self.reason:
            raise self._failure(f"the guest could not be killed within {_KILL_SECONDS:.0f} s")
        self._kill("timeout")
        return False

    def _kill(self, reason: str) -> None:
        if self.ended is not None or self.reason:
            return
        self.reason = reason
        self._deadline = time.monotonic() + _KILL_SECONDS
        if self._started:
            self._on_kill()
        try:
            self._control.send(b"k")
        except (BrokenPipeError, ConnectionResetError):
            return  # it has just ended by itself; its last line is on the way

    def _output(self, fd: int, name: str) -> None:
        try:
            piece = os.read(fd, _PIECE)
        except BlockingIOError:
            return
        if not piece:
            self._done_with(fd)
            os.close(fd)
            return
        if live := self.captured[name].feed(piece):
            self._emit(Output(id=self.run_id, stream=name, data=live))  # type: ignore[arg-type]

    def _frame(self, fd: int) -> None:
        room, piece = self._report.wanted, b""
        try:
            if room is not None:
                size = os.readv(fd, [room])
            else:
                piece = os.read(fd, _PIECE)
                size = len(piece)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the guest ended with our program unread
            size = 0
        if not size:
            self._done_with(fd)
        elif room is not None:
            self._report.filled(size)
        else:
            self._report.feed(piece)

    def _supervisor_says(self, fd: int) -> None:
        try:
            piece = os.read(fd, 4096)
        except ConnectionResetError:
            piece = b""
        self._lines += piece
        *lines, self._lines = self._lines.split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            if word == "started":
                self._started = True
                if self.reason:  # cancelled before it began: the kill waits in the socket
                    self._on_kill()
                else:
                    self._deadline = float(rest) + self._timeout
            elif word == "failed":
                raise SetupFailed(f"the sandbox could not be set up: {rest}", retryable=True)
            elif word == "broken":
                raise self._failure(f"the run's supervisor failed: {rest}")
            elif word == "exit":
                status, cpu, peak, started, ended, survivors, kill, reason, left = rest.split()
                self.ended = Ended(
                    wait_status=int(status),
                    cpu=float(cpu),
                    peak_memory=int(peak),
                    started=float(started),
                    ended=float(ended),
                    survivors=int(survivors),
                    kill_seconds=float(kill),
                    reason="" if reason == "-" else reason,
                    left=int(left),
                )
                self._deadline = time.monotonic() + _DRAIN_SECONDS
        if not piece:
            self._done_with(fd)
            if self.ended is None:
                raise self._failure("the run's supervisor was killed")

    def _send(self, fd: int) -> None:
        try:
            self._outgoing[fd].write(fd)
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            # The guest does not read what it is given, which is its right.
            self._outgoing[fd].clear()
        if self._outgoing[fd]:
            return
        del self._outgoing[fd]
        if fd in self._readers:  # the frame socket has two directions
            self._poll.modify(fd, select.POLLIN)
        else:
            self._poll.unregister(fd)
            os.close(fd)

    def _done_with(self, fd: int) -> None:
        del self._readers[fd]
        self._outgoing.pop(fd, None)
        self._poll.unregister(fd)

    def _close(self) -> None:
        control = self._control.fileno()
        frames = -1 if self._frames is None else self._frames.fileno()
        for fd in {*self._readers, *self._outgoing} - {control, frames}:
            os.close(fd)
        self._readers.clear()  # closing twice must not close somebody else's
        self._outgoing.clear()
        self._control.close()
        if self._frames is not None:
            self._frames.close()

    def _failure(self, what: str) -> BackendFailed:
        return BackendFailed(
            what,
            retryable=True,
            partial=Partial(
                stdout=self.captured["stdout"].text(), stderr=self.captured["stderr"].text()
            ),
        )

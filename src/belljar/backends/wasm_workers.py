"""A worker process that runs WebAssembly guests: starting it, following a run in it, killing it.

A `Worker` is one process of `wasm/worker.py` in a jail of its own. It serves one run at a time.
`wasm_pool.py` keeps it for the next run of the same kind.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..capture import HeadTail
from ..errors import BackendFailed, Partial, SetupFailed
from ..events import Emit, Output
from ..linux import root
from ..records import record
from ..report import Report
from ..wasm import cache
from .base import Cancel
from .wasm_plan import PRIVATE, House

if TYPE_CHECKING:
    from .shelves import Jail

# The worker's own frames: see wasm/worker.py, which cannot be imported without the engine.
DONE, READY = 0x10, 0x11
_HEADER = 5
_MAX_OWN = 1 << 20  # of what a worker says itself
_PIECE = 1 << 18
_START_SECONDS = 60.0
_KILL_SECONDS = 10.0
# The engine's own deadline comes first: a worker that keeps it need not be killed.
_GRACE = 0.1
_MOST_FILES, _DEEPEST = 1000, 16
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ENVIRONMENT = {"LANG": "C.UTF-8", "RUST_BACKTRACE": "0"}


@record
class Ended:
    """How a run ended: `report` is the worker's last word, or None if it did not live to say it.

    `wait_status` is the kernel's, of a worker that has ended.
    """

    report: dict[str, Any] | None
    reason: str
    wait_status: int
    started: float
    ended: float
    cpu: float
    peak_memory: int
    kill_seconds: float


class Worker:
    """One process. `run` it, then `settle` it for the next run or `end` it."""

    def __init__(self, jail: Jail, house: House) -> None:
        self.house, self.jail = house, jail
        self.runs = 0
        self.healthy = False
        self._cpu = 0.0
        self._buffer = bytearray()
        self._passing = 0  # bytes of a guest's frame that are still to come
        self._max_frame = _MAX_OWN
        self._poll = select.poll()
        os.close(jail.stdin)
        for fd in (jail.stdout, jail.stderr):
            os.set_blocking(fd, False)
        jail.frames.settimeout(_START_SECONDS)
        for fd in (jail.stdout, jail.stderr, jail.run.fileno(), jail.frames.fileno()):
            self._poll.register(fd, select.POLLIN)

    def begin(self, compiled: cache.Compiled) -> None:
        """Start it. BackendFailed if that does not succeed; what it said is in the message."""
        house = self.house
        try:
            start = {"argv": house.argv, "frames": True, "env": _ENVIRONMENT, "files": ()}
            self._send(marshal.dumps({**start, "cores": (), "cwd": "", "filter": b""}))
            self._send(
                marshal.dumps({
                    "language": house.language,
                    "guest": house.compiled,
                    "parts": compiled.parts,
                    "fuel": house.fuel,
                    # The interpreter's own memory is not the program's.
                    "memory": house.memory + compiled.memory if house.memory else 0,
                    "preopens": house.preopens,
                    "directory": root.WORK,
                })
            )  # fmt: skip
        except OSError as error:
            raise SetupFailed(f"the wasm worker's jail died: {error}", retryable=True) from error
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        said = {self.jail.stdout: HeadTail(1 << 12), self.jail.stderr: HeadTail(1 << 12)}
        while not self.healthy:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise SetupFailed("the wasm worker did not start in time", retryable=True)
            for fd, _ in ready:
                if fd in said:
                    with contextlib.suppress(BlockingIOError):
                        said[fd].feed(os.read(fd, _PIECE))
                elif fd == self.jail.run.fileno():
                    words = " ".join(text for each in said.values() if (text := each.text()))
                    raise SetupFailed(f"the wasm worker died at its start: {words.strip()}")
                else:
                    self._read_frames(self._take_ready, self._too_early)

    def _take_ready(self, kind: int, payload: bytes) -> None:
        if kind != READY:
            raise SetupFailed(f"the wasm worker said {kind:#x} before it was ready")
        self._cpu = marshal.loads(payload)["cpu"]
        self.healthy = True

    def _too_early(self, data: bytes) -> None:
        raise SetupFailed("a guest of the wasm worker said something before there was one")

    def alive(self) -> bool:
        return self.healthy and self.jail.alive()

    def run(
        self,
        order: dict[str, Any],
        *,
        timeout: float,
        captured: dict[str, HeadTail],
        report: Report,
        run: str,
        emit: Emit,
        cancel: Cancel,
    ) -> Ended:
        """Blocks until the program has ended, one way or the other, and all its words are read."""
        follow = _Following(self, timeout, captured, report, run, emit, cancel)
        self.runs += 1
        self._max_frame = max(_MAX_OWN, report.max_frame)
        self.healthy = False  # until the run has ended as it should
        try:
            self._send(marshal.dumps(order))
        except OSError:
            follow.sent = False
        return follow.until_over()

    def settle(self) -> None:
        """Delete what the run has left; a worker that keeps some of it is not fit for another."""
        work = self.jail.work
        private = os.open(f"../{os.path.basename(PRIVATE)}", _DIRECTORY, dir_fd=work)
        try:
            for directory in (work, private):
                _delete(directory, os.fstat(directory).st_dev)
        except (OSError, _TooMuch):
            self.healthy = False
        finally:
            os.close(private)

    def kill(self) -> None:
        """The kernel ends everybody in its pid namespace."""
        if self.jail.group is not None:
            self.jail.group.release()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.jail.pidfd, signal.SIGKILL)

    def end(self, *, keep: bool = True) -> None:
        """Kill it and give everything back; returns when the kernel has ended it.

        Unless `keep`, nothing that was made for this kind of worker is kept for the next.
        """
        self.kill()
        deadline = time.monotonic() + _KILL_SECONDS
        gone = select.poll()
        gone.register(self.jail.run.fileno(), select.POLLIN)
        gone.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for fd in (self.jail.stdout, self.jail.stderr):
            os.close(fd)
        self.jail.run.close()
        self.jail.frames.close()
        self.jail.release(keep=keep)

    def _send(self, message: bytes) -> None:
        data = len(message).to_bytes(4, "big") + message
        sent = 0
        # Past the socket's timeout, for which Python asks the kernel first: most is sent at once.
        with contextlib.suppress(BlockingIOError):
            sent = os.write(self.jail.frames.fileno(), data)
        if sent < len(data):
            self.jail.frames.sendall(memoryview(data)[sent:])

    def _read_frames(
        self, take: Callable[[int, bytes], None], pass_on: Callable[[bytes], None]
    ) -> bool:
        """Hand the worker's own frames to `take`, and the guest's, in pieces, to `pass_on`, which
        puts them together. False at the end of the stream."""
        try:
            piece = os.read(self.jail.frames.fileno(), _PIECE)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        data = bytes(self._buffer) + piece
        self._buffer.clear()
        start = 0
        while start < len(data):
            if self._passing:
                part = data[start : start + self._passing]
                pass_on(part)
                self._passing -= len(part)
                start += len(part)
                continue
            payload = start + _HEADER
            size = int.from_bytes(data[start + 1 : payload], "big")
            own = data[start] in (DONE, READY)
            if len(data) < payload + (size if own else 0):
                if size > _MAX_OWN and len(data) >= payload:
                    raise BackendFailed("the wasm worker broke its protocol")
                break
            if size > self._max_frame:
                raise BackendFailed("the wasm worker broke its protocol")
            if own:
                take(data[start], data[payload : payload + size])
                start = payload + size
            else:
                pass_on(data[start:payload])
                start, self._passing = payload, size
        self._buffer += data[start:]
        return bool(piece)


class _Following:
    """The poll loop of one run."""

    def __init__(
        self,
        worker: Worker,
        timeout: float,
        captured: dict[str, HeadTail],
        report: Report,
        run: str,
        emit: Emit,
        cancel: Cancel,
    ) -> None:
        self._worker, self._captured, self._report = worker, captured, report
        self._run, self._emit, self._cancel = run, emit, cancel
        self._streams = {worker.jail.stdout: "stdout", worker.jail.stderr: "stderr"}
        self._began = time.monotonic()
        self._deadline = self._began + timeout + _GRACE
        self._done: dict[str, Any] | None = None
        self._reason = ""
        self._killed = 0.0
        self._last = b""
        self._over = 0.0
        self.sent = True

    def until_over(self) -> Ended:
        poll = self._worker._poll
        poll.register(self._cancel.fileno(), select.POLLIN)
        try:
            while not self._over:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._out_of_time()
                    continue
                for fd, _ in poll.poll(min(left, 3600) * 1000):
                    self._handle(fd)
        finally:
            with contextlib.suppress(KeyError):
                poll.unregister(self._cancel.fileno())
        # Everything was written before the worker said its last word.
        for fd in self._streams:
            while self._read(fd):
                pass
        for name, captured in self._captured.items():
            if rest := captured.rest():
                self._emit(Output(id=self._run, stream=name, data=rest))  # type: ignore[arg-type]
        return self._ended()

    def _handle(self, fd: int) -> None:
        worker = self._worker
        if fd in self._streams:
            self._read(fd)
        elif fd == self._cancel.fileno():
            worker._poll.unregister(fd)
            self._kill("cancelled")
        elif fd == worker.jail.run.fileno():
            self._worker_ended()
        elif fd == worker.jail.frames.fileno() and not worker._read_frames(
            self._take, self._report.feed
        ):
            worker._poll.unregister(fd)  # its end is told on the other socket

    def _read(self, fd: int) -> bool:
        try:
            piece = os.read(fd, _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            with contextlib.suppress(KeyError):
                self._worker._poll.unregister(fd)
            return False
        name = self._streams[fd]
        if live := self._captured[name].feed(piece):
            self._emit(Output(id=self._run, stream=name, data=live))  # type: ignore[arg-type]
        return True

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == DONE:
            self._done = marshal.loads(payload)
            self._over = time.monotonic()

    def _out_of_time(self) -> None:
        if self._killed:
            raise BackendFailed("the wasm worker could not be killed", partial=self._partial())
        self._kill("timeout")

    def _kill(self, reason: str) -> None:
        if not self._killed and not self._over:
            self._reason, self._killed = reason, time.monotonic()
            self._deadline = self._killed + _KILL_SECONDS
            self._worker.kill()

    def _worker_ended(self) -> None:
        """What the kernel said about the worker, through the slot of its jail."""
        try:
            piece = self._worker.jail.run.recv(4096)
        except ConnectionResetError:
            piece = b""
        self._last += piece
        if b"\n" in self._last or not piece:
            with contextlib.suppress(KeyError):
                self._worker._poll.unregister(self._worker.jail.run.fileno())
            # What it had said before is still to be read.
            while self._worker._read_frames(self._take, self._report.feed):
                if not self._more():
                    break
            self._over = self._over or time.monotonic()

    def _more(self) -> bool:
        look = select.poll()
        look.register(self._worker.jail.frames.fileno(), select.POLLIN)
        return bool(look.poll(0))

    def _ended(self) -> Ended:
        worker = self._worker
        if self._done is not None and not self._killed:
            worker.healthy = True
            cpu, worker._cpu = self._done["cpu"], self._done["total_cpu"]
            return Ended(
                report=self._done, reason="", wait_status=0, started=self._began, ended=self._over,
                cpu=cpu, peak_memory=self._done["memory"], kill_seconds=0.0,
            )  # fmt: skip
        word, *rest = self._last.decode("utf-8", "replace").split() or ("",)
        if word != "exit":
            raise BackendFailed(
                "the wasm worker's jail ended without a word",
                retryable=True,
                partial=self._partial(),
            )
        status, cpu, peak, _, _, _, _, reason, _ = rest
        return Ended(
            report=None,
            reason=self._reason or ("" if reason == "-" else reason),
            wait_status=int(status),
            started=self._began,
            ended=self._over,
            cpu=max(0.0, float(cpu) - worker._cpu),
            peak_memory=int(peak),
            kill_seconds=self._over - self._killed if self._killed else 0.0,
        )

    def _partial(self) -> Partial:
        return Partial(
            stdout=self._captured["stdout"].text(), stderr=self._captured["stderr"].text()
        )


class _TooMuch(Exception):
    """Deleting it would take longer than a new worker."""


def _delete(directory: int, device: int, depth: int = 0) -> bool:
    """Delete everything in an open directory that is on `device`; whether all of it is gone.

    What is mounted in there is not the run's but ours, an interpreter that is installed below /tmp
    for one: it stays, and so do the directories that lead to it. Nothing can be moved out of the
    way here: our user id means nothing to a file system that was mounted in somebody else's user
    namespace.
    """
    with os.scandir(directory) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    if len(names) > _MOST_FILES or depth > _DEEPEST:
        raise _TooMuch
    emptied = True
    for name, is_directory in names:
        if os.stat(name, dir_fd=directory, follow_symlinks=False).st_dev != device:
            emptied = False
            continue
        if not is_directory:
            os.unlink(name, dir_fd=directory)
            continue
        below = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
            gone = _delete(below, device, depth + 1)
        finally:
            os.close(below)
        if gone:
            os.rmdir(name, dir_fd=directory)
        else:
            emptied = False
    return emptied

"""One worker of WebAssembly guests as a plain process: starting it, following its run, ending it.

Works on every platform: two threads read its pipes into a queue, and the calling thread keeps the
time and looks at the cancel switch twenty times a second.
"""

from __future__ import annotations

import contextlib
import marshal
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from ..capture import HeadTail
from ..errors import BackendFailed, Partial, SetupFailed
from ..events import Emit, Output
from ..records import record
from ..report import Report
from .base import Cancel

# The worker's own frames: see wasm/worker.py and wasm/plain_worker.py, which need the engine.
DONE, READY = 0x10, 0x11
_STREAMS = {0x12: "stdout", 0x13: "stderr"}
_HEADER = 5
_MAX_OWN = 1 << 20  # of what a worker says itself
_PIECE = 1 << 18
_QUEUED = 64
_TICK = 0.05
_START_SECONDS = 60.0
_KILL_SECONDS = 10.0
# The engine's own deadline comes first: behind it the worker is killed.
_GRACE = 0.1
_LOOK = 0.25


@record
class Ended:
    """How a run ended: `report` is the worker's last message, or None if it was ended before."""

    report: dict[str, Any] | None
    reason: str
    started: float
    ended: float
    kill_seconds: float
    exit_code: int


class Process:
    """A worker that serves one run. `begin`, `run`, and `end` whatever happened."""

    def __init__(self, argv: tuple[str, ...], env: Mapping[str, str], cwd: str) -> None:
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(env),
                cwd=cwd,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for us; without a meaning on Windows
            )
        except OSError as error:
            raise SetupFailed(f"the wasm worker could not be started: {error}") from error
        self._heard: queue.Queue[tuple[int, bytes]] = queue.Queue(_QUEUED)
        self._stopped = threading.Event()
        self._max_frame = _MAX_OWN
        self._said = HeadTail(1 << 12)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read_frames, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_words, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, setup: dict[str, Any]) -> None:
        """Set it up. SetupFailed if that does not succeed; what it said is in the message."""
        with contextlib.suppress(OSError):  # it died: its end is heard below
            self._send(setup)
        kind, _ = self._next(time.monotonic() + _START_SECONDS)
        if kind != READY:
            self.kill()
            self._threads[1].join(1)
            raise SetupFailed(f"the wasm worker did not start: {self._said.text().strip()}")

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
        over: Callable[[], str],
    ) -> Ended:
        """Blocks until the program has ended; `over` says four times a second why to end it."""
        self._max_frame = max(_MAX_OWN, report.max_frame)
        started = time.monotonic()
        deadline, look = started + timeout + _GRACE, started + _LOOK
        reason, done = "", None
        sender = threading.Thread(target=self._order, args=(order,), daemon=True)
        sender.start()
        self._threads.append(sender)
        while not reason:
            now = time.monotonic()
            if cancel.is_set():
                reason = "cancelled"
            elif now >= deadline:
                reason = "timeout"
            elif now >= look:
                reason, look = over(), now + _LOOK
            if reason:
                break
            kind, data = self._next(min(now + _TICK, deadline))
            if kind == DONE:
                done = marshal.loads(data)
                break
            if kind == 0:
                break
            if name := _STREAMS.get(kind):
                if live := captured[name].feed(data):
                    emit(Output(id=run, stream=name, data=live))  # type: ignore[arg-type]
            elif kind > 0:
                report.feed(bytes((kind,)) + len(data).to_bytes(4, "big") + data)
        ended = time.monotonic()
        if not self.kill():
            said = {name: each.text() for name, each in captured.items()}
            raise BackendFailed("the wasm worker could not be killed", partial=Partial(**said))
        for name, each in captured.items():
            if rest := each.rest():
                emit(Output(id=run, stream=name, data=rest))  # type: ignore[arg-type]
        return Ended(
            report=done,
            reason=reason,
            started=started,
            ended=ended,
            kill_seconds=time.monotonic() - ended if reason else 0.0,
            exit_code=self._process.returncode,
        )

    def kill(self) -> bool:
        """End the process, which has no others below it; whether it is gone."""
        with contextlib.suppress(OSError):
            self._process.kill()
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kill it and give everything back."""
        self._stopped.set()
        self.kill()
        for thread in self._threads:
            thread.join(_KILL_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _order(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it died: its end is heard
            self._send(order)

    def _send(self, message: dict[str, Any]) -> None:
        payload = marshal.dumps(message)
        pipe = self._process.stdin
        assert pipe is not None
        view = memoryview(len(payload).to_bytes(4, "big") + payload)
        while view:
            view = view[pipe.write(view) :]

    def _next(self, deadline: float) -> tuple[int, bytes]:
        """The next frame; (0, b"") is the end of the stream, (-1, b"") that there was none."""
        try:
            return self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return -1, b""

    def _say(self, kind: int, data: bytes) -> None:
        while not self._stopped.is_set():
            try:
                return self._heard.put((kind, data), timeout=0.1)
            except queue.Full:
                continue

    def _read_frames(self, pipe: IO[bytes]) -> None:
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while not self._stopped.is_set() and (piece := pipe.read(_PIECE)):
                buffer += piece
                start = 0
                while len(buffer) - start >= _HEADER:
                    size = int.from_bytes(buffer[start + 1 : start + _HEADER], "big")
                    end = start + _HEADER + size
                    if size > self._max_frame:
                        return self._say(0, b"")
                    if len(buffer) < end:
                        break
                    self._say(buffer[start], bytes(buffer[start + _HEADER : end]))
                    start = end
                del buffer[:start]
        self._say(0, b"")

    def _read_words(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError):
            while not self._stopped.is_set() and (piece := pipe.read(_PIECE)):
                self._said.feed(piece)

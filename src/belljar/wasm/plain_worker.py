"""The worker of `worker.py` as a plain process: no jail around it, one run, on every platform.

Its stdin brings the setup message and then the run's; its stdout carries frames. The guest's two
streams are frames as well, because further descriptors cannot be handed to a process everywhere.
The file descriptor 1 is pointed at stderr first: a stray line from a library would break a frame.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from . import engine, worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    import wasmtime

STDOUT, STDERR = 0x12, 0x13
_KINDS = {1: STDOUT, 2: STDERR}


class Pipes:
    """stdin and stdout of this process, as the socket that a worker in a jail has."""

    def __init__(self) -> None:
        self._reader, self._writer = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        if sys.platform == "win32":
            import msvcrt

            for fd in (self._reader, self._writer):
                msvcrt.setmode(fd, os.O_BINARY)
        self._lock = threading.Lock()  # the engine may write a guest's output on another thread

    def recv(self, size: int) -> bytes:
        return os.read(self._reader, size)

    def sendall(self, data: bytes) -> None:
        with self._lock:
            view = memoryview(data)
            while view:
                view = view[os.write(self._writer, view) :]


class Streams(worker.Streams):
    """A guest's streams as frames, its input as a file of the run's."""

    def __init__(self, pipes: Pipes, stdin: str) -> None:
        self._pipes, self._path = pipes, stdin

    def connect(self, wasi: wasmtime.WasiConfig) -> None:
        wasi.stdout_custom = lambda data: self.write(1, data)
        wasi.stderr_custom = lambda data: self.write(2, data)

    def write(self, number: int, data: bytes) -> None:
        if number in _KINDS and data:
            head = bytes((_KINDS[number],)) + len(data).to_bytes(4, "big")
            try:
                self._pipes.sendall(head + data)
            except OSError:
                os._exit(0)  # the parent is gone

    def stdin(self, data: bytes) -> str:
        with open(self._path, "wb") as file:
            file.write(data)
        return self._path

    def forget_stdin(self) -> None:
        return  # the parent removes it with the run's directory

    def resident(self) -> int:
        """The largest resident size so far: what a run adds to it is a lower bound of its own."""
        try:
            import resource
        except ImportError:  # Windows
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Worker(worker.Worker):
    """Serves one run and ends: what a guest might leave behind ends with the process."""

    def serve(self) -> NoReturn:
        if not self._fuel:
            self._rehearse()
        self._frame(worker.READY, b"")
        order = worker._receive(self._channel)
        if order is not None:
            threading.Thread(target=self._end_with_parent, daemon=True).start()
            self._run(order)
        os._exit(0)

    def _send_file(self, fd: int, size: int) -> None:
        """As one frame: a pipe takes no `sendfile` everywhere, and the guest's output is frames."""
        with open(fd, "rb", closefd=False) as file:
            self._frame(worker._BUFFER, file.read(size))

    def _end_with_parent(self) -> None:
        """Nothing follows the run's message: the end of the stream means that the parent died."""
        with contextlib.suppress(OSError):
            self._channel.recv(1)
        os._exit(0)


def main() -> None:
    """Serve one run, or end when the parent closes our stdin."""
    pipes = Pipes()
    setup = worker._receive(pipes)
    if setup is None:
        return
    limit(setup["rlimits"])
    made = Worker(setup, pipes, Streams(pipes, setup["stdin"]))
    threading.stack_size(engine.THREAD_STACK)
    threading.Thread(target=worker._serve, args=(made,), daemon=True).start()
    made.clock.run()


def limit(wanted: list[tuple[str, int]]) -> None:
    """Set those resource limits that this platform has, never above the hard limit."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, value in wanted:
        number = getattr(resource, name, None)
        if number is None:
            continue
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some values
            resource.setrlimit(number, (value, hard))

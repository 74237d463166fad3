"""A run's threads and the one loop that hears them all.

Pipes cannot be polled on Windows, so each stream has a thread that reads it, or feeds it. They hand
everything to one bounded queue; the thread that called `run` empties it, and alone decides and
emits. A thread owns the descriptor it works on and closes it. On POSIX the threads also wait for a
stop pipe, so that not even a surviving process that holds a stream can keep them.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable

from ..capture import HeadTail
from ..errors import BackendFailed, BelljarError, Partial
from ..events import Emit, Output
from ..records import record
from ..report import Report
from .base import Cancel
from .pieces import Pieces
from .portable_plan import Watched
from .portable_tree import Load, Reaped, Tree

_FIRST_LOOK = 0.2  # most runs are over by then, and looking costs more than they do
_EVERY = 0.25
_TICK = 0.05  # how late a cancel may be seen
_KILL_SECONDS = 10.0
_DRAIN_SECONDS = 5.0  # after the end everything is in the pipes: this is for finding survivors
_DRAIN_TICK = 0.02
_PIECE = 1 << 16
_QUEUED = 32
_UNREAD = 8 << 20  # more than queue and pipes can hold: who writes after that is a survivor
_POLLABLE = sys.platform != "win32"


@record
class Streams:
    """Our ends of the guest's pipes; the Watch owns them. `frames` are (read, write)."""

    stdout: int
    stderr: int
    stdin: int | None
    frames: tuple[int, int] | None


@record
class Ended:
    """How a run went, as the kernel and our clock have it."""

    reaped: Reaped
    reason: str
    started: float
    ended: float
    survivors: int
    kill_seconds: float
    warnings: tuple[str, ...]


class Watch:
    """Runs until the guest's tree is gone and its output read to the end."""

    def __init__(
        self,
        *,
        run: str,
        tree: Tree,
        streams: Streams,
        program: Pieces,
        data: bytes,
        timeout: float,
        captured: dict[str, HeadTail],
        watched: Watched,
        directories: tuple[str, ...],
        report: Report,
        emit: Emit,
        cancel: Cancel,
    ) -> None:
        self.captured = captured
        self._run, self._tree = run, tree
        self._timeout, self._watched, self._directories = timeout, watched, directories
        self._report, self._emit, self._cancel = report, emit, cancel
        self._heard: queue.Queue[tuple[str, bytes]] = queue.Queue(_QUEUED)
        self._failure: BelljarError | None = None
        self._ending, self._stopped = threading.Event(), threading.Event()
        self._stop_reader, self._stop_writer = os.pipe()
        self._open = {"stdout", "stderr"} | ({"frames"} if streams.frames else set())
        self._gone = False
        self._started = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._unclaimed = {streams.stdout, streams.stderr, *(streams.frames or ())}
        if streams.stdin is not None:
            self._unclaimed.add(streams.stdin)
        self._streams, self._program, self._data = streams, program, data

    def until_gone(self) -> Ended:
        """What became of the run. Whatever is raised, nothing of it is left."""
        reaped = None
        try:
            self._start_threads()
            reason = self._converse(self._started + self._timeout)
            ended = time.monotonic()
            self._ending.set()
            survivors = self._tree.kill()
            killed = time.monotonic()
            survivors = self._drain(survivors)
            reaped = self._tree.reap()
        except BaseException as problem:
            self._abandon(problem)
            raise
        finally:
            self._finish(reaped is not None)
        for name, captured in self.captured.items():
            if rest := captured.rest():
                self._tell(name, rest)
        warnings = []
        if held := sorted(self._open):
            # Every end of these pipes was the run's: somebody lives whom we could not find.
            survivors = max(1, survivors)
            warnings.append(f"a process of this run survived and holds its {' and '.join(held)}")
        elif survivors:
            warnings.append(f"{survivors} processes of this run could not be killed")
        return Ended(
            reaped=reaped,
            reason=reason,
            started=self._started,
            ended=ended,
            survivors=survivors,
            kill_seconds=killed - ended,
            warnings=tuple(warnings),
        )

    # -- the calling thread ----------------------------------------------------------------------

    def _converse(self, deadline: float) -> str:
        """Until the first process ends (""), or until there is a reason to kill it."""
        while not self._gone:
            if self._cancel.is_set():
                return "cancelled"
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            try:
                what, data = self._heard.get(timeout=min(left, _TICK))
            except queue.Empty:
                continue
            if what == "over":
                return data.decode()
            self._take(what, data)
        return ""

    def _drain(self, survivors: int) -> int:
        """After the kill: hear the end of the first process and of every stream.

        Every end of the streams was the run's. While one stays open somebody lives who was not
        found, or was born meanwhile: look again, for as long as that may help.
        """
        killed = time.monotonic()
        room = _UNREAD
        while not self._gone or (self._open and room > 0):
            waited = time.monotonic() - killed
            if not self._gone and waited > _KILL_SECONDS:
                raise self._broken(f"the guest lives {_KILL_SECONDS:.0f} s after its kill")
            try:
                what, data = self._heard.get(timeout=_DRAIN_TICK)
            except queue.Empty:
                if self._gone and waited > _DRAIN_SECONDS:
                    break
                survivors = self._tree.kill()
                continue
            self._take(what, data)
            room -= len(data)
        return survivors

    def _take(self, what: str, data: bytes) -> None:
        if what == "end":
            self._gone = True
        elif what == "failed":
            assert self._failure is not None
            raise self._broken(self._failure.message) from self._failure
        elif what == "over":
            return  # the kill it asks for has happened already
        elif not data:
            self._open.discard(what)
        elif what == "frames":
            self._report.feed(data)
        elif live := self.captured[what].feed(data):
            self._tell(what, live)

    def _tell(self, stream: str, data: bytes) -> None:
        self._emit(Output(id=self._run, stream=stream, data=data))  # type: ignore[arg-type]

    def _broken(self, what: str) -> BackendFailed:
        return BackendFailed(what, retryable=True, partial=self._partial())

    def _partial(self) -> Partial:
        return Partial(**{name: captured.text() for name, captured in self.captured.items()})

    def _abandon(self, problem: BaseException) -> None:
        """End the tree of a run that broke. What also goes wrong here is told with the problem."""
        self._ending.set()
        if isinstance(problem, BackendFailed) and problem.partial is None:
            problem.partial = self._partial()
        try:
            self._tree.kill()
        except BackendFailed as second:
            problem.add_note(f"ending the run failed too: {second.message}")

    def _finish(self, reaped: bool) -> None:
        """End every thread, and with them close every descriptor."""
        self._stopped.set()
        for fd in (self._stop_writer, *self._unclaimed):
            os.close(fd)
        for thread in self._threads:
            thread.join(_KILL_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._stop_reader)
            if not reaped:
                self._tree.reap()
        self._tree.close()

    # -- the other threads -----------------------------------------------------------------------

    def _start_threads(self) -> None:
        streams = self._streams
        self._start(self._wait_for_end)
        self._start(self._read, streams.stdout, "stdout")
        self._start(self._read, streams.stderr, "stderr")
        if streams.frames is not None:
            self._start(self._read, streams.frames[0], "frames")
            self._start(self._feed, streams.frames[1], self._program, True)
        if streams.stdin is not None:
            self._start(self._feed, streams.stdin, Pieces([self._data]), False)
        if self._watched != Watched():
            self._start(self._watch)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, name=f"belljar-{self._run}", daemon=True)
        thread.start()
        self._threads.append(thread)
        if given:
            self._unclaimed.discard(given[0])

    def _say(self, what: str, data: bytes = b"") -> None:
        while not self._stopped.is_set():
            try:
                return self._heard.put((what, data), timeout=0.1)
            except queue.Full:
                continue

    def _ready(self, fd: int, *, writing: bool) -> bool:
        """Wait until `fd` can be used; False when it is time to stop."""
        if not _POLLABLE:
            return not self._stopped.is_set()
        poll = select.poll()
        poll.register(fd, select.POLLOUT if writing else select.POLLIN)
        poll.register(self._stop_reader, select.POLLIN)
        return all(ready != self._stop_reader for ready, _ in poll.poll())

    def _read(self, fd: int, name: str) -> None:
        with open(fd, "rb", buffering=0) as pipe:
            while self._ready(fd, writing=False) and (piece := pipe.read(_PIECE)):
                self._say(name, piece)
        self._say(name)

    def _feed(self, fd: int, data: Pieces, hold: bool) -> None:
        """Write `data`, then close; with `hold` only at the end of the run."""
        with open(fd, "wb", buffering=0):
            if _POLLABLE:
                os.set_blocking(fd, False)
            while data and self._ready(fd, writing=True):
                try:
                    data.write(fd)
                except BlockingIOError:
                    continue
                except OSError:
                    break  # the guest does not read what it is given, which is its right
            if hold:
                self._stopped.wait()

    def _wait_for_end(self) -> None:
        try:
            self._tree.wait_for_end()
        except Exception as error:  # noqa: BLE001 - or the run would last until its timeout
            self._failure = BackendFailed(f"the program cannot be waited for: {error}")
            return self._say("failed")
        self._say("end")

    def _watch(self) -> None:
        pause = _FIRST_LOOK
        while not self._ending.wait(pause):
            pause = _EVERY
            try:
                load = self._tree.look()
            except BelljarError as error:
                self._failure = error
                return self._say("failed")
            if reason := self._over(load):
                return self._say("over", reason.encode())

    def _over(self, load: Load) -> str:
        watched = self._watched
        if watched.processes and load.processes > watched.processes:
            return "pids"
        if watched.memory and load.memory > watched.memory:
            return "oom"
        if watched.cpu and load.cpu >= watched.cpu:
            return "cpu"
        if watched.disk and disk_use(self._directories, watched.disk) > watched.disk:
            return "disk"
        return ""


def disk_use(directories: tuple[str, ...], enough: int) -> int:
    """Bytes allocated below `directories`; stops looking once that is past `enough`."""
    total, looked, waiting = 0, 0, list(directories)
    while waiting and total <= enough and looked < 100_000:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    looked += 1
                    info = entry.stat(follow_symlinks=False)
                    # Windows does not count blocks.
                    total += info.st_blocks * 512 if hasattr(info, "st_blocks") else info.st_size
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue  # it went while we looked
    return total

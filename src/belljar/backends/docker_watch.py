"""The poll loop of one run in a container: one connection, on which everything comes and goes."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

from ..capture import HeadTail
from ..errors import (
    BackendFailed,
    BackendUnavailable,
    BelljarError,
    CommandNotFound,
    Partial,
    RequestError,
)
from ..events import Emit, Output
from ..files.collect import MAX_BYTES, MAX_FILES, Collected
from ..files.copying import NOTHING, Copy, Wanted
from ..files.names import checked_name
from ..guest import agent, protocol
from ..records import record
from ..report import Report
from .agent_link import EngineMalformed
from .base import Cancel
from .docker_container import Container
from .docker_plan import collect_seconds
from .pieces import Pieces

_WINDOW = 1 << 18  # of input that is on its way to a program which may never read it
_KILL_SECONDS = 5.0  # an agent that has not reported the end of a killed guest is stuck
_LATE_SECONDS = 1.0  # how long an end may take to reach us: longer, and the engine hangs
_ENGINE_SECONDS = 10.0  # for an engine to kill a container, where it has been silent already
_PIECE = 1 << 18
_BUFFERED = 16  # pieces: more than a socket holds
_KINDS = {agent.STDOUT: "stdout", agent.STDERR: "stderr"}


class NotStarted(BackendFailed):
    """The container ended before it had the program."""


class EngineHangs(BackendFailed):
    """The engine takes no orders: what there is of the run cannot be removed now either."""


@record
class Told:
    """How the run ended, from the kernel through pid 1, or from the engine."""

    wait_status: int
    started: float
    ended: float
    cpu: float | None = None
    peak_memory: int | None = None
    oom_kills: int = 0
    forks_refused: int | None = None
    disk_full: bool = False
    kill_seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    cut: bool = False  # files may be missing, or are shorter than they were


class AgentWatch:
    """Runs one program in a waiting container until nothing of it is left there."""

    def __init__(
        self,
        container: Container,
        *,
        run: str,
        start: list[bytes],
        program: Pieces,
        stdin: bytes,
        timeout: float,
        captured: dict[str, HeadTail],
        report: Report,
        emit: Emit,
        cancel: Cancel,
        wanted: Wanted = NOTHING,
        given: frozenset[str] = frozenset(),
    ) -> None:
        assert container.socket is not None
        self.captured = captured
        self.found = Collected(wanted)
        self._given = given  # names of the files that the program was given
        self._collect_seconds = collect_seconds(wanted) + 10
        self.reason = ""
        self._container, self._socket = container, container.socket
        self._run, self._timeout = run, timeout
        self._report, self._emit, self._cancel = report, emit, cancel
        self._queue: deque[memoryview] = deque(memoryview(each) for each in start)
        self._streams = {agent.PROGRAM: program, agent.STDIN: Pieces([stdin])}
        self._windows = dict.fromkeys(self._streams, _WINDOW)
        self._current = memoryview(b"")
        self._exit: dict[str, Any] | None = None
        self._over = False  # nothing more is to be received
        self._done = False  # the agent said that it sent everything
        self._broken = ""  # why the stream was given up
        self._garbled = False  # it was the engine that spoilt it, not the agent
        self._hard = False
        self._copy: Copy | None = None  # the file whose content is coming
        self._gone: set[str] = set()
        self._dropped = 0
        self._full = False  # the names of files take as much as they may
        self._began = self._deadline = 0.0
        self._ended = 0.0
        self._killed = 0.0
        self._silence = 0.0  # how long the engine was waited for since the program was to end
        # Where the agent cannot see what it costs, it is read from outside.
        self._group = container.group
        self._cpu_before = container.group.cpu() if container.group is not None else None
        self._outside: tuple[float | None, int | None] = (None, None)

    def until_gone(self) -> Told:
        """What became of the program; BackendFailed if the sandbox itself broke."""
        try:
            return self._until_gone()
        finally:
            if self._copy is not None:
                self._copy.abandon()

    def _until_gone(self) -> Told:
        self._socket.setblocking(False)
        poll = select.poll()
        poll.register(self._cancel.fileno(), select.POLLIN)
        self._began = time.monotonic()
        self._deadline = self._began + self._timeout
        self._send()
        while not self._over:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._take_what_came()
                if self._over or self._deadline > time.monotonic():
                    continue
                if self._out_of_time():
                    break
                continue
            sending = select.POLLOUT if self._outgoing() else 0
            poll.register(self._socket.fileno(), select.POLLIN | sending)
            waits = time.monotonic()
            # A long time is waited for in pieces: poll takes no more than 24 days.
            ready = poll.poll(min(left, 3600) * 1000)
            if self.reason:
                self._silence += time.monotonic() - waits
            for fd, events in ready:
                if fd != self._socket.fileno():
                    poll.unregister(fd)
                    self._kill("cancelled")
                    continue
                if events & select.POLLOUT:
                    self._send()
                if events & ~select.POLLOUT and not self._receive():
                    self._over = True
        for name, captured in self.captured.items():
            if rest := captured.rest():
                self._emit(Output(id=self._run, stream=name, data=rest))  # type: ignore[arg-type]
        return self._told()

    # Going out.

    def _outgoing(self) -> bool:
        return bool(self._current or self._queue) or any(self._next_pieces())

    def _next_pieces(self) -> Iterator[int]:
        for kind, data in self._streams.items():
            if self._windows[kind] > 0 or not data:
                yield kind

    def _send(self) -> None:
        while True:
            if not self._current and not self._load():
                return
            try:
                self._current = self._current[self._socket.send(self._current) :]
            except BlockingIOError:
                return
            except OSError:  # it hung up: reading tells why
                self._current = memoryview(b"")
                self._queue.clear()
                self._streams.clear()
                return

    def _load(self) -> bool:
        """The next packet to send: first what waits in the queue, then pieces of the streams."""
        if self._queue:
            self._current = self._queue.popleft()
            return True
        for kind in self._next_pieces():
            data, size = self._streams[kind], min(self._windows[kind], 1 << 16)
            piece = data.take(size)
            self._windows[kind] -= len(piece)
            if not piece:
                del self._streams[kind]  # the empty packet says that it is the end
            self._current = memoryview(protocol.encode(kind, piece))
            return True
        return False

    # Coming in.

    def _take_what_came(self) -> None:
        """Before a time is declared over: what is here already may have come within it, if this
        process was stopped or its callbacks took long. As much as buffers hold, not all that a
        program may write."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        for _ in range(_BUFFERED):
            if self._over or not poll.poll(0):
                return
            if not self._receive():
                self._over = True

    def _receive(self) -> bool:
        """False at the end of the connection."""
        try:
            piece = self._socket.recv(_PIECE)
        except BlockingIOError:
            return True
        except OSError:
            piece = b""
        try:
            packets = self._container.incoming.feed(piece)
            for packet in packets:
                self._take(packet)
        except protocol.ProtocolError as malformed:
            self._broken = f"the agent's stream was malformed ({malformed})"
            self._garbled = isinstance(malformed, EngineMalformed)
            self._over = True
        return bool(piece)

    def _take(self, packet: protocol.Frame) -> None:
        kind, payload = packet.kind, packet.payload
        if kind in _KINDS:
            name = _KINDS[kind]
            if live := self.captured[name].feed(payload):
                self._emit(Output(id=self._run, stream=name, data=live))  # type: ignore[arg-type]
        elif kind == agent.FRAMES:
            self._report.feed(payload)
        elif kind == agent.CREDIT and len(payload) == 5 and payload[0] in self._windows:
            self._windows[payload[0]] += int.from_bytes(payload[1:], "big")
        elif kind == agent.EXIT and self._exit is None:
            self._exit = _ending(payload)
            self._ended = self._time_of_end()
            self._deadline = time.monotonic() + self._collect_seconds
            if self._group is not None:
                self._outside = self._group.cpu(), self._group.peak_memory()
        elif kind == agent.LISTED and self._exit is not None:
            self._listed(_fields(payload))
        elif kind == agent.DATA:
            self._data(payload)
        elif kind == agent.DONE and self._exit is not None:
            self._close_file()
            told = _fields(payload).get("warnings")
            texts = told if isinstance(told, list) else []
            self.found.warnings += [str(text)[:1000] for text in texts[:100]]
            self.found.finish()
            self._done = self._over = True
        elif kind == agent.FAILED:
            raise self._refused(_fields(payload))
        else:
            raise protocol.ProtocolError(f"packet kind 0x{kind:02x} out of place")

    def _listed(self, fields: dict[str, Any]) -> None:
        self._close_file()
        size, deleted = fields.get("size"), fields.get("deleted") is True
        try:
            path = os.fsdecode(bytes.fromhex(fields["path"]))
            proper = checked_name("files", path) == path
        except (KeyError, TypeError, ValueError, RequestError):
            proper = False
        if not proper:
            raise protocol.ProtocolError("a file's name is missing or no path below the directory")
        if deleted:
            if path not in self._given or path in self.found.files or path in self._gone:
                raise protocol.ProtocolError("a deleted file that was not given")
            self._gone.add(path)
            self.found.deleted(path)
            return
        if (
            type(size) is not int
            or size < 0
            or path in self.found.files
            or len(self.found.files) >= MAX_FILES
        ):
            raise protocol.ProtocolError("too many files, one twice, or one without a size")
        if self._full or not self.found.has_room(path):
            self._full = True  # what else comes is read and dropped
            return
        kind: Literal["created", "changed"] = "changed" if path in self._given else "created"
        copy = self.found.copy(path, size, kind) if fields.get("data") else None
        if copy is not None:
            copy.open()
            self._copy = copy
        else:
            self.found.add_unread(path, size, kind)

    def _data(self, piece: bytes) -> None:
        if self._copy is not None and len(piece) <= self._copy.room:
            self._copy.write(piece)
        elif self._full and self._dropped <= MAX_BYTES:
            self._dropped += len(piece)
        else:
            raise protocol.ProtocolError("more file data than was asked for")

    def _close_file(self, whole: bool = True) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            self.found.add(copy, whole=whole)

    # Ends.

    def _time_of_end(self) -> float:
        """When the program ended, as the agent has just said. BackendFailed if it ended in time and
        the engine, through which the agent speaks, was silent until long after that."""
        assert self._exit is not None
        ran = _number(self._exit, "ran")
        if self.reason != "timeout" or ran is None or ran >= self._timeout:
            return time.monotonic()
        if self._silence > _LATE_SECONDS:
            raise self._failure(
                f"the program ended after {ran:.1f} s, but the engine was silent until "
                f"{self._silence:.1f} s after its time of {self._timeout:g} s",
                "see the engine's log, e.g. `journalctl -u docker`; then run it again",
            )
        self.reason, self._killed = "", 0.0
        return self._began + ran

    def _kill(self, reason: str) -> None:
        if self._exit is not None or self.reason:
            return
        self.reason = reason
        self._killed = time.monotonic()
        self._deadline = self._killed + _KILL_SECONDS
        # What it would still be given does not matter any more. A packet half sent is finished.
        self._streams.clear()
        self._queue.append(memoryview(protocol.encode(agent.KILL)))
        self._send()

    def _out_of_time(self) -> bool:
        """The deadline of the present phase has passed. True if there is nothing to wait for."""
        if self._exit is not None:
            self._broken = "collecting files took too long and was given up"
            return True
        if not self.reason:
            self._kill("timeout")
            return False
        if not self._hard:
            self._hard = True
            self._deadline = time.monotonic() + _KILL_SECONDS * 6
            try:
                self._container.kill(_ENGINE_SECONDS)
            except (BackendUnavailable, BackendFailed) as error:
                raise EngineHangs(
                    f"the engine did not end a program whose time was up: {error.message}; its "
                    "agent ends it, and the container is removed when the engine answers again",
                    fix=error.fix,
                    retryable=True,
                    partial=self._partial(),
                ) from error
            return False
        raise self._failure("the container could not be killed")

    def _told(self) -> Told:
        ended = self._ended or time.monotonic()
        if self._exit is None:
            return self._ask_engine(ended)
        warnings = () if self._done else self._without_done()
        told = self._exit
        if self.reason and self._killed:
            kill = max(0.0, ended - self._killed)
        else:
            kill = _number(told, "kill") or 0.0
        status = told["status"]
        cpu, peak = _number(told, "cpu"), _whole(told, "peak")
        if self._group is not None:
            after, peak = self._outside
            before = self._cpu_before
            cpu = None if after is None or before is None else max(0.0, after - before)
        return Told(
            wait_status=status,
            started=self._began,
            ended=ended,
            cpu=cpu,
            peak_memory=peak,
            oom_kills=_whole(told, "oom_kills") or 0,
            forks_refused=_whole(told, "forks_refused"),
            disk_full=told.get("disk_full") is True,
            kill_seconds=kill,
            warnings=warnings,
            cut=not self._done,
        )

    def _without_done(self) -> tuple[str, ...]:
        """The program's end is known, but not that all its files have come. The agent may be in
        any state: the engine ends the container, and its answer is waited for."""
        self._close_file(whole=False)
        why = self._broken or "the connection with the container ended"
        warnings = [f"{why} before all files had come: files may be missing or cut"]
        try:
            self._container.kill()
            self._container.ended()
        except (BackendUnavailable, BackendFailed) as error:
            warnings.append(f"the engine has not confirmed the end: {error.message}")
        return tuple(warnings)

    def _ask_engine(self, ended: float) -> Told:
        """The connection ended and the agent said nothing: the engine knows what became of it."""
        try:
            if self._broken:
                self._container.kill()
            code, oom = self._container.ended()
        except (BackendUnavailable, BackendFailed) as error:
            raise self._failure(
                f"the engine went away in mid-run: {error.message}", error.fix
            ) from error
        said = self._container.incoming.complaint.decode("utf-8", "replace").strip()
        said = f": {said}" if said else ""
        if code == agent.NOT_STARTED:
            raise NotStarted(
                f"the engine lost the way to the agent{said or ': no reason given'}", retryable=True
            )
        if code == agent.FAILED_EARLY:
            raise self._failure(f"the agent failed before the program began{said}")
        if code in (0, agent.LEFT) and not (self._broken or self.reason or oom):
            # Its own orderly end when the stream from the host ends, with all that ran in there.
            raise self._failure(f"the engine ended the connection in mid-run{said}")
        spoilt = self._broken and not self._garbled
        if self.reason == "timeout" and not (spoilt or oom or code in (137, agent.LEFT)):
            # The agent ends as the program did, and it was not killed.
            raise self._failure(f"the engine lost the report of the program's end{said}")
        if self.reason or oom or code > 128:
            lost = "the sandbox was killed whole: its files are lost"
        else:
            # It had the program by then, and no program is worth running again that ends it.
            lost = f"the agent ended without a report, exit code {code}: files are lost{said}"
        return Told(
            # Only a signal's number, not a code of the agent's own choice, is the program's end.
            wait_status=code - 128 if 128 < code <= 128 + 64 and not (self.reason or oom) else 9,
            started=self._began,
            ended=ended,
            oom_kills=int(oom),
            kill_seconds=max(0.0, ended - (self._killed or ended)),
            warnings=(f"{self._broken}; {lost}" if self._broken else lost,),
            cut=True,
        )

    def _refused(self, fields: dict[str, Any]) -> BelljarError:
        problem = str(fields.get("problem"))[:1000]
        match fields.get("kind"):
            case "command":
                return CommandNotFound("command", problem)
            case "files":
                return RequestError("files", f"do not fit: {problem}", fix="raise `disk`")
        return self._failure(problem)

    def _failure(self, what: str, fix: str | None = None) -> BackendFailed:
        return BackendFailed(what, fix=fix, retryable=True, partial=self._partial())

    def _partial(self) -> Partial:
        stdout, stderr = (self.captured[name].text() for name in ("stdout", "stderr"))
        return Partial(stdout=stdout, stderr=stderr)


def _ending(payload: bytes) -> dict[str, Any]:
    fields = _fields(payload)
    status = fields.get("status")
    if type(status) is not int or not 0 <= status <= 0xFFFF or not _is_end(status):
        raise protocol.ProtocolError("an end without a status")
    return fields


def _is_end(status: int) -> bool:
    """Whether `wait` can say so of a process that ended."""
    return os.WIFEXITED(status) or os.WIFSIGNALED(status)


def _fields(payload: bytes) -> dict[str, Any]:
    fields = protocol.loads(payload)
    if type(fields) is not dict:
        raise protocol.ProtocolError("a payload is an object")
    return fields


def _number(fields: dict[str, Any], name: str) -> float | None:
    found = fields.get(name)
    return float(found) if isinstance(found, int | float) and found >= 0 else None


def _whole(fields: dict[str, Any], name: str) -> int | None:
    found = fields.get(name)
    return found if type(found) is int and found >= 0 else None

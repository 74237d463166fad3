"""The first process inside a container or a virtual machine: starts one program and tells its end.

One stream of packets comes in on descriptor 0 and one goes out on 1; nothing else connects us with
the host. A packet is one byte of kind, four bytes of big-endian length, and the payload. The order:

    agent -> host   READY (what the kernel says about our cage), then we wait for START
    host -> agent   START (marshalled: the program and its limits), FILE pieces, then at any time
                    STDIN and PROGRAM pieces (an empty one ends the stream), KILL
    agent -> host   STDOUT, STDERR and FRAMES pieces, CREDIT (how much of STDIN and PROGRAM was
                    passed on: the host keeps no more than a window of it on the way),
                    EXIT (what the kernel said), LISTED and DATA (changed files), DONE

Who can forge what: the program is a child of ours with pipes of its own. It never has descriptors 0
and 1 of this process, and cannot take them. On Linux we are not dumpable, so /proc/1 is closed to
it, pid 1 gets no signal that it does not handle, and the seccomp profile lets a process change the
limits, priority and cores of itself only. In gVisor, which has none of these three, the program is
another user. READY says whether a process like the program reached us (`agent_identity.trial`).
What the program writes arrives as STDOUT, STDERR or FRAMES, whatever it says. When it ends,
everybody else in here is killed and waited for; EXIT is said when no child is left. If the stream
from the host ends, so do we, and with us the sandbox.
"""

from __future__ import annotations

import gc
import marshal
import os
import select
import signal
import sys
import time

from . import agent_facts, agent_files, protocol
from .agent_guest import Refused, be_guest, find, handle_all
from .agent_identity import Identity, seal, trial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

START, FILE, STDIN, PROGRAM, KILL = 0x11, 0x12, 0x13, 0x14, 0x15
READY, STDOUT, STDERR, FRAMES, CREDIT = 0x91, 0x92, 0x93, 0x94, 0x95
EXIT, LISTED, DATA, DONE, FAILED = 0x96, 0x97, 0x98, 0x99, 0x9A
FROM_HOST = frozenset((START, FILE, STDIN, PROGRAM, KILL))
FROM_AGENT = frozenset(
    (READY, STDOUT, STDERR, FRAMES, CREDIT, EXIT, LISTED, DATA, DONE, FAILED)
)  # fmt: skip
MAX_PACKET = 1 << 20

# How we end if the host was gone, or we failed, before there was a program: nothing of it ran. The
# last: if the host was gone, or silent for too long, when there was one.
NOT_STARTED, FAILED_EARLY, LEFT = 119, 118, 117
_PIECE = 1 << 16
# Past the program's time, or that of collecting files: the host should have ended it, and it or the
# engine between us is gone or stuck.
_OVERTIME = 5.0
_FAREWELL = 2.0


class Left(Exception):
    """The host is gone."""


def main(idle: float, ids: tuple[int, int] | None) -> None:
    """Serve one program. Returns only in the child that is to be the program's interpreter.

    `ids` are the guest's user and group where it is to be another user than the agent.
    """
    # As pid 1 we would get none of them; but gVisor gives pid 1 what it gives everybody.
    handle_all(signal.SIG_IGN)
    sealed = seal(False)
    host, started = Host(), False
    try:
        identity = Identity(ids)
        host.say(READY, protocol.dumps(trial(identity, sealed)))
        _warm_up()
        start = host.start(time.monotonic() + idle)
        with identity:
            before = host.files(start)
        group = agent_facts.Group()
        started = True
        program = Program(start, host, identity)
        if program.child:
            return
        end = program.until_gone()
        full = agent_facts.disk_full(start["work"])
        host.deadline = time.monotonic() + start["collect"]["seconds"] + _OVERTIME
        host.say(EXIT, protocol.dumps({**end, **group.spent(), "disk_full": full}))
        with identity:  # the only one left with this user's rights is us
            warnings = agent_files.send_changed(start["collect"], before, host.say, LISTED, DATA)
        host.say(DONE, protocol.dumps({"warnings": agent_files.few(warnings)}))
        host.until_closed()
    except Left:
        os._exit(LEFT if started else NOT_STARTED)
    except Refused as refused:
        host.say(FAILED, protocol.dumps({"kind": refused.kind, "problem": str(refused)}))
        os._exit(125)
    except Exception:
        if started:
            raise
        sys.excepthook(*sys.exc_info())
        os._exit(FAILED_EARLY)
    status = os.waitstatus_to_exitcode(end["status"])
    os._exit(status if status >= 0 else 128 - status)


def _warm_up() -> None:
    """Import what the program's interpreter will need, and while nobody waits, what it may need."""
    from . import worker  # noqa: F401

    if not select.select([0], [], [], 0.02)[0]:
        from . import displays, tables  # noqa: F401
    gc.collect()
    gc.freeze()


class Host:
    """The two streams."""

    def __init__(self) -> None:
        self._decoder = protocol.Decoder(FROM_HOST, MAX_PACKET)
        self._packets: list[protocol.Frame] = []
        self.deadline: float | None = None
        # Where the engine died the other end may stay open, and full: that must not hold us up.
        os.set_blocking(1, False)

    def say(self, kind: int, payload: bytes = b"") -> None:
        view = memoryview(protocol.encode(kind, payload))
        while view:
            try:
                view = view[os.write(1, view) :]
            except BlockingIOError:
                if not select.select([], [1], [], self.left())[1]:
                    raise Left from None
            except OSError:
                raise Left from None

    def until_closed(self) -> None:
        """Throw away what the host still sends until it hangs up, because an engine that cannot
        pass it on ends the connection, and what was said last may be lost with it."""
        end = time.monotonic() + _FAREWELL
        try:
            while select.select([0], [], [], max(0.0, end - time.monotonic()))[0]:
                if not os.read(0, 1 << 18):
                    return
        except OSError:
            return

    def left(self) -> float | None:
        """Seconds until the deadline; None: there is none yet."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def pending(self) -> bool:
        """Whether a packet is here that nobody has taken."""
        return bool(self._packets)

    def heard(self) -> list[protocol.Frame]:
        """The packets that are there now; blocks until something is."""
        if not self._packets:
            try:
                piece = os.read(0, 1 << 18)
            except OSError:
                raise Left from None
            if not piece:
                raise Left
            self._packets = self._decoder.feed(piece)
        packets, self._packets = self._packets, []
        return packets

    def next(self, deadline: float | None = None) -> protocol.Frame:
        while not self._packets:
            if deadline is not None:
                left = max(0.0, deadline - time.monotonic())
                if not select.select([0], [], [], left)[0]:
                    raise Left
            self._packets = self.heard()
        return self._packets.pop(0)

    def start(self, deadline: float) -> dict[str, Any]:
        """The START message, which may come in several packets."""
        data = b""
        size = -1
        while size < 0 or len(data) < size:
            packet = self.next(deadline)
            if packet.kind != START:
                raise Left
            data += packet.payload
            if size < 0:
                size, data = int.from_bytes(data[:4], "big"), data[4:]
        start: dict[str, Any] = marshal.loads(data)
        return start

    def files(self, start: dict[str, Any]) -> dict[bytes, tuple[int, int]]:
        """Write what was given into the work directory; what to tell changed files by."""
        os.chdir(start["work"])
        os.umask(0o077)
        before = {}
        for name, length, mtime in start["files"]:
            try:
                self._write(os.fsencode(name), length, mtime)
            except OSError as error:
                raise Refused("files", f"{name!r}: {error.strerror}") from None
            before[os.fsencode(name)] = (mtime, length)
        return before

    def _write(self, name: bytes, length: int, mtime: int) -> None:
        if b"/" in name:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while length > 0:
                packet = self.next()
                if packet.kind != FILE:
                    raise Left
                length -= len(packet.payload)
                view = memoryview(packet.payload)
                while view:
                    view = view[os.write(fd, view) :]
            os.utime(fd, ns=(mtime, mtime))
        finally:
            os.close(fd)


class Program:
    """The guest: a child of ours, its pipes, and what flows through them."""

    def __init__(self, start: dict[str, Any], host: Host, identity: Identity) -> None:
        self._host = host
        self._began = time.monotonic()
        host.deadline = self._began + start["timeout"] + _OVERTIME
        self._executable = find(start["argv"], start["env"]) if start["argv"] else ""
        with identity:  # programs open /dev/stdout, which is its owner's to open
            stdin, self._stdin = os.pipe()
            self._stdout, stdout = os.pipe()
            self._stderr, stderr = os.pipe()
            # Not a socket: what comes with a message, and its end, could keep us waiting.
            program, self._program = os.pipe()
            self._frames, frames = os.pipe()
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *told: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            pid = os.fork()
        except OSError as error:
            raise Refused("start", f"fork: {error.strerror}") from None
        self.child = pid == 0
        if self.child:
            try:
                own = (stdin, stdout, stderr, program, frames)
                be_guest(start, own, self._executable, identity)
            except BaseException as error:
                os.write(2, f"belljar: {type(error).__name__}: {error}\n".encode())
                os._exit(120)
            return
        for fd in (stdin, stdout, stderr, program, frames):
            os.close(fd)
        self._pid = pid
        self._status: int | None = None
        self._killed = 0.0
        self._gone = 0.0
        self._usage = [0.0, 0]
        self._ran: float | None = None  # seconds until its own end; None if it was killed
        # Where to write what the host sends: descriptor, its kind, what waits.
        self._waiting = {self._stdin: bytearray(), self._program: bytearray()}
        self._ends: set[int] = set()
        self._targets = {STDIN: self._stdin, PROGRAM: self._program}
        self._kinds = {self._stdout: STDOUT, self._stderr: STDERR, self._frames: FRAMES}
        # The program can open its ends to read, and be there before us.
        for fd in (*self._waiting, *self._kinds):
            os.set_blocking(fd, False)

    def until_gone(self) -> dict[str, Any]:
        """Pass everything on until nobody is left; what the kernel said about them."""
        if self._host.pending:
            self._from_host()
        while self._gone == 0.0 or self._kinds:
            self._turn()
        status = 9 if self._status is None else self._status
        return {
            "status": status,
            "cpu": self._usage[0],
            "peak": self._usage[1],
            "survivors": 0,
            "kill": self._gone - self._killed,
            "ran": self._ran,
        }

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        for fd in self._kinds:
            poll.register(fd, select.POLLIN)
        for fd, data in self._waiting.items():
            if data:
                poll.register(fd, select.POLLOUT)
        left = self._host.left()
        if not left:
            self._kill()
            raise Left
        # While we kill, the dead announce themselves; but look again rather than trust in that.
        for fd, _ in poll.poll(20 if self._killed and not self._gone else left * 1000):
            if fd == 0:
                self._from_host()
            elif fd == self._wake:
                os.read(fd, 4096)
            else:
                if self._waiting.get(fd):
                    self._pass_on(fd)
                elif fd in self._kinds:
                    self._from_guest(fd)
        self._reap()

    def _from_host(self) -> None:
        try:
            packets = self._host.heard()
        except Left:
            self._kill()
            raise
        for packet in packets:
            if packet.kind == KILL:
                self._kill()
            elif packet.kind in self._targets:
                self._take(self._targets[packet.kind], packet.payload)

    def _take(self, fd: int, data: bytes) -> None:
        if fd not in self._waiting:  # the program closed it: thrown away, and no longer waited for
            self._credit(fd, len(data))
        elif data:
            self._waiting[fd] += data
        else:
            self._ends.add(fd)
            self._finish(fd)

    def _pass_on(self, fd: int) -> None:
        data = self._waiting[fd]
        try:
            sent = os.write(fd, data[:_PIECE])
        except BlockingIOError:
            return
        except OSError:  # its right: a program need not read what it is given
            self._credit(fd, len(data))
            data.clear()
            self._ends.add(fd)
        else:
            del data[:sent]
            self._credit(fd, sent)
        self._finish(fd)

    def _finish(self, fd: int) -> None:
        if fd in self._ends and not self._waiting[fd]:
            del self._waiting[fd]
            os.close(fd)

    def _credit(self, fd: int, size: int) -> None:
        kind = STDIN if fd == self._stdin else PROGRAM
        self._host.say(CREDIT, bytes((kind,)) + size.to_bytes(4, "big"))

    def _from_guest(self, fd: int) -> None:
        try:
            piece = os.read(fd, _PIECE)
        except BlockingIOError:
            return
        if piece:
            self._host.say(self._kinds[fd], piece)
        else:
            del self._kinds[fd]

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                if not self._gone:
                    self._killed = self._killed or time.monotonic()
                    self._gone = time.monotonic()
                return
            if pid == 0:
                if self._killed:
                    self._kill()
                return
            self._usage[0] += used.ru_utime + used.ru_stime
            self._usage[1] = max(self._usage[1], used.ru_maxrss * 1024)
            if pid == self._pid:
                self._status = status
                if not self._killed:
                    self._ran = time.monotonic() - self._began
                self._kill()

    def _kill(self) -> None:
        """Everybody in here but us, at once."""
        self._killed = self._killed or time.monotonic()
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return

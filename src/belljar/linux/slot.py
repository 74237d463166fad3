"""A slot of a zygote: it makes one jail after another, and waits for each until nobody is left.

Theory of operation

    zygote ──fork──> slot: has joined the control groups of its runs; one run at a time
                       │ a new pid namespace for its next children, then
                       ├─clone─> anchor: pid 1 of that namespace. It shares the slot's memory, and
                       │         all it does is to wait, with every signal blocked; what its orphans
                       │         leave the kernel collects
                       └─fork──> guest: pid 2 (run_guest.py). Makes its own mounts, gives everything
                                 up, says "ready", waits for the host's start message, runs
                                   └─clone─> keeper: pid 3, shares the guest's memory, and waits

The slot makes the pipes and sockets of the run. The guest keeps 0, 1, 2 and the frame socket, 3.
The host gets the other ends, the work directory and a pidfd of the anchor, in one message on the
shelf socket; from then on neither slot nor zygote has a part in the run until the guest ended.

Why an anchor: a program that were pid 1 itself would not die of its own signals and would have to
collect orphans. As it shares memory, it costs next to nothing to make; a forked interpreter would
copy hundreds of pages. It never runs a line of Python.

Networks: a run that may make sockets gets a namespace of its own from the guest's set-up. One that
may only make pairs of them gets the slot's, which is made once, because a namespace takes the
kernel half a millisecond: no other run is in it at the same time, it has no address, not even a
loopback that is up, and pairs end with their processes, before the next run starts.

`keeper.py` says why there is a keeper, and how it is known to be at its end.

Who kills whom: the host kills the anchor by its pidfd, and with it the kernel kills everybody in
its namespace. When the guest has ended by itself, the slot asks the kernel whether the anchor has
children: every orphan of the namespace becomes its child, so with none, or with an ending keeper,
nobody is left. If it has others, the anchor is killed and waited for, which the kernel lets end
only after all the others. Then the slot writes one line with the wait status and what was used up.
If the slot dies, which takes an administrator or the kernel, the host finds the run socket closed,
or its pidfd says so, and kills the anchor.

Nothing here may import: the files of this package are not in the jail.
"""

from __future__ import annotations

import marshal
import os
import resource
import struct
import time

from . import footprint, own_frames, pace, seccomp_jail, syscalls
from .bare import signal, socket
from .keeper import Keeper
from .root import FIRST_UID
from .run_guest import EVERY_SIGNAL, HANDED_OVER, Settled, be_guest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

MESSAGE = 1 << 18
_ANY_CHILD = 0x4000_0000  # __WALL: also one that was made to send no signal at its end
_IDS_A_SLOT = 16


def serve(orders: int, shelf: int, settled: Settled, number: int, ids: int) -> NoReturn:
    """Make a jail for every order, until the host closes the socket they come by.

    Joining a control group takes the kernel ten milliseconds and stops everybody else who wants to:
    so it is done once for many runs, by us, and not by every guest for itself.
    """
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
    # Descriptors that we send are counted together with those of every run of an ordinary user, and
    # a run can have its own limit of open files on their way; a guest gets its own limit later.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Our memory is the anchor's, who lives among the guest's processes.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    desk = _Desk(socket.socket(fileno=orders), socket.socket(fileno=shelf))
    ourselves = os.pidfd_open(os.getpid())
    _tell(desk.orders, b"here", [ourselves])
    os.close(ourselves)
    turn = 0
    while True:
        # An order must not interrupt who gives it: the host, on its way back to its caller.
        os.sched_setscheduler(0, os.SCHED_BATCH, desk.priority)
        message, _ = receive(desk.orders)
        if not message:
            os._exit(0)
        shape: dict[str, Any] = marshal.loads(message)
        # No two runs at a time have one: a slot makes one run after another.
        place = number * _IDS_A_SLOT + turn % _IDS_A_SLOT
        shape["uid"] = FIRST_UID + place % (ids - FIRST_UID) if ids else 0
        turn += 1
        key = families, memfd, affinity = tuple(shape["filter"])
        if key not in settled.filters:
            settled.filters[key] = seccomp_jail.delta(families, memfd=memfd, affinity=affinity)
        _one_run(desk, shape, settled)


class _Desk:
    """What a slot keeps from run to run."""

    def __init__(self, orders: socket.socket, shelf: socket.socket) -> None:
        self.orders, self.shelf = orders, shelf
        self.own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.stack = syscalls.Stack()
        self.priority = os.sched_param(0)
        self.has_network = False


class _Run:
    """The processes of one run, and the descriptors that we hold of it."""

    def __init__(self) -> None:
        self.anchor = self.guest = 0
        self.run = self.work = -1
        self.children: tuple[int, ...] = ()  # lists of them: our own, and the anchor's
        self.keeper: Keeper | None = None
        self.ours: list[int] = []
        self.theirs: list[int] = []
        self.guests: list[int] = []
        self.pace: pace.Pace | None = None
        self.peak = footprint.Peak()

    def end(self) -> float:
        """Nobody is left when this returns; the processor seconds of those who were."""
        seconds = 0.0
        if not self.anchor:
            return seconds
        os.kill(self.anchor, 9)
        # Whoever is our child, whatever it did to become one: the anchor's end waits for them all.
        while True:
            try:
                usage = os.wait4(-1, _ANY_CHILD)[2]
            except ChildProcessError:
                break
            seconds += usage.ru_utime + usage.ru_stime
        self.guest = self.anchor = 0
        return seconds

    def handed_over(self) -> None:
        for fd in self.theirs:
            os.close(fd)
        self.theirs.clear()

    def guest_has_its_own(self) -> None:
        for fd in self.guests:
            os.close(fd)
        self.guests.clear()

    def close(self) -> None:
        self.handed_over()
        self.guest_has_its_own()
        for fd in self.ours:
            os.close(fd)
        self.ours.clear()


def _one_run(desk: _Desk, shape: dict[str, Any], settled: Settled) -> None:
    run = _Run()
    try:
        _start(run, desk, shape, settled)
        _rehearse(run, shape)
        os.sched_setscheduler(0, os.SCHED_OTHER, desk.priority)  # its end is waited for
        _tell(desk.shelf, f"ready {shape['slot']}".encode(), run.theirs)
    except BaseException as error:  # noqa: BLE001 - the host must hear of it, whatever it is
        run.end()
        run.close()
        _tell(desk.shelf, f"failed {shape['slot']} {type(error).__name__}: {error}".encode())
        return
    run.handed_over()
    try:
        _watch(run, shape["watch"])
    except BaseException:
        run.end()  # first, because it may go on
        run.close()
        raise
    # First what keeps its files: when the anchor is gone, the next run's memory is counted.
    run.close()
    run.end()


def _start(run: _Run, desk: _Desk, shape: dict[str, Any], settled: Settled) -> None:
    """Returns when the guest is ready."""
    if shape["network"] == "kept" and not desk.has_network:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        desk.has_network = True
    syscalls.unshare(syscalls.CLONE_NEWPID)
    try:
        # The pipes come later: the anchor closes nothing.
        run.anchor = _start_anchor(desk)
        # Noted one by one, so that a failure on the way closes what there is.
        run.run = _new_pair(run.theirs, run.ours)
        frames = _new_pair(run.theirs, run.guests, guests=True)
        stdin = _new_pipe(run.guests, run.theirs)[0]
        stdout = _new_pipe(run.theirs, run.guests)[1]
        stderr = _new_pipe(run.theirs, run.guests)[1]
        ready, answer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                _fork_guest(run, shape, settled, (stdin, stdout, stderr, frames), answer)
            finally:
                answer.close()
            run.guest_has_its_own()
            words, fds = receive(ready)
            run.ours += fds
            if words == HANDED_OVER:
                words, _ = receive(ready)
        finally:
            ready.close()
    finally:
        syscalls.setns(desk.own_namespace, syscalls.CLONE_NEWPID)
    if words != b"ready":
        raise OSError(0, words.decode("utf-8", "replace") or "the guest died in its set-up")
    # The second keeps the run's mounts: undoing them must not be the guest's last act, for which
    # the host waits.
    run.work, _ = fds
    run.theirs.append(os.dup(run.work))
    run.theirs.append(os.pidfd_open(run.anchor))


def _fork_guest(
    run: _Run,
    shape: dict[str, Any],
    settled: Settled,
    own: tuple[int, int, int, int],
    answer: socket.socket,
) -> None:
    run.guest = os.fork()
    if run.guest == 0:
        try:
            be_guest(shape, settled, own, answer)
        finally:
            os._exit(120)  # not one line of the slot's is the guest's to run


def _new_pair(first: list[int], second: list[int], *, guests: bool = False) -> int:
    """A socket pair, an end for each list; the second end, which may be a guest's."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if guests:
        syscalls.refuse_descriptors(one)
    first.append(one.detach())
    second.append(other.detach())
    return second[-1]


def _new_pipe(readers: list[int], writers: list[int]) -> tuple[int, int]:
    reader, writer = os.pipe()
    readers.append(reader)
    writers.append(writer)
    return reader, writer


def _start_anchor(desk: _Desk) -> int:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EVERY_SIGNAL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its dead are collected by the kernel
    try:
        return syscalls.clone_waiting(desk.stack, signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the descriptors that came with it; nothing when the other end is gone."""
    message, ancillary, _, _ = sock.recvmsg(MESSAGE, socket.CMSG_SPACE(4 * 16))
    fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
    return message, fds


def _tell(shelf: socket.socket, words: bytes, fds: list[int] | None = None) -> None:
    data = struct.pack(f"{len(fds)}i", *fds) if fds else b""
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)] if fds else []
    shelf.sendmsg([words[:4000]], passed)


def _rehearse(run: _Run, shape: dict[str, Any]) -> None:
    """Touch what `_watch` will touch, while nobody waits: the fork left every page to be copied."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    _last_line(0, usage.ru_utime + usage.ru_stime, 0, time.monotonic(), 0.0, "", 0)
    me = os.getpid()
    try:
        for process in (me, run.anchor):
            run.ours.append(os.open(f"/proc/{process}/task/{process}/children", os.O_RDONLY))
        run.children = tuple(run.ours[-2:])
        if shape["keeper"]:
            (keeper,) = _children(run.guest, run.guest)
            run.keeper = Keeper(keeper, run.ours)
            run.keeper.rehearse()
    except FileNotFoundError:
        pass  # this kernel does not tell: everybody is ended and waited for
    _is_alone(run, run.keeper)
    if os.wait4(run.guest, os.WNOHANG)[0]:
        raise OSError(0, "the guest died in its set-up")
    if shape["watch"]:
        _over(run, shape["watch"])


def _watch(run: _Run, watch: dict[str, Any] | None) -> None:
    """Wait for the guest's end, see to it that nobody is left, and say so."""
    started, reason = time.monotonic(), ""
    look = started
    run.peak = footprint.Peak()  # one jail's warming up is not its run's
    if watch and watch["cpu"]:
        run.pace = pace.Pace(watch["rate"], _members(run))
    while True:
        if watch:
            signal.sigtimedwait((signal.SIGCHLD,), watch["every"])
            # By the clock: a guest that is stopped and continued sends us signal after signal.
            if time.monotonic() >= look:
                reason = _over(run, watch)
                look = time.monotonic() + watch["every"]
            if reason:
                os.kill(run.anchor, 9)
        pid, status, usage = os.wait4(run.guest, os.WNOHANG if watch and not reason else 0)
        if pid:
            break
    run.guest = 0
    ended = time.monotonic()
    seconds = usage.ru_utime + usage.ru_stime
    gone, left = run.keeper is None or run.keeper.end(), 0
    if reason or not gone or not _is_alone(run, run.keeper):
        # Without a control group only this count says that the limit on processes was met.
        left = len(_members(run)) if watch and not reason else 0
        seconds += run.end()
    peak = max(run.peak.value, usage.ru_maxrss * 1024)
    line = _last_line(status, seconds, peak, started, ended, reason, left)
    try:
        os.write(run.run, line)
    except BrokenPipeError:
        return  # nobody waits for this run any more


def _last_line(
    status: int, seconds: float, peak: int, started: float, ended: float, reason: str, left: int
) -> bytes:
    return (
        f"exit {status} {seconds:.6f} {peak} {started:.6f} {ended:.6f} 0 "
        f"{time.monotonic() - ended:.6f} {reason or '-'} {left}\n"
    ).encode()


def _is_alone(run: _Run, keeper: Keeper | None) -> bool:
    """Whether the kernel says that pid 1 of the run's namespace has no children, and we no other.

    `keeper` is none when it has been ended, first: a child that loses it on the way is then among
    the anchor's.

    With CLONE_PARENT a guest could make children of ours; seccomp refuses it, if it is on. The
    lists were opened beforehand, so they are of these very processes. Of an anchor that was killed
    the second is empty when it has waited for all the others; until we have, it is in the first.
    """
    if not run.children:
        return False
    try:
        ours, below = (os.pread(fd, 4096, 0) for fd in run.children)
        if keeper is not None and below == keeper.name:
            keeper.check_number()  # or its place in the list would be another's
            below = b""
    except OSError:  # it is not; or no memory for the list: end everybody, and wait
        return False
    return ours == b"%d " % run.anchor and not below


def _children(process: int, thread: int) -> list[int]:
    fd = os.open(f"/proc/{process}/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while piece := os.read(fd, 1 << 16):
            text += piece
    finally:
        os.close(fd)
    return [int(word) for word in text.split()]


def _members(run: _Run) -> list[int]:
    """The guest and everybody below and beside it, and the orphans."""
    me = os.getpid()
    pending = _children(me, me)
    found = [pid for pid in pending if pid != run.anchor]
    while pending:
        process = pending.pop()
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                below = _children(process, int(thread))
                found += below
                pending += below
        except OSError:  # it ended while we looked
            continue
    return found


def _over(run: _Run, watch: dict[str, Any]) -> str:
    """Why the run must end, or nothing."""
    if watch["memory"] and _memory(run, watch) > watch["memory"]:
        return "oom"
    if watch["cpu"] and not _keeps_pace(run, watch):
        return "cpu"
    return ""


def _memory(run: _Run, watch: dict[str, Any]) -> int:
    members, files = _members(run), os.fstatvfs(run.work)
    private = (files.f_blocks - files.f_bfree) * files.f_frsize
    room, own_network = watch["memory"] - private, watch["own_network"]
    total = private + footprint.of(members, room, watch["socket"], own_network=own_network)
    run.peak.note(total, members, private)
    return total


def _keeps_pace(run: _Run, watch: dict[str, Any]) -> bool:
    if run.pace is None:  # in its set-up
        return True
    return run.pace.hold(lambda: _members(run)) and run.pace.total <= watch["cpu"]


own_frames.without_path(serve, _one_run, _start, _fork_guest)

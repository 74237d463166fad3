"""The guest of a run, from its fork to the program: it gives everything up, checks that, and waits.

`slot.py` has the theory of operation. Nothing here may import after the zygote has its own root:
the files of this package are not in there.
"""

from __future__ import annotations

import gc
import io
import marshal
import os
import resource
import struct

from . import landlock, leave, namespaces, own_frames, root, sealed, seccomp, syscalls
from .bare import signal, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

FRAMES = 3
HANDED_OVER = b"handed over"
GUEST_ID = 1000
EVERY_SIGNAL = tuple(signal.valid_signals())


class Settled:
    """What a zygote has ready for all its runs: prebuilt rulesets and filters, and the worker."""

    def __init__(self) -> None:
        self.last_capability = 0
        self.rulesets: dict[bool, int] = {}
        self.filters: dict[tuple[Any, ...], bytes] = {}
        self.worker: Any = None  # the module `guest/worker.py`, where programs are Python's
        self.env: dict[str, str] | None = None
        self.reseed: Callable[[], None] | None = None
        self.rehearse: Callable[[int, dict[str, Any]], None] | None = None
        self.rehearsal: dict[str, Any] = {}  # what it is called with
        self.loaded: leave.Loaded | None = None
        self.stack = syscalls.Stack()  # a keeper's
        self.layers: frozenset[str] = frozenset()


def be_guest(
    shape: dict[str, Any],
    settled: Settled,
    own: tuple[int, int, int, int],
    answer: socket.socket,
) -> NoReturn:
    """The slot's child, second in its pid namespace."""
    ready = answer.detach()
    try:
        ruleset = settled.rulesets.get(shape["tcp"], -1)
        # Out of the way of each other first, then side by side from 0 on.
        kept = [syscalls.high(fd) for fd in (*own, ready, ruleset) if fd >= 0]
        for number, fd in enumerate(kept):
            os.dup2(fd, number, inheritable=number < FRAMES)
        ready, ruleset = FRAMES + 1, FRAMES + 2 if ruleset >= 0 else -1
        syscalls.close_from(len(kept))
        _enter(shape, settled)
        _hand_over(ready)
        _lose_everything(shape, settled, ruleset)
        _check(settled)
        if settled.rehearse is not None and shape["parked"]:
            _rehearse(settled, settled.rehearse)
        interpreter = None
        if settled.worker is not None:
            interpreter = settled.worker.ready(FRAMES)
            gc.enable()
            if settled.reseed is not None:
                settled.reseed()
        if shape["keeper"]:
            _leave_to_a_keeper(settled.stack)
        os.write(ready, b"ready")
        syscalls.close_from(FRAMES + 1)
    except BaseException as error:  # noqa: BLE001 - told to the slot, and through it to the host
        os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(120)
    try:
        start = receive_start()
    except EOFError:
        os._exit(0)  # the jail was never used
    except OSError as error:  # a name too long, more files than the disk has room for
        os.write(2, f"belljar: a file could not be written: {error}\n".encode())
        os._exit(120)
    if start["cores"]:
        os.sched_setaffinity(0, start["cores"])
    go_to_start(start)
    if start["argv"]:
        execute(start)
    _work(settled, interpreter, start)


def _enter(shape: dict[str, Any], settled: Settled) -> None:
    """Namespaces, mounts and a /proc of our own."""
    flags = syscalls.CLONE_NEWNS
    if "namespaces" in settled.layers:
        flags |= syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
        flags |= syscalls.CLONE_NEWNET if shape["network"] == "fresh" else 0
    syscalls.unshare(flags)
    if flags & syscalls.CLONE_NEWNET:
        namespaces.loopback_up()
        namespaces.bound_buffers()
    root.prepare_run(
        uid=shape["uid"],
        disk=shape["disk"],
        inodes=shape["inodes"],
        waiting=shape["waiting"],
    )
    if shape["proc"]:
        root.processes_and(shape["proc"])
    else:
        root.processes_only()


def _hand_over(answer: int) -> None:
    """Send the slot the work directory, and the mounts, which it keeps until the run is over.

    Before the limits are put on us: descriptors on their way are counted for the user, who is the
    same for all runs of an ordinary user, and compared with the sender's limit of open files.
    """
    work = os.open(root.WORK, os.O_RDONLY | os.O_DIRECTORY)
    mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    sender = socket.socket(fileno=answer)
    passed = struct.pack("2i", work, mounts)
    sender.sendmsg([HANDED_OVER], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    sender.detach()
    os.close(work)
    os.close(mounts)


def be_the_first_to_go() -> None:
    """When the run's memory is used up the kernel takes one of the guest's, never the slot."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, b"1000")
    os.close(fd)


def _lose_everything(shape: dict[str, Any], settled: Settled, ruleset: int) -> None:
    os.setsid()
    uid = shape["uid"]
    if uid:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else our own /proc files are not ours
    be_the_first_to_go()
    if "namespaces" in settled.layers:
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        for name, text in (
            ("setgroups", b"deny"),
            ("gid_map", b"%d %d 1" % (GUEST_ID, uid)),
            ("uid_map", b"%d %d 1" % (GUEST_ID, uid)),
        ):
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
            os.write(fd, text)
            os.close(fd)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # the slot's is not
    if shape["affinity"]:
        os.sched_setaffinity(0, shape["affinity"])
    for number, value in shape["rlimits"]:
        if number == resource.RLIMIT_DATA:
            value += _data_size()  # what a zygote has loaded is not the program's
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))
    os.chdir(root.WORK)
    if "capabilities" in settled.layers:
        syscalls.drop_capabilities(settled.last_capability)
    syscalls.no_new_privileges()
    for number in (signal.SIGINT, signal.SIGCHLD):
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    syscalls.reset_library_signals()
    # After the last change of ids and capabilities: each of them takes it off again.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
    if ruleset >= 0:
        landlock.enforce(ruleset)
    if "seccomp" in settled.layers:
        seccomp.install(settled.filters[tuple(shape["filter"])])


def _data_size() -> int:
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    size = int(os.read(fd, 200).split()[5]) * resource.getpagesize()
    os.close(fd)
    return size


def _check(settled: Settled) -> None:
    """Every layer that should be on, is on: asked of the kernel, not of our own code."""
    fd = os.open("/proc/self/status", os.O_RDONLY)
    status = os.read(fd, 1 << 13)
    os.close(fd)
    on = settled.layers
    wrong = []
    if os.getpid() != 2 or _fact(status, b"NSpid").split()[-1] != b"2":
        wrong.append("pid namespace")
    if "namespaces" in on and (os.getuid(), os.getgid(), os.geteuid()) != (GUEST_ID,) * 3:
        wrong.append("user namespace")
    if _fact(status, b"NoNewPrivs") != b"1":
        wrong.append("no_new_privs")
    sets = (b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb")
    if "namespaces" not in on:
        # The bounding set can be emptied only in a user namespace of one's own.
        sets = (b"CapInh", b"CapPrm", b"CapEff", b"CapPrm", b"CapAmb")
    if "capabilities" in on and any(int(_fact(status, name), 16) for name in sets):
        wrong.append("capabilities")
    if "seccomp" in on:
        # How many there are is told since Linux 5.9.
        if _fact(status, b"Seccomp") != b"2" or int(_fact(status, b"Seccomp_filters", b"2")) < 2:
            wrong.append("seccomp")
        elif not _refused(lambda: syscalls.unshare(syscalls.CLONE_NEWUSER)):
            wrong.append("seccomp rules")
    if "landlock" in on and not _refused(_write_to_probe):
        wrong.append("Landlock")
    if "pivot_root" in on and os.path.exists("/old"):
        wrong.append("own root")
    if os.stat(root.WORK).st_dev == os.stat(root.SANDBOX).st_dev:
        wrong.append("work directory")
    if wrong:
        raise OSError(0, f"these protections are not on: {', '.join(wrong)}")


def _fact(status: bytes, name: bytes, default: bytes | None = None) -> bytes:
    """What a line of /proc/self/status says."""
    line = b"\n%s:\t" % name
    start = status.find(line)
    if start < 0:
        if default is None:
            raise OSError(0, f"the kernel does not tell {name.decode()}")
        return default
    start += len(line)
    return status[start : status.index(b"\n", start)]


def _write_to_probe() -> None:
    os.close(os.open(root.PROBE, os.O_RDWR | os.O_NONBLOCK))


def _refused(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False


def _start_message(run: dict[str, Any], env: dict[str, str]) -> bytes:
    """What the host would send (`backends/start_message.py`)."""
    program: bytes = run["code"].encode()
    files = [(run["filename"], len(program), 0)]
    start = {"argv": [], "run": run, "frames": True, "later": False, "env": env, "files": files}
    start["cores"] = start["buffers"] = ()
    start["cwd"], start["filter"] = "", b""
    head = marshal.dumps(start)
    return len(head).to_bytes(4, "big") + head + program


def _rehearse(settled: Settled, run: Callable[[int, dict[str, Any]], None]) -> None:
    """Do what will be done for the program, on its way and with its descriptors, for another one.

    Memory that a forked process touches first is copied then, page by page; now that time is
    nobody's.
    """
    frames = syscalls.high(FRAMES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    os.dup2(theirs.fileno(), FRAMES, inheritable=False)
    theirs.close()
    ours.sendall(_start_message(settled.rehearsal, settled.env or {}))
    start = receive_start()
    set_environment(settled, start["env"])
    run(FRAMES, start["run"])
    for name, _, _ in start["files"]:
        os.unlink(name)
    os.dup2(frames, FRAMES, inheritable=False)
    os.close(frames)
    ours.close()


def _leave_to_a_keeper(stack: syscalls.Stack) -> None:
    """Have a child that shares our memory and descriptors, to take them apart when we are gone.

    It is as confined as we are, and the program may do to it what it likes: `slot.py` has more. It
    ends without a signal: so a program that waits for all of its children is not told of it. When
    it becomes another program it needs no keeper, who would keep the old one's memory and pipes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EVERY_SIGNAL)
    try:
        keeper = syscalls.clone_waiting(stack, syscalls.CLONE_FILES)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for name in ("execv", "execve"):
        setattr(os, name, _without_keeper(keeper, getattr(os, name)))
    os.supports_fd.add(os.execve)


def _without_keeper(keeper: int, become: Any) -> Any:
    kill = os.kill  # the program may replace it

    def end_keeper() -> None:
        try:
            kill(keeper, signal.SIGKILL)
        except ProcessLookupError:
            return  # the program has

    def replacement(*args: Any, **more: Any) -> Any:
        end_keeper()
        return become(*args, **more)

    replacement.__name__ = replacement.__qualname__ = become.__name__
    replacement.__doc__ = become.__doc__
    return replacement


def receive_start() -> dict[str, Any]:
    """The host's start message, and the files that follow it, which are written as the guest.

    Large data comes before them, in a memory file whose descriptor is with the first byte.
    """
    size, passed = _receive_first()
    start: dict[str, Any] = marshal.loads(_read_exactly(size))
    os.umask(0o077)
    for name, length, mtime in start["files"]:
        if "/" in name:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600)
        while length:
            piece = os.read(FRAMES, min(length, 1 << 20))
            if not piece:
                raise EOFError
            length -= len(piece)
            while piece:
                piece = piece[os.write(fd, piece) :]
        os.utime(fd, ns=(mtime, mtime))
        os.close(fd)
    if start.get("run"):
        sizes = start["buffers"]
        shared = sealed.read(passed, sizes) if passed >= 0 else map(_receive_buffer, sizes)
        start["run"]["buffers"] = list(shared)
    return start


def _receive_first() -> tuple[int, int]:
    """The length of the start message, and the descriptor that came with it, or -1."""
    frames = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, FRAMES)
    try:
        head, ancillary = frames.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)[:2]
    finally:
        frames.detach()
    head += _read_exactly(4 - len(head))
    fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
    return int.from_bytes(head, "big"), fds[0] if fds else -1


def go_to_start(start: dict[str, Any]) -> None:
    """Change to the directory that the program starts in, and add its language's own filter;
    without these there is no run."""
    try:
        if start["cwd"]:
            os.chdir(start["cwd"])
        if start["filter"]:
            seccomp.add(start["filter"])
    except OSError as error:
        os.write(2, f"belljar: the program was not started: {error}\n".encode())
        os._exit(120)


def _receive_buffer(size: int) -> io.BytesIO:
    buffer = io.BytesIO(bytes(size))
    with buffer.getbuffer() as room:
        at = 0
        while at < size:
            with room[at:] as rest:
                came = os.readv(FRAMES, [rest])
            if not came:
                raise EOFError
            at += came
    return buffer


def set_environment(settled: Settled, wanted: dict[str, str]) -> None:
    """Unless it is so already: most runs have the one that the zygote has."""
    if settled.env != wanted:
        os.environ.clear()
        os.environ.update(wanted)
        settled.env = wanted


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(FRAMES, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def execute(start: dict[str, Any]) -> NoReturn:
    argv = start["argv"]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; others should not
        signal.signal(number, signal.SIG_DFL)
    os.set_inheritable(FRAMES, start["frames"])
    try:
        os.execve(argv[0], argv, start["env"])
    except OSError as error:
        os.write(2, f"belljar: {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _work(settled: Settled, interpreter: Any, start: dict[str, Any]) -> NoReturn:
    """Run the worker in this very process."""

    def program() -> None:
        set_environment(settled, start["env"])
        settled.worker.serve(interpreter, start["run"])

    assert settled.loaded is not None
    leave.run_and_leave(program, settled.loaded, more_are_open)


def more_are_open() -> bool:
    # Since Linux 6.2 the directory's size is how many descriptors there are.
    return (os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1) > 3


own_frames.without_path(be_guest, _work)

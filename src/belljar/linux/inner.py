"""One run inside a zygote's jail: its init (ours, pid 1) and the guest (pid 2).

Theory of operation

    zygote ──fork into a new pid namespace──> init
                │ own mount, ipc and uts namespaces (and network, if asked), private directories, /proc
                │ makes the pipes and sockets of the run
                └─fork─> guest: control group, own uid, own user namespace, rlimits, no capabilities,
                         no_new_privs, Landlock, seccomp, a check that all of it is on; says "ready";
                         waits for the host's start message; then runs the worker or execs a command

Descriptors: the guest keeps 0, 1, 2 and the frame socket, 3. Everything else is closed before it
says that it is ready. Init keeps one end of the run socket, whose other end the host gets together
with the ends of the pipes, the work directory and a pidfd of init, in one message on the shelf
socket. From then on the zygote has no part in the run.

Who kills whom: the host sends SIGTERM to init by pidfd (a signal from inside the namespace is told
apart by its sender, and ignored). When the guest has ended, or must, init kills everybody and waits
until the kernel says that it has no children left: as every orphan of the namespace becomes init's
child, nobody is left then. Only after that it writes one line with the wait status and what was used
up. If init dies first, everybody dies with it.

Nothing here may import: the files of this package are not in the jail.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import array
import atexit
import fcntl
import gc
import io
import marshal
import os
import resource
import sys
import time

from . import landlock, namespaces, root, seccomp, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

FRAMES = 3
GUEST_ID = 1000
_NEVER = 1 << 30
_PAGE = resource.getpagesize()


class Settled:
    """What a zygote has ready for all its runs: prebuilt rulesets and filters, and the worker."""

    def __init__(self) -> None:
        self.last_capability = 0
        self.rulesets: dict[bool, int] = {}
        self.filters: dict[tuple[Any, ...], bytes] = {}
        self.groups: dict[str, list[int]] = {}
        self.worker: Callable[[int], None] | None = None
        self.reseed: Callable[[], None] | None = None
        self.rehearse: Callable[[], None] | None = None
        self.modules: frozenset[str] = frozenset()
        self.layers: frozenset[str] = frozenset()


def be_init(shape: dict[str, Any], settled: Settled, shelf: int) -> NoReturn:
    """The zygote's child, first in its pid namespace: prepare, start the guest, watch it, end."""
    try:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGCHLD, _signal.SIGTERM))
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # the zygote ignores it: no zombies there
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
        _enter(shape, settled)
        ours, theirs, guest, ready = _start_guest(shape, settled)
        with open(ready, "rb") as answer:
            problem = answer.read()
        _rehearse()
        if problem != b"ready":
            raise OSError(0, problem.decode("utf-8", "replace") or "the guest died in its set-up")
        _hand_over(shelf, shape["group"], theirs)
    except BaseException as error:
        _tell(shelf, f"failed {shape['group'] or '-'} {type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(shelf)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _watch(guest, ours, shape["watch"])


def _rehearse() -> None:
    """Touch what `_watch` will touch, while nobody waits: the fork left every page to be copied."""
    _signal.sigtimedwait((_signal.SIGTERM,), 0)
    _reap(-1)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    _last_line(0, usage, 0, time.monotonic(), 0.0, 0, "")


def _enter(shape: dict[str, Any], settled: Settled) -> None:
    flags = syscalls.CLONE_NEWNS
    if "namespaces" in settled.layers:
        flags |= syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
        flags |= syscalls.CLONE_NEWNET if shape["own_network"] else 0
    syscalls.unshare(flags)
    if flags & syscalls.CLONE_NEWNET:
        namespaces.loopback_up()
    root.prepare_run(
        uid=shape["uid"],
        disk=shape["disk"],
        inodes=shape["inodes"],
        waiting=shape["waiting"],
    )
    syscalls.mount(
        "proc",
        "/proc",
        "proc",
        syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC,
        "subset=pid,hidepid=ptraceable",
    )


def _start_guest(shape: dict[str, Any], settled: Settled) -> tuple[int, list[int], int, int]:
    """(init's end of the run socket, what the host gets, the guest's pid, the guest's answer)."""
    run_host, run_ours = _socketpair()
    frames_host, frames_guest = _socketpair()
    stdin_guest, stdin_host = os.pipe()
    stdout_host, stdout_guest = os.pipe()
    stderr_host, stderr_guest = os.pipe()
    ready, ready_guest = os.pipe()
    guest = os.fork()
    if guest == 0:
        _be_guest(
            shape, settled, (stdin_guest, stdout_guest, stderr_guest, frames_guest), ready_guest
        )
    for fd in (frames_guest, stdin_guest, stdout_guest, stderr_guest, ready_guest):
        os.close(fd)
    work = os.open(root.WORK, os.O_RDONLY | os.O_DIRECTORY)
    pidfd = os.pidfd_open(os.getpid())
    theirs = [run_host, frames_host, stdin_host, stdout_host, stderr_host, work, pidfd]
    return run_ours, theirs, guest, ready


def _socketpair() -> tuple[int, int]:
    first, second = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    return first.detach(), second.detach()


def _hand_over(shelf: int, group: str, fds: list[int]) -> None:
    _tell(shelf, f"ready {group}".encode(), fds)
    for fd in fds:
        os.close(fd)


def _tell(shelf: int, words: bytes, fds: list[int] | None = None) -> None:
    sock = _socket.socket(fileno=os.dup(shelf))
    try:
        passed = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([words[:4000]], passed)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody waits for this jail any more
    finally:
        sock.close()


# -- init --------------------------------------------------------------------------------------------


def _watch(guest: int, run: int, watch: dict[str, Any] | None) -> NoReturn:
    started, reason, peak, status = time.monotonic(), "", 0, -1
    waited = (_signal.SIGCHLD, _signal.SIGTERM)
    while status < 0 and not reason:
        told = _signal.sigtimedwait(waited, watch["every"] if watch else _NEVER)
        if told is None:
            reason, peak = _over(watch, peak) if watch else ("", 0)
        elif told.si_signo == _signal.SIGTERM:
            reason = "host" if told.si_pid == 0 else ""
        else:
            status = _reap(guest)
    ended = time.monotonic()
    last, survivors = _end_everybody(guest)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    final = status if status >= 0 else last
    try:
        os.write(run, _last_line(final, usage, peak, started, ended, survivors, reason))
    except BrokenPipeError:
        os._exit(0)
    os._exit(0)


def _last_line(
    status: int,
    usage: resource.struct_rusage,
    peak: int,
    started: float,
    ended: float,
    survivors: int,
    reason: str,
) -> bytes:
    return (
        f"exit {status} {usage.ru_utime + usage.ru_stime:.6f} "
        f"{max(peak, usage.ru_maxrss * 1024)} {started:.6f} {ended:.6f} {survivors} "
        f"{time.monotonic() - ended:.6f} {reason or '-'}\n"
    ).encode()


def _reap(guest: int) -> int:
    """Collect the dead; the guest's wait status, or -1 while it lives."""
    found = -1
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == guest:
            found = status


def _end_everybody(guest: int) -> tuple[int, int]:
    """Kill and wait until this namespace holds nobody else; (the guest's status, survivors)."""
    found = 9
    while True:
        try:
            os.kill(-1, 9)
        except ProcessLookupError:
            pass  # we are alone already; what is dead is collected below
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return found, 0
        if pid == guest:
            found = status


def _over(watch: dict[str, Any], peak: int) -> tuple[str, int]:
    """(why the run must end or nothing, the largest memory seen)."""
    members = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    memory = _memory(members, watch["memory"]) if watch["memory"] else 0
    peak = max(peak, memory)
    if watch["memory"] and memory > watch["memory"]:
        return "oom", peak
    if watch["cpu"] and _cpu_seconds(members) > watch["cpu"]:
        return "cpu", peak
    return "", peak


def _memory(members: list[int], limit: int) -> int:
    # Resident sizes count shared pages many times: cheap, and an upper bound.
    room = os.statvfs(root.RUN)
    private = (room.f_blocks - room.f_bfree) * room.f_frsize
    total = private
    for pid in members:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                total += int(file.read().split()[1]) * _PAGE
        except (OSError, IndexError):  # it ended while we looked
            continue
    if total <= limit:
        return total
    return private + sum(_own_memory(pid) for pid in members)


def _own_memory(pid: int) -> int:
    """What is this process's alone, and its share of what it shares with the rest of the run."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _cpu_seconds(members: list[int]) -> float:
    total = 0
    for pid in members:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            continue
        total += sum(int(fields[index]) for index in (11, 12, 13, 14))
    return total / os.sysconf("SC_CLK_TCK")


# -- the guest ---------------------------------------------------------------------------------------


def _be_guest(
    shape: dict[str, Any], settled: Settled, own: tuple[int, int, int, int], ready: int
) -> NoReturn:
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
        for fd in settled.groups.get(shape["group"], ()):
            os.write(fd, b"0")
        ruleset = settled.rulesets.get(shape["tcp"], -1)
        # Out of the way of each other first, then side by side from 0 on.
        kept = [_high(fd) for fd in (*own, ready, ruleset) if fd >= 0]
        for number, fd in enumerate(kept):
            os.dup2(fd, number, inheritable=number < FRAMES)
        ready, ruleset = FRAMES + 1, FRAMES + 2 if ruleset >= 0 else -1
        syscalls.close_from(len(kept))
        _lose_everything(shape, settled, ruleset)
        _check(settled)
        if settled.rehearse is not None:
            settled.rehearse()
        os.write(ready, b"ready")
        syscalls.close_from(FRAMES + 1)
    except BaseException as error:
        os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(120)
    try:
        start = _receive_start()
    except EOFError:
        os._exit(0)  # the jail was never used
    if start["argv"]:
        _execute(start)
    _work(settled, start)


def _high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)


def _lose_everything(shape: dict[str, Any], settled: Settled, ruleset: int) -> None:
    os.setsid()
    uid = shape["uid"]
    if uid:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else /proc/self/uid_map is not ours to write
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
    if shape["affinity"]:
        os.sched_setaffinity(0, shape["affinity"])
    for number, value in shape["rlimits"]:
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))
    os.chdir(root.WORK)
    if "capabilities" in settled.layers:
        syscalls.drop_capabilities(settled.last_capability)
    syscalls.no_new_privileges()
    for number in (_signal.SIGINT, _signal.SIGCHLD):
        handler = _signal.default_int_handler if number == _signal.SIGINT else _signal.SIG_DFL
        _signal.signal(number, handler)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    if ruleset >= 0:
        landlock.enforce(ruleset)
    if "seccomp" in settled.layers:
        seccomp.install(settled.filters[tuple(shape["filter"])])


def _check(settled: Settled) -> None:
    """Every layer that should be on, is on: asked of the kernel, not of our own code."""
    facts = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            facts[name] = value.strip()
    on = settled.layers
    wrong = []
    if os.getpid() != 2 or facts["NSpid"].split()[-1] != "2":
        wrong.append("pid namespace")
    if "namespaces" in on and (os.getuid(), os.getgid(), os.geteuid()) != (GUEST_ID,) * 3:
        wrong.append("user namespace")
    if facts["NoNewPrivs"] != "1":
        wrong.append("no_new_privs")
    sets = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    if "namespaces" not in on:
        sets = ("CapInh", "CapPrm", "CapEff", "CapEff", "CapEff")  # the bounding set can be emptied only in a user namespace of one's own
    if "capabilities" in on and any(int(facts[name], 16) for name in sets):
        wrong.append("capabilities")
    if "seccomp" in on:
        if facts["Seccomp"] != "2" or int(facts.get("Seccomp_filters", "2")) < 2:
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


def _write_to_probe() -> None:
    os.close(os.open(root.PROBE, os.O_RDWR | os.O_NONBLOCK))


def _refused(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False


def _receive_start() -> dict[str, Any]:
    """The host's start message, and the files that follow it, which are written as the guest."""
    size = int.from_bytes(_read_exactly(4), "big")
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
    os.environ.clear()
    os.environ.update(start["env"])
    return start


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(FRAMES, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _execute(start: dict[str, Any]) -> NoReturn:
    argv = start["argv"]
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them; others should not
        _signal.signal(number, _signal.SIG_DFL)
    os.set_inheritable(FRAMES, start["frames"])
    try:
        os.execve(argv[0], argv, start["env"])
    except OSError as error:
        os.write(2, f"belljar: {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _work(settled: Settled, start: dict[str, Any]) -> NoReturn:
    """Run the worker in this very process, then end as CPython would, but for tearing down."""
    code = 0
    try:
        gc.enable()
        if settled.reseed is not None:
            settled.reseed()
        assert settled.worker is not None
        settled.worker(FRAMES)
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt:
        code = -_signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    code = _finish(settled, code)
    if code < 0:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    os._exit(code & 0xFF)


def _exit_code(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _finish(settled: Settled, code: int) -> int:
    """Threads joined, exit handlers run, files that the program left open flushed."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None and threading.active_count() > 1:
            threading._shutdown()
        atexit._run_exitfuncs()
        for name in ("__main__", *(sys.modules.keys() - settled.modules)):
            _let_go(sys.modules.get(name))
        _flush_files()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        return code or 120  # as CPython says when it cannot flush
    return code


def rehearse_finish() -> None:
    """What `_finish` does to every program, done to none."""
    _flush_files()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _flush_files() -> None:
    """What is still open, because something holds on to it, and has not been written."""
    if len(os.listdir("/proc/self/fd")) <= 4:
        return  # the three standard ones, and the one that lists them
    for thing in gc.get_objects():
        if issubclass(type(thing), io.TextIOWrapper | io.BufferedWriter) and not thing.closed:
            thing.flush()


def _let_go(module: Any) -> None:
    """Drop the variables of a program's own module, so that what they hold is closed."""
    names = getattr(module, "__dict__", None)
    if names is None or os.path.isabs(str(names.get("__file__", "/"))):
        return
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") == private:
                names[name] = None

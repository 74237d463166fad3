"""One run inside a zygote's jail: its init (ours, pid 1) and the guest (pid 2).

Theory of operation

    zygote ──fork into a new pid namespace──> init
                │ own mount, ipc and uts namespaces (and network, if asked), private directories,
                /proc │ makes the pipes and sockets of the run
                └─fork─> guest: control group, own uid, own user namespace, rlimits, no
                capabilities,
                         no_new_privs, Landlock, seccomp, a check that all of it is on; says
                         "ready"; waits for the host's start message; then runs the worker or execs
                         a command

Descriptors: the guest keeps 0, 1, 2 and the frame socket, 3. Everything else is closed before it
says that it is ready. Init keeps one end of the run socket, whose other end the host gets together
with the ends of the pipes, the work directory and a pidfd of init, in one message on the shelf
socket. From then on the zygote has no part in the run.

Who kills whom: the host sends SIGTERM to init by pidfd (a signal from inside the namespace is told
apart by its sender, and ignored). When the guest has ended, or must, init kills everybody and waits
until the kernel says that it has no children left: as every orphan of the namespace becomes init's
child, nobody is left then. Only after that it writes one line with the wait status and what was
used up. If init dies first, everybody dies with it.

Nothing here may import: the files of this package are not in the jail. run_guest.py is the guest's
half.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import array
import os
import resource
import time

from . import namespaces, root, syscalls
from .run_guest import Settled, be_guest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_NEVER = 1 << 30
_PAGE = resource.getpagesize()


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
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # from here on the program may be running
        _hand_over(shelf, shape["slot"], theirs)
    except BaseException as error:  # noqa: BLE001 - the host must hear of it, whatever it is
        _tell(shelf, f"failed {shape['slot']} {type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(shelf)
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
        be_guest(
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


def _hand_over(shelf: int, slot: int, fds: list[int]) -> None:
    _tell(shelf, f"ready {slot}".encode(), fds)
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

"""What this kernel lets us do, found by trying it in a throw-away process.

A command has that process started early (`start_ahead`) and reads its answer when it needs it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from functools import cache

from ..errors import BackendUnavailable
from ..records import record
from . import cgroup, landlock, namespaces, seccomp, syscalls


@record
class HostFacts:
    """Everything a Linux backend's `compile` needs to know about the host."""

    machine: str
    root: bool
    userns: bool
    userns_problem: str = ""
    proc_mount: bool
    proc_mount_problem: str = ""
    landlock_abi: int
    seccomp: bool
    seccomp_problem: str = ""
    cgroup: cgroup.Home | None
    cpus: tuple[int, ...]
    # Root that may not mount, as in a container: it cannot make a jail the way root does.
    bare_root: bool = False


_CAP_SYS_ADMIN = 21
# How often, and how many times, a door is held open: longer than a command needs to get there.
_HOLD_SECONDS, _HOLDS = 0.003, 25
_probing = threading.Lock()
_ahead: list[_Attempt] = []


def facts() -> HostFacts:
    """Probed once a process, whichever thread comes first; takes a few milliseconds."""
    if not os.path.exists("/proc/self/status"):
        raise BackendUnavailable(
            "there is no /proc here, which every backend for Linux reads",
            fix="mount -t proc proc /proc",
        )
    with _probing:
        return _probed()


@cache
def _probed() -> HostFacts:
    begun = _ahead[0] if _ahead and _ahead[0].owner == os.getpid() else None
    problems = _tried(begun)
    userns, proc = problems["namespaces"], problems["namespaces"] or problems["proc"]
    filters = problems["seccomp"] if seccomp.supported() else f"no table for {syscalls.MACHINE}"
    return HostFacts(
        machine=syscalls.MACHINE,
        root=os.geteuid() == 0,
        userns=not userns,
        userns_problem=userns,
        proc_mount=not proc,
        proc_mount_problem=proc,
        landlock_abi=landlock.abi(),
        seccomp=not filters,
        seccomp_problem=filters,
        cgroup=begun.home if begun else cgroup.find(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        bare_root=os.geteuid() == 0 and not _may_administer(),
    )


def _may_administer() -> bool:
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:")).split()[1]
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _attempt() -> None:
    """Runs in a throw-away process, which tries everything and says on descriptor 1 what failed.

    Each line is a name and what went wrong. A line that does not come means that we died of it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a host that ignores it passes that on
    try:
        namespaces.enter(network=True)
    except OSError as error:
        _say("namespaces", str(error))
    else:
        if os.fork() == 0:
            _attempt_mounts()
            os._exit(0)
        os.wait()
    if seccomp.supported():
        try:
            syscalls.no_new_privileges()
            seccomp.install(seccomp.guest_filter((seccomp.AF_UNIX,)))
        except OSError as error:
            _say("seccomp", str(error))
        else:
            _say("seccomp", "")


def _attempt_mounts() -> None:
    try:
        namespaces.own_mounts()
        namespaces.read_only_except(["/tmp"], [])
    except OSError as error:
        _say("namespaces", str(error))
        return
    _say("namespaces", "")
    try:
        namespaces.mount_proc()
    except OSError as error:
        _say("proc", str(error))
        return
    _say("proc", "")


def _say(name: str, problem: str) -> None:
    os.write(1, f"{name} {problem}\n".encode())


def _tried(begun: _Attempt | None) -> dict[str, str]:
    """For each of what `_attempt` tries what went wrong, or nothing."""
    if begun is not None:
        told = begun.answer()
    elif _may_fork():
        attempt = _Attempt()
        told = attempt.answer()
        attempt.wait()
    else:
        told = _try_in_new_interpreter()
    problems = dict.fromkeys(("namespaces", "proc", "seccomp"), "it could not be tried")
    for line in told.splitlines():
        name, _, problem = line.partition(" ")
        problems[name] = problem
    return problems


def start_ahead() -> None:
    """Have it tried while the caller does something else; `end_ahead` must follow."""
    if not _ahead and _may_fork():
        _ahead.append(_Attempt(hold_door=True))
        # Now: who holds that door keeps others from making groups.
        _ahead[0].home = cgroup.find()


def let_go() -> None:
    """No group will be joined any more: what was started ahead may end."""
    if _ahead and _ahead[0].owner == os.getpid():
        _ahead[0].let_go()


def end_ahead() -> None:
    """Returns when it has ended."""
    if _ahead and _ahead[0].owner == os.getpid():
        _ahead.pop().wait()


def _may_fork() -> bool:
    """Forking a process that has threads is not safe."""
    return threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1


def _try_in_new_interpreter() -> str:
    import subprocess  # late: it takes milliseconds, and a command does not come here

    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from belljar.linux import probe\n"
        "probe._attempt()"
    )
    package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, package_parent],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        text=True,
    )
    return done.stdout


class _Attempt:
    """A fork of us that tries. With `hold_door` it then joins, again and again for a while, the
    control group that it is in: the first process that joins one waits for a grace period of the
    kernel's, ten milliseconds and more; those who come soon after another do not.
    """

    def __init__(self, *, hold_door: bool = False) -> None:
        self.owner = os.getpid()
        self.home: cgroup.Home | None = None
        self._reader, writer = os.pipe()
        until, self._until = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.dup2(until, 0)
                os.dup2(writer, 1)
                syscalls.close_from(3)  # the host may close what it has, and somebody wait for that
                door = cgroup.own_door() if hold_door else -1
                _attempt()
                os.close(1)
                if door >= 0:
                    _hold(door)
            finally:
                os._exit(0)
        os.close(writer)
        os.close(until)

    def answer(self) -> str:
        with open(self._reader, encoding="utf-8", errors="replace") as file:
            self._reader = -1
            return file.read()

    def let_go(self) -> None:
        if self._until >= 0:
            os.close(self._until)
            self._until = -1

    def wait(self) -> None:
        self.let_go()
        if self._reader >= 0:
            os.close(self._reader)
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:  # this host ignores SIGCHLD, and the kernel waited for us
            return


def _hold(door: int) -> None:
    """Until the host closes its end of our standard input, or it has been long enough."""
    for _ in range(_HOLDS):
        os.write(door, b"0")
        if select.select([0], [], [], _HOLD_SECONDS)[0]:
            return

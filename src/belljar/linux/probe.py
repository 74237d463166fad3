"""What this kernel lets us do, found by trying it in a throw-away process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import cache

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
_probing = threading.Lock()


def facts() -> HostFacts:
    """Probed once a process, whichever thread comes first; takes a few milliseconds."""
    with _probing:
        return _probed()


@cache
def _probed() -> HostFacts:
    userns = _try("namespaces")
    proc = userns or _try("proc")
    filters = _try("seccomp") if seccomp.supported() else f"no table for {syscalls.MACHINE}"
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
        cgroup=cgroup.find(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        bare_root=os.geteuid() == 0 and not _may_administer(),
    )


def _may_administer() -> bool:
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:")).split()[1]
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _attempt(what: str) -> None:
    """Runs in the throw-away process."""
    if what == "seccomp":
        syscalls.no_new_privileges()
        seccomp.install(seccomp.guest_filter((seccomp.AF_UNIX,)))
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a host that ignores it passes that on
    namespaces.enter(network=True)
    if os.fork() == 0:
        try:
            namespaces.own_mounts()
            if what == "proc":
                namespaces.mount_proc()
            namespaces.read_only_except(["/tmp"], [])
        except OSError as error:
            os.write(1, str(error).encode())
        os._exit(0)
    os.wait()


def _try(what: str) -> str:
    """Empty if it works here, else what went wrong."""
    if threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1:
        return _try_forked(what)
    # Forking a process that has threads is not safe: use a new interpreter.
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from belljar.linux import probe\n"
        "try: probe._attempt(sys.argv[2])\n"
        "except OSError as error: print(error)"
    )
    package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, package_parent, what],
        capture_output=True,
        env={},
        text=True,
    )
    return (done.stdout or done.stderr).strip()


def _try_forked(what: str) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 1)
        try:
            _attempt(what)
        except OSError as error:
            os.write(1, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        problem = answer.read()
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:  # this host ignores SIGCHLD, and the kernel waited for us
        return problem.decode().strip()
    return problem.decode().strip()

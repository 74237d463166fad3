"""What this host offers, found by looking and trying: findings, each with the command to fix it.

Nothing here changes the host. A missing tool is only a missing choice; whether Belljar can do its
work is answered by the backends' own probes and enforcement reports (`backend_reports`).
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from . import policy
from .backends.base import Backend
from .config import Settings
from .errors import BelljarError, PolicyUnenforceable
from .records import field, plain, record, replace
from .resolve import resolve
from .types import Enforcement, Request
from .units import human_size

if TYPE_CHECKING:
    from .linux.probe import HostFacts

State = Literal["ok", "warn", "missing"]
Read = Callable[[str], "str | None"]


@record
class Finding:
    """One fact about the host. `fix` is a command or a setting, where there is something to fix."""

    name: str
    state: State
    detail: str
    fix: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


@record
class BackendReport:
    """One backend on this host, under the default policy of the configured level.

    `usable` means that it can run here and holds that policy; else `problem` says why not.
    """

    name: str
    isolation: str
    available: bool
    usable: bool
    problem: str = ""
    fix: str | None = None
    notes: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    enforcement: Mapping[str, Enforcement] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        told = plain(self)
        told["notes"], told["lacking"] = list(self.notes), list(self.lacking)
        told["enforcement"] = {
            name: {"state": held.state, "by": held.by} for name, held in self.enforcement.items()
        }
        return told


def host(settings: Settings) -> list[Finding]:
    """Every finding about this host, in the order in which to read them."""
    return [*_system(settings), *_kernel_protections(), *_engines(settings), *_tools()]


def read_file(path: str) -> str | None:
    """A small file's text; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20).strip()
    except OSError:
        return None


def _system(settings: Settings) -> Iterator[Finding]:
    yield Finding(name="kernel", state="ok", detail=f"{platform.system()} {platform.release()}")
    yield Finding(name="architecture", state="ok", detail=platform.machine())
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(name="python", state="ok", detail=f"{version} ({sys.executable})")
    if hasattr(os, "geteuid"):
        yield user(os.geteuid())
    yield memory(read_file("/proc/meminfo"), policy.level_policy(settings.level).limits.memory)


def user(uid: int) -> Finding:
    if uid:
        return Finding(name="user", state="ok", detail=f"uid {uid}, not root")
    return Finding(
        name="user",
        state="warn",
        detail="running as root: what escapes a sandbox would be root too",
        fix="run belljar as an ordinary user",
    )


def memory(meminfo: str | None, needed: int) -> Finding:
    """Whether one run at the level's memory limit fits into what is free now."""
    lines = (line.split() for line in (meminfo or "").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    if "MemAvailable" not in kib:
        return Finding(name="memory", state="warn", detail="unknown: no /proc/meminfo here")
    free, total = kib["MemAvailable"] << 10, kib.get("MemTotal", 0) << 10
    detail = f"{human_size(free)} free of {human_size(total)}"
    if free >= needed:
        return Finding(name="memory", state="ok", detail=detail)
    return Finding(
        name="memory",
        state="warn",
        detail=f"{detail}; one run at the level's limit needs {human_size(needed)}",
        fix="lower defaults.memory in belljar.toml, or free some memory",
    )


def _kernel_protections() -> list[Finding]:
    if sys.platform != "linux":
        return [
            Finding(
                name="kernel protections",
                state="missing",
                detail=f"namespaces, Landlock, seccomp and cgroups do not exist on {sys.platform}",
                fix="run Belljar on Linux for more than process limits",
            )
        ]
    from .linux import probe

    return kernel_protections(probe.facts(), read_file)


def kernel_protections(facts: HostFacts, read: Read) -> list[Finding]:
    """Namespaces, Landlock, seccomp and cgroups, as the kernel answered when they were tried."""
    found = [_works("namespaces") if facts.userns else namespaces(facts.userns_problem, read)]
    if not facts.userns and facts.landlock_abi and facts.seccomp:
        meanwhile = "; meanwhile the backend landlock serves floors up to landlock"
        found = [replace(found[0], detail=found[0].detail + meanwhile)]
    if not facts.proc_mount:
        found.append(
            Finding(
                name="own /proc",
                state="warn",
                detail=f"cannot be mounted: {facts.proc_mount_problem or 'needs namespaces'}",
                fix="in a container: docker run --security-opt systempaths=unconfined",
            )
        )
    if facts.landlock_abi:
        found.append(Finding(name="landlock", state="ok", detail=f"ABI {facts.landlock_abi}"))
    else:
        found.append(
            Finding(
                name="landlock",
                state="missing",
                detail="the kernel does not offer it: files are not confined by path",
                fix="boot Linux 5.13 or later with lsm=landlock,... on the kernel's command line",
            )
        )
    if facts.seccomp:
        found.append(_works("seccomp"))
    else:
        found.append(
            Finding(
                name="seccomp",
                state="missing",
                detail=facts.seccomp_problem or "the kernel refuses filters",
                fix="use a kernel with CONFIG_SECCOMP_FILTER, on x86-64 or arm64",
            )
        )
    if facts.cgroup is not None:
        detail = f"version {facts.cgroup.version}, writable at {facts.cgroup.directories[0]}"
        found.append(Finding(name="cgroup", state="ok", detail=detail))
    else:
        user = "" if facts.root else "--user "
        found.append(
            Finding(
                name="cgroup",
                state="warn",
                detail="none that was given to us: memory and processor time are counted instead",
                fix=f"systemd-run {user}--scope -p Delegate=yes belljar ..., or the same in a unit",
            )
        )
    return found


def _works(name: str) -> Finding:
    return Finding(name=name, state="ok", detail="work" if name.endswith("s") else "works")


def namespaces(problem: str, read: Read) -> Finding:
    """Why an unprivileged user namespace was refused: the switch that does it, in plain words."""

    def refused(why: str, fix: str) -> Finding:
        return Finding(name="namespaces", state="missing", detail=f"{why} ({problem})", fix=fix)

    for path, off, why, fix in (
        (
            "/proc/sys/user/max_user_namespaces",
            "0",
            "switched off for everybody",
            "sudo sysctl -w user.max_user_namespaces=15000",
        ),
        (
            "/proc/sys/kernel/unprivileged_userns_clone",
            "0",
            "switched off for ordinary users",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "AppArmor takes their rights away from ordinary users",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        if read(path) == off:
            return refused(why, fix)
    filtered = "Seccomp:\t2" in (read("/proc/self/status") or "")
    if filtered or any(read(mark) is not None for mark in ("/.dockerenv", "/run/.containerenv")):
        return refused(
            "this container's seccomp profile forbids them",
            "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined ..., or profiles that allow unshare and mount",
        )
    return refused("the kernel refuses them", "use a kernel built with CONFIG_USER_NS")


def _engines(settings: Settings) -> Iterator[Finding]:
    home = os.environ.get("XDG_RUNTIME_DIR", "")
    docker = (settings.docker_host or "", "/var/run/docker.sock", f"{home}/docker.sock")
    podman = (f"{home}/podman/podman.sock", "/run/podman/podman.sock")
    yield engine_socket("docker", docker, "sudo apt-get install docker.io")
    yield engine_socket("podman", podman, "sudo apt-get install podman")


def engine_socket(name: str, candidates: Sequence[str], install: str) -> Finding:
    """The first of `candidates` that takes a connection."""
    problem, fix = "no socket found", install
    if shutil.which(name):
        problem, fix = f"{name} is installed but no socket was found", f"systemctl start {name}"
    for candidate in candidates:
        path = candidate.removeprefix("unix://")
        if "://" in path:
            return Finding(name=name, state="warn", detail=f"{path} is configured, and not probed")
        if not os.path.isabs(path) or not os.path.exists(path):
            continue
        refusal = _refused_connection(path)
        if refusal is None:
            return Finding(name=name, state="ok", detail=f"listens on {path}")
        problem = f"{path}: {refusal}"
        fix = f"sudo systemctl start {name}"
        if isinstance(refusal, PermissionError):
            fix = f"sudo usermod -aG {name} $USER   # this group is as good as root"
    return Finding(name=name, state="missing", detail=problem, fix=fix)


def _refused_connection(path: str) -> OSError | None:
    import socket

    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2)
        try:
            probe.connect(path)
        except OSError as error:
            return error
    return None


# What to look for, what it is good for, and how to get it on Debian and Ubuntu.
TOOLS = (
    ("bwrap", "bubblewrap: jails without root", "sudo apt-get install bubblewrap"),
    ("firejail", "firejail: jails", "sudo apt-get install firejail"),
    ("nsjail", "nsjail: jails", "build it: https://github.com/google/nsjail"),
    ("runsc", "gVisor: a kernel of its own", "see https://gvisor.dev/docs/user_guide/install"),
    (f"qemu-system-{platform.machine()}", "QEMU: machines", "sudo apt-get install qemu-system"),
    ("wasmtime", "wasmtime: WebAssembly", "pip install 'belljar[wasm]'"),
    ("node", "JavaScript programs", "sudo apt-get install nodejs"),
    ("bash", "shell programs", "sudo apt-get install bash"),
)


def _tools() -> Iterator[Finding]:
    for command, purpose, install in TOOLS:
        path = shutil.which(command) or _python_package(command)
        if path:
            yield Finding(name=command, state="ok", detail=f"{purpose} ({path})")
        else:
            yield Finding(name=command, state="missing", detail=purpose, fix=install)


def _python_package(name: str) -> str | None:
    if name != "wasmtime":
        return None
    from importlib.util import find_spec

    try:
        found = find_spec(name)
    except ImportError:  # `trusted_imports`: what there is lies where a run could write
        return None
    return found.origin if found else None


class Backends(Protocol):
    """The part of the Engine that a report needs."""

    settings: Settings

    def backend_names(self) -> tuple[str, ...]: ...

    def backend(self, name: str) -> Backend: ...


def backend_reports(engine: Backends) -> list[BackendReport]:
    """Each backend's own probe, and what it would hold of the configured level's policy."""
    settings = engine.settings
    rules = resolve(
        settings.level,
        {},
        ceiling=settings.ceiling,
        defaults=settings.defaults,
        found=settings.found,
    ).policy
    return [_backend_report(engine, name, rules) for name in engine.backend_names()]


def _backend_report(engine: Backends, name: str, rules: policy.Policy) -> BackendReport:
    try:
        backend = engine.backend(name)
        found = backend.probe()
    except Exception as error:  # noqa: BLE001 - a plug-in that is broken must not end the report
        return BackendReport(
            name=name,
            isolation="",
            available=False,
            usable=False,
            problem=_problem(error),
            fix=getattr(error, "fix", None),
        )
    known: dict[str, Any] = {
        "name": name,
        "isolation": backend.isolation.value,
        "available": found.available,
        "notes": found.notes,
    }
    if not found.available:
        return BackendReport(**known, usable=False, problem=found.reason, fix=found.fix)
    try:
        plan = backend.compile(rules, Request(code="pass"))
    except PolicyUnenforceable as error:
        return BackendReport(
            **known, usable=False, problem=error.message, fix=error.fix, lacking=error.fields
        )
    except Exception as error:  # noqa: BLE001 - as above
        fix = getattr(error, "fix", None)
        return BackendReport(**known, usable=False, problem=_problem(error), fix=fix)
    return BackendReport(**known, usable=True, enforcement=plan.enforcement)


def _problem(error: Exception) -> str:
    if isinstance(error, BelljarError):
        return error.message
    return f"the backend itself is broken: {type(error).__name__}: {error}"

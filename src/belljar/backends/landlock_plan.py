"""What one process tree can be held by without any namespace: the pure half of `landlock`.

From a policy, a request and the host's facts: which layers apply, what each policy field is held
by, and the plain values that a supervisor is started with.

How many processes a run may be depends on who would end them, and on what the floor demands:

    group     a cgroup holds the tree, and Landlock (ABI 6) keeps it from signalling anybody else
    watched   no cgroup: a subreaper and a watchdog, as `subprocess` has them. Best effort, which
              is enough for floors up to `process`
    one       one process and its threads; seccomp refuses to fork. What a higher floor gets: every
              field is then enforced
"""

from __future__ import annotations

import math
import os
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..guest import protocol
from ..interpreter import find as find_interpreter
from ..policy import Isolation, Policy
from ..types import Enforcement, Request
from . import process_plan
from .base import absent, best_effort, enforced
from .jail_plan import _ALWAYS_THERE, DATA_MODULES, STANDARD_MODULES, imported, inside_any

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

LAYERS = (
    "landlock", "seccomp", "capabilities", "cgroup", "rlimits", "subreaper", "watchdog",
    "output_cap",
)  # fmt: skip

Children = Literal["group", "watched", "one"]
SCOPED_SIGNALS_ABI, TRUNCATION_ABI = 6, 3
# A shared map of it is memory that only a cgroup counts.
_ZERO = "/dev/zero"
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16
_WATCH_EVERY = 0.02
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """What the supervisor counts, because the kernel holds it to nothing. Zero means: not this."""

    every: float
    memory: int = 0
    processes: int = 0
    cpu: float = 0.0
    disk: int = 0
    threads: int = 0
    written: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What a supervisor is told, apart from the paths that exist only during the run."""

    argv: tuple[str, ...]
    file: str | None
    worker: bool
    preload: tuple[str, ...]
    layers: tuple[str, ...]
    children: Children
    read_only: tuple[str, ...]
    read_write: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    families: tuple[int, ...]
    truncate: bool
    own_signals: bool
    rlimits: tuple[tuple[int, int], ...]
    cores: int
    watch: Watching | None


def active_layers(
    facts: HostFacts, disabled: frozenset[str], user: tuple[int, int] | None
) -> frozenset[str]:
    there = {
        "landlock": facts.landlock_abi > 0,
        "seccomp": facts.seccomp,
        "capabilities": facts.root and user is None,  # others have none to lose
        "cgroup": facts.cgroup is not None,
    }
    return frozenset(name for name in LAYERS if there.get(name, True)) - disabled


def children(policy: Policy, facts: HostFacts, active: frozenset[str]) -> Children:
    """See the module's docstring."""
    demanding = not Isolation.PROCESS.at_least(policy.min_isolation)
    if demanding or policy.limits.processes == 1 or facts.landlock_abi < SCOPED_SIGNALS_ABI:
        return "one"
    if "cgroup" in active:
        return "group"
    return "watched" if {"subreaper", "watchdog"} & active else "one"


def enforcement(
    policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]
) -> dict[str, Enforcement]:
    """Every policy field, and what will hold it with these layers."""
    mode = children(policy, facts, active)
    report = {
        "timeout": _timeout(mode, facts, active),
        "memory": _memory(mode, facts, active),
        "cpus": _cpus(mode, policy, facts, active),
        "processes": _processes(mode, policy, facts, active),
        "disk": _disk(mode, policy, active),
    }
    report["output"] = (
        enforced("the host keeps head and tail and drops the rest")
        if "output_cap" in active
        else absent("the cap is off")
    )
    report["open_files"] = (
        enforced("RLIMIT_NOFILE") if "rlimits" in active else absent("rlimits are off")
    )
    report["network"] = process_plan._network(policy, active)
    report["filesystem"] = _filesystem(policy, request, facts, active)
    report["mounts"] = _mounts(policy, request, active)
    if policy.limits.fuel is not None:
        report["fuel"] = absent("a process has no fuel; the wasm backend counts it")
    if policy.modules.active:
        report["modules"] = best_effort("import lint before the run; a lint, not a boundary")
    return report


def _group_name(facts: HostFacts) -> str:
    return f"cgroup v{facts.cgroup.version}" if facts.cgroup is not None else "no cgroup"


def _timeout(mode: Children, facts: HostFacts, active: frozenset[str]) -> Enforcement:
    clock = "the host's clock, then"
    if mode == "one" and "seccomp" in active:
        return enforced(f"{clock} a kill of the one process")
    if "subreaper" not in active:
        return best_effort(f"{clock} the first process is killed; others may survive")
    if "landlock" not in active:
        return best_effort(f"{clock} a kill; without Landlock the program can signal us, too")
    if mode == "group":
        return enforced(f"{clock} {_group_name(facts)} stops forks and the subreaper kills all")
    return best_effort(f"{clock} the subreaper kills the tree until nothing is left")


def _memory(mode: Children, facts: HostFacts, active: frozenset[str]) -> Enforcement:
    if mode == "group":
        return enforced(f"{_group_name(facts)} memory controller, the whole tree")
    also = ", and RLIMIT_DATA" if "rlimits" in active else ""
    if "watchdog" in active:
        counted = f"the supervisor counts it 50 times a second{also}"
        if mode == "one" and "seccomp" in active:
            return enforced(counted)
        return best_effort(counted)
    if "rlimits" in active:
        return best_effort("RLIMIT_DATA, each process for itself")
    return absent("no cgroup, no rlimits, no watchdog")


def _cpus(mode: Children, policy: Policy, facts: HostFacts, active: frozenset[str]) -> Enforcement:
    cpus, cores = policy.limits.cpus, len(facts.cpus)
    if mode == "group":
        return enforced(f"{_group_name(facts)} cpu controller")
    if cpus >= cores:
        return enforced("this machine has no more cores than allowed")
    if "seccomp" not in active:
        return best_effort("affinity, which a program can change without seccomp")
    if cpus == int(cpus):
        return enforced(f"affinity to {int(cpus)} of {cores} cores")
    if "watchdog" not in active:
        return absent("no cgroup and no watchdog")
    ended = (
        f"affinity to {math.ceil(cpus)} of {cores} cores, and the supervisor ends the run at "
        f"{cpus * policy.limits.timeout:g} seconds of processor time"
    )
    return enforced(ended) if mode == "one" else best_effort(ended)


def _processes(
    mode: Children, policy: Policy, facts: HostFacts, active: frozenset[str]
) -> Enforcement:
    if mode == "group":
        return enforced(f"{_group_name(facts)} pids controller")
    if mode == "one" and "seccomp" in active:
        only = "one process: seccomp refuses to fork"
        if "watchdog" in active:
            most = policy.limits.processes
            return enforced(f"{only}; the supervisor ends it if it has more than {most} threads")
        return best_effort(f"{only}; nobody counts its threads")
    if mode == "watched" and "watchdog" in active:
        return best_effort("a watchdog counts the tree, 50 times a second")
    return absent("no cgroup, no seccomp that refuses to fork, no watchdog")


def _disk(mode: Children, policy: Policy, active: frozenset[str]) -> Enforcement:
    parts = [
        *(["RLIMIT_FSIZE for each file"] if "rlimits" in active else []),
        *(["a watchdog over the work directory"] if "watchdog" in active else []),
    ]
    if not parts:
        return absent("nothing counts it")
    if _counts_writes(mode, policy) and {"watchdog", "seccomp"} <= active:
        return enforced(
            "the supervisor counts, 50 times a second, what the kernel says was written in all"
        )
    return best_effort(f"{' and '.join(parts)}; no quota")


def _counts_writes(mode: Children, policy: Policy) -> bool:
    """Whether all that is ever written is the limit: for a floor that best effort does not meet.

    It is stricter than the size of what is left, and nothing can be hidden from it: not the files
    that a program has unlinked and keeps open. Only a disk's writes are counted.
    """
    demanding = not Isolation.PROCESS.at_least(policy.min_isolation)
    return demanding and mode == "one" and writes_are_counted(tempfile.gettempdir())


def writes_are_counted(directory: str) -> bool:
    """Whether the kernel counts what is written there: on disks, not in memory file systems."""
    if not os.path.exists("/proc/self/io"):
        return False
    found, kind = "", ""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, where, what, *_ = line.split()
            inside = where == "/" or inside_any(os.path.realpath(directory), (where,))
            if inside and len(where) >= len(found):
                found, kind = where, what
    return kind not in _MEMORY_FILE_SYSTEMS


def _filesystem(
    policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]
) -> Enforcement:
    files = policy.filesystem
    if "landlock" not in active:
        return process_plan._filesystem(policy, facts, active, None)
    if nested := process_plan._nested(files.read_only, files.read_write):
        return absent(f"{nested[0]!r} is read-only inside a writable path: needs namespaces")
    shown = _shown(policy, request)
    for path in files.hidden:
        real = os.path.realpath(path)
        if any(real != top and inside_any(real, (os.path.realpath(top),)) for top in shown):
            return absent(f"{path!r} is inside of what is shown: hiding it needs namespaces")
    also = "" if "capabilities" in active or not facts.root else ", with all capabilities"
    landlock = f"Landlock ABI {facts.landlock_abi}"
    if "seccomp" in active:
        return enforced(f"{landlock}, and seccomp for modes, owners, times and attributes{also}")
    return best_effort(f"{landlock}, which does not hold modes, owners and times{also}")


def _mounts(policy: Policy, request: Request, active: frozenset[str]) -> Enforcement:
    held = process_plan._mounts(policy, request, active)
    writable = any(m.mode == "rw" and os.path.isdir(m.src) for m in request.mounts)
    if writable and held.state == "enforced":
        return best_effort(f"{held.by}; a project's metadata in a writable one is not protected")
    return held


def _shown(policy: Policy, request: Request) -> tuple[str, ...]:
    """Every path that the program may read, before what is hidden is taken away."""
    *_, needed = process_plan._program(request)
    interpreter = find_interpreter(None)
    own = (interpreter.executable, *interpreter.prefixes, protocol.GUEST_DIR)
    return (
        *process_plan.SYSTEM,
        *own,
        *needed,
        *policy.filesystem.read_only,
        *policy.filesystem.read_write,
        *(mount.src for mount in request.mounts),
    )


def spec(policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]) -> Spec:
    """The values for the supervisor. Starts nothing; a missing command is CommandNotFound."""
    argv, file, worker, _ = process_plan._program(request)
    warm = worker and request.python is None
    if worker:
        argv = () if warm else (*argv, "-c", protocol.boot_code(protocol.GUEST_DIR, 3))
    files, limits = policy.filesystem, policy.limits
    mode = children(policy, facts, active)
    hidden = tuple(map(os.path.realpath, files.hidden))
    writable = (*files.read_write, *(m.src for m in request.mounts if m.mode == "rw"))
    shown = _without(_shown(policy, request), (*hidden, *map(os.path.realpath, writable)))
    online = policy.network.mode == "any"
    grouped = mode == "group"
    return Spec(
        argv=argv,
        file=file,
        worker=worker,
        preload=_preload(request) if warm else (),
        layers=tuple(name for name in LAYERS if name in active),
        children=mode,
        read_only=shown,
        read_write=_without(writable, hidden),
        links=tuple((m.dst, m.src) for m in request.mounts if not os.path.isabs(m.dst)),
        devices=tuple(each for each in process_plan.DEVICES if mode != "one" or each != _ZERO),
        families=(_AF_INET, _AF_INET6, _AF_NETLINK) if online else (),
        truncate=facts.landlock_abi >= TRUNCATION_ABI,
        own_signals=facts.landlock_abi < SCOPED_SIGNALS_ABI,
        rlimits=_rlimits(policy) if "rlimits" in active else (),
        cores=0 if grouped else min(math.ceil(limits.cpus), len(facts.cpus)),
        watch=_watch(mode, policy, facts) if "watchdog" in active else None,
    )


def _without(paths: tuple[str, ...], closed: tuple[str, ...]) -> tuple[str, ...]:
    """The real places of those that exist, none inside another one, and none that is closed."""
    real = sorted({os.path.realpath(path) for path in paths if os.path.exists(path)})
    kept: list[str] = []
    for path in real:
        if not inside_any(path, (*closed, *kept)):
            kept.append(path)
    return tuple(kept)


def _preload(request: Request) -> tuple[str, ...]:
    """Which zygote the program is forked from: the smaller a process, the faster it forks."""
    named = imported(request.code or "")
    standard = STANDARD_MODULES if named - _ALWAYS_THERE else ()
    return (*standard, *(DATA_MODULES if not named.isdisjoint(DATA_MODULES) else ()))


def _rlimits(policy: Policy) -> tuple[tuple[int, int], ...]:
    limits = policy.limits
    return (
        # One byte: zero would still start a piped core handler on the host.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.disk),
        (resource.RLIMIT_MEMLOCK, 0),
        # Room for thread stacks and the like: the exact total is the cgroup's or the watchdog's.
        (resource.RLIMIT_DATA, limits.memory + (256 << 20)),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    )


def _watch(mode: Children, policy: Policy, facts: HostFacts) -> Watching:
    limits = policy.limits
    if mode == "group":
        return Watching(every=0.2, disk=limits.disk)
    whole = limits.cpus == int(limits.cpus) or limits.cpus >= len(facts.cpus)
    return Watching(
        every=_WATCH_EVERY,
        memory=limits.memory,
        processes=limits.processes if mode == "watched" else 0,
        cpu=0.0 if whole else limits.cpus * limits.timeout,
        disk=limits.disk,
        threads=limits.processes if mode == "one" else 0,
        written=limits.disk if _counts_writes(mode, policy) else 0,
    )


def shortcomings(facts: HostFacts, user: tuple[int, int] | None) -> Iterator[str]:
    """What this host lacks, each with its consequence."""
    if facts.landlock_abi < SCOPED_SIGNALS_ABI:
        yield f"Landlock ABI {facts.landlock_abi}: a run is one process and its threads"
    elif facts.cgroup is None:
        yield "no writable cgroup: memory, processor time and processes are counted by a watchdog"
    if facts.root and user is None:
        yield "running as root: guests keep uid 0, without capabilities; set `user` to change that"

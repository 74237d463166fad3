"""How one process tree is held without any namespace: the pure half of `landlock`.

From a policy, a request and the host's facts: which layers apply, and the plain values that a
supervisor is started with. `landlock_report.py` says what they hold.

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
from functools import cache
from typing import TYPE_CHECKING, Literal

from .. import language_host, languages
from ..guest import protocol
from ..interpreter import find as find_interpreter
from ..policy import Isolation, Policy
from ..records import record
from ..types import Request, Result
from . import process_plan, warmth
from .jail_plan import inside_any
from .layered import data_limit, needs_data_limit

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
# What programs read to size their pools and caches. The kernel tells as much in a system call; how
# busy each processor is, in /proc/stat, it does not.
MACHINE = tuple(f"/proc/{name}" for name in ("cpuinfo", "loadavg", "meminfo", "uptime", "version"))
_LIMITS = (
    "cpu.max", "memory.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us",
    "memory/memory.limit_in_bytes",
)  # fmt: skip
_ON_DISK = "/var/tmp"
# What starts other processes, as a program names it.
_STARTERS = frozenset({"subprocess", "multiprocessing", "pty"})
_STARTING_CALLS = frozenset(
    {"os.system", "os.popen", "os.fork", "os.posix_spawn", "os.spawnv", "os.forkpty"}
    | {"concurrent.futures.ProcessPoolExecutor", "asyncio.create_subprocess_exec"}
    | {"asyncio.create_subprocess_shell"}
)
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@record
class Watching:
    """What the supervisor counts, because the kernel holds it to nothing. Zero means: not this."""

    every: float
    memory: int = 0
    processes: int = 0
    cpu: float = 0.0
    rate: float = 0.0
    disk: int = 0
    threads: int = 0
    written: int = 0


@record
class Spec:
    """What a supervisor is told, apart from the paths that exist only during the run.

    Where a control group counts, the program is on `visible` processors, and may leave them. Paths
    of `resolved` must lead through no link any more.
    """

    argv: tuple[str, ...]
    file: str | None
    worker: bool
    preload: tuple[str, ...]
    layers: tuple[str, ...]
    children: Children
    read_only: tuple[str, ...]
    read_write: tuple[str, ...]
    resolved: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    families: tuple[int, ...]
    counted: bool
    affinity: bool
    truncate: bool
    own_signals: bool
    rlimits: tuple[tuple[int, int], ...]
    cores: int
    visible: int
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


def doubt(policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]) -> str:
    """Why a run that is one process may not get this program to its end; "" if it should."""
    if policy.limits.processes == 1 or children(policy, facts, active) != "one":
        return ""
    lacking = "cannot start other processes"
    if facts.landlock_abi < SCOPED_SIGNALS_ABI:
        lacking += f" on this kernel (Landlock ABI {facts.landlock_abi})"
    if request.command or request.code is None or languages.of(request).family == "bash":
        return f"{lacking}, which a command may do"
    if languages.of(request).family != "python":
        return ""
    from .. import needs

    found = needs.of_python(request.code, request.files)
    for name in found.names:
        if name.partition(".")[0] in _STARTERS or name in _STARTING_CALLS:
            return f"{lacking}, which the program may do ({name})"
    return ""


def childless(mode: Children, result: Result, facts: HostFacts) -> Iterator[str]:
    """A warning for a run that failed because it could not have a child process."""
    unconfirmed = any("EAGAIN" in warning for warning in result.warnings)
    if mode != "one" or not (result.limit_hit == "pids" or unconfirmed):
        return
    if facts.landlock_abi < SCOPED_SIGNALS_ABI:
        yield (
            f"a run on `landlock` is one process here, because this kernel's Landlock (ABI"
            f" {facts.landlock_abi}) cannot hold children: Linux 6.12 could, a jail could (user"
            ' namespaces: see `belljar doctor`), and backend="subprocess" runs the program'
        )
    else:
        yield (
            "a run on `landlock` is one process where that is the floor; a floor of `process`, or"
            " a jail, allows children"
        )


def counts_writes(mode: Children, policy: Policy) -> bool:
    """Whether all that is ever written is the limit: for a floor that best effort does not meet.

    It is stricter than the size of what is left, and nothing can be hidden from it: not the files
    that a program has unlinked and keeps open. Only a disk's writes are counted.
    """
    demanding = not Isolation.PROCESS.at_least(policy.min_isolation)
    return demanding and mode == "one" and writes_are_counted(work_base())


def work_base() -> str:
    """Where runs have their directories: where writes are counted, if there is such a place.

    /tmp is in memory on many hosts, /var/tmp never is. A TMPDIR that is set is the operator's wish.
    """
    usual = tempfile.gettempdir()
    if os.environ.get("TMPDIR") or writes_are_counted(usual):
        return usual
    fits = os.access(_ON_DISK, os.W_OK | os.X_OK) and writes_are_counted(_ON_DISK)
    return _ON_DISK if fits else usual


def writes_are_counted(directory: str) -> bool:
    """Whether the kernel counts what is written there: on disks, not in memory file systems."""
    return os.path.exists("/proc/self/io") and file_system(directory) not in _MEMORY_FILE_SYSTEMS


def file_system(directory: str) -> str:
    """The kind of file system that a directory is on, as the kernel calls it."""
    found, kind = "", ""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, where, what, *_ = line.split()
            inside = where == "/" or inside_any(os.path.realpath(directory), (where,))
            if inside and len(where) >= len(found):
                found, kind = where, what
    return kind


def shown_paths(policy: Policy, request: Request) -> tuple[str, ...]:
    """Every path that the program may read, before what is hidden is taken away."""
    *_, needed = _program(request)
    interpreter = find_interpreter(None)
    own = (interpreter.executable, *interpreter.prefixes, protocol.GUEST_DIR)
    return (
        *process_plan.SYSTEM,
        *MACHINE,
        *(f"/sys/fs/cgroup/{name}" for name in _LIMITS),
        *own,
        *needed,
        *policy.filesystem.read_only,
        *policy.filesystem.read_write,
        *(mount.src for mount in request.mounts),
    )


def spec(
    policy: Policy,
    request: Request,
    facts: HostFacts,
    active: frozenset[str],
    recent: warmth.Recent,
) -> Spec:
    """The values for the supervisor. Starts nothing; a missing command is CommandNotFound.

    `recent` is what earlier programs named, and hears of this one.
    """
    argv, file, worker, _ = _program(request)
    files, limits = policy.filesystem, policy.limits
    mode = children(policy, facts, active)
    hidden = tuple(map(os.path.realpath, files.hidden))
    writable = (*files.read_write, *(m.src for m in request.mounts if m.mode == "rw"))
    # Without paths of its own it depends on nothing that changes while we run.
    own = request.mounts or files.read_only or files.read_write
    arrange = _without if own else _without_cached
    shown = arrange(shown_paths(policy, request), (*hidden, *map(os.path.realpath, writable)))
    online = policy.network.mode == "any"
    grouped = mode == "group"
    strict = not request.command and languages.of(request).seccomp == "strict"
    written = _without(writable, hidden)
    return Spec(
        argv=argv,
        file=file,
        worker=worker,
        preload=() if argv else _preload(request, recent),
        layers=tuple(name for name in LAYERS if name in active),
        children=mode,
        read_only=shown,
        read_write=written,
        resolved=(*shown, *written) if own or argv else (),
        links=tuple((m.dst, m.src) for m in request.mounts if not os.path.isabs(m.dst)),
        devices=tuple(each for each in process_plan.DEVICES if mode != "one" or each != _ZERO),
        families=(_AF_INET, _AF_INET6, _AF_NETLINK) if online else (),
        counted=grouped and not strict,
        affinity=grouped and not strict,
        truncate=facts.landlock_abi >= TRUNCATION_ABI,
        own_signals=facts.landlock_abi < SCOPED_SIGNALS_ABI,
        rlimits=_rlimits(policy, grouped, worker) if "rlimits" in active else (),
        cores=0 if grouped else min(math.ceil(limits.cpus), len(facts.cpus)),
        visible=min(math.ceil(limits.cpus), len(facts.cpus)) if grouped else 0,
        watch=_watch(mode, policy, facts) if "watchdog" in active else None,
    )


def _program(request: Request) -> tuple[tuple[str, ...], str | None, bool, tuple[str, ...]]:
    """(argv or nothing for a warm interpreter, program file, worker, paths that it reads)."""
    if request.command:
        return process_plan._program(request)
    language = languages.of(request)
    if language.family != "python":
        path = language_host.installed(language, "landlock")
        argv = (path, *language.command_on("landlock")[1:], language.file, *request.args)
        return argv, language.file, False, (path, os.path.realpath(path), *language.paths)
    wanted = language_host.python_of(language, request.python, "landlock")
    if wanted is None:
        return (), language.file, True, language.paths
    python = find_interpreter(wanted)
    boot = protocol.boot_code(protocol.GUEST_DIR, 3)
    needed = (python.executable, *python.prefixes, *language.paths)
    return (python.executable, "-I", "-c", boot), language.file, True, needed


def _without(paths: tuple[str, ...], closed: tuple[str, ...]) -> tuple[str, ...]:
    """The real places of those that exist, none inside another one, and none that is closed."""
    real = sorted({os.path.realpath(path) for path in paths if os.path.exists(path)})
    kept: list[str] = []
    for path in real:
        if not inside_any(path, (*closed, *kept)):
            kept.append(path)
    return tuple(kept)


_without_cached = cache(_without)


def _preload(request: Request, recent: warmth.Recent) -> tuple[str, ...]:
    """joblib asks when it is imported whether there are semaphores, which a run does not have."""
    found = recent.of_request(request).preload
    return tuple(name for name in found if not name.startswith("sklearn"))


def _rlimits(policy: Policy, counted: bool, worker: bool) -> tuple[tuple[int, int], ...]:
    limits = policy.limits
    data: tuple[tuple[int, int], ...] = ()
    if needs_data_limit(counted=counted, worker=worker):
        # Room for thread stacks and the like: the exact total is the cgroup's or the watchdog's.
        data = ((resource.RLIMIT_DATA, data_limit(limits.memory, counted=counted)),)
    return (
        # One byte: zero would still start a piped core handler on the host.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.disk),
        (resource.RLIMIT_MEMLOCK, 0),
        *data,
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
        rate=limits.cpus,
        disk=limits.disk,
        threads=limits.processes if mode == "one" else 0,
        written=limits.disk if counts_writes(mode, policy) else 0,
    )

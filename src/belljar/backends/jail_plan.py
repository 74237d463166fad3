"""What a jail is made of: the pure half of the `jail` backend.

From a policy, a request and the host's facts: which layers apply, what each policy field is held
by, and two descriptions in plain values. `Outer` says which zygote can serve the run, `Shape` how
its inner jail is made. Runs with equal ones can use each other's warm zygotes and parked jails.
"""

from __future__ import annotations

import math
import os
import resource
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from .. import language_host, languages
from ..errors import CommandNotFound, PolicyUnenforceable
from ..guest import protocol
from ..interpreter import find as find_interpreter
from ..linux import root
from ..policy import Policy
from ..records import positional_record, record, replace
from ..types import Request
from . import guest_env, proc_files, protect, warmth
from .base import covered_by
from .layered import data_limit, needs_data_limit

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

LAYERS = (
    "namespaces", "pivot_root", "landlock", "seccomp", "capabilities", "cgroup", "rlimits",
    "watchdog", "output_cap",
)  # fmt: skip

# What a guest's environment is, unless a request says otherwise.
GUEST_ENV = guest_env.environment(home=root.HOME, tmp="/tmp")
GUEST_DIR = root.GUEST_DIR
# What programs read to start at all.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC = (
    "alternatives", "ca-certificates", "debian_version", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "os-release", "protocols", "services", "ssl",
    "timezone", *guest_env.SETTINGS,
)  # fmt: skip
ETC_ONLINE = ("resolv.conf",)
# Every run has its own of these, so a host path below them must be mounted by the run itself.
_PRIVATE = {"/tmp": root.TMP, "/var/tmp": root.TMP, "/dev/shm": root.SHM}
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_INODES_LEAST, _BYTES_AN_INODE = 4096, 16384
_WATCH_EVERY = 0.02


NOTHING_READ = warmth.Warmth((), True, True, True)


# (relative path, what): "ro" closes a part of a mount for writing, "hide" covers it.
Inside = tuple[tuple[str, str], ...]


@positional_record
class View:
    """The file tree of a jail: see `linux/root.py`."""

    show: tuple[tuple[str, str, str, Inside], ...]
    links: tuple[tuple[str, str], ...]
    hide: tuple[str, ...]
    waiting: tuple[tuple[str, str, Inside], ...]
    mapped: tuple[str, ...]
    resolved: tuple[str, ...]


@positional_record
class Outer:
    """A zygote: what it sees, what it has imported, what is switched off in it."""

    view: View
    layers: tuple[str, ...]
    worker: bool
    preload: tuple[str, ...]
    writable: tuple[str, ...]
    open_network: bool


@positional_record
class Shape:
    """An inner jail, as far as it is made before the program is known.

    `network`: "fresh" is a network namespace that no other run has had, with a loopback; "kept" is
    an empty one that a slot's runs have one after the other, and that none of them can make sockets
    in, but for pairs; "outer" is the zygote's. `machine` is whether /proc has files about the
    machine besides those of processes: they take as long to put there as all the rest together.
    `visible` is how many cores the program sees.
    """

    disk: int
    inodes: int
    network: str
    tcp: bool
    families: tuple[int, ...]
    memfd: bool
    affinity: bool
    cores: int
    rlimits: tuple[tuple[int, int], ...]
    watch: tuple[float, int, float] | None
    waiting: tuple[tuple[str, str], ...]
    memory: int
    processes: int
    cpus: float
    keeper: bool
    machine: bool
    visible: int

    def message(self, cores: tuple[int, ...]) -> dict[str, Any]:
        """Plain values for `linux/slot.py`."""
        watch = None
        if self.watch is not None:
            watch = dict(zip(("every", "memory", "cpu"), self.watch, strict=True))
            watch |= {
                "rate": self.cpus,
                "own_network": self.network != "outer",
                "socket": largest_socket(),
            }
        return {
            "disk": self.disk,
            "inodes": self.inodes,
            "network": self.network,
            "tcp": self.tcp,
            "filter": (self.families, self.memfd, self.affinity),
            "affinity": cores,
            "rlimits": self.rlimits,
            "watch": watch,
            "waiting": self.waiting,
            "keeper": self.keeper,
            "proc": proc_files.texts(self.visible, self.memory) if self.machine else {},
        }


@record
class Spec:
    """Everything `run` needs. `keep` says whether the zygote is worth keeping for other runs.

    In the sources of `guarded` the project's metadata is protected. `cores` is on how many
    processors the program is put when it starts: none is as the jail was made.
    """

    outer: Outer
    shape: Shape
    argv: tuple[str, ...]
    file: str | None
    worker: bool
    keep: bool
    layers: tuple[str, ...]
    guarded: tuple[str, ...]
    cores: int


@cache
def largest_socket() -> int:
    """What a watchdog counts each socket at, on this host."""
    from ..linux import footprint

    return footprint.largest_socket()


def active_layers(facts: HostFacts, disabled: frozenset[str]) -> frozenset[str]:
    grouped = facts.cgroup is not None and "cgroup" not in disabled
    there = {
        "landlock": facts.landlock_abi > 0,
        "cgroup": facts.cgroup is not None,
        "watchdog": not grouped,  # then the kernel counts
    }
    return frozenset(name for name in LAYERS if there.get(name, True)) - disabled


def spec(
    policy: Policy,
    request: Request,
    facts: HostFacts,
    active: frozenset[str],
    guess: warmth.Warmth | None = None,
) -> Spec:
    """The values for the run. Starts nothing; a missing command is CommandNotFound.

    `guess` is what the program's source suggests, if it has been read already.
    """
    argv, file, worker, needed = _program(request)
    mounts = all_mounts(policy, request)
    online = policy.network.mode == "any"
    keep = not (mounts or needed or online or policy.filesystem.hidden)
    layers = tuple(name for name in LAYERS if name in active)
    # What is not read gets sockets: every command, other interpreters, runs with mounts.
    warm = NOTHING_READ
    if worker and not argv and keep:
        warm = guess or warmth.of_request(request)
    arrange = _view if mounts else _plain_view
    bare = protect.unprotected(policy, request) if mounts else frozenset()
    view, waiting, writable = arrange(
        mounts, needed, policy.filesystem.hidden, online, active, bare
    )
    outer = Outer(
        view=view,
        layers=layers,
        worker=not argv,
        preload=warm.preload,
        writable=writable,
        open_network=online,
    )
    network = "outer"
    if not online and "namespaces" in active:
        network = "fresh" if warm.sockets else "kept"
    written = tuple(source for source, _, mode in mounts if mode == "rw")
    shape = _shape(
        policy, facts, active, network=network, waiting=waiting, big_files=bool(written),
        # It has the guest's files open a little longer: not those of a mount, for others to see.
        # Only a control group counts its memory once.
        shown=shows_host(mounts, needed),
        keeper=not argv and keep and "cgroup" in active,
        worker=worker,
        machine=warm.machine,
    )  # fmt: skip
    if not request.command and languages.of(request).seccomp == "strict":
        families = () if policy.network.mode == "off" else shape.families
        # Its processors are given out beforehand: it cannot choose them itself.
        cores = shape.visible if shape.visible < len(facts.cpus) else shape.cores
        shape = replace(shape, families=families, memfd=False, affinity=False, cores=cores)
    return Spec(
        outer=outer,
        shape=shape,
        argv=argv,
        file=file,
        worker=worker,
        keep=keep,
        layers=layers,
        guarded=tuple(source for source in written if source not in bare),
        cores=0 if shape.cores or not warm.cores else shape.visible,
    )


def disk_size(policy: Policy) -> int:
    """The work directory is memory: unless asked for, it takes at most half of it."""
    limits = policy.limits
    if "disk" in policy.explicit:
        return limits.disk
    return min(limits.disk, limits.memory // 2)


@lru_cache(maxsize=64)
def with_disk(policy: Policy) -> Policy:
    """The policy with the disk limit that is held, for the plan: what is shown is what is held."""
    size = disk_size(policy)
    if size == policy.limits.disk:
        return policy
    return replace(policy, limits=replace(policy.limits, disk=size))


def inode_count(size: int) -> int:
    return max(_INODES_LEAST, size // _BYTES_AN_INODE)


def _shape(
    policy: Policy,
    facts: HostFacts,
    active: frozenset[str],
    *,
    network: str,
    waiting: tuple[tuple[str, str], ...],
    big_files: bool,
    shown: bool,
    keeper: bool,
    worker: bool,
    machine: bool,
) -> Shape:
    limits = policy.limits
    grouped = "cgroup" in active
    families: tuple[int, ...] = ()
    if policy.network.mode == "any":
        # Without a network namespace only Landlock keeps the host's abstract sockets away.
        families = (_AF_INET, _AF_INET6, _AF_NETLINK)
        families += (_AF_UNIX,) if facts.landlock_abi >= 6 and "landlock" in active else ()
    elif network == "fresh":
        families = (_AF_UNIX, _AF_INET, _AF_INET6)
    families = without_named_sockets(families, policy, shown)
    watch = None
    if not grouped and "watchdog" in active:
        whole = limits.cpus == int(limits.cpus) or limits.cpus >= len(facts.cpus)
        watch = (_WATCH_EVERY, limits.memory, 0.0 if whole else limits.cpus * limits.timeout)
    size = disk_size(policy)
    return Shape(
        disk=size,
        inodes=inode_count(size),
        network=network,
        tcp=network == "fresh" or policy.network.mode == "any",
        families=families,
        memfd=grouped,
        affinity=grouped,
        cores=0 if grouped else min(math.ceil(limits.cpus), len(facts.cpus)),
        rlimits=_rlimits(policy, grouped, size if big_files else None, worker)
        if "rlimits" in active
        else (),
        watch=watch,
        waiting=waiting,
        memory=limits.memory,
        processes=limits.processes,
        cpus=limits.cpus,
        keeper=keeper,
        machine=machine,
        visible=min(math.ceil(limits.cpus), len(facts.cpus)),
    )


def shows_host(mounts: tuple[tuple[str, str, str], ...], needed: tuple[str, ...]) -> bool:
    """Whether a run sees host directories in which a daemon's socket may lie.

    The system's own and those of the interpreter that every run gets do not count.
    """
    usual = (*SYSTEM, *find_interpreter(None).prefixes)
    return bool(mounts) or any(not inside_any(path, usual) for path in needed)


def without_named_sockets(
    families: tuple[int, ...], policy: Policy, shown: bool
) -> tuple[int, ...]:
    """`families` without AF_UNIX where a path could lead to a host's daemon; pairs still work.

    Neither a read-only mount nor a network namespace keeps a program from connecting to a path.
    """
    if policy.network.mode == "any" or not shown:
        return families
    return tuple(family for family in families if family != _AF_UNIX)


def _rlimits(
    policy: Policy, grouped: bool, file_size: int | None, worker: bool
) -> tuple[tuple[int, int], ...]:
    limits = policy.limits
    # The memory file system holds itself; only what is written to a mount needs a limit a file.
    files = () if file_size is None else ((resource.RLIMIT_FSIZE, file_size),)
    data: tuple[tuple[int, int], ...] = ()
    if needs_data_limit(counted=grouped, worker=worker):
        data = ((resource.RLIMIT_DATA, data_limit(limits.memory, counted=grouped)),)
    return (
        *files,
        # One byte: zero would still start a piped core handler on the host.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_MEMLOCK, 0),
        *data,
        # Behind a pids controller it must not answer first, or nobody would count the refusals.
        (resource.RLIMIT_NPROC, limits.processes + (16 if grouped else 0)),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    )


def _program(request: Request) -> tuple[tuple[str, ...], str | None, bool, tuple[str, ...]]:
    """(argv or nothing for our own interpreter, program file, worker, paths to show for it)."""
    if request.command:
        import shutil  # late: a program does not need it, and it imports every compressor

        path = shutil.which(request.command[0], path=guest_env.search_path())
        if path is None:
            raise CommandNotFound("command", f"{request.command[0]!r} is not installed")
        return (path, *request.command[1:], *request.args), None, False, _outside_system(path)
    language = languages.of(request)
    paths = tuple(path for path in language.paths if not inside_any(path, SYSTEM))
    if language.family != "python":
        path = language_host.installed(language, "jail")
        argv = (path, *language.command_on("jail")[1:], language.file, *request.args)
        return argv, language.file, False, (*_outside_system(path), *paths)
    wanted = language_host.python_of(language, request.python, "jail")
    if wanted is None and not paths:
        return (), language.file, True, ()
    python = find_interpreter(wanted)
    boot = protocol.boot_code(GUEST_DIR, 3)
    argv = (python.executable, "-I", "-c", boot)
    return argv, language.file, True, (*python.prefixes, *paths)


def _outside_system(path: str) -> tuple[str, ...]:
    found = (path, os.path.realpath(path))
    return tuple(each for each in found if not inside_any(each, SYSTEM))


def inside_any(path: str, directories: tuple[str, ...]) -> bool:
    return any(path == each or path.startswith(each + "/") for each in directories)


def all_mounts(policy: Policy, request: Request) -> tuple[tuple[str, str, str], ...]:
    """(source, absolute destination, mode), parents before what is mounted inside them."""
    files = policy.filesystem
    found = [(os.path.realpath(path), path, "ro") for path in files.read_only]
    found += [(os.path.realpath(path), path, "rw") for path in files.read_write]
    found += [
        (mount.src, os.path.normpath(os.path.join(root.WORK, mount.dst)), mount.mode)
        for mount in request.mounts
    ]
    return tuple(sorted(found, key=lambda each: each[1]))


def _open_to_all(path: str) -> bool:
    """Whether anybody may enter: what is below a closed directory is shown by name, if at all."""
    return os.stat(path).st_mode & 0o005 == 0o005


@cache
def _system(pivot: bool, online: bool) -> tuple[tuple[tuple[str, str, str], ...], Any]:
    """What every jail shows of the host: (mounts, links)."""
    show: list[tuple[str, str, str]] = []
    links: list[tuple[str, str]] = []
    if pivot:
        for path in SYSTEM:
            if os.path.islink(path):
                links.append((path, os.readlink(path)))
            elif os.path.isdir(path):
                show.append((path, path, "ro"))
    else:
        for name in os.listdir("/"):
            path = "/" + name
            if os.path.islink(path):
                links.append((path, os.readlink(path)))
            elif name not in ("proc", "dev", "sandbox", "etc", "run", "sys") and _open_to_all(path):
                show.append((path, path, "rw"))
    for name in (*ETC, *(ETC_ONLINE if online else ())):
        real = os.path.realpath(f"/etc/{name}")
        if os.path.exists(real):
            show.append((real, f"/etc/{name}", "ro"))
    show.append((protocol.GUEST_DIR, GUEST_DIR, "ro"))
    return tuple(show), tuple(links)


def _view(
    mounts: tuple[tuple[str, str, str], ...],
    needed: tuple[str, ...],
    hidden: tuple[str, ...],
    online: bool,
    active: frozenset[str],
    bare: frozenset[str],
) -> tuple[View, tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(the tree, what the run itself puts into place, where Landlock must allow writing)."""
    show, links = _system("pivot_root" in active, online)
    interpreter = find_interpreter(None)
    mapped = tuple(source for source, _, _ in mounts)
    resolved = list(mapped)
    places = [
        (source, destination, mode)
        for source, destination, mode in show
        if source == protocol.GUEST_DIR or covered_by(destination, hidden) is None
    ]
    for path in sorted({*interpreter.prefixes, *needed}):
        if (cover := covered_by(path, hidden)) is not None:
            raise PolicyUnenforceable(
                f"{cover!r} is hidden, and the program's interpreter needs {path!r}",
                fields=("filesystem",),
                fix="hide less, or choose another interpreter",
            )
        shown = tuple(destination for _, destination, _ in places)
        if os.path.exists(path) and not inside_any(path, shown):
            places.append((os.path.realpath(path), path, "ro"))
            resolved.append(places[-1][0])
    waiting: list[tuple[str, str, Inside]] = []
    late: list[tuple[str, str]] = []
    early: list[tuple[str, str, str, Inside]] = []
    closed = tuple(source for source, _, mode in mounts if mode == "ro")
    for source, destination, mode in (*places, *mounts):
        below = [path for path in _real(hidden) if inside_any(path, (source,))]
        inside = [(os.path.relpath(path, source), "hide") for path in below]
        if mode == "rw":
            below = [path for path in closed if path.startswith(source + "/")]
            inside += [(os.path.relpath(path, source), "ro") for path in below]
            inside += protect.inside(source) if source not in bare else ()
        private = _private_place(destination)
        if private is None:
            early.append((source, destination, mode, tuple(inside)))
        else:
            late.append((f"{root.WAITING}/{len(waiting)}", private))
            waiting.append((source, mode, tuple(inside)))
    writable = tuple(place for _, place, mode, _ in early if mode == "rw")
    view = View(tuple(early), links, hidden, tuple(waiting), mapped, tuple(resolved))
    return view, tuple(late), writable


# Without mounts it depends on nothing that changes while we run.
_plain_view = cache(_view)


def _real(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for path in paths for each in (path, os.path.realpath(path))))


def _private_place(path: str) -> str | None:
    """Where a path really is if every run has its own there, else None."""
    if inside_any(path, (root.RUN,)):
        return path
    for directory, place in _PRIVATE.items():
        if path.startswith(directory + "/"):
            return place + path[len(directory) :]
    return None

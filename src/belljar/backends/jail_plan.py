"""What a jail is made of: the pure half of the `jail` backend.

From a policy, a request and the host's facts: which layers apply, what each policy field is held
by, and two descriptions in plain values. `Outer` says which zygote can serve the run, `Shape` how
its inner jail is made. Runs with equal ones can use each other's warm zygotes and parked jails.
"""

from __future__ import annotations

import math
import os
import re
import resource
from functools import cache
from typing import TYPE_CHECKING, Any

from .. import language_host, languages
from ..errors import CommandNotFound
from ..guest import protocol
from ..interpreter import find as find_interpreter
from ..linux import root
from ..policy import Policy
from ..records import positional_record, record, replace
from ..types import Request
from . import protect

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

LAYERS = (
    "namespaces", "pivot_root", "landlock", "seccomp", "capabilities", "cgroup", "rlimits",
    "watchdog", "output_cap",
)  # fmt: skip

GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a guest's environment is, unless a request says otherwise.
GUEST_ENV = {
    "PATH": GUEST_PATH,
    "HOME": root.WORK,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "user",
    "PYTHONDONTWRITEBYTECODE": "1",
}
GUEST_DIR = root.GUEST_DIR
# What programs read to start at all.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC = (
    "alternatives", "ca-certificates", "debian_version", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "os-release", "protocols", "services", "ssl",
    "timezone",
)  # fmt: skip
ETC_ONLINE = ("resolv.conf",)
# Every run has its own of these, so a host path below them must be mounted by the run itself.
_PRIVATE = {"/tmp": root.TMP, "/var/tmp": root.TMP, "/dev/shm": root.SHM}
# What zygotes have imported already: the smaller a process, the faster it forks, so a program that
# names nothing gets a bare one.
DATA_MODULES = ("numpy", "pandas", "matplotlib")
STANDARD_MODULES = (
    "collections", "contextlib", "dataclasses", "datetime", "enum", "functools", "itertools",
    "json", "math", "operator", "random", "re", "string", "threading", "time", "traceback",
    "typing",
)  # fmt: skip
# Programs that name one of these may want a loopback interface: it costs half a millisecond.
_SOCKET_MODULES = frozenset((
    "aiohttp", "asyncio", "asyncore", "fastapi", "flask", "ftplib", "grpc", "http", "httpx",
    "imaplib", "multiprocessing", "poplib", "requests", "select", "selectors", "smtplib",
    "socket", "socketserver", "ssl", "telnetlib", "tornado", "twisted", "urllib", "urllib3",
    "uvicorn", "websockets", "wsgiref", "xmlrpc", "zmq",
))  # fmt: skip
# In every interpreter, or so small that it does not matter.
_ALWAYS_THERE = frozenset(("builtins", "gc", "itertools", "math", "os", "sys", "time"))
_IMPORT = re.compile(r"^\s*(?:import|from)\s+([\w.]+(?:\s*,\s*[\w.]+)*)", re.MULTILINE)
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_INODES_LEAST, _BYTES_AN_INODE = 4096, 16384
_WATCH_EVERY = 0.02


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
    """An inner jail, as far as it is made before the program is known."""

    disk: int
    inodes: int
    own_network: bool
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

    def message(self, cores: tuple[int, ...]) -> dict[str, Any]:
        """Plain values for `linux/slot.py`."""
        every, memory, cpu = self.watch or (0.0, 0, 0.0)
        return {
            "disk": self.disk,
            "inodes": self.inodes,
            "own_network": self.own_network,
            "tcp": self.tcp,
            "filter": (self.families, self.memfd, self.affinity),
            "affinity": cores,
            "rlimits": self.rlimits,
            "watch": {"every": every, "memory": memory, "cpu": cpu} if self.watch else None,
            "waiting": self.waiting,
            "keeper": self.keeper,
        }


@record
class Spec:
    """Everything `run` needs. `keep` says whether the zygote is worth keeping for other runs.

    In the sources of `guarded` the project's metadata is protected.
    """

    outer: Outer
    shape: Shape
    argv: tuple[str, ...]
    file: str | None
    worker: bool
    keep: bool
    layers: tuple[str, ...]
    guarded: tuple[str, ...]


def active_layers(facts: HostFacts, disabled: frozenset[str]) -> frozenset[str]:
    grouped = facts.cgroup is not None and "cgroup" not in disabled
    there = {
        "landlock": facts.landlock_abi > 0,
        "cgroup": facts.cgroup is not None,
        "watchdog": not grouped,  # then the kernel counts
    }
    return frozenset(name for name in LAYERS if there.get(name, True)) - disabled


def spec(policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]) -> Spec:
    """The values for the run. Starts nothing; a missing command is CommandNotFound."""
    argv, file, worker, needed = _program(request)
    named = imported(request.code) if worker and not argv and request.code else frozenset()
    mounts = all_mounts(policy, request)
    online = policy.network.mode == "any"
    keep = not (mounts or needed or online or policy.filesystem.hidden)
    layers = tuple(name for name in LAYERS if name in active)
    preload: tuple[str, ...] = ()
    if not argv and keep:
        if named - _ALWAYS_THERE:
            preload = STANDARD_MODULES
        if not named.isdisjoint(DATA_MODULES):
            preload += DATA_MODULES
    arrange = _view if mounts else _plain_view
    bare = protect.unprotected(policy, request) if mounts else frozenset()
    view, waiting, writable = arrange(
        mounts, needed, policy.filesystem.hidden, online, active, bare
    )
    outer = Outer(
        view=view,
        layers=layers,
        worker=not argv,
        preload=preload,
        writable=writable,
        open_network=online,
    )
    # Runs of one zygote share its empty network unless abstract sockets could cross it, or unless
    # the program may want a loopback.
    own_network = not online and (
        bool(argv) or not keep or facts.landlock_abi < 6 or "landlock" not in active
        or not named.isdisjoint(_SOCKET_MODULES)
    )  # fmt: skip
    written = tuple(source for source, _, mode in mounts if mode == "rw")
    shape = _shape(
        policy, facts, active, own_network=own_network, waiting=waiting, big_files=bool(written),
        # It has the guest's files open a little longer: not those of a mount, for others to see.
        # Only a control group counts its memory once.
        keeper=not argv and keep and "cgroup" in active,
    )  # fmt: skip
    if not request.command and languages.of(request).seccomp == "strict":
        families = () if policy.network.mode == "off" else shape.families
        shape = replace(shape, families=families, memfd=False, affinity=False)
    return Spec(
        outer=outer,
        shape=shape,
        argv=argv,
        file=file,
        worker=worker,
        keep=keep,
        layers=layers,
        guarded=tuple(source for source in written if source not in bare),
    )


def disk_size(policy: Policy) -> int:
    """The work directory is memory: unless asked for, it takes at most half of it."""
    limits = policy.limits
    if "disk" in policy.explicit:
        return limits.disk
    return min(limits.disk, limits.memory // 2)


def inode_count(size: int) -> int:
    return max(_INODES_LEAST, size // _BYTES_AN_INODE)


def imported(code: str) -> frozenset[str]:
    """The top-level names of what the program seems to import. A guess that decides only speed."""
    return frozenset(
        name.strip().partition(".")[0]
        for found in _IMPORT.findall(code)
        for name in found.split(",")
    )


def _shape(
    policy: Policy,
    facts: HostFacts,
    active: frozenset[str],
    *,
    own_network: bool,
    waiting: tuple[tuple[str, str], ...],
    big_files: bool,
    keeper: bool,
) -> Shape:
    limits = policy.limits
    grouped = "cgroup" in active
    families: tuple[int, ...] = (_AF_UNIX,)
    if policy.network.mode == "any":
        # Without a network namespace only Landlock keeps the host's abstract sockets away.
        families = (_AF_INET, _AF_INET6, _AF_NETLINK)
        families += (_AF_UNIX,) if facts.landlock_abi >= 6 and "landlock" in active else ()
    elif own_network and "namespaces" in active:
        families = (_AF_UNIX, _AF_INET, _AF_INET6)
    watch = None
    if not grouped and "watchdog" in active:
        whole = limits.cpus == int(limits.cpus) or limits.cpus >= len(facts.cpus)
        watch = (_WATCH_EVERY, limits.memory, 0.0 if whole else limits.cpus * limits.timeout)
    size = disk_size(policy)
    return Shape(
        disk=size,
        inodes=inode_count(size),
        own_network=own_network,
        tcp=own_network or policy.network.mode == "any",
        families=families,
        memfd=grouped,
        affinity=grouped,
        cores=0 if grouped else min(math.ceil(limits.cpus), len(facts.cpus)),
        rlimits=_rlimits(policy, grouped, size if big_files else None)
        if "rlimits" in active
        else (),
        watch=watch,
        waiting=waiting,
        memory=limits.memory,
        processes=limits.processes,
        cpus=limits.cpus,
        keeper=keeper,
    )


def _rlimits(policy: Policy, grouped: bool, file_size: int | None) -> tuple[tuple[int, int], ...]:
    limits = policy.limits
    # The memory file system holds itself; only what is written to a mount needs a limit a file.
    files = () if file_size is None else ((resource.RLIMIT_FSIZE, file_size),)
    return (
        *files,
        # One byte: zero would still start a piped core handler on the host.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_MEMLOCK, 0),
        # Room for thread stacks and the like: the exact total is the cgroup's or the watchdog's.
        (resource.RLIMIT_DATA, limits.memory + (256 << 20)),
        # Behind a pids controller it must not answer first, or nobody would count the refusals.
        (resource.RLIMIT_NPROC, limits.processes + (16 if grouped else 0)),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    )


def _program(request: Request) -> tuple[tuple[str, ...], str | None, bool, tuple[str, ...]]:
    """(argv or nothing for our own interpreter, program file, worker, paths to show for it)."""
    if request.command:
        import shutil  # late: a program does not need it, and it imports every compressor

        path = shutil.which(request.command[0], path=GUEST_PATH)
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
    places = list(show)
    for path in sorted({*interpreter.prefixes, *needed}):
        shown = tuple(destination for _, destination, _ in places)
        if os.path.exists(path) and not inside_any(path, shown):
            places.append((os.path.realpath(path), path, "ro"))
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
    mapped = tuple(source for source, _, _ in mounts)
    view = View(tuple(early), links, hidden, tuple(waiting), mapped)
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

"""What a container is made of: the pure half of the `docker` and `gvisor` backends.

From a policy, a request and the engine's facts: which layers apply, and two descriptions in plain
values. `Shape` is all that is decided when a container is made: runs with equal ones can use each
other's waiting containers. The rest is in `Spec`, and is told to the agent when the program is.
"""

from __future__ import annotations

import os
import secrets
import stat
from typing import Any

from .. import languages
from ..errors import BackendUnavailable, RequestError
from ..files.collect import MAX_BYTES, MAX_DEPTH, MAX_FILES, MAX_SECONDS
from ..files.copying import MAX_HASHED, Wanted
from ..images.names import image_for, image_name
from ..linux import remap
from ..linux.cgroup import SOCKETS_PART
from ..policy import Policy
from ..records import record
from ..types import Request
from . import protect, warmth, working_directory
from .docker_facts import EngineFacts
from .jail_plan import disk_size, inode_count, inside_any
from .layered import data_limit, needs_data_limit

LAYERS = (
    "seccomp", "capabilities", "read_only_root", "network", "cgroup", "rlimits", "user",
    "output_cap",
)  # fmt: skip
# What the agent needs, where it is another user than the guest, to become and to kill the guest.
# These are rights inside the sandbox's own kernel (gVisor), and the guest has none of them.
AGENT_RIGHTS = ["SETUID", "SETGID", "SETPCAP", "KILL"]
SOCKETS = ("unix", "inet")  # the kinds that a guest may open at most
WORK = "/sandbox"  # in no image: an engine gives what it has to make the mode we ask for
SHM = "/dev/shm"
# In gVisor the sentry itself needs threads: a number close to a guest's crashes it.
GVISOR_PIDS = 4096
_FIRST_ID, _IDS = 1_900_000_000, 1 << 24
_FIRST_MAPPED, _MAPPED_IDS = 20_000, 40_000  # within the 65536 of a remapped or rootless engine
# Podman makes these writable in a read-only root, as large as memory, unless we make them small.
_PODMAN_SCRATCH = (("/run", 65536), ("/var/tmp", 65536))
# What engines hide of the host by themselves, and what else of it shows neighbours, hardware or
# the kernel's build. A list of ours replaces the engine's.
MASKED = (
    "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
    "/sys/devices/virtual/powercap",
    "/proc/cmdline", "/proc/config.gz", "/proc/consoles", "/proc/diskstats", "/proc/driver",
    "/proc/interrupts", "/proc/iomem", "/proc/ioports", "/proc/kallsyms", "/proc/kmsg",
    "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/locks", "/proc/mdstat",
    "/proc/modules", "/proc/pagetypeinfo", "/proc/partitions", "/proc/schedstat",
    "/proc/slabinfo", "/proc/softirqs", "/proc/swaps", "/proc/sysrq-trigger",
    "/proc/vmallocinfo", "/proc/zoneinfo", "/sys/block", "/sys/kernel/debug",
    "/sys/kernel/security", "/sys/kernel/slab", "/sys/kernel/tracing",
)  # fmt: skip
_LEAST_RATE = 16 << 20  # bytes a second that an engine passes on, at the least
_PLACES = ("/proc", "/dev", "/sys")

# (source, target, what): "ro" and "rw" are bind mounts, "hide" covers what is below.
Binds = tuple[tuple[str, str, str], ...]


@record
class Shape:
    """A container, as far as it is made before the program is known.

    It is made of `image_id`; `image`, the name that was asked for, may mean another one by then.
    """

    image: str
    image_id: str
    runtime: str | None
    memory: int
    cpus: float
    processes: int
    scratch: tuple[tuple[str, int], ...]
    network: str
    binds: Binds
    owner: tuple[int, int] | None
    layers: tuple[str, ...]
    strict: bool = False
    families: tuple[str, ...] = SOCKETS
    sockets: int = 0  # bytes of buffers, where the container's limit of memory does not count them
    # (target, its owner): mounts, and those inside them, that are shown as the guest's own.
    remapped: tuple[tuple[str, tuple[int, int]], ...] = ()

    @property
    def apart(self) -> bool:
        """Whether the agent is another user than the guest. On Linux it needs no capabilities for
        being out of reach; gVisor closes a process to other users only."""
        return self.runtime is not None and "user" in self.layers


def collect_seconds(wanted: Wanted) -> float:
    """How long an agent may take to send a run's files, by how many bytes those may be."""
    more = 0 if wanted.total is None else max(0, wanted.total - MAX_BYTES)
    return MAX_SECONDS + more / _LEAST_RATE


def to_collect(wanted: Wanted) -> dict[str, Any]:
    """What the agent is told about the files to send, in plain values."""
    total = MAX_BYTES if wanted.total is None else wanted.total
    return {
        "work": WORK,
        "outputs": list(wanted.globs),
        "files": MAX_FILES,
        "bytes": total,
        "each": total if wanted.each is None else wanted.each,
        "hash": MAX_HASHED,
        "seconds": collect_seconds(wanted),
        "depth": MAX_DEPTH,
    }


@record
class Spec:
    """Everything `run` needs. `keep` says whether a container like it is worth keeping ready.

    Of the sources that are `written` to, in those of `guarded` the project's metadata is protected.
    `version` is what the image's Python must be.
    """

    shape: Shape
    argv: tuple[str, ...]
    file: str | None
    worker: bool
    env: tuple[tuple[str, str], ...]
    rlimits: tuple[tuple[str, int], ...]
    keep: bool
    written: tuple[str, ...]
    guarded: tuple[str, ...]
    version: tuple[int, ...]

    def start(
        self, request: Request, timeout: float, files: list[tuple[str, int, int]], wanted: Wanted
    ) -> Any:
        """The START message, in plain values."""
        return {
            "argv": list(working_directory.command_line(self.argv, request, self.file, WORK)),
            "env": {**dict(self.env), **working_directory.environment(request, WORK)},
            "work": WORK,
            "filter": languages.seccomp_filter(request),
            "cwd": working_directory.start_in(request, WORK),
            "files": files,
            "timeout": timeout,
            "rlimits": list(self.rlimits),
            "layers": ["gvisor"] if self.shape.runtime else [],
            "collect": to_collect(wanted),
        }


def active_layers(facts: EngineFacts, disabled: frozenset[str], gvisor: bool) -> frozenset[str]:
    there = {
        "seccomp": facts.seccomp and not gvisor and facts.machine in ("x86_64", "aarch64"),
        "cgroup": facts.memory and facts.pids and facts.cpu,
    }
    return frozenset(name for name in LAYERS if there.get(name, True)) - disabled


def spec(
    policy: Policy,
    request: Request,
    facts: EngineFacts,
    active: frozenset[str],
    *,
    image: str,
    image_id: str,
    runtime: str | None,
    user: str | None,
) -> Spec:
    """The values for the run. Starts nothing."""
    argv, file, worker = _program(request, runtime)
    language = None if request.command else languages.of(request)
    mounts = all_mounts(policy, request)
    written = tuple(source for source, _, mode in mounts if mode == "rw")
    bare = protect.unprotected(policy, request)
    limits = policy.limits
    shape = Shape(
        image=image,
        image_id=image_id,
        runtime=runtime,
        memory=limits.memory,
        cpus=min(limits.cpus, facts.cores),
        # One more for the agent. Without a pids limit of its own a sentry's threads would count.
        processes=GVISOR_PIDS if runtime else limits.processes + 1,
        scratch=scratch(disk_size(policy)),
        network=_network(policy, active),
        binds=_binds(mounts, policy.filesystem.hidden, bare),
        owner=_owner(written, user),
        remapped=_remapped(mounts, written, user) if "user" in active else (),
        layers=tuple(name for name in LAYERS if name in active),
        strict=language is not None and language.seccomp == "strict",
        families=_families(policy, bool(mounts), facts),
        sockets=limits.memory // SOCKETS_PART if own_socket_limit(facts, active, runtime) else 0,
    )
    env = {
        "HOME": "/tmp",  # caches there are no files of the program's
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "USER": "user",
        "PYTHONDONTWRITEBYTECODE": "1",
        **(language.env if language is not None else {}),
        **request.env,
    }
    return Spec(
        shape=shape,
        argv=argv,
        file=file,
        worker=worker,
        env=tuple(env.items()),
        rlimits=(
            _rlimits(policy, bool(written), runtime, counted="cgroup" in active, worker=worker)
            if "rlimits" in active
            else ()
        ),
        keep=not mounts,
        written=written,
        guarded=tuple(source for source in written if source not in bare),
        version=language.version if language is not None and worker else (),
    )


def images(request: Request, backend: str) -> tuple[str, ...]:
    """The images that would do, the best first; without the last one it cannot run."""
    if request.image:
        return (request.image,)
    if request.command:
        return (image_for("bash"),)
    language = languages.of(request)
    if image := language.image_on(backend):
        return (image,)
    own = image_for(language.family)
    if language.family != "python":
        if language.version:
            raise BackendUnavailable(
                f"{language.name} is not installed in an image of ours",
                fix="name an image that has it: image=... in the call or in the language file",
            )
        return (own,)
    data = image_name("data")
    tops = {type(value).__module__.partition(".")[0] for value in request.context.values()}
    if not tops.isdisjoint((*warmth.DATA_MODULES, "pyarrow")):
        return (data,)
    if warmth.imports_data_modules(request.code or ""):
        return (data, own)
    return (own,)


def scratch(disk: int) -> tuple[tuple[str, int], ...]:
    """(place, bytes) of the memory file systems, which make up `disk` together."""
    small = disk // 8 // 4096 * 4096
    return ((WORK, disk - 2 * small), ("/tmp", small), (SHM, small))


def container(
    shape: Shape,
    facts: EngineFacts,
    labels: dict[str, str],
    command: list[str],
    *,
    seccomp: str,
    empty: str,
) -> dict[str, Any]:
    """The body of `POST /containers/create`. `seccomp` is a profile's text or its path, `empty` a
    directory of the host that covers what is hidden: a memory file system would be filled with what
    it covers by Podman."""
    on = frozenset(shape.layers)
    uid, gid = shape.owner or _fresh_id(facts)
    if "user" not in on:
        uid = gid = 0
    rights = AGENT_RIGHTS if shape.apart else []
    security = []
    if "capabilities" in on:
        security.append("no-new-privileges")
    if not shape.runtime:
        security.append(f"seccomp={seccomp if 'seccomp' in on else 'unconfined'}")
        if facts.podman:  # which adds them to its own
            security.append(f"mask={':'.join(MASKED)}")
    host: dict[str, Any] = {
        "NetworkMode": shape.network,
        "ReadonlyRootfs": "read_only_root" in on,
        "Tmpfs": {
            place: _tmpfs(place, size, facts, uid, gid)
            for place, size in (*shape.scratch, *(_PODMAN_SCRATCH if facts.podman else ()))
        },
        "Mounts": [_mount(source or empty, place, how) for source, place, how in shape.binds],
        "SecurityOpt": security,
        "CapDrop": ["ALL"] if "capabilities" in on else [],
        "CapAdd": rights if "capabilities" in on else ["ALL"],
        "IpcMode": "private",
        "CgroupnsMode": "private" if facts.cgroup_version == 2 else "host",
        # One byte of core: zero would still start a piped handler on the host.
        "Ulimits": [
            {"Name": "core", "Soft": 1, "Hard": 1},
            {"Name": "nofile", "Soft": 1024, "Hard": 1024},
            # Podman would raise it otherwise, which not every root may. The pids limit holds it.
            *([{"Name": "nproc", "Soft": 4096, "Hard": 4096}] if facts.podman else []),
        ],
        # gVisor's /proc and /sys are its own.
        **({} if shape.runtime or facts.podman else {"MaskedPaths": list(MASKED)}),
        "Init": False,  # the agent is init
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no"},
        "OomKillDisable": False,
    }
    if "cgroup" in on:
        host |= {
            "Memory": shape.memory,
            "MemorySwap": shape.memory,
            "NanoCpus": int(shape.cpus * 1e9),
            "PidsLimit": shape.processes,
        }
    if shape.runtime:
        host["Runtime"] = shape.runtime
    return {
        "Image": shape.image_id,
        "Entrypoint": [*command, *([f"{uid}:{gid}"] if shape.apart else [])],
        "Cmd": [],
        "User": "0:0" if shape.apart else f"{uid}:{gid}",
        "WorkingDir": "/",
        "Env": ["LANG=C.UTF-8"],
        "Hostname": "belljar",
        "Labels": labels,
        # Pid 1 gets no signal that it has no handler for, so an engine that stops would wait ten
        # seconds for each container. There is nothing in there to be saved.
        "StopSignal": "SIGKILL",
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "NetworkDisabled": shape.network == "none",
        "HostConfig": host,
    }


def _tmpfs(place: str, size: int, facts: EngineFacts, uid: int, gid: int) -> str:
    options = f"rw,nosuid,nodev,{'noexec' if place == SHM else 'exec'},size={size}"
    if facts.podman:
        # It takes neither an owner nor a number of files; memory bounds that number.
        return f"{options},mode=1777,notmpcopyup"
    return f"{options},nr_inodes={inode_count(size)},mode=700,uid={uid},gid={gid}"


def _mount(source: str, target: str, mode: str) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": source,
        "Target": target,
        "ReadOnly": mode != "rw",
        # What is mounted below a read-only mount would be writable on engines before 25.
        "BindOptions": {"Propagation": "rprivate", "NonRecursive": mode != "rw"},
    }


def _fresh_id(facts: EngineFacts) -> tuple[int, int]:
    """A user that nobody else is: what the kernel counts per user is then counted per run."""
    if facts.rootless or facts.remapped:
        uid = _FIRST_MAPPED + secrets.randbelow(_MAPPED_IDS)
    else:
        uid = _FIRST_ID + secrets.randbelow(_IDS)
    return uid, uid


def _owner(written: tuple[str, ...], user: str | None) -> tuple[int, int] | None:
    """Whoever owns a writable mount: otherwise the program could not write there."""
    if user is not None:
        uid, gid = user.split(":")
        return int(uid), int(gid)
    for source in written:
        info = os.stat(source)
        if info.st_uid != 0:
            return info.st_uid, info.st_gid
    return None


def foreign(written: tuple[str, ...], user: str | None) -> tuple[str, ...]:
    """Those of the writable `written` that the guest, as the user it is, may not write to."""
    uid, gid = _owner(written, user) or (-1, -1)

    def closed(source: str) -> bool:
        info = os.stat(source)
        shift = 6 if info.st_uid == uid else 3 if info.st_gid == gid else 0
        needed = 0o3 if stat.S_ISDIR(info.st_mode) else 0o2
        return info.st_mode >> shift & needed != needed

    return tuple(source for source in written if closed(source))


def _remapped(
    mounts: tuple[tuple[str, str, str], ...], written: tuple[str, ...], user: str | None
) -> tuple[tuple[str, tuple[int, int]], ...]:
    closed = foreign(written, user)
    found = []
    for source, target, mode in mounts:
        if mode == "rw" and source in closed:
            info = os.stat(source)
            found.append((target, (info.st_uid, info.st_gid)))
    return tuple(found)


def not_writable(
    policy: Policy, request: Request, facts: EngineFacts, user: str | None, *, gvisor: bool
) -> str:
    """Why a writable mount could not be written to by the guest; empty if all can."""
    written = tuple(source for source, _, mode in all_mounts(policy, request) if mode == "rw")
    for source in foreign(written, user):
        info = os.stat(source)
        if gvisor:
            why = "gVisor shows files with the owner that they have"
        elif not facts.here or facts.rootless or facts.remapped or os.geteuid() != 0:
            why = "to show it as the program's own takes root on the engine's machine"
        else:
            why = remap.problem(source)
        if why:
            return (
                f"{source!r} belongs to user {info.st_uid}, and the program, another user, may not "
                f"write there ({why}): `chown -R 1000:1000` it, mount it `ro`, or use the backend "
                "jail"
            )
    return ""


def own_socket_limit(facts: EngineFacts, active: frozenset[str], runtime: str | None) -> bool:
    """Whether Belljar itself limits the buffers of sockets, which gVisor keeps as memory."""
    version_1 = "cgroup" in active and facts.cgroup_version == 1 and runtime is None
    return version_1 and facts.sockets_counted


def _families(policy: Policy, mounts: bool, facts: EngineFacts) -> tuple[str, ...]:
    """What sockets a guest may open; connected pairs it always may.

    A socket's name in a mount reaches the host's daemons, even if the mount is read-only and the
    network off. Where nothing counts the buffers of other sockets, the only use of a network that
    ends at its loopback is closed with them.
    """
    if policy.network.mode == "any":
        return SOCKETS
    closed = {"unix"} if mounts else set()
    if not facts.sockets_counted:
        closed.add("inet")
    return tuple(name for name in SOCKETS if name not in closed)


def _network(policy: Policy, active: frozenset[str]) -> str:
    if "network" not in active:
        return "host"
    return "bridge" if policy.network.mode == "any" else "none"


def _program(request: Request, runtime: str | None) -> tuple[tuple[str, ...], str | None, bool]:
    """(argv or nothing for the worker, program file, worker)."""
    if request.python is not None:
        raise RequestError(
            "python", "names an interpreter of the host", fix="choose one by image=... here"
        )
    if request.command:
        return (*request.command, *request.args), None, False
    language = languages.of(request)
    if language.family == "python":
        return (), language.file, True
    command = language.command_on("gvisor" if runtime else "docker")
    return (*command, language.file, *request.args), language.file, False


def _rlimits(
    policy: Policy, big_files: bool, runtime: str | None, *, counted: bool, worker: bool
) -> tuple[tuple[str, int], ...]:
    limits = policy.limits
    # The memory file systems hold themselves; what is written to a mount needs a limit a file.
    files = (("RLIMIT_FSIZE", disk_size(policy)),) if big_files else ()
    data: tuple[tuple[str, int], ...] = ()
    if needs_data_limit(counted=counted, worker=worker):
        # Room for thread stacks and the like: the exact total is the control group's.
        data = (("RLIMIT_DATA", data_limit(limits.memory, counted=counted)),)
    return (
        *files,
        ("RLIMIT_CORE", 1),
        ("RLIMIT_NOFILE", limits.open_files),
        ("RLIMIT_MEMLOCK", 0),
        *data,
        # What a sentry does not let anybody set, it does not give either.
        *(() if runtime else (("RLIMIT_MSGQUEUE", 0), ("RLIMIT_SIGPENDING", 1024))),
    )


def all_mounts(policy: Policy, request: Request) -> tuple[tuple[str, str, str], ...]:
    """(source, absolute target, mode), parents before what is mounted inside them."""
    files = policy.filesystem
    found = [(os.path.realpath(path), os.path.normpath(path), "ro") for path in files.read_only]
    found += [(os.path.realpath(path), os.path.normpath(path), "rw") for path in files.read_write]
    found += [
        (os.path.realpath(mount.src), os.path.normpath(os.path.join(WORK, mount.dst)), mount.mode)
        for mount in request.mounts
    ]
    return tuple(sorted(found, key=lambda each: each[1]))


def objection(policy: Policy, request: Request, facts: EngineFacts) -> str:
    """Why these mounts cannot be had; empty if they can."""
    bare = protect.unprotected(policy, request)
    for source, target, mode in all_mounts(policy, request):
        if target in ("/", WORK, "/tmp", SHM) or inside_any(target, _PLACES):
            return f"{target!r} is not a place to mount on"
        for path in facts.sockets:
            real = os.path.realpath(path)
            if source == "/" or inside_any(real, (source,)) or inside_any(path, (source,)):
                return f"{source!r} would show the guest the engine's socket {path}"
        try:
            kind = os.stat(source).st_mode
        except OSError as error:
            return f"{source!r}: {error.strerror}"
        if not (stat.S_ISDIR(kind) or stat.S_ISREG(kind)):
            return f"{source!r} is neither a directory nor a file"
        if mode == "rw" and source not in bare and (found := protect.links(source)):
            return f"{found[0]!r} in {source!r} is a link, which cannot be protected"
    return ""


def _binds(
    mounts: tuple[tuple[str, str, str], ...], hidden: tuple[str, ...], bare: frozenset[str]
) -> Binds:
    closed = tuple(source for source, _, mode in mounts if mode == "ro")
    real = tuple(dict.fromkeys(each for path in hidden for each in (path, os.path.realpath(path))))
    binds: dict[str, tuple[str, str, str]] = {}
    for source, target, mode in mounts:
        binds[target] = (source, target, mode)
        if mode == "rw":
            for path in closed:
                if path.startswith(source + "/"):
                    place = os.path.join(target, os.path.relpath(path, source))
                    binds[place] = (path, place, "ro")
            for name, how in protect.inside(source) if source not in bare else ():
                place = os.path.join(target, name)
                binds[place] = (os.path.join(source, name), place, how)
        for path in real:
            if inside_any(path, (source,)) and os.path.lexists(path):
                place = os.path.normpath(os.path.join(target, os.path.relpath(path, source)))
                cover = "" if os.path.isdir(path) else "/dev/null"
                binds[place] = (cover, place, "hide")
    return tuple(binds.values())

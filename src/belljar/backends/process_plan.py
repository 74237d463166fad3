"""What a Linux child process can be held by: the pure half of the `subprocess` backend.

From a policy, a request and the host's facts: which layers apply, what each policy field is held
by, and the plain values that the supervisor is started with.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from .. import language_host, languages
from ..errors import CommandNotFound
from ..guest import protocol
from ..interpreter import find as find_interpreter
from ..linux import seccomp
from ..policy import Policy
from ..records import record
from ..types import Enforcement, Request
from . import guest_env, protect
from .base import absent, best_effort, enforced, kept_by_host
from .layered import besides_limits, data_limit, grouped_memory, needs_data_limit

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

LAYERS = (
    "namespaces", "read_only_mounts", "landlock", "seccomp", "cgroup", "rlimits", "subreaper",
    "watchdog", "output_cap",
)  # fmt: skip

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# What programs read to start at all. /etc by name, so that its secrets stay out.
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store",
    *(f"/etc/{name}" for name in (
        "alternatives", "ca-certificates", "debian_version", "group", "hosts", "ld.so.cache",
        "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "os-release",
        "passwd", "pki/ca-trust", "pki/tls/certs", "pki/tls/openssl.cnf", "protocols",
        "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "timezone",
        *guest_env.SETTINGS,
    )),
)  # fmt: skip
# Sockets of daemons and mounted secrets live here; nothing a guest needs does.
HIDDEN = ("/run",)
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16
_SHM = 64 << 20


@record
class Spec:
    """What the supervisor is told, apart from the paths that exist only during the run.

    In the sources of `guarded` the project's metadata is protected. Where a control group counts,
    the program is on `visible` processors, and may leave them. Paths of `resolved` must lead
    through no link any more; `named` are those of the policy as they were written.
    """

    argv: tuple[str, ...]
    file: str | None
    worker: bool
    layers: tuple[str, ...]
    empty_network: bool
    own_proc: bool
    private_tmp: bool
    read_only: tuple[str, ...]
    read_write: tuple[str, ...]
    resolved: tuple[str, ...]
    named: tuple[str, ...]
    freeze: tuple[str, ...]
    guarded: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    hide: tuple[str, ...]
    devices: tuple[str, ...]
    shm_size: int
    socket_families: tuple[int, ...]
    closed_calls: tuple[str, ...]
    ignored_calls: tuple[str, ...]
    rlimits: tuple[tuple[int, int], ...]
    cores: int
    visible: int
    watch: Mapping[str, float] | None


def active_layers(facts: HostFacts, disabled: frozenset[str]) -> frozenset[str]:
    """The layers that this host has and nobody switched off."""
    there = {
        "namespaces": facts.userns,
        "landlock": facts.landlock_abi > 0,
        "seccomp": facts.seccomp,
        "cgroup": facts.cgroup is not None,
    }
    active = frozenset(name for name in LAYERS if there.get(name, True)) - disabled
    # Mounts can be changed only in a mount namespace of one's own.
    return active if "namespaces" in active else active - {"read_only_mounts"}


def enforcement(
    policy: Policy,
    request: Request,
    facts: HostFacts,
    active: frozenset[str],
    user: tuple[int, int] | None,
) -> dict[str, Enforcement]:
    """Every policy field, and what will hold it with these layers."""
    report = dict(_limits(policy, facts, active, user))
    report["network"] = _network(policy, active)
    report["filesystem"] = _filesystem(policy, facts, active, user)
    report["mounts"] = _mounts(policy, request, active)
    report |= besides_limits(
        policy, request, active, "no sockets, no memory files, no System V IPC"
    )
    return report


def _limits(
    policy: Policy, facts: HostFacts, active: frozenset[str], user: tuple[int, int] | None
) -> Iterator[tuple[str, Enforcement]]:
    version = facts.cgroup.version if facts.cgroup else 0
    group = f"cgroup v{version}"
    as_root = facts.root and user is None
    cpus = policy.limits.cpus

    clock = "the host's clock, then"
    if "namespaces" in active:
        yield "timeout", enforced(f"{clock} the kernel ends the pid namespace")
    elif not ("landlock" in active and facts.landlock_abi >= 6):
        yield "timeout", best_effort(f"{clock} a kill; the program can signal us, too")
    elif "cgroup" in active and "subreaper" in active:
        yield "timeout", enforced(f"{clock} {group} stops forks and the subreaper kills the tree")
    elif "subreaper" in active:
        yield "timeout", best_effort(f"{clock} the subreaper kills the tree until nothing is left")
    else:
        yield "timeout", best_effort(f"{clock} the first process is killed; others may survive")

    if "cgroup" in active and facts.cgroup is not None:
        yield "memory", grouped_memory(facts.cgroup, "the whole tree")
    elif "watchdog" in active:
        extra = " and RLIMIT_DATA" if "rlimits" in active else ""
        yield "memory", best_effort(f"a watchdog over the tree, 40 times a second{extra}")
    elif "rlimits" in active:
        yield "memory", best_effort("RLIMIT_DATA, each process for itself")
    else:
        yield "memory", absent("no cgroup, no rlimits, no watchdog")

    if "cgroup" in active:
        yield "cpus", enforced(f"{group} cpu controller")
    elif cpus >= 1 and (cpus == int(cpus) or cpus >= len(facts.cpus)):
        cores = f"affinity to {min(int(cpus), len(facts.cpus))} of {len(facts.cpus)} cores"
        if "seccomp" in active:
            yield "cpus", enforced(f"{cores}, which seccomp keeps the program from changing")
        else:
            yield "cpus", best_effort(f"{cores}, which the program can change")
    elif "watchdog" in active:
        yield (
            "cpus",
            best_effort(
                "affinity; the supervisor stops and continues the tree to hold the rate, and ends"
                " it at cpus x timeout seconds of CPU time"
            ),
        )
    else:
        yield "cpus", absent("no cgroup and no watchdog")

    if "cgroup" in active:
        yield "processes", enforced(f"{group} pids controller")
    elif "rlimits" in active and "namespaces" in active and not as_root:
        yield "processes", enforced("RLIMIT_NPROC in a user namespace of the run's own")
    elif "watchdog" in active:
        yield "processes", best_effort("a watchdog counts the tree, 40 times a second")
    else:
        yield "processes", absent("no cgroup, no RLIMIT_NPROC that binds, no watchdog")

    parts = [
        *(["RLIMIT_FSIZE for each file"] if "rlimits" in active else []),
        *(["a watchdog over the work directory"] if "watchdog" in active else []),
    ]
    yield "disk", best_effort(" and ".join(parts)) if parts else absent("nothing counts it")
    yield from kept_by_host(active).items()
    yield (
        "open_files",
        (enforced("RLIMIT_NOFILE") if "rlimits" in active else absent("rlimits are off")),
    )


def _network(policy: Policy, active: frozenset[str]) -> Enforcement:
    match policy.network.mode:
        case "any":
            return enforced("open, as the policy asks")
        case "hosts":
            return absent("a plain process cannot be held to a list of hosts")
    if "namespaces" in active and "seccomp" in active:
        return enforced("an empty network namespace, and seccomp for the other socket families")
    if "namespaces" in active:
        return best_effort("an empty network namespace, which AF_VSOCK and AF_UNIX reach out of")
    if "seccomp" in active:
        return enforced("seccomp refuses every socket")
    return absent("no network namespace and no seccomp")


def _filesystem(
    policy: Policy, facts: HostFacts, active: frozenset[str], user: tuple[int, int] | None
) -> Enforcement:
    files = policy.filesystem
    if "landlock" not in active:
        if facts.root and user is None:
            return absent(
                "as root without Landlock every file is open; set `user` or run unprivileged"
            )
        if files.read_only or files.hidden:
            return absent("read-only and hidden paths need Landlock")
        also = ", and mounts are read-only" if "read_only_mounts" in active else ""
        return best_effort(f"file permissions: what this user can read, the program can{also}")
    if "namespaces" not in active:
        if files.hidden:
            return absent("hidden paths need a mount namespace")
        if nested := _nested(files.read_only, files.read_write):
            return absent(f"{nested[0]!r} is read-only inside a writable path: needs namespaces")
    landlock = f"Landlock ABI {facts.landlock_abi}"
    if "read_only_mounts" in active:
        return enforced(", ".join((f"{landlock} and read-only mounts", *protect.given_up(policy))))
    if facts.landlock_abi < 3:
        return best_effort(f"{landlock}, which does not hold truncation")
    if "seccomp" in active:
        return enforced(f"{landlock}, and seccomp for modes, owners and times")
    return best_effort(f"{landlock}, which does not hold modes, owners and times")


def _mounts(policy: Policy, request: Request, active: frozenset[str]) -> Enforcement:
    if not request.mounts:
        return enforced("none asked for")
    for mount in request.mounts:
        if os.path.isabs(mount.dst) and mount.dst != mount.src:
            return absent(
                f"{mount.dst!r}: a plain process sees host paths; use a relative destination"
            )
    places = sorted(mount.dst for mount in request.mounts if not os.path.isabs(mount.dst))
    for place in places:
        if any(other.startswith(place + "/") for other in places):
            return absent(f"{place!r} holds another mount, and a link cannot")
    if "landlock" not in active:
        if any(mount.mode == "ro" for mount in request.mounts):
            return absent("read-only needs Landlock")
        return best_effort("a link in the work directory")
    read_only = tuple(mount.src for mount in request.mounts if mount.mode == "ro")
    writable = tuple(mount.src for mount in request.mounts if mount.mode == "rw")
    if "namespaces" not in active and (
        nested := _nested(read_only, (*writable, *policy.filesystem.read_write))
    ):
        return absent(f"{nested[0]!r} is read-only inside a writable path: needs namespaces")
    held = "a link in the work directory, held by Landlock"
    if not writable:
        return enforced(held)
    protected = _protected(policy, request)
    if protected and "read_only_mounts" not in active:
        return best_effort(f"{held}; a project's metadata in a writable one is not protected")
    for source in protected:
        if found := protect.links(source):
            return best_effort(
                f"{held}; {found[0]!r} in {source!r} is a link, which cannot be protected"
            )
    return enforced(f"{held}; {protect.promise(policy, request)}")


def _protected(policy: Policy, request: Request) -> tuple[str, ...]:
    """The writable directories in which a project's metadata is to be protected: real paths."""
    mounted = (mount.src for mount in request.mounts if mount.mode == "rw")
    real = dict.fromkeys(map(os.path.realpath, (*policy.filesystem.read_write, *mounted)))
    if not real:
        return ()
    bare = protect.unprotected(policy, request)
    return tuple(path for path in real if path not in bare and os.path.isdir(path))


def _inside(sources: Iterable[str], how: str) -> tuple[str, ...]:
    """What is closed ("ro") or nailed down ("rw") in these directories: no link can be either."""
    found = (
        os.path.join(source, name)
        for source in sources
        for name, what in protect.inside(source)
        if what == how
    )
    return tuple(path for path in found if not os.path.islink(path))


def _nested(read_only: tuple[str, ...], writable: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `read_only` inside a writable path: Landlock alone would let them be written."""
    directories = [os.path.realpath(path).rstrip("/") for path in writable]

    def inside(path: str) -> bool:
        real = os.path.realpath(path)
        return any(real == top or real.startswith(top + "/") for top in directories)

    return tuple(path for path in read_only if inside(path))


def shortcomings(facts: HostFacts, user: tuple[int, int] | None) -> Iterator[str]:
    """What this host lacks, each with its consequence."""
    if not facts.userns:
        yield f"no user namespaces ({facts.userns_problem}): no pid namespace, host name visible"
    elif not facts.proc_mount:
        yield f"own /proc cannot be mounted ({facts.proc_mount_problem}): /proc is closed to guests"
    if not facts.landlock_abi:
        yield "no Landlock: files are held by file permissions only"
    if not facts.seccomp:
        yield f"no seccomp ({facts.seccomp_problem})"
    if facts.cgroup is None:
        yield "no writable cgroup: memory is held by a watchdog, cpu by affinity"
    if facts.root and user is None:
        yield "running as root: guests keep uid 0, without capabilities; set `user` to change that"


def spec(
    policy: Policy,
    request: Request,
    facts: HostFacts,
    active: frozenset[str],
    user: tuple[int, int] | None,
) -> Spec:
    """The values for the supervisor. Starts nothing; a missing command is CommandNotFound."""
    argv, file, worker, needed = _program(request)
    files, limits = policy.filesystem, policy.limits
    spaces = "namespaces" in active
    own_proc = spaces and facts.proc_mount
    named = (*files.read_only, *files.read_write, *(mount.src for mount in request.mounts))
    # Programs look for control groups and processors there, and expect it open, or not there.
    shows_sys = any(path == "/sys" or path.startswith("/sys/") for path in named)
    private_tmp = spaces and files.private_tmp and "/tmp" not in named
    cores = 0 if "cgroup" in active else min(math.ceil(limits.cpus), len(facts.cpus))
    read_only = (
        *SYSTEM,
        *needed,
        *(["/proc"] if own_proc else []),
        *(shown := _real(files.read_only, request, "ro")),
    )
    read_write = _real(files.read_write, request, "rw")
    frozen = _nested(read_only, (*read_write, *(["/tmp"] if private_tmp else []))) if spaces else ()
    if policy.network.mode == "any":
        families: tuple[int, ...] = (_AF_INET, _AF_INET6, _AF_NETLINK)
    else:
        families = (_AF_INET, _AF_INET6) if spaces else ()
    guarded = _protected(policy, request) if "read_only_mounts" in active else ()
    if guarded:
        read_only += (protocol.GUEST_DIR,)  # with what git in there is to ignore
    strict = not request.command and languages.of(request).seccomp == "strict"
    if strict and policy.network.mode == "off":
        families = ()
    read_write += _inside(guarded, "rw")
    return Spec(
        argv=argv,
        file=file,
        worker=worker,
        layers=tuple(name for name in LAYERS if name in active),
        empty_network=policy.network.mode == "off",
        own_proc=own_proc,
        private_tmp=private_tmp,
        read_only=read_only,
        read_write=(*read_write, *(["/dev/shm"] if spaces else [])),
        resolved=(*shown, *read_write),
        named=named,
        freeze=(*frozen, *_inside(guarded, "ro")),
        guarded=guarded,
        links=tuple((m.dst, m.src) for m in request.mounts if not os.path.isabs(m.dst)),
        hide=(*HIDDEN, *(() if shows_sys else ("/sys",)), *files.hidden) if spaces else (),
        devices=DEVICES,
        shm_size=min(_SHM, limits.memory // 4) if spaces else 0,
        socket_families=families,
        closed_calls=tuple(dict.fromkeys(_closed_calls(facts, active, cores, strict))),
        ignored_calls=() if "read_only_mounts" in active else seccomp.METADATA,
        rlimits=_rlimits(policy, facts, active, user, worker) if "rlimits" in active else (),
        cores=cores,
        visible=min(math.ceil(limits.cpus), len(facts.cpus)) if "cgroup" in active else 0,
        watch=_watch(policy, facts, active, user),
    )


def _real(paths: tuple[str, ...], request: Request, mode: str) -> tuple[str, ...]:
    """Where these paths of the policy lead, and the sources of the mounts of a mode."""
    mounted = (mount.src for mount in request.mounts if mount.mode == mode)
    return (*map(os.path.realpath, paths), *mounted)


def _closed_calls(
    facts: HostFacts, active: frozenset[str], cores: int, strict: bool
) -> Iterator[str]:
    """Calls that seccomp must refuse because no other layer holds what they do, or all if asked."""
    if "cgroup" not in active or strict:
        yield from seccomp.UNCOUNTED_MEMORY
    if "namespaces" not in active or strict:
        yield from seccomp.SHARED_IPC
    if cores or strict:
        yield "sched_setaffinity"
    if "read_only_mounts" not in active and facts.landlock_abi < 3:
        yield "truncate"


def _program(request: Request) -> tuple[tuple[str, ...], str | None, bool, tuple[str, ...]]:
    """(argv, the file the program is written to, whether our worker runs it, paths it reads)."""
    if request.command:
        path = shutil.which(request.command[0], path=guest_env.search_path())
        if path is None:
            raise CommandNotFound("command", f"{request.command[0]!r} is not installed")
        return (path, *request.command[1:], *request.args), None, False, ()
    language = languages.of(request)
    if language.family != "python":
        path = language_host.installed(language, "subprocess")
        real = os.path.realpath(path)
        argv = (path, *language.command_on("subprocess")[1:], language.file, *request.args)
        return argv, language.file, False, (path, real, *language.paths)
    python = find_interpreter(language_host.python_of(language, request.python, "subprocess"))
    needed = (python.executable, *python.prefixes, protocol.GUEST_DIR, *language.paths)
    return (python.executable, "-I", "-B"), language.file, True, needed


def _rlimits(
    policy: Policy,
    facts: HostFacts,
    active: frozenset[str],
    user: tuple[int, int] | None,
    worker: bool,
) -> tuple[tuple[int, int], ...]:
    limits, counted = policy.limits, "cgroup" in active
    found = [
        # One byte: zero would still start a piped core handler on the host.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.disk),
        (resource.RLIMIT_MEMLOCK, 0),
    ]
    if needs_data_limit(counted=counted, worker=worker):
        # Room for thread stacks and the like: the exact total is the cgroup's or the watchdog's.
        found.append((resource.RLIMIT_DATA, data_limit(limits.memory, counted=counted)))
    for name, value in (("RLIMIT_MSGQUEUE", 0), ("RLIMIT_SIGPENDING", 1024)):
        if hasattr(resource, name):
            found.append((getattr(resource, name), value))
    if counted:
        return tuple(found)  # which counts what it refuses; a second limit would hide that from it
    if "namespaces" in active and not (facts.root and user is None):
        # The supervisor and init count too.
        found.append((resource.RLIMIT_NPROC, limits.processes + 2))
    return tuple(found)


def _watch(
    policy: Policy, facts: HostFacts, active: frozenset[str], user: tuple[int, int] | None
) -> dict[str, float] | None:
    """What the supervisor itself must count, because the kernel does not. Zero means nothing."""
    if "watchdog" not in active:
        return None
    limits = policy.limits
    disk = float(limits.disk)
    if "cgroup" in active:
        return {"every": 0.2, "memory": 0, "processes": 0, "cpu": 0, "disk": disk}
    whole = limits.cpus >= 1 and limits.cpus == int(limits.cpus)
    cpu = 0.0 if whole or limits.cpus >= len(facts.cpus) else limits.cpus * limits.timeout
    held = "rlimits" in active and "namespaces" in active and not (facts.root and user is None)
    return {
        "every": 0.025,
        "memory": limits.memory,
        "own_network": policy.network.mode == "off" and "namespaces" in active,
        "processes": 0 if held else limits.processes,
        "cpu": cpu,
        "rate": limits.cpus,
        "disk": disk,
    }

"""What a launcher is told and what our own stage adds in there: the pure half of `launched.py`.

The view of the file tree, the limits and the filters are the jail's own, from `jail_plan`; here is
what differs where another program makes the namespaces and the root.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ..guest import protocol
from ..interpreter import find as find_interpreter
from ..linux import no_links, root
from ..policy import Isolation, Policy
from ..records import record, replace
from ..types import Enforcement, Request
from . import jail_plan, jail_report
from .base import absent, best_effort, enforced
from .jail_plan import Inside, Shape, View

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

LAYERS = ("landlock", "seccomp", "proc_masks", "cgroup", "rlimits", "watchdog", "output_cap")
# What of the jail the tool itself is for.
_TOOL = frozenset(("namespaces", "pivot_root", "capabilities"))
# Parts of /proc that tell of the host, not of a process, or that change it.
PROC_MASKS = (
    "acpi", "asound", "bus", "cmdline", "config.gz", "diskstats", "driver", "fs", "interrupts",
    "iomem", "ioports", "irq", "kallsyms", "kcore", "key-users", "keys", "kmsg", "kpagecgroup",
    "kpagecount", "kpageflags", "latency_stats", "modules", "mtrr", "partitions", "sched_debug",
    "scsi", "slabinfo", "swaps", "sys", "sysrq-trigger", "timer_list", "timer_stats", "tty",
    "vmallocinfo",
)  # fmt: skip
# Where this host's user may read more than anybody may: under a tool a guest stays that user.
_ROOTS: Mapping[str, Inside] = {"/etc/ssl": (("private", "hide"),)}
STAGE_DIR = "/.stage/linux"
LINUX_DIR = os.path.dirname(os.path.abspath(root.__file__))
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_FAMILIES = (_AF_UNIX, _AF_INET, _AF_INET6)
_WATCH_EVERY, _WATCH_DISK_EVERY = 0.02, 0.05

Show = tuple[str, str, str, Inside]


@record
class Places:
    """Where things are in a sandbox. `scratch` are the file systems that it can write to, `probe`
    is a directory that only Landlock keeps it from writing to ("mkdir") or reading ("list")."""

    work: str
    home: str
    scratch: tuple[str, ...]
    directories: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    probe: tuple[str, str]
    readable: tuple[str, ...]
    writable: tuple[str, ...]


@record
class Sandbox:
    """What a tool is to make, in plain values: the input of the argv compilers.

    `show` is in the order of mounting, and its sources that are in `resolved` must lead through no
    link any more; `masks` are parts of /proc. Of what is to be covered,
    `directories` are those that are directories, and `top` are the host's top directories and
    those of /run: `present` fills them in, when the run starts.
    `user` is what the guest is to be called in a user namespace of the tool's, or None without one;
    `maps_root` says that our stage will make one, of root's, which takes CAP_SETFCAP.
    """

    show: tuple[Show, ...]
    links: tuple[tuple[str, str], ...]
    hide: tuple[str, ...]
    masks: tuple[str, ...]
    resolved: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    top: tuple[str, ...] = ()
    online: bool
    disk: int
    inodes: int
    user: int | None
    maps_root: bool


@record
class Ends:
    """Descriptor numbers that must pass through the tool. `filter` is our seccomp program, for a
    tool that takes one, and `data` other files that the tool reads."""

    tell: int
    frames: int
    stdin: int
    stdout: int
    stderr: int
    filter: int = -1
    data: tuple[int, ...] = ()

    @property
    def stage(self) -> tuple[int, ...]:
        return self.tell, self.frames, self.stdin, self.stdout, self.stderr

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.stage, *((self.filter,) if self.filter >= 0 else ()), *self.data)


@record
class Spec:
    """Everything `run` needs."""

    sandbox: Sandbox
    places: Places
    shape: Shape
    argv: tuple[str, ...]
    file: str | None
    worker: bool
    layers: tuple[str, ...]
    guarded: tuple[str, ...]
    own_user: bool
    watch: Mapping[str, float] | None


def active_layers(facts: HostFacts, disabled: frozenset[str]) -> frozenset[str]:
    there = {
        "landlock": facts.landlock_abi > 0,
        "seccomp": facts.seccomp,
        "cgroup": facts.cgroup is not None,
    }
    return frozenset(name for name in LAYERS if there.get(name, True)) - disabled


def spec(
    policy: Policy,
    request: Request,
    facts: HostFacts,
    active: frozenset[str],
    *,
    tool_user: bool,
    sized: bool,
    overhead: int,
) -> Spec:
    """`tool_user`: the tool makes a user namespace. `sized`: it holds the size of the work
    directory. `overhead`: how many processes of its own and ours there are beside the guest's."""
    jail = jail_plan.spec(policy, request, facts, active | _TOOL)
    online = policy.network.mode == "any"
    # Without a user namespace of the run's own the number would count all of this user's.
    own_user = not tool_user and facts.userns
    rlimits = tuple(
        # The stage is in the tool's namespace.
        (number, value + (tool_user and number == resource.RLIMIT_NPROC))
        for number, value in jail.shape.rlimits
        if number != resource.RLIMIT_NPROC or _counted(facts, tool_user or own_user)
    )
    if rlimits and not sized and resource.RLIMIT_FSIZE not in dict(rlimits):
        rlimits = (*rlimits, (resource.RLIMIT_FSIZE, jail.shape.disk))
    # A watchdog cannot tell how much a TCP socket holds, and the size of its buffers is the tool's
    # network namespace's: where only what is enforced will do there are none.
    families = _FAMILIES if "cgroup" in active or not _demanding(policy) else (_AF_UNIX,)
    shape = replace(
        jail.shape,
        network="outer" if online else "fresh",
        families=jail.shape.families if online else _families(policy, request, families),
        rlimits=rlimits,
    )
    view = jail.outer.view
    late = zip(view.waiting, jail.shape.waiting, strict=True)
    show = (*view.show, *((source, at, mode, inside) for (source, mode, inside), (_, at) in late))
    show = tuple(
        (source, at, mode, (*inside, *_ROOTS.get(at, ()))) for source, at, mode, inside in show
    )
    writable = tuple(place for _, place, mode, _ in show if mode == "rw")
    return Spec(
        sandbox=Sandbox(
            show=((LINUX_DIR, STAGE_DIR, "ro", ()), *show),
            resolved=view.resolved,
            links=(*view.links, *((f"/{path}", target) for path, target in root.LINKS)),
            hide=tuple(path for path in view.hide if _is_shown(path, view)),
            masks=_masks() if "proc_masks" in active else (),
            online=online,
            disk=shape.disk,
            inodes=shape.inodes,
            user=jail_user() if tool_user else None,
            maps_root=own_user and facts.root,
        ),
        places=Places(
            work=root.WORK,
            home=root.HOME,
            scratch=(root.RUN,),
            directories=(root.WORK, root.HOME, root.TMP, root.SHM),
            links=(),
            probe=("mkdir", root.RUN),
            readable=("/",),
            writable=(root.WORK, root.HOME, root.TMP, root.SHM, *writable),
        ),
        shape=shape,
        argv=jail.argv or _own_worker(),
        file=jail.file,
        worker=jail.worker,
        layers=tuple(name for name in LAYERS if name in active),
        guarded=jail.guarded,
        own_user=own_user,
        watch=_watch(policy, facts, active, tool_user or own_user, sized, shape, overhead),
    )


def _families(policy: Policy, request: Request, families: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `families` that a run in an empty network of its own may open sockets of."""
    needed = jail_plan._program(request)[3]
    shown = jail_plan.shows_host(jail_plan.all_mounts(policy, request), needed)
    return jail_plan.without_named_sockets(families, policy, shown)


def _demanding(policy: Policy) -> bool:
    """Whether the policy's floor takes nothing that is best effort."""
    return not Isolation.PROCESS.at_least(policy.min_isolation)


def jail_user() -> int:
    from ..linux.namespaces import GUEST_ID

    return GUEST_ID


def _own_worker() -> tuple[str, ...]:
    boot = protocol.boot_code(jail_plan.GUEST_DIR, 3)
    return (find_interpreter(None).executable, "-I", "-c", boot)


def stage_command(directory: str, ends: Ends) -> tuple[str, ...]:
    """How our stage is started: `directory` is where the package `linux` is in the sandbox."""
    parent, name = os.path.split(directory)
    numbers = ", ".join(map(str, ends.stage))
    code = (
        f"import sys; sys.path.append({parent!r}); from {name}.stage import main; main({numbers})"
    )
    return (find_interpreter(None).executable, "-I", "-S", "-B", "-c", code)


def _counted(facts: HostFacts, own_namespace: bool) -> bool:
    """Whether RLIMIT_NPROC binds the guest, and counts nobody else."""
    return own_namespace and not facts.root


def _is_shown(path: str, view: View) -> bool:
    """Whether a path of the host is in the sandbox, under the same name."""
    return any(source == at and jail_plan.inside_any(path, (at,)) for source, at, _, _ in view.show)


def _watch(
    policy: Policy,
    facts: HostFacts,
    active: frozenset[str],
    own_namespace: bool,
    sized: bool,
    shape: Shape,
    overhead: int,
) -> dict[str, float] | None:
    """What the supervisor must count, because the kernel does not. Zero means nothing."""
    if "watchdog" not in active:
        return None
    limits = policy.limits
    grouped = "cgroup" in active
    whole = limits.cpus == int(limits.cpus) or limits.cpus >= len(facts.cpus)
    held = "rlimits" in active and _counted(facts, own_namespace)
    return {
        "every": _WATCH_DISK_EVERY if grouped else _WATCH_EVERY,
        "memory": 0 if grouped else limits.memory,
        "own_network": shape.network != "outer",
        "processes": 0 if grouped or held else limits.processes + overhead,
        "cpu": 0 if grouped or whole else limits.cpus * limits.timeout,
        "rate": limits.cpus,
        # A file system of that size is rounded up to a page: full is not over.
        "disk": shape.disk + (resource.getpagesize() if sized else 0),
        "inodes": shape.inodes,
    }


def enforcement(
    policy: Policy,
    request: Request,
    facts: HostFacts,
    active: frozenset[str],
    *,
    tool: str,
    tool_user: bool,
    sized: bool,
) -> dict[str, Enforcement]:
    """Every policy field, and what will hold it: the jail's report where it is the same."""
    report = jail_report.enforcement(policy, request, facts, active | _TOOL)
    report["timeout"] = enforced(
        f"the host's clock, then the supervisor kills {tool} and the kernel its pid namespace"
    )
    if "cgroup" in active and facts.cgroup is not None:
        report["processes"] = enforced(f"cgroup v{facts.cgroup.version} pids controller")
    else:
        if "rlimits" in active and _counted(facts, tool_user or facts.userns):
            report["processes"] = enforced("RLIMIT_NPROC in a user namespace of the run's own")
        elif "watchdog" in active:
            report["processes"] = best_effort("a watchdog counts the tree, 50 times a second")
        else:
            report["processes"] = absent("no cgroup, no RLIMIT_NPROC that binds, no watchdog")
    report["disk"] = _disk(policy, active, tool, sized)
    memory = report["memory"]
    if "cgroup" not in active and memory.state == "enforced":
        if _demanding(policy):
            report["memory"] = enforced(f"{memory.by}; no sockets but AF_UNIX")
        else:
            report["memory"] = best_effort(f"{memory.by}, but not how much TCP sockets hold")
    if "proc_masks" in active:
        by = report["filesystem"].by
        report["filesystem"] = replace(report["filesystem"], by=f"{by}, /proc thinned out")
    return report


def _disk(policy: Policy, active: frozenset[str], tool: str, sized: bool) -> Enforcement:
    size = jail_plan.disk_size(policy)
    inodes = jail_plan.inode_count(size)
    if size > policy.limits.memory:
        return absent(
            f"the work directory is in memory, and {policy.limits.memory} bytes of memory cannot "
            f"hold {size} bytes of disk"
        )
    mounts = "; a writable mount is the host's, RLIMIT_FSIZE holds each file in it"
    rest = mounts if "rlimits" in active else ""
    if sized:
        return enforced(
            f"a memory file system of {size} bytes; a watchdog ends the run at {inodes} files{rest}"
        )
    if "watchdog" not in active:
        return absent(f"{tool} gives memory file systems no size, and the watchdog is off")
    words = (
        f"a watchdog ends the run past {size} bytes or {inodes} files in {tool}'s memory file "
        f"systems{rest}"
    )
    if "cgroup" in active:
        return enforced(f"{words}; what they hold counts as memory, too")
    return enforced(words)


@cache
def _masks() -> tuple[str, ...]:
    """`PROC_MASKS`, and what only root may read in /proc: that differs between kernels, and under a
    tool that root started the guest has root's user id on the host."""
    with os.scandir("/proc") as entries:
        roots = sorted(
            entry.name
            for entry in entries
            if not entry.name.isdigit()
            and not entry.is_symlink()
            and not entry.stat().st_mode & stat.S_IROTH
        )
    return tuple(f"/proc/{name}" for name in dict.fromkeys((*PROC_MASKS, *roots)))


def below(directory: str, name: str) -> str:
    return os.path.normpath(os.path.join(directory, name))


def closed_places(sandbox: Sandbox) -> tuple[tuple[str, bool], ...]:
    """(path in the sandbox, whether it is read-only) of what is shown; what is covered is not."""
    places: list[tuple[str, bool]] = []
    for _, at, mode, inside in sandbox.show:
        places.append((at, mode == "ro"))
        places += ((below(at, part), what == "ro") for part, what in inside)
    return (*places, *((path, False) for path in sandbox.hide))


def identities(sandbox: Sandbox, cleanup: contextlib.ExitStack) -> tuple[tuple[str, int, int], ...]:
    """(place in the sandbox, device, inode) of what is to be shown there. A tool opens paths by
    name, and what it has opened is compared with these, which went through no link.

    The inodes are held until `cleanup` ends: none of them can get another file meanwhile.
    """
    _refuse_led_places(sandbox)
    found = []
    for source, at, _, inside in sandbox.show:
        if source not in sandbox.resolved:
            continue
        parts = [part for part, what in inside if what != "hide"]
        for part in (".", *parts):
            fd = no_links.open_path(below(source, part))
            cleanup.callback(os.close, fd)
            held = os.fstat(fd)
            found.append((below(at, part), held.st_dev, held.st_ino))
    return tuple(found)


def _refuse_led_places(sandbox: Sandbox) -> None:
    """OSError where a link in a mount leads the place of another one inside it elsewhere: a tool
    makes places while the host's own tree is still in its sight."""
    asked = [(source, at) for source, at, _, _ in sandbox.show if source in sandbox.resolved]
    for _, at in asked:
        for source, above in asked:
            if at.startswith(above.rstrip("/") + "/"):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.close(no_links.open_path(os.path.relpath(at, above), source))


def present(sandbox: Sandbox) -> Sandbox:
    """Without what is not there, now that the run starts: nothing can be mounted on that."""
    directories: list[str] = []

    def there(path: str) -> bool:
        if os.path.isdir(path):
            directories.append(path)
        return os.path.exists(path)

    show = tuple(
        (source, at, mode, tuple(part for part in inside if there(below(source, part[0]))))
        for source, at, mode, inside in sandbox.show
    )
    masks = tuple(filter(there, sandbox.masks))
    hide = tuple(filter(there, sandbox.hide))
    top = sorted(os.listdir("/"))
    if os.path.isdir("/run"):
        top += [f"run/{name}" for name in sorted(os.listdir("/run")) if name != "firejail"]
    top = [name for name in top if not os.path.islink(f"/{name}")]
    return replace(
        sandbox,
        show=show,
        masks=masks,
        hide=hide,
        directories=tuple(directories),
        top=tuple(top),
    )

"""What a child process can be held by where there is no Linux: the pure half of `portable.py`.

From a policy, a request and a few facts about the host: what each policy field is held by, which
fields nothing holds, and the plain values that a run is started with.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator

from .. import language_host, languages
from ..errors import BackendUnavailable, CommandNotFound
from ..interpreter import find as find_interpreter
from ..policy import Policy
from ..records import record
from ..types import Enforcement, Request
from .base import absent, best_effort, enforced, kept_by_host

LAYERS = ("rlimits", "watchdog", "descendants", "output_cap")

SANDBOX_EXEC = "/usr/bin/sandbox-exec"
# What is looked up in Seatbelt profiles by a parameter each, because a path may hold any character.
_RUN, _HOME = "RUN", "HOME"
# Files outside of the run's own that programs write to in order to work at all.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/tty", "/dev/dtracehelper")
_POSIX_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAC_PATH = f"/opt/homebrew/bin:{_POSIX_PATH}"
_NAMES = {"darwin": "macOS", "win32": "Windows", "linux": "plain POSIX"}
_UNTESTED = "untested"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Room for thread stacks and the like: the total is the watchdog's to hold.
_DATA_SLACK = 256 << 20
# RLIMIT_CPU is only there for a guest that outlives us, so it comes well after all other limits.
_CPU_SLACK = 5.0


@record
class Host:
    """What `compile` needs to know about this machine."""

    platform: str
    root: bool
    cores: int
    ps: str | None
    sandbox_exec: bool
    system_root: str = ""

    @property
    def name(self) -> str:
        return _NAMES.get(self.platform, self.platform)

    @property
    def windows(self) -> bool:
        return self.platform == "win32"

    @property
    def path(self) -> str:
        """The PATH that guests get, and on which their commands are looked up."""
        if self.windows:
            return f"{self.system_root}\\System32;{self.system_root}"
        return _MAC_PATH if self.platform == "darwin" else _POSIX_PATH


def this_host() -> Host:
    return Host(
        platform=sys.platform,
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        cores=os.cpu_count() or 1,
        ps=shutil.which("ps", path="/bin:/usr/bin"),
        sandbox_exec=sys.platform == "darwin" and os.path.exists(SANDBOX_EXEC),
        system_root=os.environ.get("SYSTEMROOT", "C:\\Windows"),
    )


@record
class Watched:
    """What the watchdog ends a run for. Zero means that it does not look at this."""

    memory: int = 0
    processes: int = 0
    cpu: float = 0.0
    disk: int = 0


@record
class Seatbelt:
    """What macOS's sandbox-exec is to hold: the network, and files outside of the run's own.

    `readable` lies in the home directory and is shown, `writable` is also written to.
    """

    network: bool
    home: str
    readable: tuple[str, ...]
    writable: tuple[str, ...]

    def command(self, run: str) -> tuple[str, ...]:
        """What goes before a command line. `run` is the run's directory, without links."""
        paths = {_RUN: run, _HOME: self.home}
        paths |= {f"READ{number}": path for number, path in enumerate(self.readable)}
        paths |= {f"WRITE{number}": path for number, path in enumerate(self.writable)}
        shown = "".join(f'(subpath (param "{name}"))' for name in paths if name != _HOME)
        written = "".join(
            f'(subpath (param "{name}"))' for name in paths if name == _RUN or name[0] == "W"
        )
        devices = "".join(f'(literal "{path}")' for path in _DEVICES)
        # The last rule that matches counts.
        profile = (
            "(version 1)(allow default)"
            + ("(deny network*)" if self.network else "")
            + f"(deny file-write*)(allow file-write* {written}{devices})"
            + f'(deny file-read-data (subpath (param "{_HOME}")))'
            + f"(allow file-read-data {shown})"
        )
        given = [word for name, path in paths.items() for word in ("-D", f"{name}={path}")]
        return (SANDBOX_EXEC, *given, "-p", profile)


@record
class Spec:
    """What a run is started with, apart from the paths that exist only while it lasts.

    `ulimits` are the options of the shell's `ulimit` and their values; `job` are the limits of a
    Windows job object.
    """

    argv: tuple[str, ...]
    file: str | None
    worker: bool
    layers: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    seatbelt: Seatbelt | None
    ulimits: tuple[tuple[str, int], ...]
    job: tuple[tuple[str, float], ...]
    watched: Watched


def enforcement(
    policy: Policy,
    request: Request,
    host: Host,
    active: frozenset[str],
    user: tuple[int, int] | None,
) -> tuple[dict[str, Enforcement], tuple[str, ...]]:
    """Every policy field with what holds it, and a warning for each that nothing holds.

    A limit that nothing here holds is `absent`, and so refused, if the request asked for it. If it
    is only the level's default the run goes on without, and the result says so.
    """
    warnings: list[str] = []

    def nothing(field: str) -> Enforcement:
        why = f"nothing on {host.name} holds this"
        if field in policy.explicit:
            return absent(why)
        warnings.append(f"{field}: {why}; the default was not applied")
        return best_effort(why)

    report: dict[str, Enforcement] = {}
    for field, held in _windows_limits() if host.windows else _posix_limits(policy, host, active):
        report[field] = held if held is not None else nothing(field)
    report |= kept_by_host(active)
    report["network"] = _network(policy, host)
    report["filesystem"] = _filesystem(policy, host, user)
    warnings.append(_in_reach(host))
    report["mounts"] = _mounts(request, host)
    if policy.limits.fuel is not None:
        report["fuel"] = absent("a process has no fuel; the wasm backend counts it")
    if policy.modules.active:
        report["modules"] = best_effort("import lint before the run; a lint, not a boundary")
    return report, tuple(warnings)


def _posix_limits(
    policy: Policy, host: Host, active: frozenset[str]
) -> Iterator[tuple[str, Enforcement | None]]:
    """None stands for a field that nothing holds."""
    watchdog, rlimits = "watchdog" in active, "rlimits" in active
    whom = (
        "and to all that ps shows of its tree; a daemon that hides from ps survives"
        if "descendants" in active
        else "only; what left it survives"
    )
    yield "timeout", best_effort(f"the host's clock, then SIGKILL to the process group {whom}")
    also = " and RLIMIT_DATA, where the system counts it" if rlimits else ""
    by_memory = f"a watchdog adds up the tree's resident sizes, 4 times a second{also}"
    yield "memory", best_effort(by_memory) if watchdog else None
    if policy.limits.cpus >= host.cores:
        yield "cpus", enforced("this machine has no more cores than allowed")
    else:
        by_cpu = "an end at cpus x timeout seconds of CPU time, looked at 4 times a second"
        yield "cpus", best_effort(by_cpu) if watchdog else None
    by_count = "a watchdog counts the tree, 4 times a second: a fork bomb is ended, not prevented"
    yield "processes", best_effort(by_count) if watchdog else None
    parts = [
        *(["RLIMIT_FSIZE for each file"] if rlimits else []),
        *(["a watchdog over the work directory"] if watchdog else []),
    ]
    yield "disk", best_effort(" and ".join(parts)) if parts else None
    yield "open_files", enforced("RLIMIT_NOFILE") if rlimits else None


def _windows_limits() -> Iterator[tuple[str, Enforcement | None]]:
    job = f"the job object ({_UNTESTED})"
    yield "timeout", best_effort(f"the host's clock, then the end of {job}")
    yield "memory", best_effort(f"the committed memory of {job}")
    yield "cpus", best_effort(f"affinity and CPU rate of {job}")
    yield "processes", best_effort(f"the active processes of {job}")
    yield "disk", best_effort(f"a watchdog over the work directory ({_UNTESTED})")
    yield "open_files", None


def _network(policy: Policy, host: Host) -> Enforcement:
    match policy.network.mode:
        case "any":
            return enforced("open, as the policy asks")
        case "hosts":
            return absent("a plain process cannot be held to a list of hosts")
    if host.sandbox_exec:
        return best_effort(f"sandbox-exec denies network* ({_UNTESTED})")
    return absent(f"nothing on {host.name} closes the network for one process")


def _filesystem(policy: Policy, host: Host, user: tuple[int, int] | None) -> Enforcement:
    files = policy.filesystem
    if files.read_only or files.hidden:
        return absent(f"nothing on {host.name} holds read-only and hidden paths for one process")
    if host.root and user is None:
        return absent("to root every file is open; set `user` or run unprivileged")
    if host.sandbox_exec:
        return best_effort(
            "sandbox-exec: writes outside of the run's directory and mounts are refused, and so is"
            f" the home directory ({_UNTESTED}); this user's permissions hold the rest"
        )
    return best_effort("this user's file permissions only: what the user can read, the program can")


def _in_reach(host: Host) -> str:
    if host.sandbox_exec:
        return (
            "files are not isolated: outside of the home directory the program reads whatever this"
            ' user can; backend="wasm" shows it only the files of the run'
        )
    return (
        "files are not isolated: the program reads and changes whatever this user can;"
        ' backend="wasm" shows it only the files of the run'
    )


def _mounts(request: Request, host: Host) -> Enforcement:
    for mount in request.mounts:
        if os.path.isabs(mount.dst) and mount.dst != mount.src:
            return absent(
                f"{mount.dst!r}: a plain process sees host paths; use a relative destination"
            )
        if mount.mode == "ro":
            return absent(f"nothing on {host.name} holds a path read-only for one process")
    if request.mounts:
        return best_effort("a link in the work directory, and this user's file permissions")
    return enforced("none asked for")


def shortcomings(host: Host, user: tuple[int, int] | None) -> Iterator[str]:
    """What this host lacks, each with its consequence."""
    yield f"on {host.name} limits are approximate and files are held by permissions only"
    if host.platform != "linux":
        yield f"this backend has not been tested on {host.name}"
    if not host.sandbox_exec:
        yield 'the network cannot be closed here: runs need network="any"'
    if host.root and user is None:
        yield "running as root: every run is refused until `user` is set"


def spec(policy: Policy, request: Request, host: Host, active: frozenset[str]) -> Spec:
    """The values for a run. Starts nothing; a missing command is CommandNotFound."""
    argv, file, worker = _program(request, host)
    limits = policy.limits
    watchdog = "watchdog" in active
    counted = watchdog and not host.windows  # a job object holds these by itself
    cpu_seconds = limits.cpus * limits.timeout
    return Spec(
        argv=argv,
        file=file,
        worker=worker,
        layers=tuple(name for name in LAYERS if name in active),
        links=tuple((m.dst, m.src) for m in request.mounts if not os.path.isabs(m.dst)),
        seatbelt=_seatbelt(policy, request, argv[0]) if host.sandbox_exec else None,
        ulimits=_ulimits(policy, host) if "rlimits" in active and not host.windows else (),
        job=(
            ("memory", limits.memory),
            ("processes", limits.processes),
            ("cpus", min(limits.cpus, host.cores)),
            ("cores", host.cores),
        )
        if host.windows
        else (),
        watched=Watched(
            memory=limits.memory if counted else 0,
            processes=limits.processes if counted else 0,
            cpu=cpu_seconds if counted and limits.cpus < host.cores else 0.0,
            disk=limits.disk if watchdog else 0,
        ),
    )


def _seatbelt(policy: Policy, request: Request, program: str) -> Seatbelt:
    """The interpreter may be installed below the home directory, and so may Belljar be."""
    files = policy.filesystem
    home = os.path.realpath(os.path.expanduser("~"))
    beside = os.path.dirname(program)
    wanted = (sys.prefix, sys.base_prefix, beside, os.path.dirname(beside), _PACKAGE)
    # Only what is really inside: to show a directory above it would show the home directory.
    readable = {path for each in wanted if (path := os.path.realpath(each)).startswith(f"{home}/")}
    written = {os.path.realpath(mount.src) for mount in request.mounts}
    written |= {os.path.realpath(path) for path in files.read_write}
    return Seatbelt(
        network=policy.network.mode == "off",
        home=home,
        readable=tuple(sorted(readable)),
        writable=tuple(sorted(written)),
    )


def _ulimits(policy: Policy, host: Host) -> tuple[tuple[str, int], ...]:
    limits = policy.limits
    cpu = min(min(limits.cpus, host.cores) * limits.timeout + _CPU_SLACK, 1e9)
    return (
        ("c", 0),
        ("n", limits.open_files),
        # POSIX says blocks of 512 bytes. A shell that reads 1024 allows twice as much, which the
        # watchdog still sees; the other way round honest programs would fail.
        ("f", math.ceil(limits.disk / 512)),
        ("d", math.ceil((limits.memory + _DATA_SLACK) / 1024)),
        ("t", math.ceil(cpu)),
    )


def _program(request: Request, host: Host) -> tuple[tuple[str, ...], str | None, bool]:
    """(argv, the file the program is written to, whether our worker runs it)."""
    if request.command:
        path = shutil.which(request.command[0], path=host.path)
        if path is None:
            raise CommandNotFound("command", f"{request.command[0]!r} is not installed")
        return (path, *request.command[1:], *request.args), None, False
    language = languages.of(request)
    if language.family == "python":
        python = language_host.python_of(language, request.python, "subprocess")
        return (find_interpreter(python).executable, "-I"), language.file, True
    path = language_host.installed(language, "subprocess")
    if host.windows and path.lower().startswith(host.system_root.lower()):
        raise BackendUnavailable(
            f"{path!r} starts programs in WSL, out of reach of every limit here",
            fix="install Git for Windows and put its bash first on PATH",
        )
    words = language.command_on("subprocess")[1:]
    return (path, *words, language.file, *request.args), language.file, False

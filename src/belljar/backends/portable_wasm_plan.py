"""What holds each policy field for a WebAssembly guest in a plain process: the pure half of
`portable_wasm.py`. From a policy, a request and the platform's name; starts nothing."""

from __future__ import annotations

import os
import posixpath

from .. import languages
from ..policy import Policy
from ..records import record
from ..types import Enforcement, Request
from .base import absent, best_effort, covered_by, enforced, kept_by_host
from .wasm_orders import language_of

LAYERS = ("store_limits", "epoch", "rlimits", "watchdog", "output_cap")
# What a guest calls its two directories, which are the run's own on the host.
WORK, TMP = "/sandbox/work", "/tmp"
_WORKER_FILES = 40  # for the worker itself
_ALONE = "no jail around the worker"


@record
class Spec:
    """What a run is started with, apart from the paths that exist only while it lasts.

    `shown` are (host directory, name in the guest): read-only ones of the host's.
    """

    language: str
    file: str
    files: bool
    fuel: bool
    memory: int
    disk: int
    rlimits: tuple[tuple[str, int], ...]
    shown: tuple[tuple[str, str], ...]
    layers: tuple[str, ...]


def enforcement(
    policy: Policy, request: Request, platform: str, active: frozenset[str]
) -> tuple[dict[str, Enforcement], tuple[str, ...]]:
    """Every policy field with what holds it, and a warning for each that nothing holds.

    A limit that nothing here holds is `absent`, and so refused, if the request asked for it. If it
    is only the level's default the run goes on without, and the result says so.
    """
    warnings: list[str] = []
    limits = policy.limits

    def nothing(field: str, why: str) -> Enforcement:
        if field in policy.explicit:
            return absent(why)
        warnings.append(f"{field}: {why}; the default was not applied")
        return best_effort(why)

    kill = "the host's clock, then the end of the worker"
    report = {
        "timeout": enforced(
            f"an epoch deadline in the engine, behind it {kill}" if "epoch" in active else kill
        ),
        "memory": enforced(
            f"the engine gives {limits.memory} bytes beyond the interpreter's own, no more"
        )
        if "store_limits" in active
        else absent("the engine's limit is off"),
        "cpus": enforced("a guest is one thread")
        if limits.cpus >= 1
        else nothing("cpus", "nothing holds a share of one core here"),
        "processes": enforced("WebAssembly has no processes and no threads"),
        "disk": best_effort(_disk(platform, active))
        if "watchdog" in active
        else nothing("disk", "the watchdog is off"),
        **kept_by_host(active),
        "open_files": enforced(f"RLIMIT_NOFILE of the worker, which keeps {_WORKER_FILES} itself")
        if "rlimits" in active and platform != "win32"
        else nothing("open_files", "Windows has no limit of open files"),
        "network": enforced(f"the engine alone: WASI grants no address; {_ALONE}")
        if policy.network.mode == "off"
        else absent("WebAssembly guests have no network"),
        "filesystem": _filesystem(policy, platform),
        "mounts": _mounts(policy, request),
    }
    if limits.fuel is not None:
        report["fuel"] = enforced("the engine counts instructions, equally every time")
    if policy.modules.active:
        report["modules"] = best_effort("import lint before the run; a lint, not a boundary")
    return report, tuple(warnings)


def _disk(platform: str, active: frozenset[str]) -> str:
    each = "RLIMIT_FSIZE for each file and " if "rlimits" in active and platform != "win32" else ""
    return f"{each}a watchdog over the run's directories, 4 times a second"


def _filesystem(policy: Policy, platform: str) -> Enforcement:
    files = policy.filesystem
    if files.read_write:
        return absent(_no_writing("filesystem.read_write"))
    if files.read_only and platform == "win32":
        return absent("a guest's paths are POSIX's: mount the directory at a relative name")
    if reason := _not_shown(policy, tuple((path, path) for path in files.read_only)):
        return absent(reason)
    opened = "the run's directories and what is shown"
    return enforced(f"the engine alone: WASI opens nothing but {opened}; {_ALONE}")


def _mounts(policy: Policy, request: Request) -> Enforcement:
    if any(mount.mode != "ro" for mount in request.mounts):
        return absent(_no_writing("a writable mount"))
    if reason := _not_shown(policy, tuple((m.src, m.dst) for m in request.mounts)):
        return absent(reason)
    return enforced(f"the engine alone: WASI, one permission a mount; {_ALONE}")


def _no_writing(what: str) -> str:
    # In a jail the metadata is covered by mounts, so that host tools execute nothing from there.
    return (
        f"nothing protects a project's metadata inside {what} here; mount it read-only and take"
        " the program's files from `outputs`"
    )


def _not_shown(policy: Policy, shown: tuple[tuple[str, str], ...]) -> str:
    """Why a path cannot be shown to a guest; "" if all can."""
    for source, place in shown:
        if f"{WORK}/".startswith(f"{_place(place)}/"):
            return "a mount in place of the work directory hides the program"
        if not os.path.isdir(source):
            return f"{source!r} is a file: WASI shows directories"
        for hidden in policy.filesystem.hidden:
            if covered_by(hidden, (source,)):
                return f"WASI cannot hide {hidden!r} inside {source!r}, which it shows"
    return ""


def _place(name: str) -> str:
    """What the guest calls a mount's destination."""
    return posixpath.normpath(posixpath.join(WORK, name))


def spec(policy: Policy, request: Request, active: frozenset[str]) -> Spec:
    """The values for a run. BackendUnavailable for a program that no guest here runs."""
    language, limits = language_of(request), policy.limits
    files = policy.filesystem
    named = tuple((mount.src, _place(mount.dst)) for mount in request.mounts)
    rlimits = (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", limits.open_files + _WORKER_FILES),
        ("RLIMIT_FSIZE", limits.disk),
    )
    return Spec(
        language=language,
        file=languages.of(request).file,
        files=language != "javascript",
        fuel=limits.fuel is not None,
        memory=limits.memory if "store_limits" in active else 0,
        disk=limits.disk,
        rlimits=rlimits if "rlimits" in active else (),
        shown=(*((path, path) for path in files.read_only), *named),
        layers=tuple(name for name in LAYERS if name in active),
    )

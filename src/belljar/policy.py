"""The rules a program runs under, and how a request's wishes become them.

`resolve` is pure. Whatever a request says, the policy it returns is never past the operator's
ceiling and its isolation floor is never below the level's, the request's or the operator's.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal

from . import units
from .errors import PolicyError
from .types import Mount


class Isolation(StrEnum):
    """The ladder `none < process < landlock < jail = container < wasm = gvisor < vm`."""

    NONE = "none"
    PROCESS = "process"
    LANDLOCK = "landlock"
    JAIL = "jail"
    CONTAINER = "container"
    WASM = "wasm"
    GVISOR = "gvisor"
    VM = "vm"

    @property
    def rank(self) -> int:
        return _RANKS[self.value]

    def at_least(self, floor: Isolation) -> bool:
        return self.rank >= floor.rank

    @classmethod
    def parse(cls, given: object, where: str = "min_isolation") -> Isolation:
        try:
            return cls(given)  # type: ignore[arg-type]
        except ValueError:
            known = ", ".join(cls)
            raise PolicyError(where, f"{given!r} is not one of {known}") from None


_RANKS = {
    "none": 0, "process": 1, "landlock": 2, "jail": 3, "container": 3, "wasm": 4, "gvisor": 4, "vm": 5,
}  # fmt: skip

Level = Literal["permissive", "standard", "strict"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a run may use up. Seconds, bytes, cores and counts; `fuel` only where a backend counts it."""

    timeout: float
    memory: int
    cpus: float
    processes: int = 50
    disk: int = 1 << 30
    output: int = 1 << 20
    open_files: int = 256
    fuel: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """`off`, `any`, or `hosts`: only `allow` (names, `*.wildcards`, `host:port`) minus `blocked_ports`."""

    mode: Literal["off", "hosts", "any"] = "off"
    allow: tuple[str, ...] = ()
    blocked_ports: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Filesystem:
    """Host paths beyond the work directory. `hidden` wins over both others."""

    read_only: tuple[str, ...] = ()
    read_write: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    private_tmp: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules:
    """What the import lint accepts. `allow=None` accepts everything that `deny` does not name."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        return self.allow is not None or bool(self.deny)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A complete set of rules. `explicit` names the fields that the request itself set."""

    level: Level
    min_isolation: Isolation
    limits: Limits
    network: Network = field(default_factory=Network)
    filesystem: Filesystem = field(default_factory=Filesystem)
    modules: Modules = field(default_factory=Modules)
    explicit: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "min_isolation": self.min_isolation.value,
            "limits": {f.name: getattr(self.limits, f.name) for f in fields(Limits)},
            "network": {
                "mode": self.network.mode,
                "allow": list(self.network.allow),
                "blocked_ports": list(self.network.blocked_ports),
            },
            "filesystem": {
                "read_only": list(self.filesystem.read_only),
                "read_write": list(self.filesystem.read_write),
                "hidden": list(self.filesystem.hidden),
                "private_tmp": self.filesystem.private_tmp,
            },
            "modules": {
                "allow": None if self.modules.allow is None else list(self.modules.allow),
                "deny": list(self.modules.deny),
            },
        }


DANGEROUS_MODULES = ("os", "subprocess", "shutil", "socket")

LEVEL_MODULES: Mapping[Level, tuple[str, ...]] = {
    "permissive": ("pandas", "math", "statistics", "json", "numpy", "datetime"),
    "standard": ("pandas", "math", "statistics", "json"),
    "strict": ("math", "statistics", "json"),
}


def level_policy(level: Level) -> Policy:
    """The level's own defaults, before any request."""
    mebi = 1 << 20
    match level:
        case "permissive":
            return Policy(
                level=level,
                min_isolation=Isolation.NONE,
                limits=Limits(timeout=60, memory=1024 * mebi, cpus=os.cpu_count() or 1),
                modules=Modules(allow=LEVEL_MODULES[level]),
            )
        case "standard":
            return Policy(
                level=level,
                min_isolation=Isolation.PROCESS,
                limits=Limits(timeout=30, memory=512 * mebi, cpus=1),
            )
        case "strict":
            return Policy(
                level=level,
                min_isolation=Isolation.JAIL,
                limits=Limits(timeout=10, memory=256 * mebi, cpus=0.5),
                modules=Modules(allow=LEVEL_MODULES[level]),
            )
    known = ", ".join(LEVEL_MODULES)
    raise PolicyError("level", f"{level!r} is not one of {known}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """What the operator allows at most. None means that the operator sets no bound."""

    timeout: float | None = 300.0
    memory: int | None = None
    cpus: float | None = None
    processes: int | None = None
    disk: int | None = None
    output: int | None = None
    open_files: int | None = None
    fuel: int | None = None
    network: Literal["off", "hosts", "any"] = "any"
    mounts: Literal["none", "ro", "rw"] = "rw"
    min_isolation: Isolation = Isolation.NONE


# How each limit is read. Also the list of limits that a request and the ceiling may name.
LIMITS: Mapping[str, Callable[[str, object], Any]] = {
    "timeout": units.seconds,
    "memory": units.size,
    "cpus": units.cores,
    "processes": units.count,
    "disk": units.size,
    "output": units.size,
    "open_files": units.count,
    "fuel": units.count,
}

POLICY_KEYS = (*LIMITS, "network", "filesystem", "modules", "min_isolation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The policy to run under, and what the operator's ceiling changed about the request."""

    policy: Policy
    mounts: tuple[Mount, ...] = ()
    warnings: tuple[str, ...] = ()


def resolve(
    level: str,
    wishes: Mapping[str, Any],
    *,
    mounts: tuple[Mount, ...] = (),
    ceiling: Ceiling | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """Level defaults, then the operator's `defaults`, then the request's `wishes`, under `ceiling`.

    A number past the ceiling is lowered to it, with a warning. A right past the ceiling (network,
    mounts) is refused, because half a right is a broken program. None means "not asked".
    """
    ceiling = ceiling or Ceiling()
    policy = level_policy(level)  # type: ignore[arg-type]
    policy = _apply(policy, defaults or {}, explicit=False)
    asked = {k: wish for k, wish in wishes.items() if wish is not None or k not in POLICY_KEYS}
    policy = _apply(policy, asked, explicit=True)

    warnings: list[str] = []
    limits = policy.limits
    for name in LIMITS:
        most, wanted = getattr(ceiling, name), getattr(limits, name)
        # No wish at all (fuel) is a wish without end: the ceiling bounds that too.
        if most is not None and (wanted is None or wanted > most):
            limits = replace(limits, **{name: most})
            if name in policy.explicit:
                warnings.append(f"{name} {wanted:g} lowered to the operator's ceiling {most:g}")
    floor = policy.min_isolation
    if not floor.at_least(ceiling.min_isolation):
        floor = ceiling.min_isolation

    reach = ("off", "hosts", "any")
    if reach.index(policy.network.mode) > reach.index(ceiling.network):
        raise PolicyError(
            "network",
            f"{policy.network.mode!r} is past the operator's ceiling {ceiling.network!r}",
            fix="ask the operator to raise ceiling.network",
        )
    rights = ("none", "ro", "rw")
    files = policy.filesystem
    for mode, where, what in (
        *((mount.mode, "mounts", mount.src) for mount in mounts),
        *(("ro", "filesystem.read_only", path) for path in files.read_only),
        *(("rw", "filesystem.read_write", path) for path in files.read_write),
    ):
        if rights.index(mode) > rights.index(ceiling.mounts):
            raise PolicyError(
                where,
                f"{mode} {what!r} is past the operator's ceiling {ceiling.mounts!r}",
                fix="ask the operator to raise ceiling.mounts",
            )
    policy = replace(policy, limits=limits, min_isolation=floor)
    return Resolved(policy=policy, mounts=mounts, warnings=tuple(warnings))


def _apply(policy: Policy, wishes: Mapping[str, Any], *, explicit: bool) -> Policy:
    unknown = sorted(str(key) for key in wishes if key not in POLICY_KEYS)
    if unknown:
        raise PolicyError(unknown[0], f"unknown policy key; known: {', '.join(POLICY_KEYS)}")
    changes: dict[str, Any] = {}
    limits = {name: LIMITS[name](name, wishes[name]) for name in LIMITS if name in wishes}
    if limits:
        changes["limits"] = replace(policy.limits, **limits)
    if "network" in wishes:
        changes["network"] = parse_network(wishes["network"])
    if "filesystem" in wishes:
        changes["filesystem"] = parse_filesystem(wishes["filesystem"])
    if "modules" in wishes:
        changes["modules"] = parse_modules(wishes["modules"], policy.level)
    if "min_isolation" in wishes:
        floor = Isolation.parse(wishes["min_isolation"])
        # The floor can only be raised: a lower wish leaves the level's floor standing.
        changes["min_isolation"] = floor if floor.at_least(policy.min_isolation) else policy.min_isolation
    if explicit:
        changes["explicit"] = frozenset(wishes)
    return replace(policy, **changes)


def parse_network(given: object) -> Network:
    """"off", "any", a list of hosts, a mapping, or a Network."""
    if isinstance(given, Network):
        given = {"mode": given.mode, "allow": given.allow, "blocked_ports": given.blocked_ports}
    if given is False or given == "off":
        return Network()
    if given == "any":
        return Network(mode="any")
    if isinstance(given, str):
        raise PolicyError("network", f"{given!r} is not \"off\", \"any\" or a list of hosts")
    if isinstance(given, list | tuple):
        given = {"mode": "hosts", "allow": given}
    if not isinstance(given, Mapping):
        raise PolicyError("network", f"cannot be a {type(given).__name__}")
    _known("network", given, ("mode", "allow", "blocked_ports"))
    allow = tuple(_host(host) for host in _listed("network.allow", given.get("allow", ())))
    mode = given.get("mode", "hosts" if allow else "off")
    if mode not in ("off", "hosts", "any"):
        raise PolicyError("network.mode", f"{mode!r} is not one of off, hosts, any")
    if allow and mode != "hosts":
        raise PolicyError("network.allow", f"contradicts network.mode {mode!r}")
    blocked = _listed("network.blocked_ports", given.get("blocked_ports", ()))
    ports = tuple(units.count("network.blocked_ports", port) for port in blocked)
    if any(port > 65535 for port in ports):
        raise PolicyError("network.blocked_ports", "a port is at most 65535")
    return Network(mode=mode, allow=allow, blocked_ports=ports)


def _host(given: object) -> str:
    if not isinstance(given, str) or not given or any(c in given for c in "\0/ \t\r\n@"):
        raise PolicyError("network.allow", f"{given!r} is not a host name or host:port")
    return given.lower()


def parse_filesystem(given: object) -> Filesystem:
    """A mapping of `read_only`, `read_write`, `hidden` (absolute paths) and `private_tmp`."""
    if isinstance(given, Filesystem):
        given = {f.name: getattr(given, f.name) for f in fields(Filesystem)}
    if not isinstance(given, Mapping):
        raise PolicyError("filesystem", f"cannot be a {type(given).__name__}")
    _known("filesystem", given, tuple(f.name for f in fields(Filesystem)))
    paths = {
        name: tuple(
            _absolute(f"filesystem.{name}", path)
            for path in _listed(f"filesystem.{name}", given.get(name, ()))
        )
        for name in ("read_only", "read_write", "hidden")
    }
    both = set(paths["read_only"]) & set(paths["read_write"])
    if both:
        raise PolicyError("filesystem.read_write", f"{min(both)!r} is also in read_only")
    private = given.get("private_tmp", True)
    if not isinstance(private, bool):
        raise PolicyError("filesystem.private_tmp", "is true or false")
    return Filesystem(
        read_only=paths["read_only"],
        read_write=paths["read_write"],
        hidden=paths["hidden"],
        private_tmp=private,
    )


def _listed(where: str, given: object) -> tuple[Any, ...]:
    # A single string would otherwise be read as a list of letters.
    if not isinstance(given, list | tuple):
        raise PolicyError(where, f"is a list, not a {type(given).__name__}")
    return tuple(given)


def _absolute(where: str, path: object) -> str:
    text = checked_path(where, path)
    if not os.path.isabs(text):
        raise PolicyError(where, f"{text!r} is not absolute")
    return _normal(text)


def checked_path(where: str, path: object) -> str:
    """`path` as text, without NUL bytes and without `..`: what you read is where it goes."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise PolicyError(where, f"{path!r} is not a path")
    if "\0" in path:
        raise PolicyError(where, "contains a NUL byte")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise PolicyError(where, f"{path!r} has characters that no file name can have") from None
    if ".." in path.replace(os.sep, "/").split("/"):
        raise PolicyError(where, f"{path!r} contains '..'", fix="write the path without '..'")
    return path


def _normal(path: str) -> str:
    """`path` without empty and `.` parts; POSIX would let a leading `//` stand, which hides `/`."""
    clean = posixpath.normpath(path)
    return clean[1:] if clean.startswith("//") else clean


def parse_modules(given: object, level: Level) -> Modules:
    """"any", "level" (the level's list), "safe" (deny the dangerous ones), a list, or a mapping."""
    if isinstance(given, Modules):
        given = {"allow": given.allow, "deny": given.deny}
    if given == "any":
        return Modules()
    if given == "level":
        return Modules(allow=LEVEL_MODULES[level])
    if given == "safe":
        return Modules(deny=DANGEROUS_MODULES)
    if isinstance(given, list | tuple):
        given = {"allow": given}
    if not isinstance(given, Mapping):
        raise PolicyError("modules", f"{given!r} is not \"any\", \"level\", \"safe\" or a list of names")
    _known("modules", given, ("allow", "deny"))
    allow, deny = (
        None
        if given.get(name) is None
        else tuple(_module(name, item) for item in _listed(f"modules.{name}", given[name]))
        for name in ("allow", "deny")
    )
    return Modules(allow=allow, deny=deny or ())


def _module(where: str, given: object) -> str:
    if not isinstance(given, str) or not all(part.isidentifier() for part in given.split(".")):
        raise PolicyError(f"modules.{where}", f"{given!r} is not a module name")
    return given


def _known(where: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in given:
        if key not in keys:
            raise PolicyError(f"{where}.{key}", f"unknown key; known: {', '.join(keys)}")


def parse_mount(given: object) -> Mount:
    """A Mount, or the text `SRC:DST[:ro|rw]`. The source must exist; a symlink is resolved and shown."""
    if isinstance(given, str):
        parts = given.split(":")
        if len(parts) not in (2, 3):
            raise PolicyError("mounts", f"{given!r} is not SRC:DST[:ro|rw]")
        given = Mount(*parts)  # type: ignore[arg-type]
    if not isinstance(given, Mount):
        raise PolicyError("mounts", f"cannot be a {type(given).__name__}")
    src, dst = checked_path("mounts.src", given.src), checked_path("mounts.dst", given.dst)
    if given.mode not in ("ro", "rw"):
        raise PolicyError("mounts.mode", f"{given.mode!r} is not ro or rw")
    real = os.path.realpath(src)
    if not os.path.exists(real):
        raise PolicyError("mounts.src", f"{src!r} does not exist")
    if real == os.path.sep:
        raise PolicyError("mounts.src", "the host's root cannot be mounted", fix="name a directory")
    dst = _normal(dst)
    if dst in ("/", "."):
        raise PolicyError("mounts.dst", f"{given.dst!r} would hide everything else")
    return Mount(real, dst, given.mode)

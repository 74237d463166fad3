"""The rules a program runs under, as values: policies, levels, the operator's ceiling."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from .errors import PolicyError
from .records import field, plain, record

if TYPE_CHECKING:
    import re


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
    "none": 0, "process": 1, "landlock": 2, "jail": 3, "container": 3, "wasm": 4, "gvisor": 4,
    "vm": 5,
}  # fmt: skip

Level = Literal["permissive", "standard", "strict"]


@record
class Limits:
    """What a run may use up: seconds, bytes, cores, counts; `fuel` where a backend counts it.

    `output` bounds each of stdout and stderr, `value` and `displays` what else the host keeps:
    decoded bytes, and 64 for each value in it.
    """

    timeout: float
    memory: int
    cpus: float
    processes: int = 50
    disk: int = 1 << 30
    output: int = 1 << 20
    value: int = 64 << 20
    displays: int = 16 << 20
    open_files: int = 256
    fuel: int | None = None


@record
class Network:
    """`off`, `any` or `hosts`: `allow` (names, `*.wildcards`, `host:port`) less `blocked_ports`."""

    mode: Literal["off", "hosts", "any"] = "off"
    allow: tuple[str, ...] = ()
    blocked_ports: tuple[int, ...] = ()


@record
class Filesystem:
    """Host paths beyond the work directory. `hidden` wins over both others; `protect` is what it is
    for a Mount, for every path of `read_write`."""

    read_only: tuple[str, ...] = ()
    read_write: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    private_tmp: bool = True
    protect: bool = True


@record
class Modules:
    """What the import lint accepts. `allow=None` accepts everything that `deny` does not name."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        return self.allow is not None or bool(self.deny)


@record
class Policy:
    """A complete set of rules. `explicit` names the fields that the request itself set.

    `asked_isolation` is the floor without the level's part: what the request, the operator's
    defaults and the ceiling ask for.
    """

    level: Level
    min_isolation: Isolation
    limits: Limits
    network: Network = field(default_factory=Network)
    filesystem: Filesystem = field(default_factory=Filesystem)
    modules: Modules = field(default_factory=Modules)
    explicit: frozenset[str] = frozenset()
    asked_isolation: Isolation = Isolation.NONE

    def to_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "min_isolation": self.min_isolation.value,
            "limits": plain(self.limits),
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
                "protect": self.filesystem.protect,
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


def level_policy(level: str) -> Policy:
    """The level's own defaults, before any request."""
    if not isinstance(level, str) or level not in LEVEL_MODULES:
        known = ", ".join(LEVEL_MODULES)
        raise PolicyError("level", f"{level!r} is not one of {known}")
    return _level_policy(level)


@cache
def _level_policy(level: Level) -> Policy:
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


@record
class Ceiling:
    """What the operator allows at most. None means that the operator sets no bound."""

    timeout: float | None = 300.0
    memory: int | None = None
    cpus: float | None = None
    processes: int | None = None
    disk: int | None = None
    output: int | None = None
    value: int | None = None
    displays: int | None = None
    open_files: int | None = None
    fuel: int | None = None
    network: Literal["off", "hosts", "any"] = "any"
    mounts: Literal["none", "ro", "rw", "unprotected"] = "unprotected"
    min_isolation: Isolation = Isolation.NONE
    # Pythons beside the one that runs Belljar: to ask one for its version starts it on the host.
    interpreters: tuple[str, ...] | None = None
    # One list of patterns for each source that has one: an image has to be in all of them.
    images: tuple[tuple[str, ...], ...] | None = None

    def allows_image(self, name: str) -> bool:
        """Whether an image may be used, by the very name that it is asked for.

        In a pattern `*` stands for anything but a slash, and `**` for anything. A tag can be moved
        to another image: what is to stay is listed, and asked for, with its digest.
        """
        if "@" not in name and ":" not in name.rpartition("/")[2]:
            name += ":latest"
        lists = self.images if self.images is not None else ()
        return all(any(_pattern(each).fullmatch(name) for each in listed) for listed in lists)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    import re

    pieces = {"**": ".*", "*": "[^/]*"}
    parts = re.split(r"(\*\*|\*)", text)
    return re.compile("".join(pieces.get(part) or re.escape(part) for part in parts))

"""How each field of a policy is read from what people write, or refused by name."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from . import minima, units
from .errors import PolicyError
from .guest.protocol import MAX_VALUE
from .policy import DANGEROUS_MODULES, LEVEL_MODULES, Filesystem, Level, Modules, Network
from .records import names, plain
from .types import Mount


def _value(field: str, given: object) -> int:
    size = units.size(field, given)
    if size > MAX_VALUE:
        raise PolicyError(
            field,
            f"{given!r} is more than a value can have, which is {units.human_size(MAX_VALUE)}",
            fix="bring what is larger out as a file: `outputs`",
        )
    return size


# How each limit is read. Also the list of limits that a request and the ceiling may name.
LIMITS: Mapping[str, Callable[[str, object], Any]] = {
    "timeout": minima.checked(units.seconds),
    "memory": minima.checked(units.size),
    "cpus": minima.checked(units.cores),
    "processes": units.count,
    "disk": minima.checked(units.size),
    "output": units.size,
    "value": _value,
    "displays": units.size,
    "open_files": minima.checked(units.count),
    "fuel": units.count,
}

SIZES = ("memory", "disk", "output", "value", "displays")  # of LIMITS, those in bytes


def parse_network(given: object) -> Network:
    """ "off", "any", a list of hosts, a mapping, or a Network."""
    if isinstance(given, Network):
        given = {"mode": given.mode, "allow": given.allow, "blocked_ports": given.blocked_ports}
    if given is False or given == "off":
        return Network()
    if given == "any":
        return Network(mode="any")
    if isinstance(given, str):
        raise PolicyError("network", f'{given!r} is not "off", "any" or a list of hosts')
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
    """A mapping of `read_only`, `read_write`, `hidden` (absolute paths), and two switches."""
    if isinstance(given, Filesystem):
        given = plain(given)
    if not isinstance(given, Mapping):
        raise PolicyError("filesystem", f"cannot be a {type(given).__name__}")
    _known("filesystem", given, names(Filesystem))
    paths = {
        name: tuple(
            absolute(f"filesystem.{name}", path)
            for path in _listed(f"filesystem.{name}", given.get(name, ()))
        )
        for name in ("read_only", "read_write", "hidden")
    }
    both = set(paths["read_only"]) & set(paths["read_write"])
    if both:
        raise PolicyError("filesystem.read_write", f"{min(both)!r} is also in read_only")
    switches = {name: given.get(name, True) for name in ("private_tmp", "protect")}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise PolicyError(f"filesystem.{name}", "is true or false")
    return Filesystem(
        read_only=paths["read_only"],
        read_write=paths["read_write"],
        hidden=paths["hidden"],
        **switches,
    )


def _listed(where: str, given: object) -> tuple[Any, ...]:
    # A single string would otherwise be read as a list of letters.
    if not isinstance(given, list | tuple):
        raise PolicyError(where, f"is a list, not a {type(given).__name__}")
    return tuple(given)


def absolute(where: str, path: object) -> str:
    text = checked_path(where, path)
    if not os.path.isabs(text):
        raise PolicyError(where, f"{text!r} is not absolute")
    return normal_path(text)


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


def normal_path(path: str) -> str:
    """`path` without empty and `.` parts; POSIX would let a leading `//` stand, which hides `/`."""
    clean = posixpath.normpath(path)
    return clean[1:] if clean.startswith("//") else clean


def parse_modules(given: object, level: Level) -> Modules:
    """What the lint accepts: "any", "level" (its list), "safe" (deny the dangerous), or a list."""
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
        raise PolicyError("modules", f'{given!r} is not "any", "level", "safe" or a list of names')
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
    """A Mount, or the text `SRC:DST[:ro|rw|rw,unprotected]`. The source must exist; links in it are
    resolved."""
    if isinstance(given, str):
        parts = given.split(":")
        if len(parts) not in (2, 3):
            raise PolicyError("mounts", f"{given!r} is not SRC:DST[:ro|rw|rw,unprotected]")
        src, dst, *mode = parts
        bare = mode == ["rw,unprotected"]
        if bare:
            mode = ["rw"]
        given = Mount(src, dst, *mode, protect=not bare)  # type: ignore[arg-type,misc]
    if not isinstance(given, Mount):
        raise PolicyError("mounts", f"cannot be a {type(given).__name__}")
    src, dst = checked_path("mounts.src", given.src), checked_path("mounts.dst", given.dst)
    if given.mode not in ("ro", "rw"):
        raise PolicyError("mounts.mode", f"{given.mode!r} is not ro or rw")
    if not isinstance(given.protect, bool):
        raise PolicyError("mounts.protect", "is true or false")
    if given.mode == "ro" and not given.protect:
        raise PolicyError("mounts.protect", "nothing in a read-only mount can be changed")
    real = os.path.realpath(src)
    if not os.path.exists(real):
        raise PolicyError("mounts.src", f"{src!r} does not exist")
    if real == os.path.sep:
        raise PolicyError("mounts.src", "the host's root cannot be mounted", fix="name a directory")
    dst = normal_path(dst)
    if dst in ("/", "."):
        raise PolicyError("mounts.dst", f"{given.dst!r} would hide everything else")
    return Mount(real, dst, given.mode, given.protect)


def number_text(name: str, value: float) -> str:
    """A value of the limit `name` as people write it."""
    if name in SIZES:
        return units.human_size(int(value))
    if name == "timeout":
        return f"{value:g} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"

"""Reads a firejail profile of the operator's: only what makes our own arguments stricter.

A profile has no version and hundreds of words, most of which open something. So only words that are
known to close something are taken; those that our arguments hold already are passed over; every
other one refuses the whole profile, because half a profile is a promise that nothing keeps.
"""

from __future__ import annotations

import re

from ..errors import ConfigError

# Each takes one path, and is handed to firejail after our own lines.
_PATHS = frozenset(("blacklist", "noexec", "read-only"))
_WHOLE = frozenset(("memory-deny-write-execute",))
# Held by our own arguments, the stage, or a /dev that has no such device.
_HELD = frozenset((
    "apparmor", "caps.drop all", "dbus-system none", "dbus-user none", "disable-mnt",
    "ipc-namespace", "machine-id", "net none", "netfilter", "no3d", "nodbus", "nodvd", "nogroups",
    "noinput", "nonewprivs", "noprinters", "noroot", "nosound", "notv", "nou2f", "novideo",
    "private", "private-cache", "private-dev", "private-tmp", "restrict-namespaces", "seccomp",
    "shell none", "x11 none",
))  # fmt: skip
# A macro, or a plain absolute path: no quotes, no links by glob to what a line below covers.
_PATH = re.compile(r"(/|\$\{(HOME|RUNUSER|PATH)\}/?)[A-Za-z0-9._/+@:~*-]*")
_MOST, _MOST_BYTES = 1000, 1 << 20


def load(path: str) -> str:
    """The lines of the profile at `path` that firejail is given; ConfigError names the first line
    that is not known to make a sandbox stricter."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(
            "firejail_profile", f"cannot read {path!r}: {error.strerror}", fix="correct the path"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("firejail_profile", f"{path!r} is not plain ASCII") from None
    taken = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        clean = " ".join(words)
        if clean in _HELD:
            continue
        if clean in _WHOLE or (
            len(words) == 2 and words[0] in _PATHS and _PATH.fullmatch(words[1])
            and ".." not in words[1].split("/")
        ):  # fmt: skip
            taken.append(clean)
            continue
        raise ConfigError(
            "firejail_profile",
            f"line {number} of {path!r} could loosen the sandbox, or is not known: {clean[:100]!r}",
            fix=f"keep only lines with {', '.join(sorted(_PATHS | _WHOLE))}, and those that hold "
            "anyway (`nonewprivs`, `caps.drop all`, `net none`, ...)",
        )
    if len(taken) > _MOST:
        raise ConfigError("firejail_profile", f"{path!r} has more than {_MOST} lines")
    return "".join(f"{line}\n" for line in taken)

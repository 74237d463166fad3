"""What a caller on the other side of a socket may ask for: less than the operator's ceiling allows.

A caller of the library already has all rights of its process; a remote caller has those that the
operator gives it here, and they are never past the ceiling:

- nothing that names a path of the host, an interpreter or an image, unless the operator allows it;
- no backend that leaves the host's files open to programs, unless the operator allows it;
- no network, unless the operator allows it;
- no isolation below the floor of the configured level, and never the `inprocess` backend, which
  would give the caller the server's own process and its tokens;
- no limit without a bound: where the ceiling has none, MOST holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .. import units
from ..api import wishes_from
from ..config import Settings
from ..config_keys import REACH, RIGHTS
from ..engine import Engine
from ..errors import FieldError, RequestError
from ..files.collect import MAX_BYTES
from ..policy import Ceiling, Isolation, level_policy
from ..policy_fields import LIMITS, parse_network
from ..records import record, replace

# The bounds of a server whose operator set none. They keep one request from taking the whole host:
# output, values and displays are held in the server's own memory.
MOST: Mapping[str, Any] = {
    "memory": 2 << 30,
    "cpus": os.cpu_count() or 1,
    "processes": 512,
    "disk": 2 << 30,
    "output": 16 << 20,
    "value": 64 << 20,
    "displays": 64 << 20,
    "open_files": 4096,
}


class NotAllowed(FieldError):
    """The request is well-formed; the operator does not let remote callers ask for this."""

    code = "not_allowed"


@record
class Rights:
    """What `belljar serve --allow-...` gives to remote callers beside the ceiling."""

    network: Literal["off", "hosts", "any"] = "off"
    mounts: Literal["none", "ro", "rw"] = "none"
    images: bool = False
    host_files: bool = False  # those that the server's user can read, where no backend hides them


def bounded(settings: Settings, rights: Rights | None = None) -> Settings:
    """The settings with a ceiling that a server can be run under."""
    ceiling = settings.ceiling
    changes: dict[str, Any] = {}
    for name, most in MOST.items():
        if getattr(ceiling, name) is None:
            given = settings.defaults.get(name)  # the operator's own default is no loosening
            changes[name] = most if given is None else max(most, LIMITS[name](name, given))
    if not ceiling.min_isolation.at_least(Isolation.PROCESS):
        changes["min_isolation"] = Isolation.PROCESS
    filled: Ceiling = replace(ceiling, **changes)
    open_files = rights is not None and rights.host_files
    return replace(settings, ceiling=filled, demanded=() if open_files else ("filesystem",))


def check(options: Mapping[str, Any], engine: Engine, rights: Rights) -> dict[str, Any]:
    """`options` of `run` with the floor that holds for them; NotAllowed for what may not be asked.

    Called before anything looks at a path in `options`, so that an answer does not tell whether
    the path exists on the host.
    """
    policy = options.get("policy")
    within = policy if isinstance(policy, Mapping) else {}
    for name, refuse in _RULES.items():
        for where, given in ((name, options.get(name)), (f"policy.{name}", within.get(name))):
            if given is not None:
                refuse(where, given, engine, rights)
    checked = dict(options)
    settings = engine.settings
    level = options.get("level")
    if level is not None and level != settings.level:
        floor = _floor(settings)
        if not level_policy(level).min_isolation.at_least(floor):
            asked = wishes_from(options).get("min_isolation")
            if asked is None or not Isolation.parse(asked).at_least(floor):
                checked["min_isolation"] = floor.value
    return checked


def _floor(settings: Settings) -> Isolation:
    floor = level_policy(settings.level).min_isolation
    given = settings.defaults.get("min_isolation")
    if given is not None and Isolation.parse(given).at_least(floor):
        floor = Isolation.parse(given)
    return floor


def _backend(where: str, given: object, engine: Engine, _rights: Rights) -> None:
    if given == "auto":
        return
    names = engine.backend_names()
    if given not in names:
        raise RequestError(where, f"{given!r} is not one of auto, {', '.join(names)}")
    settings = engine.settings
    if given in (settings.backend, *settings.fallback_allow):
        return
    if getattr(engine.backend(str(given)), "off_host", False):
        raise NotAllowed(
            where,
            f"{given!r} runs programs on another host, which the operator has not configured",
            fix="ask the operator to name it in belljar.toml",
        )


def _network(where: str, given: object, _engine: Engine, rights: Rights) -> None:
    if REACH.index(parse_network(given).mode) > REACH.index(rights.network):
        raise NotAllowed(
            where,
            f"this server gives programs at most the network {rights.network!r}",
            fix="ask the operator for `belljar serve --allow-network any`, or hosts",
        )


def _mounts(where: str, given: Any, _engine: Engine, rights: Rights) -> None:
    if not given:
        return
    for mount in given:
        source, _, rest = str(mount).partition(":")
        mode = rest.partition(":")[2] or "ro"
        mode = "unprotected" if mode == "rw,unprotected" else mode
        if mode not in RIGHTS or RIGHTS.index(mode) > RIGHTS.index(rights.mounts):
            raise NotAllowed(
                where,
                f"this server shows programs no directories of its host ({source!r}, {mode})"
                if rights.mounts == "none"
                else f"this server shows directories of its host at most {rights.mounts!r}",
                fix="send the content in `files`, or ask the operator for --allow-mounts ro",
            )


def _filesystem(where: str, _given: object, _engine: Engine, _rights: Rights) -> None:
    raise NotAllowed(
        where,
        "names paths of the server's host, which remote callers cannot",
        fix="ask the operator to set defaults.filesystem in belljar.toml",
    )


def _outputs_to(where: str, _given: object, _engine: Engine, _rights: Rights) -> None:
    raise NotAllowed(
        where,
        "names a directory of the server's host, which remote callers cannot",
        fix="ask for the files with `outputs`: they come with the result",
    )


def _outputs_size(where: str, given: object, _engine: Engine, _rights: Rights) -> None:
    if units.size(where, given) > MAX_BYTES:
        raise NotAllowed(
            where, f"is at most {units.human_size(MAX_BYTES)}: the server holds files in its memory"
        )


def _python(where: str, given: object, engine: Engine, _rights: Rights) -> None:
    if engine.settings.ceiling.interpreters is None:
        raise NotAllowed(
            where,
            "names an interpreter on the server's host, and the operator has listed none",
            fix='write language="python3.12", or ask the operator to set ceiling.interpreters',
        )


def _image(where: str, given: object, engine: Engine, rights: Rights) -> None:
    if not rights.images and engine.settings.ceiling.images is None:
        raise NotAllowed(
            where,
            "this server runs only the images that its operator configured",
            fix="ask the operator to list it in ceiling.images, or for --allow-images",
        )


_RULES: Mapping[str, Callable[[str, Any, Engine, Rights], None]] = {
    "backend": _backend,
    "network": _network,
    "mounts": _mounts,
    "filesystem": _filesystem,
    "outputs_to": _outputs_to,
    "outputs_each": _outputs_size,
    "outputs_total": _outputs_size,
    "python": _python,
    "image": _image,
}

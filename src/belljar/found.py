"""What a belljar.toml that was merely found does to a policy: it makes it stricter, or nothing.

The file may have come with the code that is to be run. Its policy keys are therefore no defaults,
which a level, a language or the operator's own defaults could be below, but bounds that are laid
over all of those: `resolve` calls `tightened` last, before what the request itself asks for.
`config_keys.FOUND` says which keys get here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .policy import Filesystem, Isolation, Modules, Network, Policy
from .policy_fields import LIMITS, parse_filesystem, parse_modules, parse_network
from .records import replace


def tightened(policy: Policy, found: Mapping[str, Any]) -> Policy:
    """`policy` with each key of `found` that is stricter; keys that are not leave it as it is."""
    limits = {
        name: smaller(getattr(policy.limits, name), LIMITS[name](name, value))
        for name, value in found.items()
        if name in LIMITS
    }
    changes: dict[str, Any] = {"limits": replace(policy.limits, **limits)} if limits else {}
    if "network" in found and parse_network(found["network"]).mode == "off":
        changes["network"] = Network()
    if "filesystem" in found:
        changes["filesystem"] = _closed(policy.filesystem, parse_filesystem(found["filesystem"]))
    if "modules" in found:
        changes["modules"] = narrowed(policy.modules, parse_modules(found["modules"], policy.level))
    if "min_isolation" in found:
        floor = Isolation.parse(found["min_isolation"])
        if not policy.min_isolation.at_least(floor):
            changes["min_isolation"] = floor
        if not policy.asked_isolation.at_least(floor):
            changes["asked_isolation"] = floor
    return replace(policy, **changes)


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two limits, of which None is no limit at all."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _closed(files: Filesystem, found: Filesystem) -> Filesystem:
    """Without paths that `found` shows: those are refused when the file is read."""
    return replace(
        files,
        hidden=tuple(dict.fromkeys((*files.hidden, *found.hidden))),
        private_tmp=files.private_tmp or found.private_tmp,
        protect=files.protect or found.protect,
    )


def narrowed(trusted: Modules, found: Modules) -> Modules:
    """What the lint accepts when `trusted` and `found` both have to accept it.

    A module that a list allows by name escapes what a list of denials implies (`posix` for `os`):
    so nothing is allowed by name that `trusted` alone refuses.
    """
    if not trusted.active:
        return found
    deny = tuple(dict.fromkeys((*trusted.deny, *found.deny)))
    if found.allow is None:
        return Modules(allow=trusted.allow, deny=deny)
    if trusted.allow is None:
        from .lint_rules import Rules

        rules = Rules(trusted, ())
        allow = tuple(
            name
            for name in found.allow
            if not rules.refuses(name)
            and not any(implied.startswith(f"{name}.") for implied in rules.derived)
        )
    else:
        allow = (
            *(name for name in found.allow if _inside(name, trusted.allow)),
            *(name for name in trusted.allow if _inside(name, found.allow)),
        )
    return Modules(allow=tuple(dict.fromkeys(allow)), deny=deny)


def _inside(name: str, names: tuple[str, ...]) -> bool:
    return any(name == known or name.startswith(f"{known}.") for known in names)

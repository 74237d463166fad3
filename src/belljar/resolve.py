"""How a request's wishes become the policy it runs under.

`resolve` is pure. Whatever a request says, the policy it returns is never past the operator's
ceiling and its isolation floor is never below the level's, the request's or the operator's.
Weakest first: the level, the operator's defaults for every program, the operator's defaults for
the program's language, which say more about it, and the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import PolicyError
from .policy import Ceiling, Filesystem, Isolation, Policy, level_policy
from .policy_fields import LIMITS, number_text, parse_filesystem, parse_modules, parse_network
from .records import record, replace
from .types import Language, Mount

POLICY_KEYS = (*LIMITS, "network", "filesystem", "modules", "min_isolation")


@record
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
    language: Language | None = None,
    found: Mapping[str, Any] | None = None,
    data_directory: str | None = None,
) -> Resolved:
    """Level, then `defaults`, then the language's, then the request's `wishes`, under `ceiling`.

    `data_directory` is what the level `permissive` may read, unless something later says otherwise.
    `found` are policy keys of a belljar.toml that was merely found: they only make stricter what
    holds before the wishes.

    A number past the ceiling is lowered to it, with a warning. A right past the ceiling (network,
    mounts) is refused, because half a right is a broken program. None means "not asked". A language
    that allows its programs the network has it on within the ceiling; one that denies it cannot be
    asked for more.
    """
    ceiling = ceiling or Ceiling()
    policy = level_policy(level)
    if data_directory is not None and policy.level == "permissive":
        policy = replace(policy, filesystem=Filesystem(read_only=(data_directory,)))
    if defaults:
        policy = _apply(policy, defaults, explicit=False)
    asked = {k: wish for k, wish in wishes.items() if wish is not None or k not in POLICY_KEYS}
    warnings: list[str] = []
    if language is not None:
        if language.limits:
            policy = _apply(policy, language.limits, explicit=False)
        if language.allow_network is not None and "network" not in asked:
            reach = "any" if language.allow_network and ceiling.network == "any" else "off"
            policy = _apply(policy, {"network": reach}, explicit=False)
            if language.allow_network and reach == "off":
                warnings.append(
                    f"{language.name} programs may use the network, but not past the operator's"
                    f" ceiling {ceiling.network!r}: it is off"
                )
    if found:
        from .found import tightened

        policy = tightened(policy, found)
    if asked:
        policy = _apply(policy, asked, explicit=True)
    if language is not None and language.allow_network is False and policy.network.mode != "off":
        raise PolicyError(
            "network",
            f"{policy.network.mode!r} is more than {language.name} programs are allowed",
            fix="ask the operator to change allow_network in the language file",
        )

    limits = policy.limits
    for name in LIMITS:
        most, wanted = getattr(ceiling, name), getattr(limits, name)
        # No wish at all (fuel) is a wish without end: the ceiling bounds that too.
        if most is not None and (wanted is None or wanted > most):
            limits = replace(limits, **{name: most})
            if name in policy.explicit:
                lowered = f"lowered to the operator's ceiling {number_text(name, most)}"
                warnings.append(f"{name} {number_text(name, wanted)} {lowered}")
    floor = policy.min_isolation
    if not floor.at_least(ceiling.min_isolation):
        floor = ceiling.min_isolation

    modes = ("off", "hosts", "any")
    if modes.index(policy.network.mode) > modes.index(ceiling.network):
        raise PolicyError(
            "network",
            f"{policy.network.mode!r} is past the operator's ceiling {ceiling.network!r}",
            fix="ask the operator to raise ceiling.network",
        )
    rights = ("none", "ro", "rw", "unprotected")
    files = policy.filesystem
    for mode, where, what in (
        *(
            (mount.mode if mount.protect else "unprotected", "mounts", mount.src)
            for mount in mounts
        ),
        *(("ro", "filesystem.read_only", path) for path in files.read_only),
        *(
            ("rw" if files.protect else "unprotected", "filesystem.read_write", path)
            for path in files.read_write
        ),
    ):
        if rights.index(mode) > rights.index(ceiling.mounts):
            raise PolicyError(
                where,
                f"{mode} {what!r} is past the operator's ceiling {ceiling.mounts!r}",
                fix="ask the operator to raise ceiling.mounts",
            )
    asked_floor = policy.asked_isolation
    if not asked_floor.at_least(ceiling.min_isolation):
        asked_floor = ceiling.min_isolation
    if (limits, floor, asked_floor) != (
        policy.limits,
        policy.min_isolation,
        policy.asked_isolation,
    ):
        policy = replace(policy, limits=limits, min_isolation=floor, asked_isolation=asked_floor)
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
        changes["min_isolation"] = (
            floor if floor.at_least(policy.min_isolation) else policy.min_isolation
        )
        if floor.at_least(policy.asked_isolation):
            changes["asked_isolation"] = floor
    if explicit:
        changes["explicit"] = frozenset(wishes)
    return replace(policy, **changes)

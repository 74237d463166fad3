"""What is said when no backend runs a program: a sentence, a line for each backend, and the fix."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import (
    BackendUnavailable,
    BelljarError,
    LanguageMissing,
    LibrariesMissing,
    LimitValue,
    PolicyUnenforceable,
)
from .policy import Isolation, Policy, level_policy

_WIDTH = 110


class NotHere(BackendUnavailable):
    """The host lacks what the backend needs: `reason` in a few words."""

    def __init__(self, name: str, reason: str, fix: str | None) -> None:
        super().__init__(f"backend {name!r} is not available: {reason}", fix=fix)
        self.reason = brief(reason)


def brief(reason: str) -> str:
    """The first clause of a reason."""
    return reason.partition(" (")[0].partition(";")[0].strip()


def why_unavailable(error: BackendUnavailable) -> str:
    return error.reason if isinstance(error, NotHere) else brief(error.message)


def of_all(
    refusals: Mapping[str, BelljarError], policy: Policy, rungs: Mapping[str, Isolation]
) -> BelljarError:
    """What to raise when every backend has refused."""
    for refusal in refusals.values():
        if isinstance(refusal, LanguageMissing):  # the policy would be held
            return refusal
    # That the others run no images does not help a request that names one.
    about = {n: e for n, e in refusals.items() if getattr(e, "fields", ()) != ("image",)}
    refusals = about or refusals
    if len(refusals) == 1:
        return next(iter(refusals.values()))
    if values := [error for error in refusals.values() if isinstance(error, LimitValue)]:
        return values[0]  # the one that is tried first, and a change of one number away
    lacked = [error for error in refusals.values() if isinstance(error, LibrariesMissing)]
    if lacked:
        return LibrariesMissing(
            f"no backend here has every library that the program requires\n{_table(refusals)}",
            libraries=dict.fromkeys(name for error in lacked for name in error.libraries),
            fix="install them where programs run, or name an image that has them",
        )
    fields = tuple(
        dict.fromkeys(
            field for error in refusals.values() for field in getattr(error, "fields", ())
        )
    )
    floor = policy.min_isolation
    too_weak = [
        name
        for name, error in refusals.items()
        if "min_isolation" in getattr(error, "fields", ()) or isinstance(error, NotHere)
    ]
    if refusals and len(too_weak) == len(refusals):
        by = f'level "{policy.level}"' if is_the_levels(policy) else "the policy"
        said = f"no backend here can enforce this policy: {by} needs isolation {floor.value}"
    else:
        said = "no backend here can enforce this policy"
    if not refusals:
        return PolicyUnenforceable(f"{said}: none is installed", fields=(), fix="belljar doctor")
    return PolicyUnenforceable(
        f"{said}\n{_table(refusals)}", fields=fields, fix=_fix(refusals, policy, rungs, fields)
    )


def is_the_levels(policy: Policy) -> bool:
    """Whether the isolation floor is the level's own, and not an explicit one."""
    levels = level_policy(policy.level).min_isolation
    return policy.min_isolation is levels and not policy.asked_isolation.at_least(levels)


def _table(refusals: Mapping[str, BelljarError]) -> str:
    width = max(map(len, refusals), default=0)
    lines = (f"  {name.ljust(width)}  {_line(error)}" for name, error in refusals.items())
    return "\n".join(lines)


def _line(error: BelljarError) -> str:
    match error:
        case NotHere():
            text = f"not available: {error.reason}"
        case PolicyUnenforceable() if error.lacking:
            parts = []
            for field, why in error.lacking.items():
                parts.append(f"{field}: {brief(why)}")
            text = "; ".join(parts)
        case _:
            text = error.message.partition(": ")[2] or error.message
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _fix(
    refusals: Mapping[str, BelljarError],
    policy: Policy,
    rungs: Mapping[str, Isolation],
    fields: tuple[str, ...],
) -> str:
    parts = []
    first, error = next(iter(refusals.items()))  # what would have been used, if it were here
    reaches = first not in rungs or rungs[first].at_least(policy.min_isolation)
    if isinstance(error, NotHere) and error.fix and reaches:
        parts.append(error.fix)
    asked = [name for name in fields if name in policy.explicit and name != "min_isolation"]
    if asked:
        parts.append(f"leave out {', '.join(asked)}")
    elif policy.level == "strict" and is_the_levels(policy):
        parts.append('use level="standard"')
    elif "min_isolation" in fields and policy.asked_isolation is policy.min_isolation:
        parts.append("ask for a lower min_isolation")
    return "; or ".join([*parts, "see `belljar doctor`"])

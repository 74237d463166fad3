"""The order in which `auto` tries backends for one program, and why, as values. Starts nothing.

The order of preference is the registry's; the numbers behind it are in docs/choosing.md. What is
known beforehand moves a backend back: one below the floor, one that counts no fuel where fuel is
asked for, one without images where an image is named, and `wasm` for a program that needs more than
it has. The source is read only when the answer depends on it: not while a backend before `wasm`
takes the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from . import languages
from .policy import Isolation, Policy
from .records import positional_record
from .types import Request

_FUEL = frozenset({"wasm"})
_IMAGES = frozenset({"docker", "gvisor"})
# Values that only a guest with these packages can be given.
_TABLES = frozenset({"numpy", "pandas", "polars", "pyarrow"})
_SHOWN = 3


@positional_record
class Candidate:
    """A backend to try. `doubt` is why it stands behind the others.

    A `stand_in` has another interpreter than the language is known for: where that one is missing,
    to say so helps more than a program that fails.
    """

    name: str
    doubt: str = ""
    stand_in: bool = False


def candidates(
    preference: Iterable[str],
    rungs: Mapping[str, Isolation],
    policy: Policy,
    request: Request,
) -> Iterator[Candidate]:
    """Every backend of `preference`: first those that suit, then the doubtful, then the others.

    `rungs` tells how strong they are, as far as that is known without loading them.
    """
    floor, fuel = policy.min_isolation, policy.limits.fuel is not None
    doubtful: list[Candidate] = []
    last: list[Candidate] = []
    for name in preference:
        rung = rungs.get(name)
        if rung is not None and not rung.at_least(floor):
            last.append(Candidate(name, f"cannot reach the floor {floor.value}"))
        elif fuel and name in rungs and name not in _FUEL:
            last.append(Candidate(name, "cannot count fuel"))
        elif request.image is not None and name in rungs and name not in _IMAGES:
            last.append(Candidate(name, f"cannot use the image {request.image}"))
        elif name == "wasm" and (doubt := wasm_doubt(request)):
            stand_in = not request.command and languages.of(request).family == "javascript"
            doubtful.append(Candidate(name, doubt, stand_in))
        else:
            yield Candidate(name)
    yield from doubtful
    yield from last


def strongest_first(preference: Iterable[str], rungs: Mapping[str, Isolation]) -> tuple[str, ...]:
    """`preference` by isolation; among equals, and for those of unknown strength, as it was."""
    return tuple(sorted(preference, key=lambda name: -(rungs[name].rank if name in rungs else 0)))


def wasm_doubt(request: Request) -> str:
    """Why `wasm` may not be able to run this program to its end; "" if it should be."""
    if request.command or request.code is None:
        return "cannot run commands"
    family = languages.of(request).family
    from . import needs

    if family == "javascript":
        word = needs.of_node(request.code)
        return f"cannot stand in for Node.js (the program names {word})" if word else ""
    if family != "python":
        return f"cannot run {family} programs"
    for name, value in request.context.items():
        package = type(value).__module__.partition(".")[0]
        if package in _TABLES:
            return f"cannot offer {package}, which the context's {name!r} needs"
    from .wasm import modules

    found = needs.of_python(request.code, request.files)
    mounted = {mount.dst.strip("/").split("/")[0] for mount in request.mounts}
    lacking = dict.fromkeys(
        what
        for name in found.names
        if name.partition(".")[0] not in mounted and (what := modules.lacks(name))
    )
    if lacking:
        shown = list(lacking)[:_SHOWN]
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        return f"cannot offer {', '.join(shown)}{more}"
    if found.unreadable:
        return f"cannot be sure of it: {found.unreadable}"
    if mounted & set(found.modules):
        return "cannot be sure of it: it imports from a mount"
    return ""


def reason(
    name: str, passed: Mapping[str, str], doubt: str = "", *, strongest: bool = False
) -> str:
    """One sentence for the result: why `auto` took `name`; `passed` says why not those before.

    Each of those reasons begins with "cannot", and so goes after one name or many.
    """
    if not passed:
        if strongest:
            return f"auto: {name} isolates most of what can run it here (prefer=isolation)"
        return f"auto: {name} is the first choice here and holds the policy"
    alike: dict[str, list[str]] = {}
    for other, why in passed.items():
        alike.setdefault(why, []).append(other)
    causes = [f"{_listed(others)} {why}" for why, others in alike.items()]
    though = f", though it {doubt}" if doubt else ""
    wish = " (prefer=isolation)" if strongest else ""
    return f"auto: {name}{though}, because {'; '.join(causes)}{wish}"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

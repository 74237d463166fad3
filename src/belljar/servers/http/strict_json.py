"""JSON as RFC 8259 has it and no more: what two readers could understand differently is refused.

Names that come twice, NaN and Infinity, numbers past a double, lone surrogates and deep nesting are
errors that name the place: Python's own reader accepts each of them without a word.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...errors import FieldError

MAX_DEPTH = 80
MAX_CONTAINERS = 1 << 18  # lists and objects: three bytes of text make up to a hundred of memory
_MOST_DIGITS = 400  # more than any double has


class Malformed(FieldError):
    """The body is not strict JSON; `field` is where, or `body`."""

    code = "json_invalid"


# To the end of the text if there is no second quote: or every quote in it would be tried again.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)', re.DOTALL)


class _Flaw:
    """Stands where something was read that is not strict JSON, until its place is known."""

    __slots__ = ("problem",)

    def __init__(self, problem: str) -> None:
        self.problem = problem


def loads(data: bytes) -> Any:
    """The value of a JSON text in UTF-8; Malformed for everything else."""
    flaws: list[_Flaw] = []

    def flaw(problem: str) -> _Flaw:
        flaws.append(_Flaw(problem))
        return flaws[-1]

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            times = Counter(name for name, _ in items)
            made[times.most_common(1)[0][0]] = flaw("is given twice")
        return made

    def real(text: str) -> Any:
        number = float(text)
        return number if math.isfinite(number) else flaw("is a number past the range of a double")

    def whole(text: str) -> Any:
        return int(text) if len(text) <= _MOST_DIGITS else flaw("is a number with too many digits")

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed("body", f"is not UTF-8 at byte {error.start}") from None
    if _brackets(text) > MAX_CONTAINERS and _brackets(_STRING.sub("", text)) > MAX_CONTAINERS:
        raise Malformed("body", f"has more than {MAX_CONTAINERS} lists and objects")
    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_float=real,
            parse_int=whole,
            parse_constant=lambda name: flaw(f"is {name}, which JSON does not have"),
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise Malformed("body", f"is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise Malformed("body", "is nested too deeply") from None
    # A cheap sign first: most requests are flat and have no escapes.
    if flaws or "\\u" in text or text.count("[") + text.count("{") > MAX_DEPTH:
        for where, problem in _problems(value):
            raise Malformed(where or "body", problem)
    if flaws:  # in what a later value of the same name has replaced
        raise Malformed("body", flaws[0].problem)
    return value


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _problems(value: Any) -> Iterator[tuple[str, str]]:
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    while waiting:
        where, item, depth = waiting.pop()
        if isinstance(item, _Flaw):
            yield where, item.problem
        elif isinstance(item, str):
            if not _is_text(item):
                yield where, "has half of a surrogate pair"
        elif isinstance(item, list | dict):
            if depth >= MAX_DEPTH:
                yield where, "is nested too deeply"
                return
            if isinstance(item, list):
                # Cut, or every item of a list would have a copy of a name of any length.
                inner = [(f"{where[:200]}[{place}]", each) for place, each in enumerate(item)]
            else:
                if any(not _is_text(name) for name in item):
                    yield where, "has a name with half of a surrogate pair"
                inner = [
                    (f"{where[:200]}.{name[:200]}" if where else name[:200], each)
                    for name, each in item.items()
                ]
            waiting += [(place, each, depth + 1) for place, each in reversed(inner)]


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

"""Assertions about the result as data: strict JSON, plain types, nothing out of a pickle."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ....types import Status
from ..scene import Scene
from . import check

_OPTIONAL_TEXT = (str, type(None))
_SHAPE: dict[str, tuple[type, ...]] = {
    "id": (str,), "status": (str,), "exit_code": (int, type(None)), "signal": (int, type(None)),
    "limit_hit": _OPTIONAL_TEXT, "stdout": (str,), "stderr": (str,), "truncated": (bool,),
    "error": (dict, type(None)), "displays": (list,), "files": (dict,), "usage": (dict,),
    "timings": (dict,), "enforcement": (dict,), "backend": (str,), "isolation": (str,),
}  # fmt: skip


@check("json_strict_ok")
def json_strict_ok(scene: Scene, _: str) -> str | None:
    return strict_json_problem(scene.seen.wire)


@check("result_typed")
def result_typed(scene: Scene, _: str) -> str | None:
    problem = strict_json_problem(scene.seen.wire)
    if problem:
        return problem
    told = json.loads(scene.seen.wire)
    for name, kinds in _SHAPE.items():
        if not isinstance(told.get(name, ...), kinds):
            return f"{name} is {type(told.get(name)).__name__}"
    if told["status"] not in set(Status):
        return f"{told['status']!r} is not a status"
    if told["error"] is not None and not all(
        isinstance(text, str) for text in told["error"].values()
    ):
        return "an exception crossed as more than text"
    result = scene.seen.result
    strange = None if result is None else _strange_type(result.value)
    return f"the value holds a {strange}" if strange else None


def strict_json_problem(wire: bytes) -> str | None:
    """What a strict RFC 8259 reader would object to; None if nothing."""

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        json.loads(wire.decode("utf-8"), parse_constant=constant)
        # Escaped halves of surrogate pairs are grammatical, and no text in any encoding.
        json.dumps(json.loads(wire), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return "the JSON holds a lone surrogate"
    except ValueError as error:
        return f"not strict JSON: {error}"
    return None


def _strange_type(value: Any) -> str | None:
    """The name of a type in `value` that no guest's object should have crossed as."""
    plain = (bool, int, float, str, bytes, type(None))
    if type(value) in plain:
        return None
    if type(value) in (list, tuple):
        return next(filter(None, map(_strange_type, value)), None)
    if type(value) is dict:
        return next(filter(None, (_strange_type(x) for pair in value.items() for x in pair)), None)
    # Arrow tables and frames were read by a validating reader; whatever else came was rebuilt.
    if type(value).__module__.partition(".")[0] in ("pandas", "pyarrow", "numpy", "belljar"):
        return None
    if type(value).__module__ in ("datetime", "decimal", "uuid"):
        return None
    return f"{type(value).__module__}.{type(value).__qualname__}"

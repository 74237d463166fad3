"""What is said about a value that the worker could not send: its type, its size and the reason.

Loaded only when a value was dropped. The worker writes a notice, which the host reads like anything
else that a guest sends: `notice` is honest, and whatever else may come is checked by the reader.
"""

from __future__ import annotations

import sys

from .failures import cut, type_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TYPE = 100
MAX_REASON = 200
UNITS = ("", "items", "characters", "bytes", "bits", "rows", "elements")
# Limits that a notice may name: raising one lets the value through.
FIELDS = ("", "value", "memory")
# Read through the type's own method: a subclass may answer anything, or hang.
_COUNTED: tuple[tuple[Any, str], ...] = (
    (str, "characters"), (bytes, "bytes"), (bytearray, "bytes"), (list, "items"),
    (tuple, "items"), (dict, "items"), (set, "items"), (frozenset, "items"),
)  # fmt: skip
_TABLES = (
    ("pandas", "DataFrame", "rows"), ("pandas", "Series", "rows"), ("polars", "DataFrame", "rows"),
    ("polars", "Series", "rows"), ("pyarrow", "Table", "rows"), ("numpy", "ndarray", "elements"),
)  # fmt: skip
_TAGGED = {
    "bytes": ("bytes", "bytes"), "bytearray": ("bytearray", "bytes"), "tuple": ("tuple", "items"),
    "set": ("set", "items"), "frozenset": ("frozenset", "items"), "dict": ("dict", "items"),
    "dataframe": ("DataFrame", "rows"), "series": ("Series", "rows"),
    "ndarray": ("ndarray", "elements"), "floats": ("list", "items"), "ints": ("list", "items"),
}  # fmt: skip


def notice(value: object, field: str, reason: str) -> dict[str, Any]:
    """The payload of a DROPPED frame for `value`."""
    count, unit = _size(value)
    return {
        "what": "value",
        "type": cut(type_name(type(value)), MAX_TYPE),
        "count": count,
        "unit": unit,
        "field": field,
        "why": cut(reason, MAX_REASON),
    }


def of_wire(wire: Any, buffers: list[int]) -> dict[str, Any]:
    """The type and the size of a value that has been sent, before it is decoded. `buffers` are the
    lengths of what its numbers refer to."""
    kind: str = type(wire).__name__
    unit = {"list": "items", "dict": "items", "str": "characters", "int": "bits"}.get(kind, "")
    count = 0
    if unit:
        count = wire.bit_length() if kind == "int" else len(wire)
    if kind == "dict" and type(wire.get("$")) is str:
        inner = wire.get("v")
        kind, unit = _TAGGED.get(wire["$"], (cut(wire["$"], MAX_TYPE), ""))
        count = _count_of(inner, unit, buffers)
    return {"type": kind, "count": count, "unit": unit if count else ""}


def _count_of(inner: Any, unit: str, buffers: list[int]) -> int:
    if type(inner) is int:
        size = buffers[inner] if 0 <= inner < len(buffers) else 0
        return size // 8 if unit == "items" else size
    if unit == "bytes" and type(inner) is str:
        return len(inner) * 3 // 4
    if type(inner) is list:
        return len(inner)
    count: Any = 0
    if type(inner) is dict and unit == "rows":
        count = inner.get("rows")
    elif type(inner) is dict and unit == "elements" and type(inner.get("shape")) is list:
        count = 1
        for length in inner["shape"][:32]:
            count *= length if type(length) is int and 0 <= length < 1 << 40 else 0
    return min(count, 1 << 62) if type(count) is int and count > 0 else 0


def _size(value: Any) -> tuple[int, str]:
    kind = type(value)
    try:
        if issubclass(kind, int):
            return int.bit_length(value), "bits"
        for plain, unit in _COUNTED:
            if issubclass(kind, plain):
                return plain.__len__(value), unit
        for module, name, unit in _TABLES:
            base: Any = getattr(sys.modules.get(module), name, None)
            if base is not None and kind is base:
                return (value.size if unit == "elements" else len(value)), unit
    except BaseException:
        return 0, ""
    return 0, ""

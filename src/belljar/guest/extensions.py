"""Periods, intervals, and categories of them: what pandas has and Arrow cannot hold, as arrays.

period, interval                {freq, ordinal}, {closed, left, right}
period_array, interval_array    the same with arrays
categorical                     {ordered, codes, categories: one of the two above}
"""

from __future__ import annotations

from .protocol import NODE
from .values import Reader, Writer, expect, tagged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TAGS = ("period", "interval", "period_array", "interval_array", "categorical")
_CLOSED = ("left", "right", "both", "neither")
_ARRAY = 64 * NODE
_FREQUENCY = 12


def write_scalar(writer: Writer, pandas: Any, obj: Any, depth: int) -> Any:
    """A period or an interval; None for anything else."""
    if type(obj) is pandas.Period:
        freq = _name(pandas.PeriodDtype(obj.freq))
        return tagged("period", {"freq": freq, "ordinal": writer.integer(obj.ordinal, depth)})
    if type(obj) is pandas.Interval:
        left, right = writer.write(obj.left, depth + 1), writer.write(obj.right, depth + 1)
        return tagged("interval", {"closed": obj.closed, "left": left, "right": right})
    return None


def write(writer: Writer, pandas: Any, array: Any, depth: int) -> Any:
    """An array of pandas' that Arrow does not know; None for anything else."""
    kind, arrays = type(array), pandas.arrays
    if kind is arrays.PeriodArray:
        ordinals = writer.write(array.asi8, depth + 1)
        return tagged("period_array", {"freq": _name(array.dtype), "ordinals": ordinals})
    if kind is arrays.IntervalArray:
        left = writer.write(array.left.to_numpy(), depth + 1)
        right = writer.write(array.right.to_numpy(), depth + 1)
        return tagged("interval_array", {"closed": array.closed, "left": left, "right": right})
    if kind is pandas.Categorical:
        categories = write(writer, pandas, array.categories.array, depth + 1)
        if categories is not None:
            codes = writer.write(array.codes, depth + 1)
            ordered = bool(array.ordered)
            wire = {"ordered": ordered, "codes": codes, "categories": categories}
            return tagged("categorical", wire)
    return None


def read(reader: Reader, tag: str, wire: dict[str, Any], depth: int) -> Any:
    """What the other two wrote."""
    import numpy
    import pandas

    reader.spend(_ARRAY)

    def array(name: str, kinds: str) -> Any:
        found = reader.read(wire[name], depth + 1)
        if type(found) is not numpy.ndarray or found.ndim != 1 or found.dtype.kind not in kinds:
            raise ValueError(f"{name} are an array")
        return found

    if tag.startswith("period"):
        freq = expect(str, wire["freq"])
        if len(freq) > _FREQUENCY or not freq.replace("-", "").isalnum():
            raise ValueError("not the name of a frequency")
        dtype = pandas.PeriodDtype(freq)
        if tag == "period":
            _only(wire, "freq", "ordinal")
            ordinal = expect(int, wire["ordinal"])
            return pandas.Period(ordinal=ordinal, freq=dtype.freq)
        _only(wire, "freq", "ordinals")
        ordinals = array("ordinals", "i")
        if ordinals.dtype.itemsize != 8:
            raise ValueError("ordinals take eight bytes")
        return pandas.arrays.PeriodArray(ordinals, dtype=dtype)
    if tag == "categorical":
        _only(wire, "ordered", "codes", "categories")
        inner = expect(dict, wire["categories"])
        if inner.get("$") not in ("period_array", "interval_array"):
            raise ValueError("categories of another type")
        categories = reader.read(inner, depth + 1)
        reader.spend(4 * NODE * len(categories))
        return pandas.Categorical.from_codes(
            array("codes", "i"), categories=categories, ordered=expect(bool, wire["ordered"])
        )
    _only(wire, "closed", "left", "right")
    if wire["closed"] not in _CLOSED:
        raise ValueError("an interval is closed in another way")
    if tag == "interval":
        left, right = reader.read(wire["left"], depth + 1), reader.read(wire["right"], depth + 1)
        return pandas.Interval(left, right, closed=wire["closed"])
    left, right = array("left", "iufmMO"), array("right", "iufmMO")
    reader.spend(2 * NODE * len(left))
    return pandas.arrays.IntervalArray.from_arrays(left, right, closed=wire["closed"])


def _only(wire: dict[str, Any], *names: str) -> None:
    if wire.keys() != set(names):
        raise ValueError("other fields")


def _name(dtype: Any) -> str:
    name: str = dtype.name  # "period[Q-DEC]"
    return name[len("period[") : -1]

"""The table of docs/values.md is what really crosses.

`python tests/test_docs_values.py` writes it.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from belljar.guest import protocol
from belljar.guest.values import decode, encode

PAGE = Path(__file__).parent.parent / "docs" / "values.md"
SETUP = """
import collections, dataclasses, datetime, decimal, enum, fractions, math, pathlib, uuid
class Colour(enum.Enum): RED = 1
class Level(enum.IntEnum): LOW = 1
Point = dataclasses.make_dataclass("Point", ["x", "y"])
Pair = collections.namedtuple("Pair", "a b")
class Own:
    def __repr__(self): return "mine"
"""
# An expression, the type that comes back, and what it needs.
ROWS = [
    ("None", "NoneType", ""),
    ("True", "bool", ""),
    ("2**5000", "int", ""),
    ("math.nan", "float", ""),
    ("1 + 2j", "complex", ""),
    ("'text'", "str", ""),
    ("b'bytes'", "bytes", ""),
    ("bytearray(b'bytes')", "bytearray", ""),
    ("[1, 'two']", "list", ""),
    ("(1, 2)", "tuple", ""),
    ("{'a': 1, 2: 3}", "dict", ""),
    ("{1, 2}", "set", ""),
    ("frozenset({1})", "frozenset", ""),
    ("range(3)", "range", ""),
    ("datetime.datetime(2024, 2, 29, 12)", "datetime", ""),
    ("datetime.date(2024, 2, 29)", "date", ""),
    ("datetime.time(12)", "time", ""),
    ("datetime.timedelta(days=1)", "timedelta", ""),
    ("decimal.Decimal('1.50')", "Decimal", ""),
    ("fractions.Fraction(1, 3)", "Fraction", ""),
    ("uuid.UUID(int=1)", "UUID", ""),
    ("pathlib.PurePosixPath('a/b')", "PurePosixPath", ""),
    ("pathlib.Path('a/b')", "PosixPath", ""),
    ("Colour.RED", "belljar.Member", ""),
    ("Level.LOW", "int", ""),
    ("Pair(1, 2)", "tuple", ""),
    ("Point(1, 2)", "belljar.Fields", ""),
    ("Own()", "belljar.Opaque", ""),
    ("numpy.float64(0.5)", "float", "numpy"),
    ("numpy.arange(3)", "numpy.ndarray", "numpy"),
    ("numpy.array(['2024-01-01'], dtype='M8[D]')", "numpy.ndarray", "numpy"),
    ("pandas.DataFrame({'a': [1], 'b': ['x']})", "pandas.DataFrame", "pandas"),
    ("pandas.Series(['u', 'v'], dtype='category')", "pandas.Series", "pandas"),
    ("pandas.Series(pandas.date_range('2024', periods=2, tz='UTC'))", "pandas.Series", "pandas"),
    ("pandas.Series(pandas.period_range('2024', periods=2, freq='M'))", "pandas.Series", "pandas"),
    ("pandas.cut(pandas.Series([1, 2, 3]), 2)", "pandas.Series", "pandas"),
    ("pandas.Index([1, 2])", "pandas.Index", "pandas"),
    ("pandas.RangeIndex(3)", "pandas.RangeIndex", "pandas"),
    ("pandas.Period('2024', 'Y')", "pandas.Period", "pandas"),
    ("pandas.Interval(0, 1)", "pandas.Interval", "pandas"),
    ("pandas.Timestamp('2024-02-29')", "datetime", "pandas"),
    ("polars.DataFrame({'a': [1]})", "polars.DataFrame", "polars"),
    ("polars.Series([1, 2])", "polars.Series", "polars"),
    ("pyarrow.table({'a': [1]})", "pyarrow.Table", "pyarrow"),
]


def crossed(expression: str, library: str) -> Any:
    names: dict[str, Any] = {}
    exec(SETUP + (f"import {library}" if library else ""), names)
    buffers: list[Any] = []
    value = eval(expression, names)  # noqa: S307 - a row of ours
    wire = encode(value, buffers=buffers, objects=1)
    wire = protocol.loads(protocol.dumps(wire))
    return decode(wire, buffers=[io.BytesIO(bytes(each)) for each in buffers])


@pytest.mark.parametrize(("expression", "kind", "library"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_table_is_true(expression: str, kind: str, library: str) -> None:
    if library:
        pytest.importorskip(library)
        pytest.importorskip("pyarrow")
    found = type(crossed(expression, library))
    home = found.__module__.partition(".")[0]
    named = home in ("belljar", "numpy", "pandas", "polars", "pyarrow")
    assert (f"{home}.{found.__qualname__}" if named else found.__qualname__) == kind


def table() -> str:
    lines = ["| in | out |", "|---|---|"]
    lines += [f"| `{expression}` | `{kind}` |" for expression, kind, _ in ROWS]
    return "\n".join(lines)


def with_table(text: str) -> str:
    return re.sub(
        r"(<!-- types:[^\n]*\n).*?(<!-- end of types -->)",
        lambda found: f"{found[1]}{table()}\n{found[2]}",
        text,
        flags=re.DOTALL,
    )


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "python tests/test_docs_values.py"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Coverage-guided fuzzing of typed values with their buffers: arrays, tables, Arrow streams.

Random bytes hardly ever make a table. So each input changes some places of a real value: its JSON,
the bytes of its buffers, their lengths and their number. What comes of it must be a value or a
warning, must be encodable again, and may not take more than the budget that the host set.

    python tests/fuzz/fuzz_values.py -max_total_time=3600
"""

from __future__ import annotations

import datetime
import decimal
import json
import sys
import uuid
from typing import Any

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["belljar"]):
    from belljar import presentation
    from belljar.guest import protocol, values
    from belljar.report import Budgets, Report
    from belljar.types import Result, Status

BUDGET = 1 << 20
# What a change puts in the place of a number, a text or a whole value.
TEXTS = ["", "x", "$", "v", "<f8", "|b1", "<M8[ns]", "O", "U", "Int64", "category", "é"]
OTHERS = ["null", "true", "[]", "{}", "[0]", '{"$":"tuple","v":[]}', "0", "1", "-1", "2", "255",
          str(1 << 31), str(1 << 62), str(1 << 70), "0.5", *map(json.dumps, TEXTS)]  # fmt: skip


def samples() -> list[Any]:
    """One value of each kind that can cross."""
    found: list[Any] = [
        [1, 2.5, "x", None, (1,), {1, 2}, {1: 2}, b"x" * 3000, bytearray(b"y"), 1 << 2000, 1j],
        [n / 7 for n in range(300)],
        list(range(300)),
        [datetime.datetime(2024, 1, 1), decimal.Decimal("1.5"), uuid.UUID(int=1), range(3)],
    ]
    try:
        import numpy
        import pandas
        import pyarrow

        found += [
            numpy.arange(1000),
            numpy.array([["a", "b"]]),
            numpy.arange(6).astype("M8[D]").reshape(2, 3),
            pandas.DataFrame({"n": range(9000), "x": 0.5}),
            pandas.DataFrame({"t": ["a", None], "d": pandas.date_range("2024", periods=2)}),
            pandas.Series(["u", "v"], dtype="category"),
            pandas.Series([1, None], dtype="Int64"),
            pandas.MultiIndex.from_tuples([(1, "a"), (2, "b")]),
            pandas.Series(pandas.period_range("2024", periods=2, freq="M")),
            pyarrow.table({"a": [1, None], "b": ["x", "y"]}),
        ]
        import polars

        found.append(polars.DataFrame({"a": [1, 2], "b": ["x", None]}))
    except ImportError as missing:
        print(f"without {missing.name}", file=sys.stderr)
    return found


def encoded() -> list[tuple[bytes, list[bytes]]]:
    found = []
    for value in samples():
        buffers: list[Any] = []
        wire = values.encode(value, buffers=buffers)
        found.append((protocol.dumps(wire), [bytes(each) for each in buffers]))
    return found


WIRES = encoded()


def changed(wire: Any, provider: Any) -> Any:
    """`wire` with one place, chosen on the way down, replaced."""
    if isinstance(wire, dict) and wire and provider.ConsumeIntInRange(0, 7):
        key = sorted(wire)[provider.ConsumeIntInRange(0, len(wire) - 1)]
        match provider.ConsumeIntInRange(0, 15):
            case 0:
                del wire[key]
            case 1:
                wire[provider.PickValueInList(TEXTS)] = wire[key]
            case _:
                wire[key] = changed(wire[key], provider)
        return wire
    if isinstance(wire, list) and wire and provider.ConsumeIntInRange(0, 7):
        place = provider.ConsumeIntInRange(0, min(len(wire), 40) - 1)
        match provider.ConsumeIntInRange(0, 15):
            case 0:
                del wire[place]
            case 1:
                wire.append(wire[place])
            case _:
                wire[place] = changed(wire[place], provider)
        return wire
    if type(wire) is int and provider.ConsumeBool():
        return wire + provider.ConsumeIntInRange(-2, 2)
    return json.loads(provider.PickValueInList(OTHERS))


def damaged(data: bytes, provider: Any) -> bytes:
    """`data` with some bytes changed, or cut, or doubled."""
    room = bytearray(data)
    for _ in range(provider.ConsumeIntInRange(0, 6)):
        # An Arrow stream has its descriptions in front, and what they point to behind.
        place = provider.ConsumeIntInRange(0, max(0, min(len(room), 2000) - 1))
        room[place : place + 1] = provider.ConsumeBytes(1)
    match provider.ConsumeIntInRange(0, 9):
        case 0:
            del room[provider.ConsumeIntInRange(0, len(room)) :]
        case 1:
            room += bytes(room)
    return bytes(room)


def test_one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    payload, buffers = WIRES[provider.ConsumeIntInRange(0, len(WIRES) - 1)]
    wire = json.loads(payload)
    for _ in range(provider.ConsumeIntInRange(0, 3)):
        wire = changed(wire, provider)
    pieces = [damaged(each, provider) for each in buffers]
    if provider.ConsumeIntInRange(0, 15) == 0:
        pieces = pieces[1:] if provider.ConsumeBool() else [*pieces, b"more"]
    report = Report(budgets=Budgets(value=BUDGET))
    for piece in pieces:
        report.feed(protocol.encode(protocol.BUFFER, piece))
    report.feed(protocol.encode(protocol.VALUE, json.dumps(wire, separators=(",", ":")).encode()))
    value = report.value
    assert value is None or not report.truncated
    if value is not None:
        values.encode(value, 64 * BUDGET, objects=sys.maxsize)
    presentation.value_text(value)
    presentation.as_json(Result(status=Status.SUCCESS, value=value, warnings=report.warnings))


def main() -> None:
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

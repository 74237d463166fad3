"""What a guest may make the host keep: a value and displays have budgets of their own."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

import belljar
from belljar.errors import PolicyError
from belljar.guest import protocol
from belljar.guest.protocol import BUFFER, DISPLAY, DROPPED, VALUE, encode
from belljar.report import NO_BUDGETS, Budgets, Report, budgets
from belljar.resolve import resolve

SMALL = Budgets(value=64 << 10, displays=64 << 10)


def told(kind: int, payload: bytes, allowed: Budgets | None = SMALL) -> Report:
    report = Report(budgets=allowed)
    report.feed(encode(kind, payload))
    return report


def many(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    "payload",
    [
        many(b"1", 1100),
        many(b"[]", 1100),
        many(b'{"a":1}', 400),
        many(b'{"$":"set","v":[]}', 300),
        many(b'{"$":"decimal","v":"1.5"}', 600),
        b'"' + b"x" * (65 << 10) + b'"',
        '"日{}"'.format("x" * (33 << 10)).encode(),
        many(b"1" * 300, 500),
    ],
    ids=["numbers", "lists", "dicts", "sets", "decimals", "ascii", "wide", "large numbers"],
)
def test_a_value_past_its_budget_is_dropped_with_one_warning(payload: bytes) -> None:
    report = told(VALUE, payload)
    assert (report.truncated, report.value) == (True, None)
    (warning,) = report.warnings
    assert "`value`" in warning
    assert told(VALUE, payload, Budgets()).value is not None  # the control arm


def test_the_value_of_a_dropped_list_is_named_with_its_size() -> None:
    (warning,) = told(VALUE, many(b"1", 1100)).warnings
    assert warning == (
        "the value was dropped: list of 1100 items takes more than the 64 KiB that `value` allows; "
        "raise `value`, or write it to a file"
    )


def table_of_nulls(pyarrow: Any, rows: int) -> dict[str, Any]:
    import base64

    sink, table = pyarrow.BufferOutputStream(), pyarrow.table({"0": pyarrow.nulls(rows)})
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    arrow = base64.b64encode(bytes(sink.getvalue())).decode()
    names = {"columns": ["a"], "names": [None], "index": 0, "index_names": []}
    return {"$": "series", "v": {"rows": rows, **names, "dtypes": ["object"], "arrow": arrow}}


@pytest.mark.parametrize("kind", ["tables of nulls", "arrays of text"])
def test_tables_and_arrays_share_the_budget_of_the_value(kind: str) -> None:
    if kind == "tables of nulls":
        pytest.importorskip("pandas")
        item = table_of_nulls(pytest.importorskip("pyarrow"), 1 << 16)
    else:
        pytest.importorskip("numpy")
        texts = {"dtype": "U", "shape": [200], "items": ["y" * 600] + [""] * 199}
        item = {"$": "ndarray", "v": texts}
    allowed = Budgets(value=4 << 20)
    assert len(told(VALUE, protocol.dumps([item]), allowed).value) == 1
    payload = protocol.dumps([item] * 100)  # 50 MB and more on the host
    tracemalloc.start()
    try:
        report = told(VALUE, payload, allowed)
        assert (report.value, report.truncated) == (None, True)
        assert tracemalloc.get_traced_memory()[1] < (3 * 4 + 8) << 20
    finally:
        tracemalloc.stop()
    assert len(told(VALUE, payload, NO_BUDGETS).value) == 100  # the control arm


def test_numbers_of_a_column_with_gaps_are_counted_as_the_objects_they_become() -> None:
    pyarrow, _ = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    import base64

    table = pyarrow.table({"0": pyarrow.array([1 << 40, None] * 20_000, pyarrow.int64())})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    wire = table_of_nulls(pyarrow, 0)
    wire["v"] |= {"rows": 40_000, "arrow": base64.b64encode(bytes(sink.getvalue())).decode()}
    payload = protocol.dumps(wire)
    assert told(VALUE, payload, Budgets(value=1 << 20)).value is None
    assert len(told(VALUE, payload, Budgets(value=8 << 20)).value) == 40_000


def test_displays_past_their_budget_are_dropped_with_one_warning() -> None:
    report = Report(budgets=SMALL)
    for size in (30, 30, 30, 1, 30):
        report.feed(encode(DISPLAY, protocol.dumps({"text/html": "x" * (size << 10)})))
    assert [len(shown.data["text/html"]) >> 10 for shown in report.displays] == [30, 30, 1]
    assert report.truncated
    (warning,) = report.warnings
    assert warning.startswith("2 of the displays were dropped")
    assert "`displays`" in warning


def test_a_display_of_many_mime_types_is_not_read() -> None:
    names = b",".join(b'"a/%x":""' % number for number in range(1_000_000))
    tracemalloc.start()
    try:
        report = told(DISPLAY, b"{" + names + b"}", Budgets())
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()
    assert (report.displays, report.truncated) == ((), True)


def value_of(payload: bytes, *buffers: bytes, allowed: Budgets = SMALL) -> Report:
    report = Report(budgets=allowed)
    for data in buffers:
        report.feed(encode(BUFFER, data))
    report.feed(encode(VALUE, payload))
    return report


def test_a_value_refers_to_its_buffers() -> None:
    report = value_of(b'[{"$":"bytes","v":1},{"$":"bytes","v":0}]', b"first", b"second")
    assert (report.value, report.warnings) == ([b"second", b"first"], ())


@pytest.mark.parametrize(
    ("payload", "buffers", "said"),
    [
        (b'{"$":"bytes","v":0}', [], "no such buffer"),
        (b'{"$":"bytes","v":-1}', [b"x"], "no such buffer"),
        (b'[{"$":"bytes","v":0},{"$":"bytes","v":0}]', [b"x"], "twice"),
        (b"1", [b"x"], "used by nothing"),
        (b'{"$":"floats","v":0}', [b"x"], "could not be read"),
    ],
)
def test_a_value_and_buffers_that_do_not_fit_are_no_value(
    payload: bytes, buffers: list[bytes], said: str
) -> None:
    report = value_of(payload, *buffers)
    assert report.value is None
    (warning,) = report.warnings
    assert said in warning


def test_buffers_past_the_budget_of_a_value_are_not_kept() -> None:
    few = value_of(b"1", *[b""] * 1100)
    assert "broke the protocol" in few.warnings[0]  # each counts, an empty one too
    report = Report(budgets=Budgets(value=1 << 20))
    tracemalloc.start()
    try:
        for _ in range(200):
            report.feed(encode(BUFFER, b"x" * (1 << 19)))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "broke the protocol" in report.warnings[0]
    control = Report(budgets=Budgets(value=1 << 30))
    for _ in range(200):
        control.feed(encode(BUFFER, b"x" * (1 << 19)))
    assert control.warnings == ()


def test_numbers_in_a_buffer_are_counted_as_what_they_become() -> None:
    data = bytes(8 * 900)
    assert value_of(b'{"$":"floats","v":0}', data).value == [0.0] * 900
    assert value_of(b'{"$":"floats","v":0}', data * 2).truncated


NOTICE = {
    "what": "value", "type": "Path", "count": 0, "unit": "", "field": "", "why": "no form",
}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"what": "files"}, {"type": 1}, {"count": "1"}, {"count": -1}, {"count": True},
        {"count": 1 << 70}, {"unit": "lies"}, {"field": "network"}, {"why": None},
    ],
)  # fmt: skip
def test_a_notice_that_no_worker_writes_breaks_the_protocol(changed: dict[str, Any]) -> None:
    (warning,) = told(DROPPED, protocol.dumps(NOTICE | changed)).warnings
    assert "broke the protocol" in warning


def test_a_notice_is_cut_and_repeated_ones_are_one_warning() -> None:
    report = Report()
    for _ in range(1000):
        report.feed(encode(DROPPED, protocol.dumps(NOTICE | {"why": "x" * 100_000})))
    (warning,) = report.warnings
    assert len(warning) < 500


def test_notices_that_differ_are_bounded_too() -> None:
    report = Report()
    for number in range(1000):
        report.feed(encode(DROPPED, protocol.dumps(NOTICE | {"type": f"T{number}"})))
    assert len(report.warnings) == 1


def test_a_value_cannot_be_allowed_more_than_a_frame_carries() -> None:
    assert resolve("standard", {"value": "1G"}).policy.limits.value == protocol.MAX_VALUE
    assert resolve("standard", {}).policy.limits.value == protocol.DEFAULT_VALUE
    with pytest.raises(PolicyError) as refusal:
        resolve("standard", {"value": "1025M"})
    assert refusal.value.field == "value"
    assert "outputs" in (refusal.value.fix or "")


def test_a_program_copies_no_more_to_send_its_value_than_its_memory_allows() -> None:
    limits = resolve("standard", {"memory": "64M"}).policy.limits
    assert budgets(limits).copy == 8 << 20
    result = belljar.run("bytearray(9 << 20)", memory="64M")
    assert (result.success, result.value) == (True, None)
    assert any("`memory`" in warning for warning in result.warnings)
    assert len(belljar.run("b'x' * (9 << 20)", memory="64M").value) == 9 << 20  # sent uncopied

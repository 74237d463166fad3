"""Arrays and tables cross as numbers and Arrow; a stream that a guest tampered with is refused."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_guest_values import cross

from belljar.guest.values import Unrepresentable, decode, encode, from_base64, to_base64

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")


def table() -> Any:
    return pd.DataFrame(
        {
            "number": [1, 2, 3],
            "text": ["x", None, "z"],
            "kind": pd.Categorical(["u", "v", "u"]),
            "moment": pd.to_datetime(["2020-01-01"] * 3).tz_localize("Europe/Berlin"),
            "maybe": pd.array([1, None, 2**60 + 1], dtype="Int64"),
            "flag": [True, False, None],
            "nothing": [None] * 3,
            "mixed": pd.Series([1, None, 3], dtype=object),
        }
    )


FRAMES = {
    "every dtype": table,
    "an index": lambda: table().set_index("text"),
    "two index levels": lambda: table().set_index(["number", "text"]),
    "a time index": lambda: table().set_index("moment"),
    "a named range index": lambda: table().rename_axis("row"),
    "a slice": lambda: table().iloc[1:2],
    "no rows": lambda: table()[["number", "text"]].head(0),
    "no columns": lambda: pd.DataFrame(index=range(5)),
    "nothing": pd.DataFrame,
    "columns of one name": lambda: pd.DataFrame([[1, 2], [3, 4]], columns=["x", "x"]),
    "numbered columns": lambda: pd.DataFrame(np.eye(2)),
    "column levels": lambda: table().groupby("text").agg({"number": ["sum", "mean"]}),
    "what Arrow cannot hold": lambda: pd.DataFrame({"a": [[1], {"b": 2}, "c"], "d": [1, 2, 3]}),
    "periods": lambda: pd.DataFrame({"p": pd.period_range("2024-01", periods=3, freq="M")}),
    "quarters as an index": lambda: pd.DataFrame(
        {"x": [1, 2]}, index=pd.period_range("2024Q1", periods=2, freq="Q")
    ),
    "intervals": lambda: pd.DataFrame({"i": pd.arrays.IntervalArray.from_breaks([0, 1, 2])}),
    "what cut makes": lambda: pd.DataFrame({"c": pd.cut(pd.Series([1.0, 2.0, 9.0]), 3), "x": 1}),
    "counts of what cut makes": lambda: pd.cut(pd.Series([1.0, 9.0]), 3).value_counts().to_frame(),
    "statistics": lambda: table()[["number"]].describe(),
}


def test_what_arrives_can_be_written_to_in_place() -> None:
    frame = pd.DataFrame({"n": np.arange(20_000), "x": np.ones(20_000), "t": ["a"] * 20_000})
    buffers: list[Any] = []
    wire = encode(frame, buffers=buffers)
    assert [len(each) for each in buffers[:2]] == [160_000, 160_000]
    assert np.shares_memory(np.frombuffer(buffers[1], "<f8"), frame["x"].to_numpy())
    received: list[Any] = [io.BytesIO(bytes(each)) for each in buffers]
    memory = np.frombuffer(received[1].getbuffer(), "<f8")
    came = decode(wire, buffers=received)
    pd.testing.assert_frame_equal(came, frame)
    assert np.shares_memory(memory, came["x"].to_numpy())  # not copied on the way
    for column, value in (("n", 7), ("x", 0.5), ("t", "b")):
        came.loc[3, column] = value
        assert came.loc[3, column] == value
    array = decode(encode(np.arange(5.0)))
    array[0] = 3.0


@pytest.mark.parametrize(
    "change",
    [
        {"arrays": []}, {"arrays": [None]}, {"arrays": [[1], None]}, {"arrays": 5},
        {"arrays": [{"$": "ndarray", "v": {"dtype": "|u1", "shape": [1, 1], "data": "AA=="}}]},
        {"arrays": [{"$": "bytes", "v": ""}]},
    ],
)  # fmt: skip
def test_a_table_of_other_than_arrays_is_refused(change: dict[str, Any]) -> None:
    wire = encode(pd.DataFrame({"n": [1.0]}))
    del wire["v"]["arrow"]
    with pytest.raises(ValueError):
        decode({"$": "dataframe", "v": {**wire["v"], **change}})


@pytest.mark.parametrize("name", FRAMES)
def test_a_dataframe_comes_back_equal(name: str) -> None:
    frame = FRAMES[name]()
    pd.testing.assert_frame_equal(cross(frame), frame, check_column_type=False)


INDEXES = {
    "range": lambda: pd.RangeIndex(2, 9, 3, name="r"),
    "numbers": lambda: pd.Index([3, 1, 2], name="n"),
    "text": lambda: pd.Index(["a", None]),
    "moments": lambda: pd.date_range("2024-01-01", periods=3, tz="Europe/Berlin"),
    "periods": lambda: pd.period_range("2024-01-01", periods=3, freq="h"),
    "intervals": lambda: pd.interval_range(0, 3, closed="left", name="i"),
    "categories": lambda: pd.CategoricalIndex(["a", "b", "a"]),
    "levels": lambda: pd.MultiIndex.from_product([["a", "b"], [1, 2]], names=["x", None]),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_comes_back_equal(name: str) -> None:
    index = INDEXES[name]()
    came = cross(index)
    assert type(came) is type(index)
    assert came.equals(index)
    assert list(came.names) == list(index.names)


def test_periods_and_intervals_come_back_equal() -> None:
    given = [pd.Period("2024Q2", "Q"), pd.Interval(1, 2, closed="both"), pd.Interval(0.5, 1.5)]
    assert cross(given) == given


@pytest.mark.parametrize("made", ["arrow", "polars", "polars series"])
def test_tables_of_other_libraries_come_back_equal(made: str) -> None:
    columns = {
        "n": [1, 2, None],
        "t": ["a", "ü", None],
        "f": [0.5, None, 1.5],
        "b": [True, None, False],
    }
    if made == "arrow":
        given = pa.table({**columns, "c": pa.array(["x", "y", "x"]).dictionary_encode()})
        assert cross(given).equals(given)
        return
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(columns).with_columns(
        c=polars.Series(["x", "y", "x"], dtype=polars.Categorical), day=polars.date(2024, 2, 29)
    )
    given = frame if made == "polars" else frame["t"]
    assert type(cross(given)) is type(given)
    assert cross(given).equals(given)


def test_a_column_of_nested_type_does_not_cross() -> None:
    with pytest.raises(Unrepresentable, match="nested"):
        encode(pa.table({"a": [[1], [2]]}))


@pytest.mark.parametrize(
    "kind",
    [
        "null", "bool_", "int8", "uint64", "float16", "float64", "string", "large_string", "binary",
        "large_binary", "date32", "date64", "time32s", "time64ns", "timestamps", "timestampns",
        "durations", "decimal128", "decimal256", "dictionary",
    ],
)  # fmt: skip
@pytest.mark.parametrize("tag", ["arrow", "polars"])
def test_every_type_of_column_is_read_or_refused(tag: str, kind: str) -> None:
    pytest.importorskip("polars")
    kinds = {
        "time32s": pa.time32("s"), "time64ns": pa.time64("ns"), "timestamps": pa.timestamp("s"),
        "timestampns": pa.timestamp("ns", "Europe/Berlin"), "durations": pa.duration("s"),
        "decimal128": pa.decimal128(38, 5), "decimal256": pa.decimal256(70, 5),
        "dictionary": pa.dictionary(pa.int8(), pa.int64()),
    }  # fmt: skip
    column = pa.nulls(3, kinds[kind] if kind in kinds else getattr(pa, kind)())
    wire = encode(pa.table({"a": column}))
    try:
        value = decode({"$": tag, "v": wire["v"]})
    except ValueError:
        return
    encode(value)  # as a result's JSON is


@pytest.mark.parametrize(
    "wire",
    [
        {"$": "period", "v": {"freq": "os.system", "ordinal": 1}},
        {"$": "period", "v": {"freq": "D" * 13, "ordinal": 1}},
        {"$": "period", "v": {"freq": "D", "ordinal": 1 << 70}},
        {"$": "period", "v": {"freq": "D"}},
        {"$": "interval", "v": {"closed": "left", "left": 2, "right": 1}},
        {"$": "interval", "v": {"closed": "up", "left": 1, "right": 2}},
        {"$": "interval", "v": {"closed": "left", "left": "a", "right": [1]}},
        {"$": "categorical", "v": {"ordered": True, "codes": [0], "categories": {}}},
        {"$": "index", "v": {"range": [0, 1, 0], "name": None}},
        {"$": "index", "v": {"range": [0, 1 << 63, 1], "name": None}},
        {"$": "index", "v": {}},
        {"$": "arrow", "v": {"rows": 1 << 60, "columns": 1, "arrow": ""}},
        {"$": "polars", "v": {"rows": 1, "columns": 1, "arrow": "AAAA"}},
    ],
    ids=str,
)
def test_tables_that_were_not_written_here_are_refused(wire: Any) -> None:
    with pytest.raises(ValueError):
        decode(wire)


@pytest.mark.parametrize(
    "make",
    [
        lambda: table()["number"],
        lambda: table()["moment"],
        lambda: table()["maybe"],
        lambda: table()["text"].value_counts(),
        lambda: pd.Series([1, "x", None]),
        lambda: pd.Series([1.5], name=("a", 1)),
        lambda: pd.Series(dtype=float),
    ],
)
def test_a_series_comes_back_equal(make: Any) -> None:
    pd.testing.assert_series_equal(cross(make()), make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(6).reshape(2, 3),
        lambda: np.arange(6).reshape(2, 3).T,
        lambda: np.arange(10)[::2],
        lambda: np.array(1.5),
        lambda: np.array([True, False]),
        lambda: np.array(["a", "bcd"]),
        lambda: np.array([b"x", b"yz"]),
        lambda: np.array([1, None, ["x"]], dtype=object),
        lambda: np.zeros((0, 3)),
        lambda: np.array([1 + 2j, np.nan]),
        lambda: np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
        lambda: np.array([1, 2], dtype=">i4"),
    ],
)
def test_an_array_comes_back_equal(make: Any) -> None:
    array, crossed = make(), cross(make())
    np.testing.assert_array_equal(crossed, array)
    assert crossed.dtype == array.dtype.newbyteorder("=")
    assert crossed.flags.writeable


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (pd.NaT, None),
        (pd.NA, None),
        ({np.int64(1): np.float64(2)}, {1: 2.0}),
    ],
)
def test_scalars_cross_as_plain_python(scalar: Any, expected: Any) -> None:
    crossed = cross(scalar)
    assert crossed == expected
    assert type(crossed) is type(expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.longdouble(1),
        lambda: np.ma.array([1, 2], mask=[0, 1]),
        lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.broadcast_to(np.int8(1), (10**6, 10**6)),
        lambda: np.broadcast_to(np.array("x"), (10**6, 10**6)),
        lambda: pd.DataFrame({"a": [object()]}),
    ],
)
def test_what_would_lose_or_explode_is_unrepresentable(make: Any) -> None:
    with pytest.raises(Unrepresentable):
        encode(make())


def stream_of(arrow_table: Any, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, arrow_table.schema, options=options) as stream:
        stream.write_table(arrow_table)
    return sink.getvalue()


def wire_of(stream: bytes, rows: int, dtypes: tuple[str, ...] = ("str",)) -> dict[str, Any]:
    return {
        "$": "dataframe",
        "v": {
            "rows": rows,
            "columns": [f"c{place}" for place in range(len(dtypes))],
            "names": [None],
            "index": 0,
            "index_names": [],
            "dtypes": list(dtypes),
            "arrow": to_base64(stream),
        },
    }


def test_a_compressed_stream_is_refused() -> None:
    column = pa.table({"0": ["x" * 1000] * 1000})
    assert decode(wire_of(stream_of(column), 1000)).shape == (1000, 1)
    for codec in ("zstd", "lz4"):
        with pytest.raises(ValueError, match="compressed"):
            decode(wire_of(stream_of(column, codec), 1000))


def test_a_compressed_dictionary_is_refused() -> None:
    column = pa.table({"0": pa.array(["x" * 1000, "y"] * 10).dictionary_encode()})
    assert decode(wire_of(stream_of(column), 20)).shape == (20, 1)
    with pytest.raises(ValueError, match="compressed"):
        decode(wire_of(stream_of(column, "zstd"), 20))


def test_an_extension_type_is_refused_before_its_reader_is_asked() -> None:
    storage = pa.field("0", pa.int64())
    marked = storage.with_metadata({"ARROW:extension:name": "x", "ARROW:extension:metadata": ""})
    plain, extended = (
        pa.Table.from_arrays([pa.array([1])], schema=pa.schema([field]))
        for field in (storage, marked)
    )
    assert decode(wire_of(stream_of(plain), 1, ("int64",))).shape == (1, 1)
    with pytest.raises(ValueError, match="plain types"):
        decode(wire_of(stream_of(extended), 1, ("int64",)))


def test_a_type_of_which_a_row_costs_nothing_is_refused() -> None:
    runs = pa.RunEndEncodedArray.from_arrays([10**9], ["x"])
    with pytest.raises(ValueError):
        decode(wire_of(stream_of(pa.table({"0": runs})), 10**9))
    with pytest.raises(ValueError, match="not used here"):
        decode(wire_of(stream_of(pa.table({"0": runs.slice(0, 5)})), 5))


def test_too_many_cells_are_refused() -> None:
    assert decode(wire_of(stream_of(pa.table({"0": pa.nulls(5)})), 5)).shape == (5, 1)
    with pytest.raises(ValueError, match="too many cells"):
        decode(wire_of(stream_of(pa.table({"0": pa.nulls(10**9)})), 10**9))
    with pytest.raises(ValueError, match="another table"):
        decode(wire_of(stream_of(pa.table({"0": pa.nulls(10**9)})), 5))


def test_offsets_that_leave_the_buffer_are_refused() -> None:
    good = stream_of(pa.table({"0": ["x", "y", "z"]}))
    offsets = bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert good.count(offsets) == 1
    bad = good.replace(offsets, offsets[:4] + b"\xff\xff\xff\x7f" + offsets[8:])
    assert decode(wire_of(good, 3)).shape == (3, 1)
    pa.ipc.open_stream(bad).read_all().validate()  # the quick validation sees only both ends
    with pytest.raises(ValueError):
        decode(wire_of(bad, 3))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_stream_with_any_bytes_changed_decodes_or_is_refused(data: st.DataObject) -> None:
    frame = table()
    wire = encode(frame)
    stream = bytearray(from_base64(wire["v"]["arrow"]))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    wire["v"]["arrow"] = to_base64(bytes(stream))
    try:
        decoded = decode(wire)
    except ValueError:
        return
    assert decoded.shape == frame.shape


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 2}, {"rows": -1}, {"rows": None}, {"columns": ["a"]}, {"names": []}, {"index": -1},
        {"index": 1}, {"index": 10**6}, {"index_names": ["x"]}, {"dtypes": []}, {"dtypes": None},
        {"dtypes": [["Int64"]]}, {"dtypes": ["Int64", "Int64"]}, {"arrow": "AAAA"}, {"arrow": None},
        {"arrays": []}, {"extra": 1},
    ],
)  # fmt: skip
def test_a_table_whose_description_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    wire = encode(pd.DataFrame({"a": ["x", "y", "z"], "b": [1, 2, 3]}))
    assert decode(wire).shape == (3, 2)
    wire["v"].update(changes)
    with pytest.raises(ValueError):
        decode(wire)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "|O"}, {"dtype": "O"}, {"dtype": "<f16"}, {"dtype": "<M8"}, {"dtype": "f8,f8"},
        {"dtype": 8}, {"shape": [4]}, {"shape": [-3]}, {"shape": [1 << 60, 0]}, {"shape": 3},
        {"shape": [True, 3]}, {"shape": [1] * 40 + [3]}, {"data": "AAAA"}, {"items": [1, 2, 3]},
    ],
)  # fmt: skip
def test_an_array_whose_description_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    wire = encode(np.array([1.0, 2.0, 3.0]))
    assert decode(wire).shape == (3,)
    wire["v"].update(changes)
    with pytest.raises(ValueError):
        decode(wire)


def test_one_long_text_cannot_make_every_other_one_as_long() -> None:
    wire = {"dtype": "U", "shape": [1001], "items": ["x" * 50_000] + ["y"] * 1000}
    with pytest.raises(ValueError, match="too large"):
        decode({"$": "ndarray", "v": wire})
    wire["items"] = ["x" * 500] + ["y"] * 1000
    assert decode({"$": "ndarray", "v": wire}).shape == (1001,)


def test_booleans_are_booleans_whatever_their_byte() -> None:
    wire = {"dtype": "|b1", "shape": [3], "data": to_base64(b"\x00\x01\x07")}
    assert decode({"$": "ndarray", "v": wire}).view("u1").tolist() == [0, 1, 1]


def test_without_pyarrow_a_table_crosses_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table()[["number", "text", "maybe"]]
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "pyarrow")
        wire = encode(frame)
    assert "arrays" in wire["v"]
    decoded = decode(wire)
    assert decoded["number"].tolist() == [1, 2, 3]
    assert decoded["maybe"].tolist() == [1, None, 2**60 + 1]


def test_a_reader_without_pandas_says_what_to_install() -> None:
    program = """
import sys
sys.modules.update(pandas=None, numpy=None)
from belljar.guest import values
for tag in ("ndarray", "dataframe"):
    try:
        values.decode({"$": tag, "v": {}})
    except ValueError as problem:
        print(problem)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout.count("pip install 'belljar[data]'") == 2, told.stderr

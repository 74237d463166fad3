"""Arrow streams: columns and whole tables, written by pyarrow or polars, checked on arrival.

A stream that a guest wrote may not be compressed (a few bytes could claim gigabytes), may not name
extension types (their readers are code of the host's), and has to validate in full. What its
columns will take as pandas has them is counted against the value's budget before any is made: a
column of type null has no bytes on the wire and eight a row on the host.
"""

from __future__ import annotations

import sys

from .protocol import NODE
from .values import Reader, Unrepresentable, Writer, expect, tagged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A column of flags grows sixtyfold when pandas turns it into objects.
MAX_CELLS = 16 << 20
_TABLE, _COLUMN = 4096, 2048
# Columns that Arrow alone would bring back as floats or objects.
NULLABLE = frozenset(
    [f"{sign}{bits}" for sign in ("Int", "UInt") for bits in (8, 16, 32, 64)]
    + ["Float32", "Float64", "boolean", "string"]
)
_BYTES = ("string", "large_string", "binary", "large_binary")
_OBJECTS = ("date", "time", "decimal")


def write_table(writer: Writer, obj: Any) -> dict[str, Any] | None:
    """`obj` if it is a table of pyarrow's or one of polars' own; None if it is neither."""
    arrow, polars, kind = sys.modules.get("pyarrow"), sys.modules.get("polars"), type(obj)
    if kind is getattr(arrow, "Table", None):
        data, tag, shape = _stream(arrow, obj), "arrow", (obj.num_rows, obj.num_columns)
    elif polars is not None and kind in (polars.DataFrame, polars.Series):
        tag = "polars" if kind is polars.DataFrame else "polars_series"
        frame = obj if kind is polars.DataFrame else obj.to_frame()
        data, shape = _polars_stream(polars, frame), frame.shape
    else:
        return None
    if shape[0] * shape[1] > MAX_CELLS:
        raise Unrepresentable("a table of too many cells")
    wire = {"rows": shape[0], "columns": shape[1], "arrow": writer.binary(data, copied=True)}
    return tagged(tag, wire)


def _stream(arrow: Any, table: Any) -> memoryview:
    if not all(_plain(arrow.types, field.type) for field in table.schema):
        raise Unrepresentable("a table with a column of nested type cannot cross the boundary")
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return memoryview(sink.getvalue()).cast("B")


def _polars_stream(polars: Any, frame: Any) -> memoryview:
    import io

    if any(dtype.is_nested() or dtype == polars.Object for dtype in frame.dtypes):
        raise Unrepresentable("a table with a column of nested type cannot cross the boundary")
    sink = io.BytesIO()
    frame.write_ipc_stream(sink, compat_level=polars.CompatLevel.oldest())
    return sink.getbuffer()


def read_table(reader: Reader, tag: str, wire: Any) -> Any:
    """What `write_table` wrote."""
    import pyarrow

    if expect(dict, wire).keys() != {"rows", "columns", "arrow"}:
        raise ValueError("a table has other fields")
    rows, width = expect(int, wire["rows"]), expect(int, wire["columns"])
    if rows < 0 or width < 0 or rows * width > MAX_CELLS:
        raise ValueError("a table of too many cells")
    reader.spend(_TABLE + _COLUMN * width)
    number = wire["arrow"]
    data = reader.binary(number) if type(number) is str else reader.buffer(number).getbuffer()
    table = _table(reader, pyarrow, data, width, rows)
    for column in table.columns:
        reader.spend(_memory(pyarrow.types, column, ""))
    if tag == "arrow":
        return table
    if any(pyarrow.types.is_decimal256(field.type) for field in table.schema):
        raise ValueError("polars has no such decimals")
    import polars

    try:
        frame: Any = polars.from_arrow(table)
    except BaseException as problem:
        # What its own code does not expect is no Exception there, and would end the host's program.
        if type(problem).__name__ != "PanicException":
            raise
        raise ValueError("polars cannot read it") from None
    return frame if tag == "polars" else frame.to_series()


def _table(reader: Reader, pyarrow: Any, data: Any, width: int, rows: int) -> Any:
    """The table of a stream, of so many columns and rows, after every check."""
    messages = _check_stream(pyarrow, data)
    stream = pyarrow.ipc.open_stream(pyarrow.py_buffer(data))
    if len(stream.schema) != width:
        raise ValueError("the stream holds another table")
    if not all(_plain(pyarrow.types, field.type) for field in stream.schema):
        raise ValueError("a column of a type that is not used here")
    reader.spend(NODE * messages * width * 8)
    table = stream.read_all()
    if table.num_rows != rows:
        raise ValueError("the stream holds another table")
    table.validate(full=True)
    return table


def columns(reader: Reader, data: Any, dtypes: list[Any], rows: int) -> list[Any]:
    """The columns of a stream as pandas' Series, each of which was of the dtype named for it."""
    import pandas
    import pyarrow

    table = _table(reader, pyarrow, data, len(dtypes), rows)
    for place, name in enumerate(dtypes):
        reader.spend(_memory(pyarrow.types, table.column(place), name))
    return [_to_series(pandas, table.column(place), name) for place, name in enumerate(dtypes)]


def _to_series(pandas: Any, column: Any, dtype: Any) -> Any:
    if dtype in NULLABLE:
        return pandas.Series(pandas.api.types.pandas_dtype(dtype).__from_arrow__(column))
    series = column.to_pandas(integer_object_nulls=dtype == "object")
    series.name = None  # in place, as below: `rename` and `set_axis` copy
    if dtype == "object" and series.dtype != object:
        return series.astype(object)
    return series.copy()  # or a program could not write to what Arrow has in its own memory


def stream_of(columns: list[Any]) -> memoryview | None:
    """The columns as one stream, or None where there are none or Arrow cannot hold them."""
    arrow = sys.modules.get("pyarrow")  # pandas loads it if it is there
    if arrow is None or not columns:
        return None
    try:
        arrays = [arrow.array(column, from_pandas=True) for column in columns]
    except (arrow.ArrowException, OverflowError):
        return None
    if not all(_plain(arrow.types, array.type) for array in arrays):
        return None
    names = [str(place) for place in range(len(arrays))]
    return _stream(arrow, arrow.Table.from_arrays(arrays, names=names))


def _plain(types: Any, kind: Any) -> bool:
    """Whether every row of this type costs its share of bytes and comes back as pandas knows it."""
    if types.is_dictionary(kind):
        return not types.is_dictionary(kind.value_type) and _plain(types, kind.value_type)
    return any(
        getattr(types, "is_" + name)(kind)
        for name in (
            "null", "boolean", "integer", "floating", "string", "large_string", "binary",
            "large_binary", "date", "time", "timestamp", "duration", "decimal",
        )
    )  # fmt: skip


def _memory(types: Any, column: Any, dtype: Any) -> int:
    """Bytes that pandas needs, at most, for what it makes of a column beyond the stream's own."""
    kind, rows = column.type, len(column)
    if types.is_dictionary(kind):
        words = sum(_memory_of(types, chunk.dictionary, dtype) for chunk in column.chunks)
        return 8 * rows + words
    return sum(_memory_of(types, chunk, dtype) for chunk in column.chunks)


def _memory_of(types: Any, chunk: Any, dtype: Any) -> int:
    kind, rows = chunk.type, len(chunk)
    if types.is_null(kind):
        return 8 * rows
    if not rows:
        return 0
    if any(getattr(types, "is_" + name)(kind) for name in _BYTES):
        held: Any = next((buffer for buffer in chunk.buffers()[2:] if buffer is not None), b"")
        wide = "string" in str(kind) and not bytes(held).isascii()
        return (NODE + 8) * rows + (4 if wide else 1) * len(held)
    if dtype == "object" or any(getattr(types, "is_" + name)(kind) for name in _OBJECTS):
        # Flags and what is missing are objects that exist once.
        return (8 if types.is_boolean(kind) else 8 + 2 * NODE) * rows
    return rows if dtype not in NULLABLE and not chunk.null_count else 8 * rows


def _check_stream(pyarrow: Any, data: Any) -> int:
    """Refuse compression and extension types before anything of the stream is interpreted.

    Gives the number of messages.
    """
    place = 0
    for place, message in enumerate(pyarrow.ipc.MessageReader.open_stream(pyarrow.py_buffer(data))):
        metadata = bytes(message.metadata)
        if place == 0:
            if message.type != "schema" or b"ARROW:extension" in metadata:
                raise ValueError("a stream starts with a schema of plain types")
        elif message.type not in ("dictionary", "record batch"):
            raise ValueError("a stream holds record batches")
        elif _compressed(metadata, nested=message.type == "dictionary"):
            raise ValueError("a compressed stream")
    return place + 1


def _compressed(metadata: bytes, nested: bool) -> bool:
    """Whether a record batch names a codec; pyarrow does not say before it has unpacked it.

    In Arrow's Message.fbs a Message has its header in slot 2, a DictionaryBatch its RecordBatch in
    slot 1, and a RecordBatch its compression in slot 3.
    """
    batch = _follow(metadata, _slot(metadata, _follow(metadata, 0), 2))
    if nested:
        batch = _follow(metadata, _slot(metadata, batch, 1))
    return _slot(metadata, batch, 3) != 0


def _number(data: bytes, place: int, size: int, signed: bool = False) -> int:
    if not 0 <= place <= len(data) - size:
        raise ValueError("an offset leaves the message")
    return int.from_bytes(data[place : place + size], "little", signed=signed)


def _follow(data: bytes, place: int) -> int:
    """Where the flatbuffer offset at `place` points."""
    return place + _number(data, place, 4)


def _slot(data: bytes, table: int, slot: int) -> int:
    """Where a field of a flatbuffer table is, or 0 if the table does not have it."""
    directory = table - _number(data, table, 4, signed=True)
    if 4 + 2 * slot >= _number(data, directory, 2):
        return 0
    offset = _number(data, directory + 4 + 2 * slot, 2)
    return table + offset if offset else 0

"""Numpy arrays and pandas tables as wire values: raw numbers and Arrow streams, checked on arrival.

An `ndarray` is `{dtype, shape, data}` with little-endian binary data (see `values`), or `{dtype,
shape, items}` for text, bytes and objects. A `dataframe` or `series` is `{rows, columns, names,
index, index_names, dtypes}` with the index levels first and then the columns. Large columns of
numbers are `arrays` (of ndarrays, null for any other column), which the host can use where they
arrive; the other columns are `arrow`, one Arrow IPC stream. Without pyarrow, or for columns that
Arrow cannot hold, all are arrays.

An Arrow stream that a guest wrote may not be compressed (a few bytes could claim gigabytes), may
not name extension types (their readers are code of the host's), and has to validate in full. What
its columns will take as pandas has them is counted against the value's budget before any is made:
a column of type null has no bytes on the wire and eight a row on the host.
"""

from __future__ import annotations

import sys

from .protocol import NODE
from .values import (
    Reader,
    Unrepresentable,
    Writer,
    expect,
    tagged,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A column of flags grows sixtyfold when pandas turns it into objects.
MAX_CELLS = 16 << 20
_MAX_TEXT = 64 << 20
_MAX_DIMENSIONS = 32
# Bytes from which on a column is a buffer of its own: a small one costs more than it saves.
_LARGE_COLUMN = 1 << 16
# What the objects of numpy, pandas and pyarrow take besides their data.
_ARRAY, _TABLE, _COLUMN = 192, 4096, 2048
_NUMBERS = frozenset(
    ["|b1", "|i1", "|u1", "<f2", "<f4", "<f8", "<c8", "<c16"]
    + ["<" + sign + size for sign in "iu" for size in "248"]
)
_TIMES = frozenset(
    f"<{kind}8[{unit}]"
    for kind in "mM"
    for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
)
# Columns that Arrow alone would bring back as floats or objects.
_NULLABLE = frozenset(
    [f"{sign}{bits}" for sign in ("Int", "UInt") for bits in (8, 16, 32, 64)]
    + ["Float32", "Float64", "boolean", "string"]
)
_BYTES = ("string", "large_string", "binary", "large_binary")
_OBJECTS = ("date", "time", "decimal")
_FIELDS = ("rows", "columns", "names", "index", "index_names", "dtypes")


def write(writer: Writer, obj: Any, kind: type, depth: int) -> Any:
    """`obj` if it is one of numpy's or pandas' own; Unrepresentable if not. Subclasses are not."""
    numpy, pandas = sys.modules["numpy"], sys.modules.get("pandas")
    if issubclass(kind, numpy.generic):
        return _write_scalar(writer, numpy, obj, depth)
    if kind is numpy.ndarray:
        return _write_array(writer, obj, depth)
    if pandas is not None:
        if obj is pandas.NA:
            return None
        if kind is pandas.DataFrame:
            return tagged("dataframe", _write_frame(writer, pandas, obj, depth))
        if kind is pandas.Series:
            frame = obj.to_frame()
            frame.columns = pandas.Index([obj.name], tupleize_cols=False)
            return tagged("series", _write_frame(writer, pandas, frame, depth))
        if issubclass(kind, pandas.Index):
            return writer.items(obj.tolist(), depth)
    raise Unrepresentable(f"{kind.__module__}.{kind.__qualname__} cannot cross the boundary")


def read(reader: Reader, tag: str, wire: Any, depth: int) -> Any:
    """What `write` wrote; ValueError for anything else, and where pandas or numpy is missing."""
    try:
        if tag == "ndarray":
            return _read_array(reader, expect(dict, wire), depth)
        return _read_frame(reader, expect(dict, wire), tag, depth)
    except ValueError:
        raise
    except ImportError as missing:
        hint = getattr(missing, "hint", "pip install 'belljar[data]'")
        raise ValueError(f"a {tag} needs {missing.name} ({hint})") from None
    except Exception as problem:
        # pyarrow and pandas have exceptions of their own for what does not fit.
        raise ValueError(f"malformed {tag}: {type(problem).__name__}") from None


def _write_scalar(writer: Writer, numpy: Any, obj: Any, depth: int) -> Any:
    if obj.dtype.kind in "mM":
        obj = obj.astype(obj.dtype.kind + "8[us]")  # finer units have no Python type
    plain = obj.item()
    if issubclass(type(plain), numpy.generic):
        raise Unrepresentable(f"{obj.dtype} has no Python number")
    return writer.write(plain, depth)


def _write_array(writer: Writer, obj: Any, depth: int) -> Any:
    code = obj.dtype.newbyteorder("<").str
    wire = {"dtype": code, "shape": list(obj.shape)}
    if code in _NUMBERS or code in _TIMES:
        plain = obj.dtype.str == code and obj.flags.c_contiguous
        if not plain:
            writer.spend(obj.nbytes)  # before copying: a broadcast array is larger than its memory
            writer.keep(-obj.nbytes)  # that is counted below
            obj = obj.astype(code, order="C")
        wire["data"] = writer.binary(memoryview(obj.reshape(-1).view("|u1")))
    elif obj.dtype.kind in "USO" and obj.size <= MAX_CELLS:
        wire["dtype"] = obj.dtype.kind
        wire["items"] = writer.items(obj.ravel().tolist(), depth)
    else:
        raise Unrepresentable(f"an array of {obj.dtype} cannot cross the boundary")
    return tagged("ndarray", wire)


def _read_array(reader: Reader, wire: dict[str, Any], depth: int) -> Any:
    import numpy

    content = "data" if "data" in wire else "items"
    if wire.keys() != {"dtype", "shape", content}:
        raise ValueError("an array has dtype, shape and data or items")
    code, shape = expect(str, wire["dtype"]), expect(list, wire["shape"])
    count = 1
    for length in shape:
        if type(length) is not int or not 0 <= length < 1 << 40:
            raise ValueError("not a length")
        count *= length
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError("too many dimensions")
    reader.spend(_ARRAY)
    if content == "items":
        items = reader.items(wire["items"], depth)
        if len(items) != count:
            raise ValueError("items do not fill the shape")
        return _read_objects(reader, numpy, code, items).reshape(shape)
    if code not in _NUMBERS and code not in _TIMES:
        raise ValueError("unknown dtype")
    data = _binary(reader, wire, "data")
    if len(data) != count * numpy.dtype(code).itemsize:
        raise ValueError("data do not fill the shape")
    if not count:
        return numpy.empty(shape, code)
    if code == "|b1":  # any byte but 0 and 1 would make a broken boolean
        return (numpy.frombuffer(data, "|u1") != 0).reshape(shape)
    array = numpy.frombuffer(data, code).reshape(shape)
    return array if array.flags.writeable else array.copy()


def _binary(reader: Reader, wire: dict[str, Any], name: str) -> Any:
    """The binary data of a field: a writable view of its buffer, or bytes. The field is taken out,
    because its text would take memory until the end."""
    data = wire.pop(name)
    return reader.binary(data) if type(data) is str else reader.buffer(data).getbuffer()


def _read_objects(reader: Reader, numpy: Any, code: str, items: list[Any]) -> Any:
    kinds = {"U": str, "S": bytes}
    if code in kinds:
        if any(type(item) is not kinds[code] for item in items):
            raise ValueError("items of another type")
        # Every item takes as much room as the longest one does.
        size = len(items) * max((len(item) for item in items), default=0)
        reader.spend(size * 4 if code == "U" else size)
        if 4 * size > _MAX_TEXT:
            raise ValueError("too large an array of text")
        return numpy.array(items, dtype=code)
    if code != "O":
        raise ValueError("unknown dtype")
    reader.spend(8 * len(items))
    array = numpy.empty(len(items), dtype=object)
    for place, item in enumerate(items):
        array[place] = item
    return array


def _write_frame(writer: Writer, pandas: Any, frame: Any, depth: int) -> dict[str, Any]:
    rows, width = frame.shape
    index = frame.index
    default = type(index) is pandas.RangeIndex and index.equals(pandas.RangeIndex(rows))
    levels = 0 if default and index.name is None else index.nlevels
    if rows * (width + levels) > MAX_CELLS:
        raise Unrepresentable("a table of too many cells")
    columns = [index.get_level_values(level).to_series() for level in range(levels)]
    columns += [frame.iloc[:, place] for place in range(width)]
    wire = {
        "rows": rows,
        "columns": writer.items(frame.columns.tolist(), depth),
        "names": writer.items(list(frame.columns.names), depth),
        "index": levels,
        "index_names": writer.items(list(index.names) if levels else [], depth),
        "dtypes": [str(column.dtype) for column in columns],
    }
    raw = [_is_raw(writer, column) for column in columns]
    others = [column for place, column in enumerate(columns) if not raw[place]]
    stream = _to_arrow(others)
    if stream is not None:
        wire["arrow"] = writer.binary(stream, copied=True)
    if stream is None or any(raw):
        wire["arrays"] = [
            None
            if stream is not None and not raw[place]
            else writer.write(column.astype(object).to_numpy(), depth + 1)
            if wire["dtypes"][place] in _NULLABLE or not hasattr(column.dtype, "newbyteorder")
            else writer.write(column.to_numpy(), depth + 1)
            for place, column in enumerate(columns)
        ]
    return wire


def _is_raw(writer: Writer, column: Any) -> bool:
    """Whether a column is large and its memory can be sent as it is."""
    if writer.buffers is None or not hasattr(column.dtype, "newbyteorder"):
        return False
    code = column.dtype.str
    large = len(column) * column.dtype.itemsize >= _LARGE_COLUMN
    return large and (code in _NUMBERS or code in _TIMES)


def _to_arrow(columns: list[Any]) -> memoryview | None:
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
    table = arrow.Table.from_arrays(arrays, names=[str(place) for place in range(len(arrays))])
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return memoryview(sink.getvalue()).cast("B")


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


def _read_frame(reader: Reader, wire: dict[str, Any], tag: str, depth: int) -> Any:
    import pandas

    found = wire.keys() - set(_FIELDS)
    if len(wire) != len(_FIELDS) + len(found) or not found or found - {"arrow", "arrays"}:
        raise ValueError("a table has other fields")
    rows, levels = expect(int, wire["rows"]), expect(int, wire["index"])
    labels, names = reader.items(wire["columns"], depth), reader.items(wire["names"], depth)
    index_names = reader.items(wire["index_names"], depth)
    dtypes = expect(list, wire["dtypes"], levels + len(labels))
    if not names or levels < 0 or len(index_names) != levels or rows < 0:
        raise ValueError("a table's names do not fit")
    if rows * max(1, len(dtypes)) > MAX_CELLS:
        raise ValueError("a table of too many cells")
    reader.spend(_TABLE + _COLUMN * len(dtypes) + 16 * rows * levels)
    columns = _from_arrays(reader, expect(list, wire.pop("arrays", [None] * len(dtypes))), depth)
    others = [place for place, column in enumerate(columns) if column is None]
    if "arrow" in found:
        data = _binary(reader, wire, "arrow")
        rest = _from_arrow(reader, data, [dtypes[place] for place in others], rows)
        for number, place in enumerate(others):
            columns[place] = rest[number]
    elif others:
        raise ValueError("columns of a table are missing")
    if len(columns) != len(dtypes) or any(len(column) != rows for column in columns):
        raise ValueError("a table's columns do not fit")
    index = _index(pandas, columns[:levels], index_names) if levels else pandas.RangeIndex(rows)
    del columns[:levels]
    for column in columns:
        column.index = index
    if tag == "series":
        (column,), (label,) = columns, labels
        column.name = label
        return column
    frame = pandas.DataFrame(dict(enumerate(columns)), index=index, copy=False)
    if len(names) > 1:
        frame.columns = pandas.MultiIndex.from_tuples(labels, names=names)
    else:
        frame.columns = pandas.Index(labels, name=names[0], tupleize_cols=False)
    return frame


def _index(pandas: Any, columns: list[Any], names: list[Any]) -> Any:
    if len(columns) == 1:
        return pandas.Index(columns[0], name=names[0])
    return pandas.MultiIndex.from_arrays(columns, names=names)


def _from_arrays(reader: Reader, arrays: list[Any], depth: int) -> list[Any]:
    """The columns that are arrays; None in the places of the others."""
    import numpy
    import pandas

    columns: list[Any] = []
    for wire in arrays:
        array = None if wire is None else reader.read(wire, depth + 1)
        if array is not None and (type(array) is not numpy.ndarray or array.ndim != 1):
            raise ValueError("a column is an array")
        columns.append(None if array is None else pandas.Series(array, copy=False))
    return columns


def _from_arrow(reader: Reader, data: Any, dtypes: list[Any], rows: int) -> list[Any]:
    import pandas
    import pyarrow

    messages = _check_stream(pyarrow, data)
    stream = pyarrow.ipc.open_stream(pyarrow.py_buffer(data))
    if len(stream.schema) != len(dtypes):
        raise ValueError("the stream holds another table")
    if not all(_plain(pyarrow.types, field.type) for field in stream.schema):
        raise ValueError("a column of a type that is not used here")
    reader.spend(NODE * messages * len(dtypes) * 8)
    table = stream.read_all()
    if table.num_rows != rows:
        raise ValueError("the stream holds another table")
    table.validate(full=True)
    for place, name in enumerate(dtypes):
        reader.spend(_memory(pyarrow.types, table.column(place), name))
    return [_to_series(pandas, table.column(place), name) for place, name in enumerate(dtypes)]


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
    return rows if dtype not in _NULLABLE and not chunk.null_count else 8 * rows


def _to_series(pandas: Any, column: Any, dtype: Any) -> Any:
    if dtype in _NULLABLE:
        return pandas.Series(pandas.api.types.pandas_dtype(dtype).__from_arrow__(column))
    series = column.to_pandas(integer_object_nulls=dtype == "object")
    series.name = None  # in place, as below: `rename` and `set_axis` copy
    if dtype == "object" and series.dtype != object:
        return series.astype(object)
    return series.copy()  # or a program could not write to what Arrow has in its own memory


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

"""Numpy arrays and pandas tables as wire values: raw numbers and Arrow streams, checked on arrival.

An `ndarray` is `{dtype, shape, data}` with little-endian base64, or `{dtype, shape, items}` for
text, bytes and objects. A `dataframe` or `series` is `{rows, columns, names, index, index_names,
dtypes}` with the index levels first and then the columns, as `arrow` (one Arrow IPC stream in
base64) or, without pyarrow or for columns that Arrow cannot hold, as `arrays` (of ndarrays).

An Arrow stream that a guest wrote may not be compressed (a few bytes could claim gigabytes), may
not name extension types (their readers are code of the host's), and has to validate in full.
"""

from __future__ import annotations

import sys

from .values import (
    Unrepresentable,
    Writer,
    expect,
    from_base64,
    read_items,
    tagged,
)
from .values import read as read_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A column of flags grows sixtyfold when pandas turns it into objects.
MAX_CELLS = 16 << 20
_MAX_TEXT = 64 << 20
_MAX_DIMENSIONS = 32
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


def read(tag: str, wire: Any, depth: int) -> Any:
    """What `write` wrote; ValueError for anything else, and where pandas or numpy is missing."""
    try:
        if tag == "ndarray":
            return _read_array(expect(dict, wire), depth)
        return _read_frame(expect(dict, wire), tag, depth)
    except ValueError:
        raise
    except ImportError as missing:
        raise ValueError(f"a {tag} needs {missing.name} (pip install 'belljar[data]')") from None
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
        writer.spend(obj.nbytes)  # before copying: a broadcast array is larger than its memory
        wire["data"] = writer.binary(obj.astype(code, copy=False).tobytes())
    elif obj.dtype.kind in "USO" and obj.size <= MAX_CELLS:
        wire["dtype"] = obj.dtype.kind
        wire["items"] = writer.items(obj.ravel().tolist(), depth)
    else:
        raise Unrepresentable(f"an array of {obj.dtype} cannot cross the boundary")
    return tagged("ndarray", wire)


def _read_array(wire: dict[str, Any], depth: int) -> Any:
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
    if content == "items":
        items = read_items(wire["items"], depth)
        if len(items) != count:
            raise ValueError("items do not fill the shape")
        return _read_objects(numpy, code, items).reshape(shape)
    data = from_base64(wire["data"])
    if code not in _NUMBERS and code not in _TIMES:
        raise ValueError("unknown dtype")
    if len(data) != count * numpy.dtype(code).itemsize:
        raise ValueError("data do not fill the shape")
    if not count:
        return numpy.empty(shape, code)
    if code == "|b1":  # any byte but 0 and 1 would make a broken boolean
        return (numpy.frombuffer(data, "|u1") != 0).reshape(shape)
    return numpy.frombuffer(data, code).reshape(shape).copy()


def _read_objects(numpy: Any, code: str, items: list[Any]) -> Any:
    kinds = {"U": str, "S": bytes}
    if code in kinds:
        if any(type(item) is not kinds[code] for item in items):
            raise ValueError("items of another type")
        # Every item takes as much room as the longest one does.
        if 4 * len(items) * max((len(item) for item in items), default=0) > _MAX_TEXT:
            raise ValueError("too large an array of text")
        return numpy.array(items, dtype=code)
    if code != "O":
        raise ValueError("unknown dtype")
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
    stream = _to_arrow(columns)
    if stream is not None:
        wire["arrow"] = writer.binary(stream)
    else:
        wire["arrays"] = [
            writer.write(column.astype(object).to_numpy(), depth + 1)
            if wire["dtypes"][place] in _NULLABLE or not hasattr(column.dtype, "newbyteorder")
            else writer.write(column.to_numpy(), depth + 1)
            for place, column in enumerate(columns)
        ]
    return wire


def _to_arrow(columns: list[Any]) -> bytes | None:
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
    return bytes(sink.getvalue())


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


def _read_frame(wire: dict[str, Any], tag: str, depth: int) -> Any:
    import pandas

    content = "arrow" if "arrow" in wire else "arrays"
    if wire.keys() != {*_FIELDS, content}:
        raise ValueError("a table has other fields")
    rows, levels = expect(int, wire["rows"]), expect(int, wire["index"])
    labels, names = read_items(wire["columns"], depth), read_items(wire["names"], depth)
    index_names = read_items(wire["index_names"], depth)
    dtypes = expect(list, wire["dtypes"], levels + len(labels))
    if not names or levels < 0 or len(index_names) != levels or rows < 0:
        raise ValueError("a table's names do not fit")
    if rows * max(1, len(dtypes)) > MAX_CELLS:
        raise ValueError("a table of too many cells")
    if content == "arrow":
        columns = _from_arrow(from_base64(wire["arrow"]), dtypes, rows)
    else:
        columns = [
            pandas.Series(read_value(item, depth + 1)) for item in expect(list, wire["arrays"])
        ]
    if len(columns) != len(dtypes) or any(len(column) != rows for column in columns):
        raise ValueError("a table's columns do not fit")
    index = _index(pandas, columns[:levels], index_names) if levels else pandas.RangeIndex(rows)
    columns = [column.set_axis(index) for column in columns[levels:]]
    if tag == "series":
        (column,), (label,) = columns, labels
        return column.rename(label)
    frame = pandas.DataFrame(dict(enumerate(columns)), index=index)
    if len(names) > 1:
        frame.columns = pandas.MultiIndex.from_tuples(labels, names=names)
    else:
        frame.columns = pandas.Index(labels, name=names[0], tupleize_cols=False)
    return frame


def _index(pandas: Any, columns: list[Any], names: list[Any]) -> Any:
    if len(columns) == 1:
        return pandas.Index(columns[0], name=names[0])
    return pandas.MultiIndex.from_arrays(columns, names=names)


def _from_arrow(data: bytes, dtypes: list[Any], rows: int) -> list[Any]:
    import pandas
    import pyarrow

    _check_stream(pyarrow, data)
    table = pyarrow.ipc.open_stream(pyarrow.py_buffer(data)).read_all()
    if table.num_rows != rows or table.num_columns != len(dtypes):
        raise ValueError("the stream holds another table")
    if not all(_plain(pyarrow.types, field.type) for field in table.schema):
        raise ValueError("a column of a type that is not used here")
    table.validate(full=True)
    return [_to_series(pandas, table.column(place), name) for place, name in enumerate(dtypes)]


def _to_series(pandas: Any, column: Any, dtype: Any) -> Any:
    if dtype in _NULLABLE:
        return pandas.Series(pandas.api.types.pandas_dtype(dtype).__from_arrow__(column))
    series = column.to_pandas(integer_object_nulls=dtype == "object").rename(None)
    return series.astype(object) if dtype == "object" else series


def _check_stream(pyarrow: Any, data: bytes) -> None:
    """Refuse compression and extension types before anything of the stream is interpreted."""
    for place, message in enumerate(pyarrow.ipc.MessageReader.open_stream(pyarrow.py_buffer(data))):
        metadata = bytes(message.metadata)
        if place == 0:
            if message.type != "schema" or b"ARROW:extension" in metadata:
                raise ValueError("a stream starts with a schema of plain types")
        elif message.type not in ("dictionary", "record batch"):
            raise ValueError("a stream holds record batches")
        elif _compressed(metadata, nested=message.type == "dictionary"):
            raise ValueError("a compressed stream")


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

"""Numpy arrays and pandas tables as wire values: raw numbers and Arrow streams, checked on arrival.

An `ndarray` is `{dtype, shape, data}` with little-endian binary data (see `values`), or `{dtype,
shape, items}` for text, bytes and objects. A `dataframe` or `series` is `{rows, columns, names,
index, index_names, dtypes}` with the index levels first and then the columns. Large columns of
numbers are `arrays` (of ndarrays, null for any other column), which the host can use where they
arrive; the other columns are `arrow`, one Arrow IPC stream. Without pyarrow, or for columns that
Arrow cannot hold, all are arrays.

Columns of periods, of intervals, and of categories that Arrow cannot hold are tagged arrays, see
`extensions`. Streams are checked in `arrow`. An `index` is the table of its levels, or a range.
"""

from __future__ import annotations

import sys

from . import arrow, extensions
from .values import Reader, Unrepresentable, Writer, expect, tagged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
_FIELDS = ("rows", "columns", "names", "index", "index_names", "dtypes")


def write(writer: Writer, obj: Any, kind: type, depth: int) -> Any:
    """`obj` if it is one of the four libraries' own; Unrepresentable if not. Subclasses are not."""
    table = arrow.write_table(writer, obj)
    if table is not None:
        return table
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    if numpy is None:
        raise Unrepresentable(f"{kind.__module__}.{kind.__qualname__} cannot cross the boundary")
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
            return tagged("index", _write_index(writer, pandas, obj, depth))
        for form in (extensions.write_scalar, extensions.write):
            wire = form(writer, pandas, obj, depth)
            if wire is not None:
                return wire
    raise Unrepresentable(f"{kind.__module__}.{kind.__qualname__} cannot cross the boundary")


def read(reader: Reader, tag: str, wire: Any, depth: int) -> Any:
    """What `write` wrote; ValueError for anything else, and where pandas or numpy is missing."""
    try:
        if tag == "ndarray":
            return _read_array(reader, expect(dict, wire), depth)
        if tag in ("arrow", "polars", "polars_series"):
            return arrow.read_table(reader, tag, wire)
        if tag == "index":
            return _read_index(reader, expect(dict, wire), depth)
        if tag in extensions.TAGS:
            return extensions.read(reader, tag, expect(dict, wire), depth)
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
    elif obj.dtype.kind in "USO" and obj.size <= arrow.MAX_CELLS:
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
    if rows * (width + levels) > arrow.MAX_CELLS:
        raise Unrepresentable("a table of too many cells")
    parts = [index.get_level_values(level).to_series() for level in range(levels)]
    parts += [frame.iloc[:, place] for place in range(width)]
    wire = {
        "rows": rows,
        "columns": writer.items(frame.columns.tolist(), depth),
        "names": writer.items(list(frame.columns.names), depth),
        "index": levels,
        "index_names": writer.items(list(index.names) if levels else [], depth),
        "dtypes": [str(column.dtype) for column in parts],
    }
    arrays = [_apart(writer, pandas, column, depth) for column in parts]
    stream = arrow.stream_of([parts[place] for place, each in enumerate(arrays) if each is None])
    if stream is not None:
        wire["arrow"] = writer.binary(stream, copied=True)
    else:
        for place, column in enumerate(parts):
            if arrays[place] is None:
                numbers = hasattr(column.dtype, "newbyteorder")
                plain = numbers and wire["dtypes"][place] not in arrow.NULLABLE
                values = column.to_numpy() if plain else column.astype(object).to_numpy()
                arrays[place] = writer.write(values, depth + 1)
    if stream is None or any(each is not None for each in arrays):
        wire["arrays"] = arrays
    return wire


def _apart(writer: Writer, pandas: Any, column: Any, depth: int) -> Any:
    """A column that is no part of a stream: large and of plain numbers, or unknown to Arrow."""
    if _is_raw(writer, column):
        return writer.write(column.to_numpy(), depth + 1)
    return extensions.write(writer, pandas, column.array, depth + 1)


def _write_index(writer: Writer, pandas: Any, index: Any, depth: int) -> dict[str, Any]:
    if type(index) is pandas.RangeIndex:
        bounds = [index.start, index.stop, index.step]
        return {"range": bounds, "name": writer.write(index.name, depth + 1)}
    frame = pandas.DataFrame(index=index)
    return {"levels": index.nlevels, "table": _write_frame(writer, pandas, frame, depth + 1)}


def _read_index(reader: Reader, wire: dict[str, Any], depth: int) -> Any:
    import pandas

    if wire.keys() == {"range", "name"}:
        bounds = [expect(int, each) for each in expect(list, wire["range"], 3)]
        if any(abs(each) >= 1 << 62 for each in bounds):
            raise ValueError("a range out of bounds")
        return pandas.RangeIndex(*bounds, name=reader.read(wire["name"], depth + 1))
    if wire.keys() != {"levels", "table"}:
        raise ValueError("an index has other fields")
    return _read_frame(reader, expect(dict, wire["table"]), "dataframe", depth + 1).index


def _is_raw(writer: Writer, column: Any) -> bool:
    """Whether a column is large and its memory can be sent as it is."""
    if writer.buffers is None or not hasattr(column.dtype, "newbyteorder"):
        return False
    code = column.dtype.str
    large = len(column) * column.dtype.itemsize >= _LARGE_COLUMN
    return large and (code in _NUMBERS or code in _TIMES)


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
    if rows * max(1, len(dtypes)) > arrow.MAX_CELLS:
        raise ValueError("a table of too many cells")
    reader.spend(_TABLE + _COLUMN * len(dtypes) + 16 * rows * levels)
    columns = _from_arrays(reader, expect(list, wire.pop("arrays", [None] * len(dtypes))), depth)
    others = [place for place, column in enumerate(columns) if column is None]
    if "arrow" in found:
        data = _binary(reader, wire, "arrow")
        rest = arrow.columns(reader, data, [dtypes[place] for place in others], rows)
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

    own = pandas.arrays
    kinds = (numpy.ndarray, own.PeriodArray, own.IntervalArray, pandas.Categorical)
    columns: list[Any] = []
    for wire in arrays:
        array = None if wire is None else reader.read(wire, depth + 1)
        if array is not None and (type(array) not in kinds or array.ndim != 1):
            raise ValueError("a column is an array")
        columns.append(None if array is None else pandas.Series(array, copy=False))
    return columns

"""The beginning of a table as plain data: its columns, their types, and its first rows.

`{"rows", "columns": [{"name", "type"}], "head": [[...]]}`, and `index` with the labels of those
rows where they are not just counted. A cell is a number, a text, a boolean or null. Frames and
series of pandas and polars, and Arrow tables, have one.
"""

from __future__ import annotations

import sys

from .failures import cut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MIME = "application/vnd.belljar.table+json"
MAX_ROWS = 10
MAX_COLUMNS = 100
_MAX_TEXT = 200
# A reader of JSON that knows only doubles reads larger integers as others.
_EXACT = 1 << 53


def of_table(obj: Any) -> dict[str, Any] | None:
    """The preview of a table; None for what is none."""
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    arrow, kind = sys.modules.get("pyarrow"), type(obj)
    if kind in _of(pandas, "DataFrame", "Series"):
        return _of_pandas(pandas, obj.to_frame() if obj.ndim == 1 else obj)
    if kind in _of(polars, "DataFrame", "Series"):
        frame = obj if kind.__name__ == "DataFrame" else obj.to_frame()
        head = frame[:, :MAX_COLUMNS].head(MAX_ROWS)
        named = zip(head.columns, head.dtypes)
        return _preview(frame.height, frame.width, named, head.rows())
    if kind in _of(arrow, "Table"):
        head = obj.select(range(min(MAX_COLUMNS, obj.num_columns))).slice(0, MAX_ROWS)
        types = [(field.name, field.type) for field in head.schema]
        cells = zip(*(column.to_pylist() for column in head.columns))
        return _preview(obj.num_rows, obj.num_columns, types, cells)
    return None


def _of(module: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(module, name, None) for name in names) if module is not None else ()


def _of_pandas(pandas: Any, frame: Any) -> dict[str, Any]:
    head = frame.iloc[:MAX_ROWS, :MAX_COLUMNS]
    columns = [head.iloc[:, place] for place in range(head.shape[1])]
    types = [(label, column.dtype) for label, column in zip(head.columns, columns)]
    cells = zip(*(column.tolist() for column in columns)) if columns else ()
    preview = _preview(len(frame), frame.shape[1], types, cells)
    index = frame.index
    counted = type(index) is pandas.RangeIndex and (index.start, index.step) == (0, 1)
    if not counted:
        preview["index"] = [_cell(label) for label in head.index.tolist()]
    return preview


def _preview(rows: int, width: int, types: Any, cells: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rows": rows,
        "columns": [{"name": _text(name), "type": _text(kind)} for name, kind in types],
        "head": [[_cell(cell) for cell in row] for row in cells],
    }
    return found if width <= MAX_COLUMNS else {**found, "width": width}


def _cell(cell: Any) -> Any:
    kind = type(cell)
    if cell is None or kind is bool or (kind is int and -_EXACT < cell < _EXACT):
        return cell
    if kind is float:
        return cell if cell - cell == 0 else None if cell != cell else repr(cell)
    if kind.__name__ in ("NaTType", "NAType"):
        return None
    return _text(cell)


def _text(thing: Any) -> str:
    return cut(str(thing), _MAX_TEXT)

"""What a matplotlib figure plots, as plain data: for a caller that draws it again, or reads it.

`{"title", "charts": [{"type", "title", "x", "y", "series"}]}`, one chart for each pair of axes. `x`
and `y` are `{"label", "scale"}`. The type of a chart is that of its series, or "mixed":

    line, scatter    {"type", "label", "x": [...], "y": [...]}
    bar              the same; "horizontal": true where bars lie, x is then their length
    histogram        {"type", "label", "edges": [...], "y": [...]}, where bars adjoin
    pie              {"type", "labels": [...], "shares": [...]}, shares of 1
    image            {"type", "shape": [rows, columns], "values": [[...]]}, values of a small one

Dates are ISO 8601 and categories their names. At most MAX_POINTS numbers are kept of a figure; a
series that is cut has its full length as "count". Everything is read from the program's own
objects, so any failure means no chart.
"""

from __future__ import annotations

import sys

from .failures import cut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MIME = "application/vnd.belljar.chart+json"
MAX_POINTS = 20_000
MAX_CHARTS = 50
MAX_SERIES = 100
_MAX_TEXT = 200
_MAX_CELLS = 2500


def of_figure(figure: Any) -> dict[str, Any] | None:
    """The charts of a figure; None if nothing in it is known here."""
    room = _Room()
    charts = []
    for axes in figure.axes[:MAX_CHARTS]:
        series = [] if axes.get_label() == "<colorbar>" else _series(axes, room)
        if series:
            kinds = {each["type"] for each in series}
            charts.append({
                "type": kinds.pop() if len(kinds) == 1 else "mixed",
                "title": _text(axes.get_title()),
                "x": {"label": _text(axes.get_xlabel()), "scale": _text(axes.get_xscale())},
                "y": {"label": _text(axes.get_ylabel()), "scale": _text(axes.get_yscale())},
                "series": series,
            })  # fmt: skip
    above = getattr(figure, "_suptitle", None)
    title = _text(above.get_text()) if above is not None else None
    return {"title": title, "charts": charts} if charts else None


class _Room:
    """How many numbers may still be kept."""

    def __init__(self) -> None:
        self.left = MAX_POINTS

    def of(self, size: int, each: int = 1) -> int:
        """How many of `size` points, of so many numbers each, are kept."""
        kept = min(size, self.left // each)
        self.left -= kept * each
        return kept


def _series(axes: Any, room: _Room) -> list[dict[str, Any]]:
    names_x, names_y = _names(axes.xaxis), _names(axes.yaxis)
    found: list[dict[str, Any]] = []
    for bars in axes.containers:
        if type(bars).__name__ == "BarContainer":
            found.append(_bars(bars, names_x, names_y, room))
    for line in axes.lines:
        if line.get_transform() == axes.transData:  # others are drawn across the axes
            points = line.get_xdata(orig=False), line.get_ydata(orig=False)
            found.append(_points("line", line, *points, names_x, names_y, room))
    for collection in axes.collections:
        if type(collection).__name__ == "PathCollection":
            x, y = collection.get_offsets().T
            found.append(_points("scatter", collection, x, y, names_x, names_y, room))
        elif type(collection).__name__ == "QuadMesh":
            found.append(_image(collection, room))
    found += [_image(image, room) for image in axes.images]
    wedges = [patch for patch in axes.patches if type(patch).__name__ == "Wedge"]
    if wedges:
        found.append(_pie(wedges[: room.of(len(wedges))]))
    return found[:MAX_SERIES]


def _points(
    kind: str, artist: Any, x: Any, y: Any, names_x: Any, names_y: Any, room: _Room
) -> dict[str, Any]:
    kept = room.of(len(x), 2)
    series = {
        "type": kind,
        "label": _label(artist),
        "x": _values(x[:kept], names_x),
        "y": _values(y[:kept], names_y),
    }
    return series if kept == len(x) else {**series, "count": len(x)}


def _bars(bars: Any, names_x: Any, names_y: Any, room: _Room) -> dict[str, Any]:
    kept = room.of(len(bars.patches), 2)
    rectangles = bars.patches[:kept]
    lying = bars.orientation == "horizontal"
    if lying:
        starts = [each.get_y() for each in rectangles]
        widths = [each.get_height() for each in rectangles]
        lengths = [each.get_width() for each in rectangles]
    else:
        starts = [each.get_x() for each in rectangles]
        widths = [each.get_width() for each in rectangles]
        lengths = [each.get_height() for each in rectangles]
    names = names_y if lying else names_x
    middles = [start + width / 2 for start, width in zip(starts, widths)]
    series: dict[str, Any] = {"type": "bar", "label": _label(bars)}
    if names is None and _adjoin(starts, widths):
        series["type"] = "histogram"
        series["edges"] = _values([*starts, starts[-1] + widths[-1]], None)
        series["y"] = _values(lengths, None)
    else:
        series["x"], series["y"] = _values(middles, names), _values(lengths, None)
        if lying:
            series["x"], series["y"] = series["y"], series["x"]
            series["horizontal"] = True
    return series if kept == len(bars.patches) else {**series, "count": len(bars.patches)}


def _adjoin(starts: list[Any], widths: list[Any]) -> bool:
    """Whether each bar begins where the one before it ends."""
    ends = [start + width for start, width in zip(starts, widths)]
    return len(starts) > 1 and all(
        abs(end - start) <= 1e-6 * abs(width) for end, start, width in zip(ends, starts[1:], widths)
    )


def _pie(wedges: list[Any]) -> dict[str, Any]:
    shares = [(wedge.theta2 - wedge.theta1) / 360 for wedge in wedges]
    return {"type": "pie", "labels": [_label(each) for each in wedges],
            "shares": _values(shares, None)}  # fmt: skip


def _image(image: Any, room: _Room) -> dict[str, Any]:
    cells = image.get_array()
    series: dict[str, Any] = {"type": "image", "label": _label(image), "shape": list(cells.shape)}
    if cells.ndim == 2 and cells.size <= min(_MAX_CELLS, room.left):
        room.of(cells.size)
        series["values"] = [_values(row, None) for row in cells]
    return series


def _names(axis: Any) -> Callable[[list[Any]], list[Any]] | None:
    """What numbers on this axis stand for: dates, or the names of categories; None if numbers."""
    formatter = axis.get_major_formatter()
    kind = type(formatter).__name__
    if kind in ("AutoDateFormatter", "ConciseDateFormatter", "DateFormatter"):
        dates: Any = sys.modules["matplotlib.dates"]
        return lambda numbers: [
            each.replace(tzinfo=None).isoformat() for each in dates.num2date(numbers)
        ]
    if kind == "StrCategoryFormatter":
        return lambda numbers: formatter.format_ticks(numbers)
    if kind == "TimeSeries_DateFormatter":  # of pandas, which counts periods
        period: Any = sys.modules["pandas"].Period
        return lambda numbers: [
            str(period(ordinal=int(each), freq=formatter.freq)) for each in numbers
        ]
    if type(axis.get_major_locator()).__name__ == "FixedLocator":
        places = axis.get_majorticklocs()
        texts = formatter.format_ticks(places)
        named = {float(at): text for at, text in zip(places, texts) if text}
        return lambda numbers: [named.get(float(each), each) for each in numbers]
    return None


def _values(numbers: Any, names: Any) -> list[Any]:
    """Plain numbers, or what they stand for; None for what is missing."""
    plain = numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)
    plain = [each.item() if hasattr(each, "item") else each for each in plain]
    plain = [each if type(each) in (int, float) and each - each == 0 else None for each in plain]
    if names is None:
        return plain
    named = iter(names([each for each in plain if each is not None]))
    return [None if each is None else _named(next(named)) for each in plain]


def _named(name: Any) -> Any:
    return _text(name) if type(name) is str else name


def _label(artist: Any) -> str | None:
    """The label that a legend would show."""
    label = artist.get_label()
    return None if str(label).startswith("_") else _text(label)


def _text(text: Any) -> str | None:
    return cut(str(text), _MAX_TEXT) if text else None

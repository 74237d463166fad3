"""Data of what is shown: charts of matplotlib's figures, previews of tables, plots of libraries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from worker_process import run_program

from belljar.guest.charts import MAX_POINTS
from belljar.guest.displays import bundle
from belljar.guest.previews import MAX_COLUMNS, MAX_ROWS
from belljar.types import Display

PYPLOT = """
import datetime, matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
def drawn(plot):
    figure, axes = plt.subplots()
    plot(axes)
    display(figure)
    plt.close(figure)
"""
DAYS = "[datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2, 12)]"
SERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "line": (
        "axes.plot([1, 2, 3], [1, float('nan'), 4], label='a')",
        {"type": "line", "label": "a", "x": [1, 2, 3], "y": [1, None, 4]},
    ),
    "dates": (
        f"axes.plot({DAYS}, [1, 2])",
        {"type": "line", "label": None, "x": ["2024-01-01T00:00:00", "2024-01-02T12:00:00"],
         "y": [1, 2]},
    ),
    "categories": (
        "axes.plot(['p', 'q'], [1, 2])",
        {"type": "line", "label": None, "x": ["p", "q"], "y": [1, 2]},
    ),
    "scatter": (
        "axes.scatter([1, 2], [3, 4], label='s')",
        {"type": "scatter", "label": "s", "x": [1, 2], "y": [3, 4]},
    ),
    "bar": (
        "axes.bar(['a', 'b'], [1, 2], label='n')",
        {"type": "bar", "label": "n", "x": ["a", "b"], "y": [1, 2]},
    ),
    "named ticks": (
        "(axes.bar([0, 1], [1, 2]), axes.set_xticks([0, 1], ['k', 'l']))",
        {"type": "bar", "label": None, "x": ["k", "l"], "y": [1, 2]},
    ),
    "lying bars": (
        "axes.barh(['a', 'b'], [1, 2])",
        {"type": "bar", "label": None, "x": [1, 2], "y": ["a", "b"], "horizontal": True},
    ),
    "histogram": (
        "axes.hist([0, 0, 1, 2], bins=[0, 1, 2])",
        {"type": "histogram", "label": None, "edges": [0, 1, 2], "y": [2, 2]},
    ),
    "pie": (
        "axes.pie([1, 3], labels=['u', 'v'])",
        {"type": "pie", "labels": ["u", "v"], "shares": [0.25, 0.75]},
    ),
    "image": (
        "axes.imshow([[0, 1], [2, 3]])",
        {"type": "image", "label": None, "shape": [2, 2], "values": [[0, 1], [2, 3]]},
    ),
}  # fmt: skip


def shown(code: str) -> list[Display]:
    run = run_program(code)
    assert run.exit_code == 0, run.stderr
    return list(run.report.displays)


def test_what_a_figure_plots_comes_as_data_beside_its_picture() -> None:
    pytest.importorskip("matplotlib")
    plots = "".join(f"drawn(lambda axes: {plot})\n" for plot, _ in SERIES.values())
    found = shown(PYPLOT + plots + "None")
    assert len(found) == len(SERIES)
    for name, (display, (_, wanted)) in zip(SERIES, zip(found, SERIES.values(), strict=True),
                                            strict=True):  # fmt: skip
        assert display.png, name
        assert display.chart is not None, name
        (chart,) = display.chart["charts"]
        assert chart["series"] == [wanted], name
        assert chart["type"] == wanted["type"], name


def test_titles_labels_and_scales_of_each_pair_of_axes() -> None:
    pytest.importorskip("matplotlib")
    code = (
        PYPLOT
        + """
figure, (left, right) = plt.subplots(1, 2)
figure.suptitle("both")
left.plot([1, 2]); left.set(title="one", xlabel="time", ylabel="size", yscale="log")
right.bar([1, 2], [1, 2], width=0.5); right.plot([1, 2]); right.axhline(3)
plt.show()
"""
    )
    (display,) = shown(code)
    assert display.chart is not None
    assert display.chart["title"] == "both"
    one, two = display.chart["charts"]
    assert (one["title"], one["x"]["label"]) == ("one", "time")
    assert one["y"] == {"label": "size", "scale": "log"}
    assert two["type"] == "mixed"
    assert [series["type"] for series in two["series"]] == ["bar", "line"]


def test_a_long_series_is_cut_and_says_its_length() -> None:
    pytest.importorskip("matplotlib")
    (display,) = shown(PYPLOT + "plt.plot(range(100_000)); plt.plot([1]); plt.show()")
    assert display.chart is not None
    long, short = display.chart["charts"][0]["series"]
    assert (long["count"], len(long["x"])) == (100_000, MAX_POINTS // 2)
    assert (short["count"], short["x"]) == (1, [])


def test_pandas_plots_have_their_labels_and_days() -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    code = (
        PYPLOT
        + """
import pandas
pandas.DataFrame({"v": [1, 2]}, index=["k", "l"]).plot.bar(); plt.show()
pandas.DataFrame({"v": [1, 2]}, index=pandas.date_range("2024", periods=2)).plot(); plt.show()
"""
    )
    bars, days = shown(code)
    assert bars.chart is not None
    assert days.chart is not None
    assert bars.chart["charts"][0]["series"][0]["x"] == ["k", "l"]
    assert days.chart["charts"][0]["series"][0]["x"] == ["2024-01-01", "2024-01-02"]


def test_a_figure_that_breaks_when_it_is_read_has_a_picture_still() -> None:
    pytest.importorskip("matplotlib")
    code = (
        PYPLOT
        + """
figure, axes = plt.subplots()
line, = axes.plot([1, 2])
line.get_xdata = None
display(figure); plt.close(figure)
"""
    )
    (display,) = shown(code)
    assert display.png
    assert display.chart is None


def test_a_table_is_previewed_as_data() -> None:
    pytest.importorskip("pandas")
    code = """
import pandas
frame = pandas.DataFrame({"n": range(1000), "x": 0.5, "t": pandas.Timestamp("2024-02-29")})
frame.loc[1, ["x", "t"]] = None
display(frame, frame.set_index(frame["n"] + 7), frame["n"])
None
"""
    plain, indexed, series = (each.table for each in shown(code))
    assert plain is not None
    assert indexed is not None
    assert series is not None
    assert plain["rows"] == 1000
    assert [column["name"] for column in plain["columns"]] == ["n", "x", "t"]
    assert plain["columns"][1]["type"] == "float64"
    assert len(plain["head"]) == MAX_ROWS
    assert plain["head"][:2] == [[0, 0.5, "2024-02-29 00:00:00"], [1, None, None]]
    assert "index" not in plain
    assert indexed["index"][0] == 7
    assert series["head"][2] == [2]


def test_wide_and_other_tables_are_previewed() -> None:
    polars = pytest.importorskip("polars")
    pyarrow = pytest.importorskip("pyarrow")
    wide = polars.DataFrame({f"c{n}": [n] for n in range(MAX_COLUMNS + 5)})
    preview = json.loads(bundle(wide)["application/vnd.belljar.table+json"])
    assert (len(preview["columns"]), preview["width"]) == (MAX_COLUMNS, MAX_COLUMNS + 5)
    table = pyarrow.table({"a": [1, 1 << 60], "b": [None, "x" * 5000]})
    preview = json.loads(bundle(table)["application/vnd.belljar.table+json"])
    assert preview["head"][0] == [1, None]
    assert preview["head"][1][0] == str(1 << 60)  # a reader with doubles would see another number
    assert len(preview["head"][1][1]) < 300
    assert not [mime for mime in bundle([1]) if "belljar" in mime]  # the control arm


PLOTS = {
    "plotly": ("import plotly.graph_objects as g; display(g.Figure(g.Bar(y=[1, 2])))",
               "application/vnd.plotly.v1+json", "data"),
    "altair": ("import altair, pandas\n"
               "display(altair.Chart(pandas.DataFrame({'a': [1]})).mark_bar().encode(x='a:Q'))",
               "application/vnd.vegalite.v", "mark"),
    "bokeh": ("from bokeh.plotting import figure, show\n"
              "p = figure(); p.line([1, 2], [1, 2]); show(p)",
              "application/vnd.bokehjs_item+json", "doc"),
}  # fmt: skip


@pytest.mark.parametrize("library", PLOTS)
def test_plots_of_libraries_have_their_own_form_and_html(library: str) -> None:
    pytest.importorskip(library)
    code, prefix, key = PLOTS[library]
    (display,) = shown(code + "\nNone")
    (mime,) = [mime for mime in display.data if mime.startswith(prefix)]
    assert key in json.loads(display.data[mime])
    assert "<script" in (display.html or "")


def test_pictures_of_pil_are_shown() -> None:
    pytest.importorskip("PIL")
    (display,) = shown("from PIL import Image; display(Image.new('RGB', (3, 3)))\nNone")
    assert (display.png or b"").startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": NaN}', "[" * 100_000, '"x"'])
def test_a_guest_that_writes_other_data_has_no_chart(text: str) -> None:
    display = Display(data={"application/vnd.belljar.chart+json": text})
    assert display.chart is None
    assert display.table is None
    good = Display(data={"application/vnd.belljar.chart+json": '{"charts": []}'})
    assert good.chart == {"charts": []}  # the control arm

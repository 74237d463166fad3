"""What programs show: rich forms as MIME bundles, figures unasked for, failures left out."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pytest
from worker_process import run_program

from belljar.guest.displays import MAX_DISPLAYS, MAX_PLAIN, MAX_RICH, bundle, is_mime

PNG = b"\x89PNG\r\n\x1a\n"


def shown(code: str) -> list[Mapping[str, str]]:
    run = run_program(code)
    assert run.exit_code == 0, run.stderr
    # Whatever is shown in place of a value that cannot cross, or only as its `repr`.
    dropped = ("the value was dropped: ", "the value has objects without a form ")
    assert [text for text in run.report.warnings if not text.startswith(dropped)] == []
    return [display.data for display in run.report.displays]


def test_display_is_a_builtin_everywhere(edge_python: str) -> None:
    run = run_program("import builtins\ndisplay(1, 'two')\nbuiltins.display", python=edge_python)
    assert [d.data for d in run.report.displays][:2] == [
        {"text/plain": "1"},
        {"text/plain": "'two'"},
    ]


def test_displays_arrive_while_the_program_still_runs() -> None:
    code = "display('early')\nimport os\nos._exit(3)"
    run = run_program(code)
    assert run.exit_code == 3
    assert [display.data["text/plain"] for display in run.report.displays] == ["'early'"]


def test_every_representation_of_an_object_crosses() -> None:
    code = """
class Rich:
    def __repr__(self): return 'Rich()'
    def _repr_html_(self): return '<b>rich</b>'
    def _repr_svg_(self): return '<svg/>'
    def _repr_png_(self): return b'\\x89PNG'
    def _repr_jpeg_(self): return (b'\\xff\\xd8', {'width': 3})
    def _repr_markdown_(self): return '**rich**'
    def _repr_latex_(self): return '$x$'
    def _repr_json_(self): return {'a': [1, float('nan')]}
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {'text/html': '<i>wins</i>', 'application/vnd.x+json': {'b': 2}}, {}
display(Rich())
"""
    assert shown(code) == [
        {
            "text/plain": "Rich()",
            "text/html": "<i>wins</i>",
            "image/svg+xml": "<svg/>",
            "image/png": base64.b64encode(b"\x89PNG").decode(),
            "image/jpeg": base64.b64encode(b"\xff\xd8").decode(),
            "text/markdown": "**rich**",
            "text/latex": "$x$",
            "application/json": '{"a":[1,{"$":"float","v":"nan"}]}',
            "application/vnd.x+json": '{"b":2}',
        }
    ]


def test_the_last_value_is_shown_only_if_it_has_more_than_its_value_to_show() -> None:
    rich = "class R(dict):\n    def _repr_html_(self): return '<p>'\nR(a=1)"
    assert shown(rich) == [{"text/plain": "{'a': 1}", "text/html": "<p>"}]
    assert run_program(rich).value == {"a": 1}
    for plain in ("[1, 2]", "'text'", "{1: (2,)}", "import datetime; datetime.date(2020, 1, 1)"):
        assert shown(plain) == []
    assert shown("object")[0]["text/plain"] == "<class 'object'>"


def test_a_dataframe_is_previewed() -> None:
    pytest.importorskip("pandas")
    (preview,) = shown("import pandas as pd\npd.DataFrame({'a': range(1000)})")
    assert "1000 rows" in preview["text/html"]
    assert len(preview["text/html"]) < 20_000
    assert "[1000 rows x 1 columns]" in preview["text/plain"]


def test_an_array_is_previewed() -> None:
    pytest.importorskip("numpy")
    assert shown("import numpy as np\nnp.arange(3)") == [{"text/plain": "array([0, 1, 2])"}]


FIGURE = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([1, 2, 3])
"""


def pictures(code: str) -> list[bytes]:
    pytest.importorskip("matplotlib")
    found = [base64.b64decode(data["image/png"]) for data in shown(code) if "image/png" in data]
    assert all(picture.startswith(PNG) for picture in found)
    return found


@pytest.mark.parametrize(
    ("ending", "number"),
    [
        ("x = 1", 1),
        ("plt.show()", 1),
        ("figure", 1),
        ("display(figure)", 1),
        ("plt.close(figure)", 0),
        ("plt.figure()\nx = 1", 1),
        ("plt.subplots()\nx = 1", 2),
    ],
)
def test_open_figures_are_shown_once(ending: str, number: int) -> None:
    assert len(pictures(FIGURE + ending)) == number


def test_figures_are_shown_of_a_program_that_failed_later() -> None:
    pytest.importorskip("matplotlib")
    run = run_program(FIGURE + "1 / 0")
    assert run.error_type == "ZeroDivisionError"
    assert [("image/png" in display.data) for display in run.report.displays] == [True]


def test_a_failing_or_absurd_representation_is_left_out() -> None:
    class Bad:
        def __repr__(self) -> str:
            return "Bad()"

        def _repr_html_(self) -> str:
            raise SystemExit

        def _repr_svg_(self) -> int:
            return 3

        def _repr_png_(self) -> bytes:
            return b"x" * (MAX_RICH + 1)

        def _repr_latex_(self) -> str:
            return "x" * (MAX_RICH + 1)

        def _repr_mimebundle_(self) -> dict[object, object]:
            return {3: "x", "nonsense": "x", "a/b": object(), "text/ok": "\ud800"}

    assert bundle(Bad()) == {"text/plain": "Bad()", "text/ok": "�"}


def test_a_class_or_a_proxy_is_only_plain() -> None:
    class Everything:
        def __getattr__(self, name: str) -> Everything:
            return self

        def __call__(self) -> str:
            return "<b>no</b>"

    class WithHtml:
        def _repr_html_(self) -> str:
            return "<b>instance</b>"

    assert bundle(Everything()).keys() == {"text/plain"}
    assert bundle(WithHtml).keys() == {"text/plain"}
    assert bundle(WithHtml()).keys() == {"text/plain", "text/html"}


def test_plain_text_is_capped_without_being_built() -> None:
    assert len(bundle("x" * 10**7)["text/plain"]) <= MAX_PLAIN
    assert len(bundle(["x" * 1000] * 10**6)["text/plain"]) <= MAX_PLAIN
    assert bundle([1, [2, [3]]])["text/plain"] == "[1, [2, [3]]]"


def test_displays_are_counted() -> None:
    report = run_program(f"for n in range({MAX_DISPLAYS + 50}):\n    display(n)").report
    assert len(report.displays) == MAX_DISPLAYS
    assert report.warnings == (f"only the first {MAX_DISPLAYS} displays were kept",)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("text/plain", True),
        ("image/svg+xml", True),
        ("text", False),
        ("/x", False),
        ("x/", False),
        ("a/\n", False),
        ("é/x", False),
        ("a/" + "x" * 100, False),
    ],
)
def test_mime_types_look_like_mime_types(name: str, good: bool) -> None:
    assert is_mime(name) is good

"""What a program shows: objects as MIME bundles, as in notebooks, with every failure contained.

The methods called here are the program's own. They may raise anything, return anything, or return a
gigabyte; a representation that fails or is too large is left out.
"""

from __future__ import annotations

import sys

from .failures import cut
from .protocol import NODE, clean, dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DISPLAYS = 100
MAX_PLAIN = 16 << 10
MAX_RICH = 8 << 20
# For all of a program's displays together, where no other limit is known.
MAX_SHOWN = 16 << 20
_MAX_BUNDLE = 16 << 20
MAX_TYPES = 20

# Without one of these loaded there is no object of theirs.
_LIBRARIES = frozenset((
    "altair", "bokeh.models", "matplotlib.figure", "pandas", "plotly.basedatatypes", "polars",
    "pyarrow",
))  # fmt: skip

_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_json_", "application/json"),
)


def bundle(obj: object) -> dict[str, str]:
    """`obj` as MIME type to text: always `text/plain`, and whatever richer form it offers."""
    shown = {"text/plain": plain(obj)}
    room = _MAX_BUNDLE
    for mime, content in _representations(obj).items():
        text = _text(mime, content)
        if text is not None and len(text) <= room and len(shown) < MAX_TYPES:
            shown[mime] = text
            room -= len(text)
    return shown


def cost(shown: dict[str, str]) -> int:
    """What a bundle takes of the budget for displays: memory for its text, and NODE for each."""
    from .values import text_size

    return NODE + sum(2 * NODE + len(mime) + text_size(text) for mime, text in shown.items())


def plain(obj: object) -> str:
    """`repr(obj)`, but of large containers the first items only: all might not fit into memory."""
    try:
        if (type(obj) is bytes or type(obj) is bytearray) and len(obj) > MAX_PLAIN:
            # reprlib writes out all of it before it cuts the middle, in four times the memory.
            obj = obj[: MAX_PLAIN // 2] + obj[-MAX_PLAIN // 2 :]
        if type(obj).__module__ == "builtins":
            import reprlib

            short = reprlib.Repr()
            short.maxlevel = 3
            short.maxlist = short.maxtuple = short.maxdict = short.maxset = 50
            short.maxfrozenset = short.maxdeque = short.maxarray = 50
            short.maxstring = short.maxother = short.maxlong = MAX_PLAIN
            return cut(short.repr(obj), MAX_PLAIN)
        return cut(str.__str__(repr(obj)), MAX_PLAIN)
    except BaseException:
        # The default form needs nothing of the object's.
        return cut(object.__repr__(obj), MAX_PLAIN)


def figures(shown: list[object]) -> list[dict[str, str]]:
    """The figures that pyplot still holds, but for those in `shown`."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    bundles = []
    try:
        for number in list(pyplot.get_fignums())[:MAX_DISPLAYS] if pyplot is not None else ():
            figure = pyplot.figure(number)
            if figure.axes and not any(figure is one for one in shown):
                bundles.append(bundle(figure))
    except BaseException:
        return bundles
    return bundles


def _representations(obj: object) -> dict[Any, Any]:
    if issubclass(type(obj), type) or _answers_everything(obj):
        return {}
    found: dict[Any, Any] = {}
    png = _figure_png(obj)
    if png is not None:
        found["image/png"] = png
    for name, mime in _METHODS:
        content = _call(obj, name)
        if content is not None:
            found[mime] = content
    several = _call(obj, "_repr_mimebundle_")
    if type(several) is tuple and several:
        several = several[0]
    if type(several) is dict:
        found.update(list(several.items())[:MAX_TYPES])
    found.update(_of_library(obj))
    return found


def _of_library(obj: Any) -> dict[Any, Any]:
    """What a library's object has besides its own representations: its data, in a form to draw."""
    if _LIBRARIES.isdisjoint(sys.modules):
        return {}
    from . import charts, plots, previews

    forms: list[tuple[str, Callable[[], Any]]] = [
        (charts.MIME, lambda: charts.of_figure(obj) if is_figure(obj) else None),
        (previews.MIME, lambda: previews.of_table(obj)),
    ]
    try:
        forms += plots.forms(obj)
    except BaseException:
        del forms[2:]  # another version of the library
    found: dict[Any, Any] = {}
    for mime, form in forms:
        try:
            content = form()
        except BaseException:
            continue
        if content is not None:
            found[mime] = content
    return found


def _call(obj: object, name: str) -> Any:
    try:
        method = getattr(obj, name, None)
        return None if method is None else method()
    except BaseException:
        return None


def _answers_everything(obj: object) -> bool:
    """A mock or a proxy claims to have every method, so none of them means anything."""
    try:
        return getattr(obj, "_belljar_no_object_has_this_", None) is not None
    except BaseException:
        return True


def is_figure(obj: object) -> bool:
    kind = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    try:
        return kind is not None and issubclass(type(obj), kind)
    except BaseException:
        return False


def _figure_png(obj: object) -> Any:
    """Matplotlib leaves it to the notebook to turn a figure into a picture."""
    if not is_figure(obj):
        return None
    try:
        import io

        buffer = io.BytesIO()
        obj.savefig(buffer, format="png", bbox_inches="tight")  # type: ignore[attr-defined]
        return buffer.getvalue()
    except BaseException:
        return None


def _text(mime: Any, content: Any) -> str | None:
    """`content` as the text that crosses, or None where it has none or is too large."""
    from .values import encode, to_base64

    try:
        if type(mime) is not str or not is_mime(mime):
            return None
        if type(content) is tuple and len(content) == 2:  # data and metadata
            content = content[0]
        if mime.endswith("json") and type(content) in (dict, list):
            content = dumps(encode(content, MAX_RICH)).decode("utf-8")
        kind = type(content)
        if issubclass(kind, (bytes, bytearray)) and len(content) <= MAX_RICH * 3 // 4:
            return to_base64(bytes(content))
        if issubclass(kind, str) and len(content) <= MAX_RICH:
            return clean(str.__str__(content))
    except BaseException:
        return None
    return None


def is_mime(name: str) -> bool:
    """Whether `name` looks like `type/subtype`, in ASCII and of a sane length."""
    kind, slash, rest = name.partition("/")
    return bool(
        kind and slash and rest and len(name) <= 100 and name.isascii() and name.isprintable()
    )

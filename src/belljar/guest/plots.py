"""Plots of plotly, altair and bokeh in the form that their own readers draw, beside HTML.

Outside of a notebook these libraries give HTML alone, or none.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PLOTLY = "application/vnd.plotly.v1+json"
BOKEH = "application/vnd.bokehjs_item+json"


def forms(obj: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The MIME types that a plot has, each with what makes its content."""
    if _is_a(obj, "plotly.basedatatypes", "BaseFigure"):
        yield PLOTLY, obj.to_json
    elif _is_a(obj, "altair", "TopLevelMixin"):
        yield from _of_altair(obj)
    elif _is_a(obj, "bokeh.models", "LayoutDOM"):
        yield "text/html", lambda: bokeh_page(obj)
        yield BOKEH, lambda: _json_item(obj)


def bokeh_page(obj: Any) -> str:
    """A page that needs nothing from elsewhere."""
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    return str(file_html(obj, INLINE))


def _json_item(obj: Any) -> Any:
    """What `Bokeh.embed.embed_item` draws."""
    from bokeh.embed import json_item

    return json_item(obj)


def _of_altair(chart: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    version = sys.modules["altair"].SCHEMA_VERSION.lstrip("v").partition(".")[0]
    yield f"application/vnd.vegalite.v{version}+json", chart.to_dict
    yield "text/html", chart.to_html


def _is_a(obj: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    try:
        return kind is not None and issubclass(type(obj), kind)
    except BaseException:
        return False

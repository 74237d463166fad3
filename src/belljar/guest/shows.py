"""`show()` of plotting libraries, which has no window to open here: it becomes a display.

The libraries choose their way of showing when they are imported, so the replacement is put into the
module right after its import, by a finder that only looks at the names in `_PATCHES`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Display = Callable[..., None]


def install(display: Display) -> None:
    """Have `show()` of the libraries, imported already or later, call `display`."""
    for name, patch in _PATCHES.items():
        module = sys.modules.get(name)
        if module is not None:
            patch(module, display)
    # A fork server has had one before, in a rehearsal.
    others = [finder for finder in sys.meta_path if type(finder) is not _Finder]
    sys.meta_path[:] = [_Finder(display), *others]


class _Finder:
    """Finds nothing by itself: it wraps the loader that the other finders give."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _PATCHES:
            return None
        for finder in sys.meta_path:
            if finder is self or getattr(finder, "find_spec", None) is None:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _Loader(spec.loader, _PATCHES[name], self._display)
                    spec.loader = loader
                return spec
        return None


class _Loader:
    """The library's own loader, and the patch after it."""

    def __init__(self, loader: Any, patch: Any, display: Display) -> None:
        self._loader, self._patch, self._display = loader, patch, display

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        try:
            self._patch(module, self._display)
        except BaseException:
            return  # another version of the library: its own show() stays


def _pyplot(module: Any, display: Display) -> None:
    def show(*args: Any, **more: Any) -> None:
        """Show all open figures and close them, so that the next plot is another one."""
        for number in module.get_fignums():
            figure = module.figure(number)
            display(figure)
            module.close(figure)

    module.show = show


def _plotly(module: Any, display: Display) -> None:
    def show(fig: Any, *args: Any, **more: Any) -> None:
        display(fig)

    module.show = show


def _bokeh(module: Any, display: Display) -> None:
    def show(obj: Any, *args: Any, **more: Any) -> None:
        display(obj)

    module.show = show


_PATCHES: dict[str, Callable[[Any, Display], None]] = {
    "matplotlib.pyplot": _pyplot,
    "plotly.io": _plotly,
    "bokeh.io": _bokeh,
    "bokeh.io.showing": _bokeh,
    "bokeh.plotting": _bokeh,
}

"""Which module names the import lint refuses, and which attributes are tricks around it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping

from .policy import Modules

# Modules that do the work of a denied one under another name.
_SAME_AS: Mapping[str, tuple[str, ...]] = {
    "os": ("posix", "nt", "pty", "posixpath", "ntpath", "genericpath", "ctypes", "_ctypes"),
    "subprocess": (
        "_posixsubprocess", "_winapi", "pty", "multiprocessing", "_multiprocessing",
        "asyncio.subprocess", "concurrent.futures.process", "distutils.spawn", "ctypes", "_ctypes",
    ),
    "shutil": ("distutils.dir_util", "distutils.file_util"),
    "socket": ("_socket", "socketserver", "ssl", "_ssl", "ctypes", "_ctypes"),
}  # fmt: skip

# Modules that import, or run, whatever they are asked to.
_IMPORTERS = (
    "builtins", "_imp", "imp", "_frozen_importlib", "_frozen_importlib_external", "importlib.util",
    "importlib.machinery", "importlib._bootstrap", "importlib._bootstrap_external", "runpy",
    "zipimport", "code", "codeop",
)  # fmt: skip

# Modules that other modules keep within reach, as in `statistics.random._os`.
_LOOSE = frozenset(
    {"os", "sys", "subprocess", "shutil", "socket", "builtins", "importlib", "ctypes"}
)

# Attributes that lead from any object to every module: none is needed by an ordinary program.
TELLING = frozenset({
    "__builtins__", "__import__", "__loader__", "__spec__", "__package__", "__path__",
    "__subclasses__", "__globals__", "__mro__", "__base__", "__bases__", "__code__", "__closure__",
    "__self__", "__getattribute__", "f_globals", "f_locals", "f_builtins", "f_back", "tb_frame",
    "gi_frame", "cr_frame", "ag_frame",
})  # fmt: skip

SYS_TRICKS = frozenset({
    "sys.modules", "sys.meta_path", "sys.path_hooks", "sys.path_importer_cache", "sys._getframe",
    "sys._current_frames",
})  # fmt: skip


class Rules:
    """The module list with everything that follows from it."""

    def __init__(self, modules: Modules, own: Collection[str]) -> None:
        self.allow = None if modules.allow is None else _prefixes(modules.allow)
        self.deny = _prefixes(modules.deny)
        follows = {*_IMPORTERS}
        for denied in modules.deny:
            follows.update(_SAME_AS.get(denied, ()))
        self.derived = _prefixes(name for name in follows if not _covered(name, self.allow or ()))
        self.own = {_own_module(path) for path in own} - {""} - sys.stdlib_module_names
        self._fine = {*self.own, "__future__"}

    def refuses(self, name: str) -> bool:
        if name.partition(".")[0] in self._fine:
            return False
        if _covered(name, self.deny) or self.derives(name):
            return True
        return self.allow is not None and not _covered(name, self.allow)

    def derives(self, name: str) -> bool:
        """Whether `name` is refused for what it can do rather than by name."""
        return _covered(name, self.derived)

    def loose(self, attribute: str) -> str | None:
        """The refused module that an attribute of some module is, going by its name."""
        name = attribute.lstrip("_")
        return name if name in _LOOSE and self.refuses(name) else None


def _prefixes(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}." for name in names)


def _covered(name: str, prefixes: tuple[str, ...]) -> bool:
    return f"{name}.".startswith(prefixes)


def _own_module(path: str) -> str:
    """The top-level module that a file provides: "pkg" for "pkg/part.py", "" for data."""
    top, _, rest = path.replace("\\", "/").removeprefix("./").partition("/")
    if rest:
        return top if rest.endswith(".py") else ""
    return top.removesuffix(".py") if top.endswith(".py") or top.isidentifier() else ""

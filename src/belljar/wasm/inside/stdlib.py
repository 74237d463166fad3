"""The standard library as marshalled code in memory: at run time there are no files to import from.

`freeze` runs when the component is built, the only time at which the library's files can be seen.
The bytes become part of the snapshot, which all instances share until they write to it.
"""

from __future__ import annotations

import importlib.machinery
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType

# Tests, and what could only fail for want of something native: world.py has words for that.
_SKIPPED = frozenset((
    "__pycache__", "bz2.py", "ctypes", "curses", "ensurepip", "idlelib", "lib2to3", "lzma.py",
    "pty.py", "site-packages", "ssl.py", "test", "tkinter", "tty.py", "turtle.py", "turtledemo",
    "venv",
))  # fmt: skip

# name: (is a package, path, marshalled code)
_modules: dict[str, tuple[bool, str, bytes]] = {}


def freeze(directory: str, prefix: str = "") -> None:
    """Compile every module below `directory` into memory."""
    for name in sorted(os.listdir(directory)):
        path = f"{directory}/{name}"
        if name in _SKIPPED:
            continue
        if name.endswith(".py"):
            _freeze_file(path, prefix, name[:-3])
        elif os.path.exists(f"{path}/__init__.py"):
            freeze(path, f"{prefix}{name}.")


def _freeze_file(path: str, prefix: str, stem: str) -> None:
    package = stem == "__init__"
    name = prefix.rstrip(".") if package else prefix + stem
    if not name:
        return
    with open(path, "rb") as file:
        source = file.read()
    _modules[name] = package, path, marshal.dumps(compile(source, path, "exec", dont_inherit=True))


class Finder:
    """Finds the frozen modules; a loader as well."""

    @classmethod
    def find_spec(
        cls, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = _modules.get(name)
        if found is None:
            return None
        package, origin, _ = found
        spec = importlib.machinery.ModuleSpec(name, cls, origin=origin, is_package=package)  # type: ignore[arg-type]
        spec.has_location = True
        if package:
            spec.submodule_search_locations = [origin.rpartition("/")[0]]
        return spec

    @staticmethod
    def create_module(spec: object) -> None:
        return None

    @classmethod
    def exec_module(cls, module: ModuleType) -> None:
        assert module.__spec__ is not None
        exec(cls.get_code(module.__spec__.name), module.__dict__)

    @staticmethod
    def get_code(name: str) -> CodeType:
        code: CodeType = marshal.loads(_modules[name][2])
        return code

    @staticmethod
    def is_package(name: str) -> bool:
        return _modules[name][0]

    @staticmethod
    def get_source(name: str) -> None:
        return None


def install() -> None:
    """Behind the built-in and the interpreter's own frozen modules, before anything with files."""
    sys.meta_path.insert(2, Finder)

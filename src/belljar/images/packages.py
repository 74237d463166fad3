"""Python packages for an image, as installed in the environment that runs Belljar."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator

from ..errors import BackendUnavailable
from .bytecode import add_bytecode
from .host import Layer
from .libraries import add_libraries

DATA = ("numpy", "pandas", "pyarrow", "matplotlib")

# Large parts that no program imports: test suites, headers, sources of extensions.
_LEFT_OUT = {"__pycache__", "tests", "test", "include", "includes"}
_SUFFIXES = (".pyc", ".a", ".o", ".h", ".hpp", ".pxd", ".pyx", ".pyi", ".cpp", ".c")


def layer(names: Iterable[str] = DATA) -> Layer:
    """Those of `names` that are installed, with what they require, as one layer."""
    made = Layer()
    chosen = with_requirements(names)
    if not chosen:
        raise BackendUnavailable(
            f"none of {', '.join(names)} is installed beside Belljar",
            fix="pip install 'belljar[data]', or belljar images build data --from-dockerfile",
        )
    place = _packages_directory()
    homes: set[str] = set()
    for name, found in sorted(chosen.items()):
        made.versions[name] = found.version
        home = os.path.realpath(str(found.locate_file("")))
        homes.add(home)
        for file in found.files or _walk(home, name):
            inside = os.path.normpath(str(file))
            parts = inside.split(os.sep)
            source = os.path.join(home, inside)
            if parts[0] == ".." or _LEFT_OUT & set(parts) or inside.endswith(_SUFFIXES):
                continue
            if os.path.isfile(source):
                made.tree.copy(source, f"{place}/{inside}")
    native = [entry.source or "" for path, entry in made.tree.files(below=place) if ".so" in path]
    add_libraries(made.tree, native, besides=homes)
    add_bytecode(made.tree, os.path.realpath(_interpreter()), sys.implementation.cache_tag or "")
    return made


def _walk(home: str, name: str) -> Iterator[str]:
    """The files of a package that a distribution installed without a list of them."""
    for folder, _, files in os.walk(os.path.join(home, name.replace("-", "_"))):
        for file in sorted(files):
            yield os.path.relpath(os.path.join(folder, file), home)


def with_requirements(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The installed ones of `names`, and of what they need without extras, by normal name."""
    chosen: dict[str, metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in chosen:
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        chosen[name] = found
        for requirement in found.requires or ():
            needed, _, marker = requirement.partition(";")
            match = re.match(r"[A-Za-z0-9._-]+", needed.strip())
            if match and "extra" not in marker:
                todo.append(match.group())
    return chosen


def _interpreter() -> str:
    """The one that a virtual environment was made from, where CPython says which that is."""
    return getattr(sys, "_base_executable", sys.executable)


def _packages_directory() -> str:
    """Where an image's Python looks for packages, as a path of the image."""
    asked = subprocess.run(
        [_interpreter(), "-I", "-c", "import site; print(site.getsitepackages()[0])"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    here = asked.stdout.strip() or site.getsitepackages()[0]
    prefix = sys.base_prefix.rstrip("/") + "/"
    return "usr/" + here.removeprefix(prefix) if here.startswith(prefix) else here.lstrip("/")

"""Which of the libraries that a program requires are missing where it would run.

Answered without starting anything where that can be known: by looking into the directories of the
interpreter that a guest shares with us, and from the list of what the wasm guest has. For any other
place `CHECK` is a program that tells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import lru_cache

from . import interpreter, languages
from .errors import RequestError
from .types import Request

# Their guests are started with the interpreter that runs us, unless the program names another.
_SHARED = frozenset({
    "bubblewrap", "firejail", "inprocess", "jail", "landlock", "nsjail", "subprocess",
})  # fmt: skip
CHECK = """
import importlib.util, sys
def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
[name for name in sys.argv[1:] if not has(name)]
"""


def checked(given: Iterable[str]) -> tuple[str, ...]:
    """Names as `import` takes them; RequestError for anything else."""
    if isinstance(given, str):
        raise RequestError("require_libraries", "is a list", fix=f"write [{given!r}]")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise RequestError("require_libraries", f"{name!r} is not a name that can be imported")
    return tuple(dict.fromkeys(names))


def missing(backend: str, request: Request, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Those of `names` that a program cannot import on `backend`; None if only a run can tell."""
    own = {path.split("/")[0].removesuffix(".py") for path in request.files}
    names = tuple(name for name in names if name.partition(".")[0] not in own)
    if backend == "wasm":
        from .wasm import modules

        return tuple(name for name in names if not modules.importable(name))
    language = languages.of(request)
    if backend not in _SHARED or request.python or language.version or language.command_on(backend):
        return None
    return _missing_here(names)


def side(backend: str, request: Request) -> str:
    """Backends on one side have the same libraries, so that one is as good as the other."""
    if backend in _SHARED:
        return "host"
    return f"image {request.image or ''}" if backend in ("docker", "gvisor") else backend


@lru_cache(maxsize=64)
def _missing_here(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if not _is_here(name))


def _is_here(name: str) -> bool:
    """Found as an import would find it, without importing anything."""
    from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

    prefixes = tuple(prefix + os.sep for prefix in interpreter.find(None).prefixes)
    search = [path for path in sys.path if path.startswith(prefixes)]
    if name == "os.path":  # no file of that name
        return True
    parts = name.split(".")
    if len(parts) == 1 and any(
        finder.find_spec(name) is not None for finder in (BuiltinImporter, FrozenImporter)
    ):
        return True
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), search)
        if spec is None:
            return False
        search = list(spec.submodule_search_locations or ())
    return True

"""Keeps Belljar's own late imports out of every directory that a run of this process could write.

A script's directory, or the current one, comes first on `sys.path`. When it is mounted writable, a
guest can leave a `decimal.py` there, and the next `import decimal` of the host would execute it.
`note_writable` is called before a run that may write to the host; from the first call on:

- `_Finder` stands first in `sys.meta_path`. It acts on imports that Belljar causes: directly, or
  through a library that Belljar called (pandas imports much of itself on first use). Which imports
  these are is read from the call stack, because they happen in many places and threads.
- Such an import resolves as always, but without what lies in a noted directory. If nothing is left
  it fails with Untrusted, because the finders that come later would look there.
- Imports of the application are none of its business, also in callbacks that Belljar calls:
  `calls_application` marks the functions that make those calls. `sys.path` stays as it is.

A directory stays noted until the process ends, because what a run left in it stays too.
"""

from __future__ import annotations

import os
import stat
import sys
import threading

try:  # loaded in every process; `importlib.machinery` is not
    from _frozen_importlib_external import PathFinder
except ImportError:
    from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, FrameType, ModuleType
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

# What a decoder imports, loaded before the first run that may write to the host: 15 ms, once.
DECODERS = ("array", "base64", "datetime", "decimal", "fractions", "pathlib", "uuid")
# What functions of Belljar import besides, loaded with them if the standard library itself, or
# Belljar, lies where a run may write. `test_trusted_imports` keeps the list complete.
LATE = (
    "ast", "asyncio", "atexit", "codecs", "ctypes", "dataclasses", "difflib", "fcntl", "hashlib",
    "html", "http.client", "importlib.machinery", "importlib.metadata", "importlib.util",
    "inspect", "io", "json", "logging", "mimetypes", "pwd", "re", "reprlib", "resource", "select",
    "shutil", "signal", "socket", "subprocess", "tempfile", "tomllib", "traceback", "urllib.parse",
)  # fmt: skip

_IMPORT_SYSTEM = ("importlib", "_frozen_importlib")
_PACKAGE = __name__.partition(".")[0]
# They run a program's own code where the program shares the host's process.
_PROGRAMS = tuple(f"{_PACKAGE}.guest.{name}" for name in ("worker", "displays", "failures"))
_MANY = 1024
_MOST_LINKS = 40

_lock = threading.Lock()
_written: dict[str, tuple[int, int] | None] = {}
_by_identity: dict[tuple[int, int], str] = {}
_forget_at = _MANY
# Directories that are no links, on whose path no run can write; found again after each change.
_safe: set[str] = set()
_callers: set[CodeType] = set()
# Of Belljar and of the standard library, while it is loaded before the run that may write to it.
_loading: tuple[str, ...] = ()
_places: tuple[str, ...] = ()


class Untrusted(ModuleNotFoundError):
    """A module that may exist, but could only come from where a run of this process can write."""

    hint = "it is not imported from a directory that a run could write"


def calls_application(function: F) -> F:
    """Decorator for a function that calls back: what is imported during the call is not ours."""
    _callers.add(function.__code__)
    return function


def note_writable(paths: Iterable[str]) -> tuple[str, ...]:
    """Remember host paths that a run will be able to write. Call it before the run starts.

    Those that hold Belljar, its interpreter or the standard library are returned: this process has
    loaded what it needs, but helper processes still start from there.
    """
    global _forget_at, _safe
    with _lock:
        new, holding, moved = [], [], False
        for path in paths:
            real = os.path.realpath(path)
            if real not in _written:
                new.append(real)
            if any(_lies_in(place, real) for place in _our_places()):
                holding.append(path)
            identity = _identity(real)
            moved = moved or _written.get(real) != identity
            _written[real] = identity
            if identity is not None:
                _by_identity[identity] = real
        if _written and (not sys.meta_path or sys.meta_path[0] is not _FINDER):
            if _FINDER in sys.meta_path:
                sys.meta_path.remove(_FINDER)
            sys.meta_path.insert(0, _FINDER)
        if new or moved:
            _safe = set()
        if new:
            _load_before_the_run(new)
        if len(_written) > _forget_at:
            _forget_removed()
            _forget_at = max(_MANY, 2 * len(_written))
        return tuple(holding)


def noted() -> tuple[str, ...]:
    """The real paths that are remembered."""
    return tuple(_written)


def is_writable(path: str) -> bool:
    """Whether a run of this process could write `path`, or change where a name on the way leads."""
    try:
        drive, path = os.path.splitdrive(os.path.join(os.getcwd(), path))
        if _loading and any(_lies_in(os.path.realpath(path), place) for place in _loading):
            return False
    except (OSError, TypeError, ValueError):
        return True  # the current directory is gone, or it is no path
    safe = _safe  # a change puts another in its place: what is found before it is not kept
    here, links, left = drive + os.sep, 0, _parts(path)
    while left:
        name = left.pop()
        if name == os.pardir:
            here = os.path.dirname(here)
            continue
        there = os.path.join(here, name)
        if there not in safe:
            if there in _written:
                return True
            try:
                info = os.lstat(there)
                if stat.S_ISLNK(info.st_mode):
                    links += 1
                    if links > _MOST_LINKS:
                        return True
                    target = os.readlink(there)
                    left += _parts(target)
                    if os.path.isabs(target):
                        here = os.path.splitdrive(target)[0] + os.sep
                    continue
            except ValueError:
                return True
            except OSError:
                here = there  # it does not exist: only what has been noted by name can lie below
                continue
            # A bind mount shows one directory under several names.
            known = _by_identity.get((info.st_dev, info.st_ino))
            if known and _identity(known) == _identity(there):
                return True
            if stat.S_ISDIR(info.st_mode) and not _loading:
                safe.add(there)
        here = there
    return False


def _parts(path: str) -> list[str]:
    """The names in a path, the last one first."""
    names = path.replace(os.altsep or os.sep, os.sep).split(os.sep)
    return [name for name in reversed(names) if name not in ("", os.curdir)]


def search_path() -> list[str]:
    """`sys.path` without the entries that a run could write."""
    return [entry for entry in sys.path if not (_written and is_writable(entry))]


def entry_points(group: str) -> dict[str, str]:
    """The entry points of a group, by name, of what is installed where no run could write."""
    from importlib import metadata

    found: dict[str, str] = {}
    seen: set[str] = set()
    for installed in metadata.distributions(path=search_path()):
        name = installed.name
        if name in seen:  # an entry further back on the path does not count
            continue
        seen.add(name)
        for point in installed.entry_points.select(group=group):
            found[point.name] = point.value
    return found


class _Finder:
    """See the module's docstring. It imports nothing itself, and takes no lock."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _caused_by_us(sys._getframe(1)):
            return None
        entries = list(sys.path if path is None else path)
        trusted = [entry for entry in entries if not is_writable(entry)]
        withheld = len(trusted) < len(entries)
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            if finder is PathFinder:
                spec, dropped = _find_below(name, trusted, target)
                withheld = withheld or dropped
            else:
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None else None
                if spec is not None and not _is_trusted(spec):
                    spec, withheld = None, True
            if spec is not None:
                return spec
        if withheld:
            raise Untrusted(f"no module named {name!r}; {Untrusted.hint}", name=name)
        return None

    def invalidate_caches(self) -> None:
        """Nothing is cached; `importlib.invalidate_caches` asks every finder."""


_FINDER = _Finder()


def _find_below(
    name: str, entries: list[str], target: ModuleType | None
) -> tuple[ModuleSpec | None, bool]:
    """What `entries` offer under this name; True if one of them had something that was dropped."""
    spec = PathFinder.find_spec(name, entries, target)
    if spec is None or _is_trusted(spec):
        return spec, False
    # A mount may lie below an entry, and there may be another module of the name further back.
    kept = []
    for entry in entries:
        alone = PathFinder.find_spec(name, [entry], target)
        if alone is not None and _is_trusted(alone):
            kept.append(entry)
    return PathFinder.find_spec(name, kept, target), True


def _is_trusted(spec: ModuleSpec) -> bool:
    """Whether no file that loading it would read lies where a run could write."""
    places = [spec.origin, spec.cached, *(spec.submodule_search_locations or ())]
    return not any(place and os.path.isabs(place) and is_writable(place) for place in places)


def _caused_by_us(frame: FrameType | None) -> bool:
    """Whether the innermost of our own functions on the stack is one that works for Belljar."""
    importer = True
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if type(module) is str and module.partition(".")[0] == _PACKAGE:
            if not module.startswith(f"{_PACKAGE}.testing"):
                return importer or not (module in _PROGRAMS or frame.f_code in _callers)
        elif module.startswith(_IMPORT_SYSTEM):
            frame = frame.f_back
            continue
        importer = False
        frame = frame.f_back
    return False


def _identity(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if info.st_ino else None


def _forget_removed() -> None:
    """Let go of directories that are gone: a server makes and removes one for each request."""
    global _by_identity
    for path in [path for path in _written if not os.path.lexists(path)]:
        del _written[path]
    # A new one, because imports in other threads read it without the lock.
    _by_identity = {found: path for path, found in _written.items() if found is not None}


def _lies_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def _our_places() -> tuple[str, ...]:
    """Where helper processes are started from: real paths, and the link that an interpreter is."""
    global _places
    if not _places:
        link = os.path.join(
            os.path.realpath(os.path.dirname(sys.executable)), os.path.basename(sys.executable)
        )
        known = (os.path.dirname(__file__), os.path.dirname(os.__file__), sys.executable)
        _places = (link, *map(os.path.realpath, (*known, sys.prefix)))
    return _places


def _load_before_the_run(new: Iterable[str]) -> None:
    """What decoders need; and all of ours if a new directory holds that, or the standard library.

    Already with the finder in place, because an earlier process's run may have left something.
    """
    global _loading
    own = [os.path.realpath(os.path.dirname(file)) for file in (__file__, os.__file__)]
    _loading = tuple(place for place in own if any(_lies_in(place, path) for path in new))
    try:
        _load(DECODERS)
        if _loading:
            _load(LATE)
            _load_all_of_ours()
    finally:
        _loading = ()


def _load(names: Iterable[str]) -> None:
    for name in names:
        if name in sys.modules:
            continue
        try:
            __import__(name)
        except ImportError:
            continue  # not on this platform, or an extra that is not installed


def _load_all_of_ours() -> None:
    top = os.path.dirname(__file__)
    for directory, below, files in os.walk(top):
        inner = os.path.relpath(directory, top).replace(os.sep, ".").strip(".")
        below[:] = [name for name in below if _is_host_package(f"{inner}.{name}".strip("."))]
        names = sorted(name[:-3] for name in files if name.endswith(".py"))
        for name in names:
            if not name.startswith("__") and f"{inner}.{name}" not in _ELSEWHERE:
                _load((".".join(part for part in (_PACKAGE, inner, name) if part),))


def _is_host_package(name: str) -> bool:
    return name not in ("testing", "wasm.inside") and "__pycache__" not in name


# Not modules of the host: they are given to helper processes, and to what runs inside.
_ELSEWHERE = frozenset({"wasm.worker", "guest.agent", "guest.agent_guest", "guest.agent_files"})

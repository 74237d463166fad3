"""Guests compiled for this host, kept in a private directory: loading one is executing it.

The directory is ours, 0700, and checked every time it is used; the files in it are 0644, because
they are shown to worker processes that run as nobody. A name holds everything that a compiled guest
is bound to: the guest, the engine's version and configuration, the machine. Builders wait for each
other; a file appears whole or not at all.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ..errors import BackendFailed, BackendUnavailable
from ..records import positional_record
from . import build, engine

_HERE = os.path.dirname(os.path.abspath(__file__))
_BOOT = (
    "import sys;p=type(sys)('belljar_wasm');p.__path__=[sys.argv[1]];sys.path.append(sys.argv[2]);"
    "sys.modules['belljar_wasm']=p;from belljar_wasm.{module} import main;{call}"
)
# Windows has access lists instead: a user's own directories are the user's only.
_HAS_OWNERS = hasattr(os, "geteuid")
Say = Callable[[str], None]


@positional_record
class Compiled:
    """A guest ready to run. `memory` is the size of its memory before it has run.

    `parts` are names of things in that memory, and where they are.
    """

    path: str
    memory: int
    parts: tuple[tuple[str, int], ...] = ()


@positional_record
class Library:
    """The installed engine: its version, and the directory of its Python package."""

    version: str
    package: str


def library() -> Library | None:
    """What is installed, without loading it; None if nothing is."""
    from importlib import metadata, util

    try:
        found = util.find_spec("wasmtime")
    except ImportError:  # `trusted_imports`: what there is lies where a run could write
        return None
    if found is None or not found.submodule_search_locations:
        return None
    package = found.submodule_search_locations[0]
    # Of this package, not of what another entry of `sys.path` says is installed.
    beside = [os.path.dirname(package)]
    for installed in metadata.distributions(name="wasmtime", path=beside):
        return Library(installed.version, package)
    return None


def directory() -> str:
    """Where compiled guests are kept; made if it is missing. BackendUnavailable if it is not ours.

    Not below a temporary directory: those are emptied, and shared.
    """
    base = os.environ.get("XDG_CACHE_HOME") or _user_cache()
    path = os.path.join(os.path.abspath(base), "belljar", "wasm")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise _unusable(path, str(error)) from error
    if not stat.S_ISDIR(found.st_mode):
        raise _unusable(path, "it is not a directory")
    if not _HAS_OWNERS:
        return path
    if found.st_uid != os.geteuid():
        raise _unusable(path, f"it belongs to uid {found.st_uid}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
    return path


def _user_cache() -> str:
    if sys.platform == "win32":  # where other users' access lists do not reach
        return os.environ.get("LOCALAPPDATA") or os.path.expanduser("~\\AppData\\Local")
    return os.path.expanduser("~/.cache")


def _unusable(path: str, why: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"compiled guests cannot be kept in {path}: {why}",
        fix="set XDG_CACHE_HOME to a directory of your own",
    )


def name(guest: str, *, fuel: bool, installed: Library) -> str:
    identity = _identity(guest)
    kind = os.path.basename(guest).removesuffix(".wasm")
    meter = "fuel" if fuel else "epoch"
    return (
        f"{kind}-{identity}-wasmtime{installed.version}-{meter}-r{engine.REVISION}-"
        f"{platform.machine()}.cwasm"
    )


def _identity(guest: str) -> str:
    """What distinguishes the guest: noted when it was built, and what we add to it."""
    more = _snapshot_key(guest)
    return build.description(guest)["sha256"][:16] + (f"-{more}" if more else "")


_snapshot_key = functools.cache(build.snapshot_key)


def find(guest: str, *, fuel: bool, installed: Library) -> Compiled | None:
    """The compiled form of `guest`, if it has been made and nobody could have touched it."""
    path = os.path.join(directory(), name(guest, fuel=fuel, installed=installed))
    try:
        found = os.lstat(path)
        with open(path + ".json", encoding="utf-8") as file:
            noted = json.load(file)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size != noted["size"]:
        return None
    if _HAS_OWNERS and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
        return None
    return _compiled(path, noted)


def prepare(guest: str, *, fuel: bool, installed: Library, say: Say) -> Compiled:
    """The compiled form of `guest`, made now if need be; `say` hears of it when that takes time."""
    found = find(guest, fuel=fuel, installed=installed)
    if found is not None:
        return found
    path = os.path.join(directory(), name(guest, fuel=fuel, installed=installed))
    if sys.platform == "win32":  # without a lock: two that compile at once replace equal files
        return _compile(guest, path, fuel, installed, say)
    import fcntl  # POSIX's own, and this module is imported everywhere

    lock = os.open(path + ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is compiling the WebAssembly guest: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        found = find(guest, fuel=fuel, installed=installed)
        return found or _compile(guest, path, fuel, installed, say)
    finally:
        os.close(lock)


def _compile(guest: str, path: str, fuel: bool, installed: Library, say: Say) -> Compiled:
    say("compiling the WebAssembly guest for this host, once (about ten seconds)")
    began = time.monotonic()
    new = f"{path}.{os.getpid()}.new"
    meter = "fuel" if fuel else "epoch"
    words = boot("compiler", "main(sys.argv[3],sys.argv[4],sys.argv[5]=='fuel')")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", words, _HERE, os.path.dirname(installed.package),
             guest, new, meter],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={"LANG": "C.UTF-8", **_needed()},
        )  # fmt: skip
        if done.returncode != 0:
            raise BackendFailed(
                f"the WebAssembly guest could not be compiled: {done.stderr.strip()[-1000:]}"
            )
        said = json.loads(done.stdout.splitlines()[-1])
        os.chmod(new, 0o644)
        noted = {"size": os.path.getsize(new), **said}
        with open(new + ".json", "w", encoding="utf-8") as file:
            json.dump(noted, file)
        # In this order: the note is what `find` reads last.
        os.replace(new, path)
        os.replace(new + ".json", path + ".json")
    finally:
        for leftover in (new, new + ".json"):
            if os.path.exists(leftover):
                os.unlink(leftover)
    say(f"compiled in {time.monotonic() - began:.0f} s, into {path}")
    return _compiled(path, noted)


def tell(text: str) -> None:
    """A `Say` for runs. Python shows warnings of a logger that has not been set up."""
    logging.getLogger("belljar").warning("%s", text)


def _needed() -> dict[str, str]:
    """Without it no program starts on Windows."""
    name = "SYSTEMROOT"
    return {name: os.environ[name]} if name in os.environ else {}


def _compiled(path: str, noted: dict[str, Any]) -> Compiled:
    return Compiled(path, noted["memory"], tuple(sorted(noted.get("parts", {}).items())))


def boot(module: str, call: str) -> str:
    """A program for `python -c` that runs a module of this package without importing Belljar.

    Its arguments begin with this directory and the one that the engine's package is in.
    """
    return _BOOT.format(module=module, call=call)


def clear() -> list[str]:
    """Remove everything that was compiled; returns what was removed."""
    place = directory()
    removed = [os.path.join(place, entry) for entry in sorted(os.listdir(place))]
    for path in removed:
        os.unlink(path)
    return removed

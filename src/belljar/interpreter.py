"""Where a Python interpreter keeps what it reads, so that a guest can be shown just that."""

from __future__ import annotations

import os
import sys
from functools import cache

from .errors import PolicyError, RequestError
from .records import record


@record
class Interpreter:
    """An executable, the directories it reads at start, and its version."""

    executable: str
    prefixes: tuple[str, ...]
    version: tuple[int, ...]


OLDEST = (3, 9)  # what the guest worker is written for


@cache
def find(python: str | None) -> Interpreter:
    """The interpreter `python` (a path, a name on PATH, a virtualenv), or the one running this."""
    if python is None:
        found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
        executable = sys.executable
        if os.pardir in executable.split(os.sep):  # the way there is not shown to a guest
            directory, name = os.path.split(executable)
            executable = os.path.join(os.path.realpath(directory), name)
        return Interpreter(
            executable=executable,
            prefixes=_with_targets(executable, found),
            version=sys.version_info[:3],
        )
    import subprocess  # late: for our own interpreter it is not needed

    path = locate(python)
    code = (
        "import sys; print(sys.prefix, sys.base_prefix, sys.exec_prefix, sys.executable,"
        " '%d.%d.%d' % sys.version_info[:3], sep='\\n')"
    )
    try:
        asked = subprocess.run(
            [path, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError("python", f"{python!r} does not run: {error}") from error
    answer = asked.stdout.splitlines()
    if asked.returncode != 0 or len(answer) != 5:
        raise RequestError("python", f"{python!r} is no Python: {asked.stderr.strip()[-200:]}")
    *prefixes, executable, told = answer
    version = tuple(map(int, told.split(".")))
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        problem = f"{python!r} is Python {told}; programs are run by a worker that needs {oldest}"
        raise RequestError("python", problem, fix=f"use Python {oldest} or later")
    # A version manager's shim starts the real interpreter, which is the one to use.
    return Interpreter(
        executable=executable,
        prefixes=_with_targets(executable, set(prefixes)),
        version=version,
    )


def locate(python: str) -> str:
    """The executable that `python` (a path, a name on PATH, a virtualenv) means. Starts nothing."""
    import shutil

    inside = (
        [os.path.join(python, "Scripts", "python.exe")]
        if os.name == "nt"
        else [os.path.join(python, "bin", name) for name in ("python", "python3")]
    )
    path = next(filter(os.path.isfile, inside), None) or shutil.which(python)
    if path is None:
        raise RequestError("python", f"{python!r} is not an interpreter or a virtualenv")
    return path


def permitted(python: str, listed: tuple[str, ...] | None) -> str:
    """What to start for `python` where the operator lists interpreters (None: any is allowed).

    To ask an interpreter for its version starts it on the host, outside every sandbox, and so does
    the code in a virtualenv's .pth files. So a virtualenv has to be listed itself: that its
    executable leads to a listed one is not enough. Raises PolicyError, and starts nothing.
    """
    if listed is None:
        return python
    path = locate(python)
    known = [sys.executable]
    for entry in listed:
        try:
            known.append(locate(entry))
        except RequestError:  # not installed here
            continue
    for start in known:
        if _place(path) == _place(start):
            return start
    for start in known:
        if os.path.realpath(path) == os.path.realpath(start) and not (
            _is_virtual(path) or _is_virtual(start)
        ):
            return start
    allowed = ", ".join(listed) if listed else "none but the one that runs Belljar"
    raise PolicyError(
        "python",
        f"{python!r} is not an interpreter that the operator's ceiling.interpreters allows"
        f" ({allowed})",
        fix="ask the operator to add it to ceiling.interpreters",
    )


def _place(path: str) -> str:
    """Which directory entry `path` is, whatever links lead to its directory."""
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(directory), name)


def _is_virtual(path: str) -> bool:
    """Whether the interpreter would find a virtualenv's settings at any of its links."""
    path = os.path.abspath(path)
    while True:
        directory = os.path.dirname(path)
        if any(
            os.path.lexists(os.path.join(each, "pyvenv.cfg"))
            for each in (directory, os.path.dirname(directory))
        ):
            return True
        if not os.path.islink(path):
            return False
        path = os.path.join(directory, os.readlink(path))


def _with_targets(executable: str, prefixes: set[str]) -> tuple[str, ...]:
    """The prefixes, and where the executable's symbolic links lead on the way to the real file."""
    found = {os.path.realpath(prefix) for prefix in prefixes} | prefixes
    if os.path.sep in found:
        raise RequestError("python", f"{executable!r} says that it owns the whole file system")
    path = executable
    while os.path.islink(path):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
        found.add(path)
    return tuple(sorted(found))


def can_reach(path: str, uid: int, gid: int) -> bool:
    """Whether every directory on the way to `path`, and it itself, is open to this user."""
    while True:
        info = os.stat(path)
        shift = 6 if info.st_uid == uid else 3 if info.st_gid == gid else 0
        if not info.st_mode >> shift & 1:
            return False
        if path == os.path.dirname(path):
            return True
        path = os.path.dirname(path)

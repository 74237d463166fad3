"""Which interpreters this host has: where a language's command is, and of which version."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from functools import cache

from . import interpreter
from .errors import BelljarError, LanguageMissing, PolicyError, RequestError
from .types import Language

# Searched after PATH, which a service may not have.
_DIRECTORIES = ("/usr/local/bin", "/usr/bin", "/bin")
_NUMBER = re.compile(r"\d+(?:\.\d+)+")
_ANSWER_SECONDS = 10
# Commands that are no Python, and when that was found: asking again is slow, never asking wrong.
_failed: dict[str, float] = {}
_FORGET_SECONDS = 5.0


def installed(language: Language, backend: str = "") -> str:
    """The path of the interpreter that `language` starts with; LanguageMissing says how to get it.

    Not for programs of the family `python`: those have `python_of`.
    """
    command = language.command_on(backend)
    if not command:
        raise _missing(language, f"has no command for backend {backend!r}", backend)
    if not language.version:
        path = _which(command[0])
        if path is None:
            raise _missing(language, f"{command[0]!r} is not installed", backend)
        return path
    wanted = ".".join(map(str, language.version))
    others: list[str] = []
    for path in _candidates((f"{command[0]}{wanted}", f"{command[0]}js{wanted}", command[0])):
        version = version_of(path)
        if version is not None and version[: len(language.version)] == language.version:
            return path
        others.append(f"{path} is {'.'.join(map(str, version or ())) or 'no answer'}")
    raise _missing(language, "; ".join(others) or f"{command[0]!r} is not installed", backend)


def python_of(language: Language, python: str | None, backend: str = "") -> str | None:
    """The interpreter for a Python program: a path, or None for the one that runs Belljar.

    PolicyError for one that the operator's ceiling does not list; that one is not started.
    """
    wanted, listed = language.version, language.interpreters
    if python is not None:
        python = interpreter.permitted(python, listed)
        has = interpreter.find(python).version
        if has[: len(wanted)] != wanted:
            told = ".".join(map(str, has))
            raise RequestError("python", f"{python!r} is Python {told}, not {language.name}")
        return python
    command = language.command_on(backend)
    if command:
        path = _which(command[0])
        if path is None:
            raise _missing(language, f"{command[0]!r} is not installed", backend)
        return interpreter.permitted(path, listed)
    if sys.version_info[: len(wanted)] == wanted:
        return None
    short = ".".join(map(str, wanted[:2]))
    refused: list[str] = []
    for path in _candidates((f"python{short}", "python3", "python")):
        if time.monotonic() - _failed.get(path, -_FORGET_SECONDS) < _FORGET_SECONDS:
            continue
        try:
            path = interpreter.permitted(path, listed)
        except PolicyError:
            refused.append(path)
            continue
        try:
            if interpreter.find(path).version[: len(wanted)] == wanted:
                return path
        except RequestError:  # a version manager's shim for a version that is not selected
            _failed[path] = time.monotonic()
    why = f"no {language.name} is on PATH"
    if refused:
        why += f" that the operator's ceiling.interpreters allows ({', '.join(refused)})"
    raise _missing(language, why, backend)


def missing(language: Language) -> bool:
    """Whether a language has a command of its own that is not on PATH. Starts nothing."""
    command = language.command
    return bool(command) and not language.version and _which(command[0]) is None


def pythons() -> list[str]:
    """The ids of the Python versions that have a command on PATH, newest last; ours is one."""
    found = {sys.version_info[:2]}
    for directory in _directories():
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            if match := re.fullmatch(r"python3\.(\d{1,3})", name):
                found.add((3, int(match[1])))
    return [f"python{major}.{minor}" for major, minor in sorted(found)]


def version_of(path: str) -> tuple[int, ...] | None:
    """What the program at `path` says its version is, or None if it does not."""
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        return None
    return _version(path, changed)


@cache
def _version(path: str, _changed: int) -> tuple[int, ...] | None:
    import subprocess

    for word in ("--version", "version"):
        try:
            told = subprocess.run(
                [path, word],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if told.returncode == 0 and (number := _NUMBER.search(told.stdout or told.stderr)):
            return tuple(map(int, number[0].split(".")))
    return None


def _directories() -> Iterator[str]:
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    places = (*filter(os.path.isabs, path), *_DIRECTORIES)
    # By where they lead: /bin is /usr/bin on most systems.
    yield from dict.fromkeys(map(os.path.realpath, places))


def _candidates(names: tuple[str, ...]) -> Iterator[str]:
    """Commands of these names, the first name everywhere before the second."""
    for name in names:
        for directory in _directories():
            if path := _which(name, path=directory):
                yield path


def _missing(language: Language, why: str, backend: str) -> BelljarError:
    elsewhere = [name for name, place in language.places.items() if place.command or place.image]
    fix = language.install
    if elsewhere and backend not in elsewhere:
        fix = f"{fix}, or use backend {elsewhere[0]}" if fix else f"use backend {elsewhere[0]}"
    return LanguageMissing(f"{language.name} cannot run here: {why}", fix=fix)


def _which(name: str, path: str | None = None) -> str | None:
    import shutil  # late: most runs need nothing of it, and it imports every compressor

    return shutil.which(name, path=path)

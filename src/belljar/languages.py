"""The languages by name: three built in, their versions, and those of the operator's file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from . import interpreter, language_host
from .config import Settings
from .errors import LanguageUnknown
from .records import replace
from .types import Language, Request

BUILT_IN: Mapping[str, Language] = {
    language.name: language
    for language in (
        Language(
            name="python",
            family="python",
            file="main.py",
            extensions=(".py",),
            aliases=("py", "python3"),
        ),
        Language(
            name="javascript",
            family="javascript",
            file="main.js",
            command=("node",),
            install="apt-get install nodejs",
            extensions=(".js", ".mjs", ".cjs"),
            aliases=("js", "node", "nodejs"),
        ),
        Language(
            name="bash",
            family="bash",
            file="main.sh",
            command=("bash",),
            install="apt-get install bash",
            extensions=(".sh", ".bash"),
            aliases=("sh",),
        ),
    )
}
_ALIASES = {alias: known for known in BUILT_IN.values() for alias in known.aliases}
# python3.12, node18, nodejs20: a language and the version that its interpreter must have.
_VERSIONED = re.compile(r"(python|nodejs|node)([0-9]{1,3}(?:\.[0-9]{1,3}){0,2})")


def find(name: str, settings: Settings | None = None) -> Language:
    """The language called `name`, or LanguageUnknown with the list of those we know."""
    table = added(settings)
    found = look_up(name, table) if isinstance(name, str) else None
    if found is None:
        raise LanguageUnknown("language", f"{name!r} is unknown; {_known(table)}")
    return found


def bounded(language: Language, python: str | None, settings: Settings) -> Language:
    """`language` with the interpreters that the operator's ceiling leaves to it, if it may need
    another one than the one that runs Belljar."""
    listed = settings.ceiling.interpreters
    if listed is None or language.family != "python":
        return language
    if python is None and not (language.version or language.command or language.places):
        return language
    return replace(language, interpreters=listed)


def seccomp_filter(request: Request) -> bytes:
    """The filter that the operator's language file adds for this program; empty without one."""
    return b"" if request.command else of(request).seccomp_filter


def of(request: Request) -> Language:
    """What the engine resolved, or for a request that came past it, what is built in."""
    return request.resolved if request.resolved is not None else find(request.language)


def added(settings: Settings | None) -> Mapping[str, Language]:
    """The languages of the operator's file, which add to the built-in ones or override them."""
    if settings is None or settings.language_file is None:
        return {}
    from . import language_file

    return language_file.load(settings.language_file)


def known(settings: Settings | None = None) -> dict[str, Language]:
    """Every language that has an entry of its own, by name. Versions of them are known, too."""
    return {**BUILT_IN, **added(settings)}


def look_up(name: str, table: Mapping[str, Language]) -> Language | None:
    """`name` in a file's table, in the aliases there, built in, or as a version of one of those.

    A Python that is too old for our worker is LanguageUnknown, with the reason.
    """
    if name in table:
        return table[name]
    for language in table.values():
        if name in language.aliases:
            return language
    if (built_in := BUILT_IN.get(name) or _ALIASES.get(name)) is not None:
        return table.get(built_in.name, built_in)
    match = _VERSIONED.fullmatch(name)
    if match is None:
        return None
    version = tuple(map(int, match[2].split(".")))
    base_name = "python" if match[1] == "python" else "javascript"
    base = table.get(base_name, BUILT_IN[base_name])
    # Limits and rights are the language's; where its interpreter is, each version's own.
    base = replace(base, version=version, aliases=(), image=None, places={}, paths=())
    if base_name == "javascript":
        install = f"install Node.js {version[0]}, https://nodejs.org/en/download"
        return replace(base, name=f"nodejs{match[2]}", command=("node",), install=install)
    if version[0] != 3 or (len(version) > 1 and version < interpreter.OLDEST):
        oldest = ".".join(map(str, interpreter.OLDEST))
        raise LanguageUnknown(
            "language",
            f"{name!r} is too old: programs are run by a worker that needs Python {oldest}",
            fix=f"use python{oldest} or later",
        )
    short = ".".join(map(str, version[:2]))
    return replace(base, name=name, command=(), install=f"uv python install {short}")


def of_file(file: str, code: str, settings: Settings | None = None) -> Language | None:
    """The language of a program by its file's extension, else by its `#!` line, else None."""
    extension = os.path.splitext(file)[1].lower()
    everything = known(settings)
    if extension:
        for language in (*added(settings).values(), *everything.values()):
            if extension in language.extensions:
                return everything.get(language.name, language)
    interpreter = _shebang(code)
    if interpreter is None:
        return None
    for language in everything.values():
        if language.command and os.path.basename(language.command[0]) == interpreter:
            return language
    return look_up(interpreter, added(settings))


def _shebang(code: str) -> str | None:
    """The name of the interpreter in a program's first line: `#!/usr/bin/env ruby -w` is ruby."""
    first = code.split("\n", 1)[0]
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return os.path.basename(words[0]) if words else None


def _known(table: Mapping[str, Language]) -> str:
    everything = {**BUILT_IN, **table}
    told = f"known: {', '.join(sorted(everything))}, and versions such as python3.12 and nodejs20"
    missing = [
        f"{name} ({language.install})" if language.install else name
        for name, language in sorted(everything.items())
        if language_host.missing(language)
    ]
    return f"{told}; known but not installed: {', '.join(missing)}" if missing else told

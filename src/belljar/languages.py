"""How a program in each language is started: its file name and its command line, as data."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from .errors import BackendUnavailable, LanguageUnknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """`command` is an argv prefix; the program's file name and the arguments follow it."""

    name: str
    file: str
    command: tuple[str, ...]
    package: str


LANGUAGES = {
    language.name: language
    for language in (
        Language(name="python", file="main.py", command=("python3",), package="python3"),
        Language(name="javascript", file="main.js", command=("node",), package="nodejs"),
        Language(name="bash", file="main.sh", command=("bash",), package="bash"),
    )
}
ALIASES = {
    "py": "python",
    "python3": "python",
    "js": "javascript",
    "node": "javascript",
    "sh": "bash",
}


def find(name: str) -> Language:
    """The language called `name`, or LanguageUnknown with the list of those we know."""
    language = LANGUAGES.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if language is None:
        known = ", ".join(sorted(LANGUAGES))
        raise LanguageUnknown("language", f"{name!r} is unknown; known: {known}")
    return language


def installed(language: Language) -> str:
    """The interpreter's path on this host; BackendUnavailable says how to install it."""
    path = shutil.which(language.command[0])
    if path is None:
        raise BackendUnavailable(
            f"{language.command[0]!r}, which runs {language.name}, is not installed",
            fix=f"apt-get install {language.package}",
        )
    return path

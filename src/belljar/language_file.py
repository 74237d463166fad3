"""Reads the operator's language file: TOML, JSON or YAML, one table a language.

A language that is built in, or that `extends` another one, has that one's values where the file
says nothing. Unknown keys are errors that name the known ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from . import languages, policy_fields, trusted_imports, units
from .config import read_bytes
from .errors import ConfigError, LanguageUnknown, PolicyError, RequestError
from .files.names import checked_name
from .records import replace
from .types import Language, Place

KEYS = (
    "extends", "command", "file", "extensions", "aliases", "install", "paths", "env", "image",
    "seccomp", "seccomp_profile", "limits", "default_memory_mb", "allow_network",
)  # fmt: skip
# What a backend's own table may say: those that run on the host's files have no images.
ON_THE_HOST = ("inprocess", "subprocess", "landlock", "jail", "bubblewrap", "firejail", "nsjail")
WITH_IMAGES = ("wasm", "docker", "gvisor", "vm", "kubernetes", "e2b", "remote")
SECCOMP_PROFILES = ("default", "strict")
_NAME = re.compile(r"[a-z][a-z0-9+#._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_loaded: dict[tuple[str, int, int, int], Mapping[str, Language]] = {}


def load(path: str) -> Mapping[str, Language]:
    """The file's languages by name. Read again only when it has changed. Raises ConfigError."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(
            "language_file", f"cannot read {path!r}: {error.strerror}", fix="correct the path"
        ) from None
    key = path, status.st_mtime_ns, status.st_size, status.st_ino
    if key not in _loaded:
        found = read(_parsed(path), path)
        _loaded.clear()
        _loaded[key] = found
    return _loaded[key]


def read(table: object, source: str) -> dict[str, Language]:
    """The languages of an already parsed file; `source` is what its errors name."""
    if not isinstance(table, Mapping):
        raise ConfigError(source, "has no tables: write one for each language")
    found: dict[str, Language] = {}
    for name, entry in table.items():
        try:
            found[name] = _language(name, entry, found, os.path.dirname(source))
        except (ConfigError, PolicyError, RequestError) as error:
            problem = error.message.removeprefix(f"{error.field}: ")
            raise ConfigError(error.field, f"{problem} (from {source})", fix=error.fix) from None
    _refuse_shared_names(found, source)
    return found


def _parsed(path: str) -> object:
    raw = read_bytes(path)
    if raw is None:
        raise ConfigError("language_file", f"there is no file {path!r}", fix="correct the path")
    suffix = os.path.splitext(path)[1].lower()
    parse = {".toml": _toml, ".json": _json, ".yaml": _yaml, ".yml": _yaml}.get(suffix)
    if parse is None:
        raise ConfigError(path, f"{suffix or 'no suffix'!r} is not .toml, .json or .yaml")
    try:
        return parse(path, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(path, f"is not UTF-8: {error}") from None
    except RecursionError:
        raise ConfigError(path, "is nested too deeply") from None


def _toml(path: str, text: str) -> object:
    import tomllib

    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(path, f"is not valid TOML: {error}") from None


def _json(path: str, text: str) -> object:
    import json

    def no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(path, f"has the key {name!r} twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=no_twins)
    except json.JSONDecodeError as error:
        raise ConfigError(path, f"is not valid JSON: {error}") from None


def _yaml(path: str, text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            path, "is YAML, which needs PyYAML", fix="pip install 'belljar[yaml]'"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(path, f"is not valid YAML: {problem}{where}") from None


def _language(
    name: object, entry: object, before: Mapping[str, Language], directory: str
) -> Language:
    where = str(name)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(where, "is not a language's name: small letters, digits and . + # _ -")
    given = _table(where, entry)
    base = _base(name, given, before)
    changes: dict[str, Any] = {"name": name, "aliases": ()}
    if base is None:
        changes["family"] = name
    elif base.name == name:
        changes["aliases"] = base.aliases
    places: dict[str, Place] = {}
    memory: dict[str, int] = {}
    for key, value in given.items():
        if key == "seccomp_profile":
            changes |= _profile(f"{where}.{key}", value, directory)
        elif key == "default_memory_mb":
            memory = {"memory": units.count(f"{where}.{key}", value) << 20}
        elif key in _READERS:
            changes[key] = _READERS[key](f"{where}.{key}", value)
        elif key != "extends":
            places[key] = _place(where, key, value)
    found = replace(base or Language(name=name, family=name, file=""), **changes)
    if memory:  # what `limits` says is more exact
        own = changes.get("limits", {})
        found = replace(found, limits={**found.limits, **memory, **own})
    found = replace(found, places={**found.places, **places})
    if "command" in given:
        found = replace(found, version=())  # the operator's word for it; nothing to look for
    if not found.file:
        raise ConfigError(f"{where}.file", "is missing", fix='as in file = "main.rb"')
    return _checked(where, found)


def _base(name: str, given: Mapping[str, Any], before: Mapping[str, Language]) -> Language | None:
    """The language whose values hold where `given` is silent: the extended or the built-in one."""
    if "extends" not in given:
        try:
            return languages.look_up(name, {})
        except LanguageUnknown as error:
            raise ConfigError(name, error.message.removeprefix("language: ")) from None
    wanted = _text(f"{name}.extends", given["extends"])
    found = languages.look_up(wanted, before)
    if found is None:
        known = ", ".join(sorted({**languages.BUILT_IN, **before}))
        raise ConfigError(
            f"{name}.extends", f"{wanted!r} is not built in and not above it; known: {known}"
        )
    # How to install it, and what its files are called, are the other one's.
    return replace(found, extensions=(), places={})


def _checked(where: str, found: Language) -> Language:
    commands = (found.command, *(place.command for place in found.places.values()))
    if found.family == "python" and any(len(command or ()) > 1 for command in commands):
        raise ConfigError(
            f"{where}.command",
            "is the interpreter alone: our worker starts it with flags of its own",
        )
    image = found.image or any(place.image for place in found.places.values())
    if found.family != "python" and not image and not any(commands):
        raise ConfigError(
            f"{where}.command", "is missing", fix=f'as in command = ["{where}"], or image = "..."'
        )
    return found


def _refuse_shared_names(found: Mapping[str, Language], source: str) -> None:
    owners: dict[str, str] = {name: name for name in found}
    for name, language in found.items():
        for alias in language.aliases:
            if owners.setdefault(alias, name) != name and alias not in found:
                raise ConfigError(
                    f"{name}.aliases", f"{alias!r} is {owners[alias]!r} already (from {source})"
                )


# Each reader takes where the value stands, for the message, and the value.


def _place(where: str, backend: str, given: object) -> Place:
    if not isinstance(given, Mapping) or not (
        backend in ON_THE_HOST or backend in WITH_IMAGES or backend in _foreign_backends()
    ):
        fix = None
        if re.fullmatch(r"[a-z]+[0-9]*", where) and re.fullmatch(r"[0-9]+", backend):
            fix = f'a name with a dot is quoted: ["{where}.{backend}"]'
        known = ", ".join((*KEYS, *ON_THE_HOST, *WITH_IMAGES))
        raise ConfigError(f"{where}.{backend}", f"unknown key; known: {known}", fix=fix)
    for key in given:
        if key not in ("command", "image"):
            raise ConfigError(f"{where}.{backend}.{key}", "unknown key; known: command, image")
    if "image" in given and backend in ON_THE_HOST:
        raise ConfigError(f"{where}.{backend}.image", f"backend {backend} has no images")
    return Place(
        command=_command(f"{where}.{backend}.command", given["command"])
        if "command" in given
        else None,
        image=_text(f"{where}.{backend}.image", given["image"]) if "image" in given else None,
    )


def _foreign_backends() -> set[str]:
    return set(trusted_imports.entry_points("belljar.backends"))


def _table(where: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(where, f"is a table, not {given!r}")
    for key in given:
        if not isinstance(key, str):
            raise ConfigError(f"{where}.{key}", "is not a text", fix="put it in quotes")
    return given


def _text(where: str, given: object) -> str:
    if not isinstance(given, str) or not given or "\0" in given:
        raise ConfigError(where, f"{given!r} is not a text")
    return given


def _texts(where: str, given: object) -> tuple[str, ...]:
    if not isinstance(given, list):
        raise ConfigError(where, f"is a list, not {given!r}", fix="write [...] around it")
    return tuple(_text(where, word) for word in given)


def _command(where: str, given: object) -> tuple[str, ...]:
    words = _texts(where, given)
    if not words:
        raise ConfigError(where, "is empty")
    return words


def _file(where: str, given: object) -> str:
    name = checked_name(where, given)
    if "/" in name:
        raise ConfigError(where, f"{name!r} is not a plain file name")
    return name


def _extensions(where: str, given: object) -> tuple[str, ...]:
    found = _texts(where, given)
    for extension in found:
        if not re.fullmatch(r"\.[a-z0-9+_-]+", extension):
            raise ConfigError(where, f"{extension!r} is not an extension", fix='as in ".rb"')
    return found


def _aliases(where: str, given: object) -> tuple[str, ...]:
    found = _texts(where, given)
    for alias in found:
        if not _NAME.fullmatch(alias):
            raise ConfigError(where, f"{alias!r} is not a language's name")
    return found


def _paths(where: str, given: object) -> tuple[str, ...]:
    found = tuple(policy_fields.checked_path(where, path) for path in _texts(where, given))
    for path in found:
        if not os.path.isabs(path) or os.path.normpath(path) == "/":
            raise ConfigError(where, f"{path!r} is not an absolute path below /")
    return found


def _env(where: str, given: object) -> dict[str, str]:
    found = _table(where, given)
    for name, text in found.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"{where}.{name}", "is not a variable name")
        if not isinstance(text, str) or "\0" in text:
            raise ConfigError(f"{where}.{name}", f"{text!r} is not a text")
    return dict(found)


def _seccomp(where: str, given: object) -> str:
    if given not in SECCOMP_PROFILES:
        known = ", ".join(SECCOMP_PROFILES)
        raise ConfigError(where, f"{given!r} is not a profile of ours; known: {known}")
    return str(given)


def _profile(where: str, given: object, directory: str) -> dict[str, Any]:
    """A profile of ours by name, or the path of one in Docker's format, relative to the file."""
    name = _text(where, given)
    if name in SECCOMP_PROFILES:
        return {"seccomp": name}
    path = os.path.join(directory, name)
    raw = read_bytes(path)
    if raw is None:
        known = ", ".join(SECCOMP_PROFILES)
        raise ConfigError(where, f"there is no file {path!r}", fix=f"or name one of {known}")
    from .linux import seccomp_profile

    try:
        document = _json(path, raw.decode("utf-8"))
        return {"seccomp_filter": seccomp_profile.compile_profile(document)}
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, f"{path!r}: {error}") from None


def _limits(where: str, given: object) -> dict[str, Any]:
    found = {}
    for name, value in _table(where, given).items():
        if name not in policy_fields.LIMITS:
            known = ", ".join(policy_fields.LIMITS)
            raise ConfigError(f"{where}.{name}", f"unknown limit; known: {known}")
        found[name] = policy_fields.LIMITS[name](f"{where}.{name}", value)
    return found


def _allow_network(where: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(where, f"{given!r} is not true or false")
    return given


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "command": _command,
    "file": _file,
    "extensions": _extensions,
    "aliases": _aliases,
    "install": _text,
    "paths": _paths,
    "env": _env,
    "image": _text,
    "seccomp": _seccomp,
    "limits": _limits,
    "allow_network": _allow_network,
}

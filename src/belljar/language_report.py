"""Every language on this host: its version, its command, where it runs and how to get it."""

from __future__ import annotations

import shutil
from typing import Any

from . import interpreter, language_host, languages
from .backends.base import Backend
from .doctor import Backends
from .errors import BelljarError, LanguageUnknown
from .records import plain, record, replace
from .resolve import resolve
from .types import Language, Request

# Shown also where it is not installed, with the way to get it.
_NEWEST_PYTHON = (3, 14)


@record
class LanguageReport:
    """One language; `backends` are those of this host that would run it, with `problem` if none."""

    name: str
    installed: bool
    version: str
    command: str
    backends: tuple[str, ...]
    source: str
    extensions: tuple[str, ...]
    problem: str = ""
    fix: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return plain(self) | {"backends": list(self.backends), "extensions": list(self.extensions)}


def reports(engine: Backends) -> list[LanguageReport]:
    """Built-in languages, their versions, and those of the language file, in that order."""
    settings = engine.settings
    here = [backend for name in engine.backend_names() if (backend := _usable(engine, name))]
    added = languages.added(settings)
    names = [*languages.BUILT_IN, *_versions(), *added]
    found = []
    for name in dict.fromkeys(names):
        source = settings.language_file or "" if name in added else "built in"
        language = languages.bounded(languages.find(name, settings), None, settings)
        found.append(_report(engine, language, here, source))
    return found


def _versions() -> list[str]:
    pythons = dict.fromkeys(
        (
            *(f"python3.{minor}" for minor in range(interpreter.OLDEST[1], _NEWEST_PYTHON[1] + 1)),
            *language_host.pythons(),
        )
    )
    node = shutil.which("node")
    version = language_host.version_of(node) if node else None
    found = [name for name in pythons if _is_known(name)]
    return [*found, *([f"nodejs{version[0]}"] if version else [])]


def _is_known(name: str) -> bool:
    try:
        languages.find(name)
    except LanguageUnknown:  # too old
        return False
    return True


def _usable(engine: Backends, name: str) -> Backend | None:
    try:
        backend = engine.backend(name)
        return backend if backend.probe().available else None
    except Exception:  # noqa: BLE001 - a plug-in that is broken must not end the report
        return None


def _report(
    engine: Backends, language: Language, here: list[Backend], source: str
) -> LanguageReport:
    settings = engine.settings
    path, version, problem, fix = "", "", "", language.install
    try:
        path, version = _where(language)
        fix = None
    except BelljarError as error:
        problem, fix = error.message, error.fix or fix
    request = Request(code="", language=language.name, resolved=language)
    runs = []
    for backend in here:
        # By the backend's own word for it; a policy it does not hold is not about the language.
        try:
            policy = resolve(
                "permissive", {}, ceiling=settings.ceiling, language=replace(language, limits={})
            ).policy
            backend.compile(replace(policy, min_isolation=backend.isolation), request)
        except BelljarError as error:
            problem = problem or error.message
            continue
        runs.append(backend.name)
    return LanguageReport(
        name=language.name,
        installed=bool(path),
        version=version,
        command=path,
        backends=tuple(runs),
        source=source,
        extensions=language.extensions,
        problem="" if runs else problem,
        fix=fix if not path else None,
    )


def _where(language: Language) -> tuple[str, str]:
    """(path, version) on this host; raises what a run would raise."""
    if language.family == "python":
        python = interpreter.find(language_host.python_of(language, None))
        return python.executable, ".".join(map(str, python.version))
    path = language_host.installed(language)
    version = language_host.version_of(path)
    return path, ".".join(map(str, version or ()))

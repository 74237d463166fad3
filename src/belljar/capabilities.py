"""What programs get where a runner runs them: languages, limits, network, Python libraries.

Written for the author of those programs, usually a model: the descriptions of tools are made of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import languages, libraries
from .api import Runner
from .backends.base import Plan
from .errors import BelljarError
from .explanation import limit_text, network_text
from .policy import Policy
from .presentation import one_line
from .records import record
from .types import Language, Mount

# Those that are looked for: what models like to import.
LIBRARIES = (
    "altair", "bs4", "duckdb", "httpx", "lxml", "matplotlib", "networkx", "nltk", "numpy",
    "openpyxl", "pandas", "PIL", "plotly", "polars", "pyarrow", "pydantic", "requests", "scipy",
    "seaborn", "shapely", "sklearn", "spacy", "sqlalchemy", "statsmodels", "sympy", "tabulate",
    "tensorflow", "torch", "tqdm", "xgboost", "yaml",
)  # fmt: skip
_PROGRAMS = {
    "python": libraries.CHECK
    + """
['.'.join(map(str, sys.version_info[:3])), *(name for name in sys.argv[1:] if not has(name))]
""",
    "javascript": "console.log(process.versions.node)",
    "bash": "echo ${BASH_VERSION%%(*}",
}
_LIMITS = ("timeout", "memory", "cpus", "processes", "disk", "output")


@record
class Speaks:
    """One language: where its programs would run, and under which policy."""

    name: str
    version: str
    backend: str
    isolation: str
    policy: Policy

    def to_dict(self) -> dict[str, Any]:
        limits = {name: getattr(self.policy.limits, name) for name in _LIMITS}
        return {
            "name": self.name,
            "version": self.version,
            "backend": self.backend,
            "isolation": self.isolation,
            "network": network_text(self.policy),
            "limits": limits,
        }


@record
class Capabilities:
    """`libraries` is None where only a run could have told and that run failed."""

    languages: tuple[Speaks, ...]
    libraries: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None  # those that the import lint lets through; None is any
    mounts: tuple[Mount, ...] = ()
    workdir: str = ""

    def language(self, name: str) -> Speaks | None:
        return next((spoken for spoken in self.languages if spoken.name == name), None)

    def limits_text(self) -> str:
        """`time 30 s, memory 512 MiB, ...`, of the first language."""
        if not self.languages:
            return "nothing runs here"
        policy = self.languages[0].policy
        limits = ", ".join(f"{name} {limit_text(policy, name)}" for name in _LIMITS)
        return f"{limits}, network {network_text(policy)}"

    def languages_text(self) -> str:
        return ", ".join(
            f"{spoken.name} ({spoken.version})" if spoken.version else spoken.name
            for spoken in self.languages
        )

    def libraries_text(self) -> str:
        """What Python programs can import, as a sentence or two."""
        if self.modules is not None:
            return f"Python programs may import only: {', '.join(sorted(self.modules))}."
        if self.libraries is None:
            return "Python programs have the standard library; others were not looked for."
        found = f" and {', '.join(self.libraries)}" if self.libraries else " and no other libraries"
        return f"Python programs have the standard library{found}. Nothing can be installed."

    def places_text(self) -> str:
        """Where a program starts, and which directories of the host it sees."""
        text = "Every call starts afresh in an empty work directory and shares nothing with others."
        if self.workdir:
            text = f"Every call starts a new program in {self.workdir}."
        if not self.mounts:
            return text
        words = {"ro": "read-only", "rw": "writable"}
        seen = ", ".join(f"{mount.dst} ({words[mount.mode]})" for mount in self.mounts)
        return f"{text} Of the user's files programs see: {seen}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "mounts": [{"path": mount.dst, "mode": mount.mode} for mount in self.mounts],
            "workdir": self.workdir,
            "languages": [spoken.to_dict() for spoken in self.languages],
            "libraries": None if self.libraries is None else list(self.libraries),
            "modules": None if self.modules is None else list(self.modules),
        }


def look(runner: Runner, allowed: Iterable[str] | None = None) -> Capabilities:
    """What `runner` offers now, by a short run in each language; `allowed` names those to try."""
    settings = runner.engine.settings
    names = languages.known(settings) if allowed is None else allowed
    spoken: list[Speaks] = []
    python: tuple[Plan, Any] | None = None
    for name in names:
        language = languages.find(name, settings)
        try:
            plan = runner.plan("", language=language.name)
        except BelljarError:  # not installed, or nothing here may run it
            continue
        told = _told(runner, language)
        if language.family == "python" and python is None:
            python = plan, told
        spoken.append(
            Speaks(
                name=language.name,
                version=one_line(str(told[0]), 20) if told else "",
                backend=plan.backend,
                isolation=plan.isolation.value,
                policy=plan.policy,
            )
        )
    if not spoken:
        return Capabilities(languages=())
    places: dict[str, Any] = {"mounts": plan.request.mounts, "workdir": plan.request.workdir}
    if python is None:
        return Capabilities(languages=tuple(spoken), **places)
    plan, told = python
    present, modules = None, plan.policy.modules.allow
    if told is not None:
        present = tuple(name for name in LIBRARIES if name not in told[1:])
        if modules is not None:
            modules = tuple(name for name in modules if name not in told[1:])
    return Capabilities(languages=tuple(spoken), libraries=present, modules=modules, **places)


def _told(runner: Runner, language: Language) -> list[Any] | None:
    """The version that a program sees, then, in Python, the libraries that it does not find."""
    program = _PROGRAMS.get(language.family)
    if program is None:
        return None
    names = LIBRARIES if language.family == "python" else ()
    try:
        result = runner.execute(program, language=language.name, args=names, modules="any")
    except BelljarError:
        return None
    if not result.success:
        return None
    if language.family == "python":
        return result.value if isinstance(result.value, list) else None
    return result.stdout.split()[:1] or None

"""Belljar runs code you do not trust: one call, one policy, one truthful result.

>>> import belljar
>>> belljar.run("print('hello')").stdout
'hello\\n'
"""

from __future__ import annotations

import os
import sys

from ._version import __version__

if sys.implementation.name != "cpython":
    raise ImportError(
        "Belljar runs on CPython only, because it forks interpreters and calls the kernel in ways"
        f" that {sys.implementation.name} does not have: install CPython 3.11 or later"
    )
if not os.path.isfile(__file__):
    raise ImportError(
        f"Belljar starts helper processes from its own files, and {__file__!r} is inside an"
        " archive: install it with pip, or unpack the archive and run it from there"
    )

TYPE_CHECKING = False  # as `typing` has it; every supervisor process would pay for that import
if TYPE_CHECKING:
    from typing import Any

    from .api import Runner, arun, create_runner, run
    from .config import Settings
    from .engine import Engine
    from .errors import (
        BackendFailed,
        BackendUnavailable,
        BelljarError,
        CommandNotFound,
        ConfigError,
        LanguageUnknown,
        PolicyError,
        PolicyUnenforceable,
        ProgramFailed,
        RequestError,
    )
    from .policy import Ceiling, Filesystem, Isolation, Limits, Modules, Network, Policy
    from .types import (
        Change,
        Display,
        Enforcement,
        Fields,
        File,
        GuestError,
        Member,
        Mount,
        Opaque,
        Request,
        Result,
        Status,
        Usage,
    )

# Where each public name lives. Nothing is imported until it is used: start-up time is a feature.
_HOMES = {
    "api": ("Runner", "arun", "create_runner", "run"),
    "config": ("Settings",),
    "engine": ("Engine",),
    "errors": (
        "BackendFailed", "BackendUnavailable", "BelljarError", "CommandNotFound", "ConfigError",
        "LanguageUnknown", "PolicyError", "PolicyUnenforceable", "ProgramFailed", "RequestError",
    ),
    "policy": ("Ceiling", "Filesystem", "Isolation", "Limits", "Modules", "Network", "Policy"),
    "types": (
        "Change", "Display", "Enforcement", "Fields", "File", "GuestError", "Member", "Mount",
        "Opaque", "Request", "Result", "Status", "Usage",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BackendFailed",
    "BackendUnavailable",
    "BelljarError",
    "Ceiling",
    "Change",
    "CommandNotFound",
    "ConfigError",
    "Display",
    "Enforcement",
    "Engine",
    "Fields",
    "File",
    "Filesystem",
    "GuestError",
    "Isolation",
    "LanguageUnknown",
    "Limits",
    "Member",
    "Modules",
    "Mount",
    "Network",
    "Opaque",
    "Policy",
    "PolicyError",
    "PolicyUnenforceable",
    "ProgramFailed",
    "Request",
    "RequestError",
    "Result",
    "Runner",
    "Settings",
    "Status",
    "Usage",
    "__version__",
    "arun",
    "create_runner",
    "run",
]


def __getattr__(name: str) -> Any:
    import importlib

    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'belljar' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})

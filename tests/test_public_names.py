"""The public names are pinned, come lazily, and importing Belljar costs little."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

import belljar

NAMES = [
    "BackendFailed", "BackendUnavailable", "BelljarError", "Ceiling", "Change", "CommandNotFound",
    "ConfigError", "Display", "Enforcement", "Engine", "Fields", "File", "Filesystem",
    "GuestError", "Isolation", "LanguageUnknown", "Limits", "Member", "Modules", "Mount",
    "Network", "Opaque", "Policy", "PolicyError", "PolicyUnenforceable", "ProgramFailed",
    "Request", "RequestError", "Result", "Runner", "Settings", "Status", "Usage", "__version__",
    "arun", "create_runner", "run",
]  # fmt: skip

# Each of these costs more to import than a short program takes to run.
HEAVY = [
    "argparse", "asyncio", "concurrent.futures", "ctypes", "email", "http", "importlib.metadata",
    "inspect", "json", "logging", "pandas", "pyarrow", "sqlite3", "ssl", "subprocess", "tempfile",
    "tomllib", "unittest", "urllib.request", "xml",
]  # fmt: skip


def in_a_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_these() -> None:
    assert sorted(belljar.__all__) == NAMES


def test_the_list_of_names_is_sorted_and_without_doubles() -> None:
    assert belljar.__all__ == sorted(set(belljar.__all__))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(belljar, name) is not None
    assert name in dir(belljar)


def test_nothing_else_is_public() -> None:
    for name in belljar.__all__:
        getattr(belljar, name)
    others = {
        name
        for name in dir(belljar)
        if not name.startswith("_")
        and name not in belljar.__all__
        and not isinstance(getattr(belljar, name), ModuleType)
        and name not in ("annotations", "TYPE_CHECKING", "Any")
    }
    assert others == set()


def test_a_star_import_brings_exactly_them() -> None:
    namespace: dict[str, object] = {}
    exec("from belljar import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = belljar.nonsense


def test_importing_belljar_imports_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import belljar, json; print(json.dumps(sorted("
    loaded = json.loads(in_a_new_process(f"{code}set(sys.modules) - before)))"))
    assert "belljar" in loaded
    # json is imported above, to tell; whatever it brings is not Belljar's.
    heavy = set(HEAVY) - {"json"}
    assert heavy & set(loaded) == set()
    assert [name for name in loaded if name.startswith("belljar.")] == ["belljar._version"]


def test_the_public_types_come_without_the_engine() -> None:
    code = (
        "import sys; before = set(sys.modules); from belljar import Mount, PolicyError, Result; "
        "print('\\n'.join(set(sys.modules) - before))"
    )
    loaded = set(in_a_new_process(code).split())
    assert "belljar.types" in loaded
    assert {
        "belljar.engine",
        "belljar.api",
        "asyncio",
        "ctypes",
        "tomllib",
        "argparse",
    } & loaded == set()


def test_a_run_needs_neither_asyncio_nor_a_toml_reader() -> None:
    code = (
        "import sys, belljar; assert belljar.run('6 * 7', backend='subprocess').value == 42; "
        "print('\\n'.join(sys.modules))"
    )
    loaded = set(in_a_new_process(code).split())
    assert "belljar.engine" in loaded
    assert {"asyncio", "argparse", "pandas", "pyarrow", "importlib.metadata"} & loaded == set()


def test_the_version_is_a_version() -> None:
    assert belljar.__version__.count(".") == 2

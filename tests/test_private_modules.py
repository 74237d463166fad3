"""Runs work on a Python whose private modules are gone or have other contents.

`_json` of Python 3.15 asked for one attribute more, and no run on any backend worked there. So each
private module that the package imports is taken away from it, and from it alone, in turn: in a copy
of the package in which it has another name, and so cannot be found.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.backends import registry
from belljar.guest import protocol
from belljar.linux import bare

PACKAGE = Path(belljar.__file__).parent
PUBLIC = {"_thread"}  # in the documentation of the standard library
BACKENDS = [
    name
    for name in ("jail", "landlock", "subprocess")
    if sys.platform == "linux" and registry.load(name).probe().available
]
PROGRAM = """
import importlib, json, sys
import belljar
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request

answers = {"package": belljar.__file__}
with Engine(Settings()) as engine:
    backends, modules = (words.split(",") for words in sys.argv[1:])
    for name in modules:
        importlib.import_module(name)
    for name in backends:
        done = engine.run(Request(code="import threading\\nprint('out')\\n'é'"), backend=name)
        failed = engine.run(Request(code="raise ValueError('no')"), backend=name)
        answers[name] = [done.value, done.stdout, failed.error.type if failed.error else None]
print(json.dumps(answers))
"""


def sources() -> Iterator[tuple[Path, str]]:
    for path in PACKAGE.rglob("*.py"):
        if "inside" not in path.parts:  # of the package in WebAssembly, which has its own Python
            yield path, path.read_text(encoding="utf-8")


def private_imports() -> set[str]:
    found = {*re.findall(r'_bare\("(_\w+)"', Path(bare.__file__).read_text(encoding="utf-8"))}
    for _, text in sources():
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found |= {name for name in names if name.startswith("_") and name != "__future__"}
    return found - PUBLIC


PRIVATE = sorted(private_imports())


def run_without(names: list[str], at: Path) -> dict[str, tuple[object, ...]]:
    shutil.copytree(PACKAGE, at / "belljar", ignore=shutil.ignore_patterns("guests"))
    words = re.compile(rf"\b({'|'.join(names)})\b")
    changed = []
    for path in (at / "belljar").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if words.search(text):
            path.write_text(words.sub(r"_gone\1", text), encoding="utf-8")
            parts = path.relative_to(at).with_suffix("").parts
            changed.append(".".join(parts))
    assert changed
    at.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(BACKENDS), ",".join(changed)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(at)},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert Path(told.pop("package")) == at / "belljar/__init__.py"
    return {name: tuple(answer) for name, answer in told.items()}


EXPECTED: dict[str, object] = dict.fromkeys(BACKENDS, ("é", "out\n", "ValueError"))


@pytest.mark.parametrize("names", [*([name] for name in PRIVATE), PRIVATE], ids="+".join)
def test_runs_work_without_a_private_module(names: list[str], tmp_path: Path) -> None:
    assert run_without(names, tmp_path) == EXPECTED


def test_the_private_modules_are_those_that_have_been_thought_of() -> None:
    """A new one needs a public fallback; the test above then tries it."""
    known = "_ast _blake2 _frozen_importlib _frozen_importlib_external _json _queue _signal _socket"
    assert known.split() == PRIVATE


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"make_scanner": lambda settings: settings.not_there},
        {"make_scanner": lambda settings: None, "make_encoder": lambda *args: None},
    ],
    ids=["empty", "another attribute", "other results"],
)
def test_the_codec_works_with_another_json_accelerator(
    odd: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = types.ModuleType("_json")
    vars(changed).update({"encode_basestring": str, **odd})
    monkeypatch.setitem(sys.modules, "_json", changed)
    text = Path(protocol.__file__).read_text(encoding="utf-8")
    spare: dict[str, Any] = {"__name__": "protocol", "__file__": protocol.__file__}
    exec(compile(text, protocol.__file__, "exec"), spare)
    data = spare["dumps"]({"é": [1, 0.5, None]})
    assert data == protocol.dumps({"é": [1, 0.5, None]})
    assert spare["loads"](data) == {"é": [1, 0.5, None]}
    with pytest.raises(ValueError, match=r"finite|JSON"):
        spare["loads"](b"NaN")


def test_what_is_used_of_the_bare_modules_is_looked_for() -> None:
    for path, text in sources():
        tree = ast.parse(text)
        mine = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("bare")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            if node.value.id in mine:
                listed = {"signal": bare.SIGNAL, "socket": bare.SOCKET}[node.value.id]
                assert node.attr in listed, f"{path.name}: {node.value.id}.{node.attr}"


def test_a_bare_module_that_lacks_something_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_signal", types.ModuleType("_signal"))
    import signal

    assert bare._bare("_signal", "signal", bare.SIGNAL) is signal


def test_another_implementation_of_python_is_refused_at_import() -> None:
    code = "import sys; sys.implementation.name = 'pypy'; import belljar"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: Belljar runs on CPython only" in done.stderr


def test_a_package_inside_an_archive_is_refused_at_import(tmp_path: Path) -> None:
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("__main__.py", "import belljar")
        for name in ("__init__.py", "_version.py"):
            bundle.write(PACKAGE / name, f"belljar/{name}")
    done = subprocess.run([sys.executable, "-I", archive], capture_output=True, text=True)
    assert "archive: install it with pip" in done.stderr

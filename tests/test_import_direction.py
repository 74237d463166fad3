"""Which part of the package may import which. One table; the code has to agree with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar

ROOT = Path(belljar.__file__).parent

# Layer -> what it may import of Belljar besides itself. A layer is a package or a module directly
# below `belljar`; the longest matching name counts. "*" is everything.
CORE = (
    "errors", "records", "units", "types", "policy", "policy_fields", "minima", "resolve",
    "guest.values",
)  # fmt: skip
LAYERS: dict[str, tuple[str, ...]] = {
    # Runs inside, on any Python from 3.9: it may not even import its own package's neighbours.
    "guest": ("guest.marked", "guest.values"),
    "guest.marked": (),
    "guest.values": ("guest", "guest.marked"),
    # Kernel facilities know no policy, no request and no result; they only raise ours.
    "linux": ("errors", "records"),
    # WebAssembly guests and their workers. What is baked into a guest sees the guest's code only.
    "wasm": ("errors", "records"),
    "wasm.inside": ("guest",),
    "wasm.modules": (),
    # The vocabulary.
    "records": (),
    "errors": ("records", "types"),
    "units": ("errors",),
    "types": ("errors", "guest.marked", "guest.values", "presentation", "records"),
    "presentation": ("guest.values", "records", "types"),
    "explanation": (*CORE, "presentation"),
    "policy": ("errors", "records", "types", "units"),
    "minima": ("errors", "policy", "units"),
    "policy_fields": ("errors", "guest", "minima", "policy", "records", "types", "units"),
    "found": ("lint_rules", "policy", "policy_fields", "records"),
    "resolve": ("errors", "found", "policy", "policy_fields", "records", "types"),
    "trusted_imports": (),
    "events": (*CORE, "trusted_imports"),
    "capture": (),
    "files": CORE,
    "languages": (*CORE, "config", "interpreter", "language_file", "language_host"),
    "language_file": (
        *CORE, "files", "config", "languages", "linux", "trusted_imports",
    ),
    "language_host": (*CORE, "interpreter"),
    "interpreter": CORE,
    "lint": (*CORE, "lint_rules"),
    "lint_rules": CORE,
    "report": (*CORE, "guest", "capture", "events"),
    # A client of somebody else's engine: the backends and the images speak through it.
    "docker_api": ("errors",),
    "images": (*CORE, "_version", "docker_api", "images.names"),
    "images.names": ("_version", "errors"),
    "config": (*CORE, "config_keys", "found"),
    "config_keys": CORE,
    # Backends sit below the engine and know nothing of the edges.
    "backends": (
        *CORE, "capture", "files", "docker_api", "events", "guest", "images.names",
        "interpreter", "language_host", "languages", "lint", "lint_rules", "linux", "log", "needs",
        "report", "trusted_imports", "wasm",
    ),
    "needs": ("lint", "records"),
    "libraries": (*CORE, "interpreter", "languages", "wasm.modules"),
    "choose": (*CORE, "languages", "needs", "wasm.modules"),
    "retrying": (*CORE, "backends", "events"),
    "refusals": CORE,
    "selection": (
        *CORE, "backends", "choose", "config", "events", "languages", "libraries", "refusals",
    ),
    "log": (),
    "exit_codes": CORE,
    "engine": (
        *CORE, "backends", "files", "config", "events", "explanation", "languages", "lint",
        "log", "retrying", "stores", "selection", "trusted_imports",
    ),
    "async_runs": (*CORE, "backends", "trusted_imports"),
    "api": (
        *CORE, "async_runs", "backends", "files", "config", "engine", "events", "languages",
        "libraries", "trusted_imports",
    ),
    "doctor": (*CORE, "backends", "config", "engine", "languages", "linux", "interpreter"),
    "language_report": (
        *CORE, "backends", "doctor", "interpreter", "language_host", "languages",
    ),
    # What tools and servers tell about the sandbox.
    "capabilities": (
        *CORE, "api", "backends", "explanation", "languages", "libraries", "presentation",
    ),
    "direct": (*CORE, "capture"),
    "tools": (*CORE, "api", "capabilities", "direct"),
    # Each server translates one protocol to the public calls.
    "servers": ("errors",),
    "servers.mcp": (
        *CORE, "_version", "api", "capabilities", "languages", "presentation", "servers.auth",
        "servers.http",
    ),
    "servers.auth": CORE,
    "servers.remote": (*CORE, "api", "config", "config_keys", "engine", "files"),
    "servers.http": (
        *CORE, "_version", "api", "async_runs", "backends", "doctor", "engine", "events", "guest",
        "log", "presentation", "servers.auth", "servers.remote", "stores",
    ),
    # Sinks of an engine.
    "stores": (*CORE, "config_keys", "events", "explanation", "log"),
    # The edges may use everything; nothing above uses them.
    "compat": ("*",),
    "cli": ("*",),
    "testing": ("*",),
    "": ("_version", "api", "config", "engine", *CORE),
    "_version": (),
    "__main__": ("cli",),
}  # fmt: skip


def layer_of(module: str) -> str:
    """The longest name in LAYERS that `module` (without the leading `belljar.`) is or is below."""
    parts = module.split(".") if module else []
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in LAYERS:
            return name
    return "" if not parts else parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    own = module_name(path)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    return imports_in(path.read_text(encoding="utf-8"), package)


def imports_in(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of Belljar's own modules, also those inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "belljar" or alias.name.startswith("belljar."):
                    yield node.lineno, alias.name.removeprefix("belljar").lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = package.split(".") if package else []
                base = ".".join(above[: len(above) - (node.level - 1)])
            elif node.module == "belljar" or (node.module or "").startswith("belljar."):
                base = ""
            else:
                continue
            module = (node.module or "").removeprefix("belljar").lstrip(".")
            base = ".".join(part for part in (base, module) if part)
            for alias in node.names:
                inner = ".".join(part for part in (base, alias.name) if part)
                yield node.lineno, inner if is_module(inner) else base


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def allowed(importer: str, imported: str) -> bool:
    mine, theirs = layer_of(importer), layer_of(imported)
    if mine == theirs or "*" in LAYERS[mine]:
        return True
    return any(theirs == name or theirs.startswith(f"{name}.") for name in LAYERS[mine])


SOURCES = sorted(path for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_the_agreed_way(path: Path) -> None:
    importer = module_name(path)
    assert layer_of(importer) in LAYERS, f"{importer} has no row in the table of layers"
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{line}: layer {layer_of(importer)!r} may not import "
        f"{imported or 'belljar'!r} (layer {layer_of(imported)!r}); "
        f"it may import {', '.join(LAYERS[layer_of(importer)]) or 'nothing of Belljar'}"
        for line, imported in imports_of(path)
        if not allowed(importer, imported)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "accepted"),
    [
        ("linux.launch", "policy", False),
        ("linux.launch", "linux.seccomp", True),
        ("guest.worker", "types", False),
        ("guest.worker", "guest.protocol", True),
        ("types", "guest.values", True),
        ("types", "guest.worker", False),
        ("types", "policy", False),
        ("backends.subprocess", "engine", False),
        ("backends.subprocess", "cli.run", False),
        ("backends.subprocess", "linux.launch", True),
        ("engine", "cli", False),
        ("cli.run", "engine", True),
    ],
)
def test_the_check_itself_can_say_no(importer: str, imported: str, accepted: bool) -> None:
    assert allowed(importer, imported) == accepted


def test_every_way_of_writing_an_import_is_seen() -> None:
    source = """
import os, belljar, belljar.engine
from belljar import policy, run
from belljar.linux import seccomp
from . import base
from .. import types
from ..guest.values import encode
def later():
    from ..cli import main
"""
    assert [name for _, name in sorted(imports_in(source, "backends"))] == [
        "", "engine", "", "policy", "linux.seccomp", "backends.base", "types", "guest.values",
        "cli",
    ]  # fmt: skip


def test_every_row_of_the_table_has_a_module() -> None:
    gone = [name for name in LAYERS if name and not is_module(name)]
    assert gone == []


def test_guest_code_imports_only_the_standard_library() -> None:
    import sys

    for path in (ROOT / "guest").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                optional = (
                    "pandas", "polars", "pyarrow", "matplotlib", "numpy", "IPython", "bokeh",
                )  # fmt: skip
                assert top in sys.stdlib_module_names or top in optional, (
                    f"{path.name}:{node.lineno}: {name} is not in the standard library"  # type: ignore[attr-defined]
                )

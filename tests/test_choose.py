"""What a program needs, read from its source, and the order of backends that follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from belljar import choose, libraries, needs
from belljar.backends import registry
from belljar.errors import RequestError
from belljar.policy import Isolation, Policy
from belljar.resolve import resolve
from belljar.types import Language, Mount, Request


def policy(**wishes: Any) -> Policy:
    return resolve("standard", wishes).policy


def order(request: Request, **wishes: Any) -> list[str]:
    found = choose.candidates(registry.PREFERENCE, registry.RUNGS, policy(**wishes), request)
    return [each.name for each in found]


# -- reading a program


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import json, os.path", ("json", "os.path")),
        ("from xml.etree import ElementTree as e", ("xml.etree.ElementTree",)),
        ("from . import mine\nfrom .mine import x", ()),
        ("import os as o\no.fork()", ("os", "os.fork")),
        ("def f():\n    import numpy", ("numpy",)),
        ("__import__('ss' + 'l')", ("ssl",)),
        ("import importlib as i\ni.import_module('lzma')", ("importlib", "importlib.import_module",
                                                            "lzma")),
        ("exec('import ctypes')", ("ctypes",)),
        ("eval(\"__import__('mmap')\")", ("mmap",)),
        ("try:\n    import numpy\nexcept ImportError:\n    numpy = None", ()),
        ("try:\n    import numpy\nexcept (KeyError, ModuleNotFoundError):\n    import json",
         ("json",)),
        ("try:\n    import numpy\nexcept KeyError:\n    pass", ("numpy",)),
        ("try:\n    import json\nfinally:\n    import re", ("json", "re")),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy",
         ("typing.TYPE_CHECKING",)),
        ("import re\nre.compile(x)", ("re", "re.compile")),
    ],
)  # fmt: skip
def test_what_a_program_imports_is_read_from_its_source(code: str, names: tuple[str, ...]) -> None:
    assert needs.of_python(code) == needs.Needs(names)


@pytest.mark.parametrize(
    "code",
    [
        "__import__(name)",
        "from importlib import import_module as f\nf(name)",
        "exec(input())",
        "eval(text)",
        "compile(text, '', 'exec')",
        "run = exec",
        "import runpy",
        "import importlib.util",
        "x = ",
        "exec('1');" * 30,
        "(" * 5000,
        "-" * 50_000 + "1",
        "x = 1\n" * 100_000,
    ],
)
def test_what_cannot_be_read_is_said(code: str) -> None:
    assert needs.of_python(code).unreadable


def test_files_that_come_with_a_program_are_read_and_are_no_needs() -> None:
    files = {"mine.py": b"import numpy, pack.inner", "pack/inner.py": b"import json", "x.csv": b"("}
    assert needs.of_python("import mine", files).modules == ("numpy", "json")
    assert needs.of_python("import mine").modules == ("mine",)  # the control arm


# -- whether wasm can serve it


@pytest.mark.parametrize(
    ("code", "doubt"),
    [
        ("import json, re, sqlite3, asyncio, dataclasses\nprint(json.dumps(1))", ""),
        ("import numpy as np", "module 'numpy'"),
        ("import os, threading\nos.fork()", "threads (threading), processes (os.fork)"),
        ("import os\nos.listdir()", ""),
        ("from concurrent.futures import ThreadPoolExecutor", "threads"),
        ("import subprocess", "processes"),
        ("import ssl, ctypes, a, b, c", "and 2 more"),
        ("import compression.zstd", "compression.zstd"),
        ("import compression.zlib", ""),
        ("exec(input())", "cannot be sure"),
    ],
)
def test_wasm_is_doubted_where_a_program_needs_more(code: str, doubt: str) -> None:
    found = choose.wasm_doubt(Request(code=code))
    assert doubt in found
    assert bool(doubt) == bool(found)


def test_values_and_mounts_that_wasm_could_not_serve_are_seen() -> None:
    class Frame:
        __module__ = "pandas.core.frame"

    assert "pandas" in choose.wasm_doubt(Request(code="df", context={"df": Frame()}))
    assert not choose.wasm_doubt(Request(code="df", context={"df": [1]}))
    mounted = (Mount("/usr", "project", "ro"),)
    assert "mount" in choose.wasm_doubt(Request(code="import project.x", mounts=mounted))
    assert not choose.wasm_doubt(Request(code="import json", mounts=mounted))


def test_a_javascript_program_for_node_is_not_for_quickjs() -> None:
    plain = Request(code="console.log([1, 2].map(x => x + 1))", language="javascript")
    node = Request(code="const fs = require('fs')", language="javascript")
    found = [
        each
        for request in (plain, node)
        for each in choose.candidates(registry.PREFERENCE, registry.RUNGS, policy(), request)
        if each.name == "wasm"
    ]
    assert [each.stand_in for each in found] == [False, True]
    assert "require" in found[1].doubt


# -- the order


def test_a_whole_python_in_a_jail_comes_first() -> None:
    assert order(Request(code="import json")) == list(registry.PREFERENCE)


def test_the_source_is_not_read_while_a_jail_takes_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def of_python(code: str, files: object) -> needs.Needs:
        read.append(code)
        return needs.Needs()

    monkeypatch.setattr(needs, "of_python", of_python)
    found = choose.candidates(
        registry.PREFERENCE, registry.RUNGS, policy(), Request(code="import json")
    )
    assert next(found).name == "jail"
    assert read == []
    list(found)
    assert read == ["import json"]  # the control arm


def test_a_floor_of_wasm_leaves_wasm_and_gvisor() -> None:
    pure, native = Request(code="import json"), Request(code="import numpy")
    assert order(pure, min_isolation="wasm")[:2] == ["wasm", "gvisor"]
    assert order(native, min_isolation="wasm")[:2] == ["gvisor", "wasm"]


def test_fuel_is_counted_by_wasm_alone_even_for_what_it_is_doubted() -> None:
    assert order(Request(code="import json"), fuel=1000)[0] == "wasm"
    assert order(Request(code="import numpy"), fuel=1000)[0] == "wasm"


def test_an_image_is_used_where_there_are_images() -> None:
    assert order(Request(code="1", image="python:3.12"))[:2] == ["docker", "gvisor"]


def test_nobody_is_left_out() -> None:
    for wishes in ({}, {"min_isolation": "vm"}, {"fuel": 5}):
        for code in ("import numpy", "import json"):
            assert sorted(order(Request(code=code), **wishes)) == sorted(registry.PREFERENCE)


def test_reasons_are_one_sentence() -> None:
    assert choose.reason("jail", {}) == "auto: jail is the first choice here and holds the policy"
    passed = {"jail": "cannot count fuel", "bubblewrap": "cannot count fuel", "x": "cannot be had"}
    assert choose.reason("wasm", passed, "cannot offer threads") == (
        "auto: wasm, though it cannot offer threads, because jail and bubblewrap cannot count fuel;"
        " x cannot be had"
    )


# -- libraries


def test_libraries_are_looked_for_where_the_guest_would_find_them() -> None:
    request = Request(code="1")
    names = ("json", "os.path", "sys", "pytest", "xml.etree", "no_such", "xml.no_such")
    assert libraries.missing("jail", request, names) == ("no_such", "xml.no_such")
    assert libraries.missing("wasm", request, names) == ("pytest", "no_such")


def test_libraries_elsewhere_are_not_known_without_a_run() -> None:
    asked = ("json",)
    assert libraries.missing("docker", Request(code="1"), asked) is None
    assert libraries.missing("jail", Request(code="1", python="/usr/bin/python3"), asked) is None
    other = Language(name="python3.9", family="python", file="main.py", version=(3, 9))
    assert libraries.missing("jail", Request(code="1", resolved=other), asked) is None


def test_a_library_that_comes_with_the_program_is_there() -> None:
    request = Request(code="1", files={"mine/__init__.py": b"", "single.py": b""})
    assert libraries.missing("jail", request, ("mine.part", "single", "other")) == ("other",)


@pytest.mark.parametrize("wrong", ["numpy", ["a b"], [""], [3], ["a..b"], ["a;b"]])
def test_a_library_is_a_name_that_can_be_imported(wrong: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        libraries.checked(wrong)
    assert refusal.value.field == "require_libraries"
    assert libraries.checked(["numpy", "xml.etree", "numpy"]) == ("numpy", "xml.etree")


def test_every_built_in_backend_has_a_rung() -> None:
    assert set(registry.BUILT_IN) <= set(registry.RUNGS)
    assert all(isinstance(rung, Isolation) for rung in registry.RUNGS.values())


# -- what the caller prefers


def test_who_prefers_isolation_has_the_strongest_tried_first() -> None:
    strongest = choose.strongest_first(registry.PREFERENCE, registry.RUNGS)
    assert strongest[:3] == ("wasm", "gvisor", "jail")
    assert strongest[-1] == "subprocess"
    assert sorted(strongest) == sorted(registry.PREFERENCE)
    assert choose.strongest_first(("mine", "jail"), registry.RUNGS) == ("jail", "mine")

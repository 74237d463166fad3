"""The import lint: what it accepts, what it names, and that no text makes it fail."""

from __future__ import annotations

import threading
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.lint import Finding, check, check_files, report
from belljar.policy import DANGEROUS_MODULES, Modules

SAFE = Modules(deny=DANGEROUS_MODULES)
JSON_ONLY = Modules(allow=("json",))


def names(code: str, modules: Modules = SAFE, own: tuple[str, ...] = ()) -> list[str]:
    return [finding.name for finding in check(code, modules, own)]


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "import os.path",
        "import os as harmless",
        "import json, os",
        "from os import path",
        "from os.path import join",
        "from os import *",
        "def f():\n    import os",
        "try:\n    import os\nexcept ImportError:\n    os = None",
        "import posix",
        "import nt",
        "import pty",
        "import _posixsubprocess",
        "from multiprocessing import Process",
        "import _socket",
        "import ctypes",
        "import runpy",
        "__import__('os')",
        "__import__('o' + 's')",
        "__import__(f'o{\"s\"}')",
        "__import__(''.join(['o', 's']))",
        "__import__(chr(111) + chr(115))",
        "__import__(name='os')",
        "import importlib; importlib.import_module('os')",
        "import importlib as i; i.import_module('os.path')",
        "from importlib import import_module as load; load('os')",
        "import importlib; m = importlib; m.import_module('os')",
        "exec('import os')",
        "eval('__import__(\"os\")')",
        "exec('exec(\"import os\")')",
        "import statistics; statistics.random._os.system('true')",
        "from random import _os",
    ],
)
def test_a_denied_module_is_named_however_it_is_imported(code: str) -> None:
    found = check(code, SAFE)
    assert found
    assert all(" is not allowed" in finding.message for finding in found)
    assert check(code, Modules()) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("n = input()\n__import__(n)", "__import__"),
        ("__import__(*['os'])", "__import__"),
        ("load = __import__\nload('os')", "__import__"),
        ("list(map(__import__, ['os']))", "__import__"),
        ("import importlib; importlib.import_module(input())", "import_module"),
        ("import importlib; importlib.import_module('.path', 'os')", "import_module"),
        ("exec(input())", "exec"),
        ("exec(b'import os')", "exec"),
        ("run = eval", "eval"),
        ("@exec\ndef f(): ...", "exec"),
        ("compile(open('x').read(), 'x', 'exec')", "compile"),
        ("__builtins__.open", "__builtins__"),
        ("getattr(__builtins__, 'open')", "__builtins__"),
        ("globals()['__builtins__']", "__builtins__"),
        ("vars()['__built' + 'ins__']", "__builtins__"),
        ("import builtins", "builtins"),
        ("import sys; sys.modules['os']", "sys.modules"),
        ("import sys as s; s.modules.get('os')", "sys.modules"),
        ("import sys; s = sys; s.modules", "sys.modules"),
        ("from sys import modules", "sys.modules"),
        ("().__class__.__base__.__subclasses__()", "__subclasses__"),
        ("int.__mro__", "__mro__"),
        ("(lambda: 0).__globals__", "__globals__"),
        ("print.__self__", "__self__"),
        ("getattr(f, '__globals__')", "__globals__"),
        ("from operator import attrgetter; attrgetter('__globals__')", "__globals__"),
        ("match f:\n    case object(__globals__=g): pass", "__globals__"),
        ("import json; json.__loader__", "__loader__"),
        ("import json; json.__spec__.loader", "__spec__"),
        ("from json import __loader__", "__loader__"),
        ("__loader__", "__loader__"),
        ("__package__ = 'os'\nfrom . import path", "__package__"),
        ("__name__ = 'os.path'", "__name__"),
        ("import importlib.util", "importlib.util"),
        ("import importlib; importlib.util.find_spec('os')", "importlib.util"),
    ],
)
def test_the_tricks_around_an_import_are_named(code: str, name: str) -> None:
    assert name in names(code)
    assert check(code, Modules()) == []


@pytest.mark.parametrize(
    "code",
    [
        "print('import os')",
        "import sys; print(sys.argv, sys.path)",
        "import importlib.metadata",
        "import importlib; importlib.import_module('json')",
        "__import__('json')",
        "eval('1 + 1')",
        "import re; re.compile(input())",
        "model.eval()",
        "model.modules()",
        "import numpy as np; np.random.random()",
        "if __name__ == '__main__': pass",
        "type(e).__name__",
        "class A:\n    def __init__(self): super().__init__()",
        "self.os = 1",
        "open('/etc/passwd')",
        "getattr(obj, name)",
        "os = 1",
    ],
)
def test_ordinary_code_has_no_findings_under_the_deny_list(code: str) -> None:
    assert check(code, SAFE) == []


def test_an_allowed_module_admits_what_is_below_it_and_nothing_beside_it() -> None:
    pandas = Modules(allow=("pandas",))
    assert names("import pandas.io.json\nfrom pandas import io\nimport pandas as pd", pandas) == []
    assert names("import pandas_extra", pandas) == ["pandas_extra"]


def test_an_allowed_submodule_does_not_admit_its_parent() -> None:
    etree = Modules(allow=("xml.etree",))
    assert names("import xml.etree.ElementTree\nfrom xml import etree", etree) == []
    assert names("import xml", etree) == ["xml"]
    assert names("from xml import dom", etree) == ["xml"]
    assert names("from xml import *", etree) == ["xml"]


def test_a_denied_submodule_is_denied_through_its_parent_too() -> None:
    rules = Modules(deny=("xml.dom",))
    assert names("from xml import dom", rules) == ["xml.dom"]
    assert names("import xml.dom.minidom", rules) == ["xml.dom.minidom"]
    assert names("import xml.etree", rules) == []


def test_the_allow_list_is_exact_but_for_future() -> None:
    assert names("from __future__ import annotations\nimport json", JSON_ONLY) == []
    assert names("import typing", JSON_ONLY) == ["typing"]
    assert names("import json", Modules(allow=())) == ["json"]


def test_deny_wins_over_allow_and_allow_wins_over_what_deny_implies() -> None:
    assert names("import os", Modules(allow=("os",), deny=("os",))) == ["os"]
    both = Modules(allow=("posix",), deny=("os",))
    assert names("import posix", both) == []
    assert names("import importlib.util", Modules(allow=("importlib",))) == []


def test_a_module_that_another_one_holds_is_accepted_if_it_is_allowed() -> None:
    code = "import random; random._os"
    assert names(code, Modules(allow=("random",))) == ["os"]
    assert names(code, Modules(allow=("random", "os"))) == []


def test_an_import_that_is_already_reported_is_not_reported_at_every_use() -> None:
    code = "import os\nos.sys.modules\nos.sys.exit()"
    assert len(check(code, JSON_ONLY)) == 1


def test_modules_of_the_program_itself_are_accepted() -> None:
    code = "import helper\nimport pkg.part\nfrom pkg import part"
    assert names(code, JSON_ONLY) == ["helper", "pkg.part", "pkg"]
    assert names(code, JSON_ONLY, ("helper.py", "pkg/part.py")) == []
    assert names(code, JSON_ONLY, ("helper", "pkg")) == []


def test_relative_imports_need_a_package_of_the_program() -> None:
    assert names("from . import part", JSON_ONLY) == ["."]
    assert names("from . import part", JSON_ONLY, ("pkg/__init__.py",)) == []


def test_a_file_named_like_a_standard_module_does_not_admit_that_module() -> None:
    assert names("import os", SAFE, ("os.py",)) == ["os"]


def test_the_files_that_come_with_a_program_are_read_as_well() -> None:
    files = {"helper.py": b"import json\nimport os\n", "data.csv": b"import os", "requests": b""}
    found = check_files("import helper", files, JSON_ONLY)
    assert found == [Finding(2, 8, "os", "module 'os' is not allowed", "helper.py")]
    assert check_files("import helper", files, Modules()) == []
    assert [item.name for item in check_files("import requests", files, JSON_ONLY)] == [
        "requests",
        "os",
    ]


def test_a_file_is_read_in_the_encoding_that_it_declares() -> None:
    hidden = b"# coding: utf-7\n+AGkAbQBwAG8AcgB0 os\n"
    assert [item.name for item in check_files("", {"a.py": hidden}, SAFE)] == ["os"]
    for unreadable in (b"# coding: nonsense\nimport os", b"# coding: rot13\n", b"\xff\xfe"):
        assert check_files("", {"a.py": unreadable}, SAFE) == []


def test_findings_say_where_in_characters_from_one() -> None:
    assert check("x = 'é'; import os", SAFE) == [
        Finding(1, 17, "os", "module 'os' is not allowed"),
    ]
    assert [item.line for item in check("\r\n\nimport os\rimport socket", SAFE)] == [3, 4]


def test_findings_come_in_the_order_of_the_source() -> None:
    code = "def f():\n    import socket\nimport os\nimport shutil, subprocess\n"
    assert names(code) == ["socket", "os", "shutil", "subprocess"]


def test_what_does_not_parse_is_left_to_the_guest() -> None:
    assert check("import os\nthis is broken python", SAFE) == []


def test_a_warning_made_an_error_does_not_hide_the_program() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names("import os; x = '\\d'; 1 is 1") == ["os"]


@pytest.mark.parametrize(
    "code",
    [
        "x\0",
        "x = '\ud800'",
        "-" * 100_000 + "1",
        "a" + ".a" * 100_000,
        "if a: pass\n" + "elif a: pass\n" * 20_000,
        "x = 1\n" * 400_000,
        "exec('" + r"import os\n" * 200_000 + "')",
    ],
    ids=["nul", "surrogate", "deep", "long-chain", "elif", "huge", "huge-inner"],
)
def test_what_cannot_be_read_is_one_finding_and_not_a_crash(code: str) -> None:
    found = check(code, SAFE)
    assert len(found) == 1
    assert "cannot be checked" in found[0].message
    assert check(code, Modules()) == []


def test_programs_nested_in_strings_end_somewhere() -> None:
    code = "import os"
    for _ in range(9):
        code = f"exec({code!r})"
    assert "nested too deeply" in check(code, SAFE)[0].message


@pytest.mark.parametrize(
    "code",
    [
        "import json\n" + ("json" + ".x" * 900 + "\n") * 140,
        "import json as a0\n" + "".join(f"a{n + 1} = a{n}.x\n" for n in range(12_000)),
        "".join(f"import m{n} as x\n" for n in range(8_000)) + "x.y\n" * 16_000,
        "'" + "g" * 100_000 + "'.join([" + "'a'," * 30_000 + "])",
        "'é'; " + "__import__(n); " * 16_000,
    ],
    ids=["chains", "growing-names", "many-meanings", "big-join", "long-line"],
)
def test_the_work_stays_in_proportion_to_the_program(code: str) -> None:
    found: list[Finding] = []
    done = threading.Event()

    def work() -> None:
        found.extend(check(code, SAFE))
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(60), "the lint did not come back"
    assert not any("cannot be checked" in item.message for item in found)


def test_the_report_says_what_how_and_what_it_is_not() -> None:
    text = report(check("import os\nimport socket\n__import__(input())", SAFE))
    assert "line 1, column 8: module 'os' is not allowed" in text
    assert 'modules=["os", "socket"]' in text
    assert 'modules="any"' in text
    assert "lint" in text
    assert "boundary" in text


def test_the_report_of_a_trick_offers_no_module_to_allow() -> None:
    text = report(check("().__class__.__base__.__subclasses__()", SAFE))
    assert "modules=[" not in text
    assert 'modules="any"' in text


def test_the_report_is_bounded_and_shows_no_control_characters() -> None:
    code = "".join(f"import m{n}\n" for n in range(500)) + "__import__('\\x1b[2J' + 'a' * 1)"
    found = check(code + "\n__import__('\\x1b[2J')", JSON_ONLY)
    text = report(found)
    assert len(text.splitlines()) < 40
    assert f"and {len(found) - 20} more" in text
    assert "\x1b" not in report(found[-2:])
    assert "x" * 200 not in report(check(f"import {'x' * 5000}", JSON_ONLY))


IMPORTISH = st.lists(
    st.sampled_from(
        ["import", "from", " ", "os", ".", "*", "as", "\n", "(", ")", "'", "__import__", "exec",
         "+", "f'{", "}", "\\", ";", "eval", "join", "[", "]", "lambda:", "\t", "match x:", "case"]
    ),
    max_size=40,
).map("".join)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), IMPORTISH))
def test_no_text_makes_it_raise(code: str) -> None:
    for rules in (SAFE, JSON_ONLY, Modules()):
        found = check(code, rules)
        assert all(isinstance(item, Finding) and item.line >= 1 for item in found)
        report(found)


@given(st.binary(max_size=200))
def test_no_file_makes_it_raise(data: bytes) -> None:
    check_files("", {"a.py": data}, SAFE)

"""Conformance: what a program leaves in a writable mount is never imported by the host."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from ...errors import ProgramFailed
from ...trusted_imports import DECODERS
from ...types import Mount, Result
from .harness import Backed, Jar, writable_directory

# Where a host imports from first is where programs may write, as when a script is started in its
# own project. `leave` is the first run: a file for every module that a host could want.
LEAVE = """
for name in names:
    with open("p/" + name + ".py", "w") as file:
        file.write(text)
len(names)
"""
NAMES = sorted({*sys.stdlib_module_names, "belljar", "numpy", "pandas", "pyarrow", "wasmtime"})
VALUES = """
import base64, datetime, decimal, fractions, uuid
moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.timezone.utc)
[
    None, True, 1 << 2000, 1.5, float("nan"), 2j, "text", b"bytes", bytearray(b"x"), (1,), {1},
    frozenset({2}), {1: 2}, range(3), moment, moment.date(), moment.time(), moment - moment,
    decimal.Decimal("1.50"), fractions.Fraction(1, 3), uuid.UUID(int=1),
]
"""
KINDS = (
    "NoneType bool int float float complex str bytes bytearray tuple set frozenset dict range"
    " datetime date time timedelta Decimal Fraction UUID"
)
ARRAY = "import numpy\nnumpy.arange(3)"
TABLE = "import pandas\npandas.DataFrame({'a': [1, 2], 'b': ['x', None]})"
CONTROL = "fractions"


def call_everything(result: Result, directory: Path) -> None:
    """Every method and property that a Result and its parts have."""
    for each in (result, *result.files.values(), *result.displays):
        repr(each)
        for name, attribute in vars(type(each)).items():
            if isinstance(attribute, property):
                getattr(each, name)
            elif isinstance(attribute, FunctionType) and not name.startswith("__"):
                where = (directory / "saved.txt",) if name == "save" else ()
                try:
                    getattr(each, name)(*where)
                except ProgramFailed:
                    assert not result.success  # what `check` is for


class Imports(Backed):
    @pytest.fixture
    def witness(self) -> Iterator[Path]:
        """Where a module that was left in the mount writes its name when it is executed."""
        with writable_directory(None) as path:
            yield path

    def test_nothing_that_a_program_left_in_a_writable_mount_is_imported(
        self,
        jar: Jar,
        open_dir: Path,
        witness: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        mounts = (Mount(str(open_dir), "p", "rw"),)
        jar.needs(mounts=mounts)
        text = f"open({str(witness) + os.sep!r} + __name__, 'w').close()\nraise ImportError"
        first = jar.run(LEAVE, context={"names": NAMES, "text": text}, mounts=mounts)
        assert first.value == len(NAMES), first
        monkeypatch.setattr(sys, "path", [str(open_dir), *sys.path])
        before = sys.path[:]
        importlib.invalidate_caches()
        for name in DECODERS:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for result in self._results(jar, mounts):
            call_everything(result, tmp_path)
            assert os.listdir(witness) == []
        assert sys.path == before
        # The control arm: an import of the application's own still finds what is there.
        monkeypatch.delitem(sys.modules, CONTROL, raising=False)
        with pytest.raises(ImportError):
            importlib.import_module(CONTROL)
        assert os.listdir(witness) == [CONTROL]

    def _results(self, jar: Jar, mounts: tuple[Mount, ...]) -> Iterator[Result]:
        plain = jar.run(VALUES, mounts=mounts)
        yield plain
        assert [type(item).__name__ for item in plain.value] == KINDS.split(), plain
        yield jar.run("open('made.txt', 'w').write('x')\n1 / 0", mounts=mounts, outputs=("*",))
        yield jar.run("import nothing_of_this_name", mounts=mounts)
        room: Any = None if jar.held("memory").state == "absent" else "4G"
        for code in (ARRAY, TABLE):
            yield jar.run(code, mounts=mounts, memory=room)

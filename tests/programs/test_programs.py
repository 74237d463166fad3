"""Programs as models write them end in a sandbox as they end outside, under the default limits.

Each file in `data` is one. Comments at its top say what it needs (modules, or commands as !name),
what is installed only on request, and where it cannot end the same way, with the reason.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import belljar

DATA = Path(__file__).parent / "data"
BACKENDS = ("jail", "landlock", "subprocess")
_SAYS = re.compile(r"^# (needs|on request|run outside|on (?:\w+)): (.*)$", re.MULTILINE)


class Program(NamedTuple):
    code: str
    needs: tuple[str, ...]
    outside: bool
    elsewhere: dict[str, str]


def read(name: str) -> Program:
    code = (DATA / f"{name}.py").read_text()
    said = dict(_SAYS.findall(code))
    needs = (said.get(kind, "") for kind in ("needs", "on request"))
    return Program(
        code=code,
        needs=tuple(word for each in needs for word in re.split(r",\s*", each) if word),
        outside=said.get("run outside") != "no",
        elsewhere={name: said[f"on {name}"] for name in BACKENDS if f"on {name}" in said},
    )


NAMES = sorted(path.stem for path in DATA.glob("*.py"))


def missing(needed: str) -> bool:
    if needed.startswith("!"):
        return shutil.which(needed[1:], path="/usr/local/bin:/usr/bin:/bin") is None
    return importlib.util.find_spec(needed) is None


@cache
def outside(name: str) -> tuple[int, str]:
    """(exit code, stdout) without a sandbox."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "main.py")
        path.write_text(read(name).code)
        bin_directory = Path(sys.executable).parent
        ended = subprocess.run(
            [sys.executable, str(path)],
            cwd=directory,
            env={
                "PATH": f"{bin_directory}:/usr/local/bin:/usr/bin:/bin",
                "HOME": directory + "/..",
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
    return ended.returncode, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_ends_as_it_does_outside(name: str, backend: str) -> None:
    program = read(name)
    for needed in program.needs:
        if missing(needed):
            pytest.skip(f"{needed} is not installed")
    result = belljar.run(program.code, backend=backend, timeout=120)
    assert result.backend == backend
    shown = f"{result.status} {result.error}\n{result.stdout}\n{result.stderr}"
    outcome, _, _ = program.elsewhere.get(backend, "").partition(",")
    if outcome == "error":
        assert not result.success, f"now it works there: change the file\n{shown}"
        return
    if not program.outside:
        assert result.success, shown
        return
    code, text = outside(name)
    assert result.exit_code == code, shown
    if outcome != "other":
        assert result.stdout == text, shown


def test_there_are_enough_and_each_exception_has_its_reason() -> None:
    assert len(NAMES) >= 40
    for name in NAMES:
        for text in read(name).elsewhere.values():
            assert re.match(r"(error|other), because ", text), name

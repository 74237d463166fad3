"""What `probe` calls available runs a program, also on hosts unlike the one it was built on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

from belljar.backends import registry
from belljar.backends.jail import JailBackend
from belljar.linux import probe

HOST = Path(__file__).with_name("odd_host.py")
BACKENDS = ("jail", "landlock", "subprocess", "bubblewrap", "firejail", "nsjail", "wasm")
_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to arrange")


def answers(peculiarity: str, backends: tuple[str, ...] = BACKENDS) -> dict[str, Any]:
    here = [name for name in backends if registry.load(name).probe().available]
    done = subprocess.run(
        [sys.executable, "-B", str(HOST), peculiarity, *here],
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert len(told) == len(here) + 1
    return told


@pytest.mark.parametrize(
    "peculiarity",
    [
        "umask",
        "umask_027",
        "library_signals",
        "few_files",
        "little_address_space",
        pytest.param("masked_proc", marks=_ROOT),
        pytest.param("no_capabilities", marks=_ROOT),
    ],
)
def test_available_backends_run_a_program(peculiarity: str) -> None:
    told = answers(peculiarity)
    assert told.pop("auto")[1] == 42
    for name, (available, *outcome) in told.items():
        assert outcome == [42] if available else outcome[0] == "backend_unavailable", (name, told)
    assert any(available for available, *_ in told.values())


@pytest.mark.skipif(not registry.load("jail").probe().available, reason="no jail here")
def test_auto_goes_on_to_the_next_backend_where_the_jail_cannot_be_set_up() -> None:
    told = answers("closed_after_probing", ("jail",))
    assert told["jail"][:2] == [True, "backend_failed"]  # the control arm: named
    backend, value, warnings = told["auto"]
    assert backend in ("landlock", "subprocess") and value == 42
    assert any("'jail' could not be used: " in warning for warning in warnings), warnings


@_ROOT
def test_without_proc_the_refusal_names_it() -> None:
    told = answers("no_proc", ("jail", "landlock", "subprocess"))
    assert all("there is no /proc here" in str(said) for *_, said in told.values())


def test_a_32_bit_interpreter_uses_no_table_of_a_64_bit_kernel() -> None:
    code = """
import ctypes, struct
size = struct.calcsize
struct.calcsize = lambda kind: 4 if kind == "P" else size(kind)
from belljar.linux import seccomp, syscalls
print(seccomp.supported(), "pivot_root" in syscalls.NUMBERS)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_the_fix_is_for_what_is_missing() -> None:
    facts = probe.facts()
    without = replace(
        facts, userns=True, proc_mount=True, seccomp=False, seccomp_problem="no table"
    )
    fix = JailBackend(facts=without).probe().fix or ""
    assert "sysctl" not in fix and "CONFIG_SECCOMP_FILTER" in fix
    covered = replace(facts, userns=True, proc_mount=False, proc_mount_problem="EPERM")
    assert "covers parts of /proc" in (JailBackend(facts=covered).probe().fix or "")
    closed = replace(facts, userns=False, userns_problem="EPERM")
    assert "sysctl" in (JailBackend(facts=closed).probe().fix or "")


_LATIN = """
import json, sys
from belljar.backends import registry
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request
assert sys.getfilesystemencoding() == "iso8859-1", sys.getfilesystemencoding()
code = "open('ä.txt', 'w').write('x')\\nopen('ö.txt').read()"
request = Request(code=code, files={"ö.txt": "in".encode()}, outputs=("ä.txt",))
told = {}
for name in sys.argv[1:]:
    with Engine(Settings(), backends={name: registry.load(name)}) as engine:
        result = engine.run(request, wishes={"modules": "any"})
        files = {path: file.data.decode() for path, file in result.files.items()}
        told[name] = [result.value, files]
print(json.dumps(told))
"""


def test_names_of_files_are_the_guests_under_a_locale_that_is_not_utf_8(tmp_path: Path) -> None:
    made = tmp_path / "en_US.ISO-8859-1"
    words = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(made)]
    if not shutil.which("localedef") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no locale can be made here")
    env = {
        **os.environ,
        "LOCPATH": str(tmp_path),
        "LC_ALL": made.name,
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "utf-8",
    }
    here = [name for name in BACKENDS if registry.load(name).probe().available]
    program = tmp_path / "program.py"
    program.write_text(_LATIN, encoding="utf-8")
    child = [sys.executable, str(program), *here]
    done = subprocess.run(child, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: ["in", {"ä.txt": "x"}] for name in here}

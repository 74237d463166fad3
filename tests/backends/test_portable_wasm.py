"""The wasm backend of macOS and Windows, run for real on Linux: an engine without a jail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.base import Backend
from belljar.backends.portable import PortableBackend
from belljar.backends.portable_plan import this_host
from belljar.backends.portable_wasm import PortableWasmBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import PolicyUnenforceable
from belljar.testing.conformance import Jar
from belljar.testing.conformance.files import Files
from belljar.testing.conformance.kills import Kills
from belljar.testing.conformance.limits import Limits
from belljar.testing.conformance.policies import Policies
from belljar.types import Mount, Request, Result, Status

_FOUND = PortableWasmBackend().probe()
pytestmark = pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)


class TestConformance(Limits, Kills, Policies, Files):
    """The parts that another worker and another way to it could break."""

    def make_backend(self) -> Backend:
        return PortableWasmBackend()

    @pytest.mark.parametrize("wanted", [{"min_isolation": "vm"}])
    def test_a_policy_past_the_backend_is_refused_by_name_and_nothing_starts(
        self, wanted: dict[str, Any]
    ) -> None:
        # `strict` is within the rung and refused for what a plain process cannot hold: see below.
        super().test_a_policy_past_the_backend_is_refused_by_name_and_nothing_starts(wanted)


@pytest.fixture
def jar() -> Iterator[Jar]:
    jar = Jar(PortableWasmBackend(platform="darwin"), "standard")
    yield jar
    jar.engine.close()


def test_the_report_says_that_the_engine_alone_isolates(jar: Jar) -> None:
    report = jar.plan("1").enforcement
    for field in ("network", "filesystem", "mounts"):
        assert report[field].state == "enforced"
        assert "the engine alone" in report[field].by
        assert "no jail around the worker" in report[field].by
    notes = " ".join(PortableWasmBackend(platform="darwin").probe().notes)
    assert "not been run on macOS or Windows yet" in notes


def test_strict_is_refused_for_what_nothing_holds_there(jar: Jar) -> None:
    with pytest.raises(PolicyUnenforceable) as refusal:
        jar.run("1", level="strict")
    assert set(refusal.value.fields) == {"cpus", "disk"}
    assert jar.run("1").success  # the control arm


def test_streams_values_input_and_files_cross_the_pipes(jar: Jar) -> None:
    result = jar.run(
        "import sys\nprint('out', end='')\nprint('err', end='', file=sys.stderr)\n"
        "open('new.txt', 'w').write('x' * 3)\n[sys.stdin.read(), sys.platform]",
        stdin=b"given",
        outputs=("*.txt",),
    )
    assert (result.stdout, result.stderr, result.value) == ("out", "err", ["given", "wasi"])
    assert result.files["new.txt"].data == b"xxx"


def test_binary_data_crosses_between_the_guests_output(jar: Jar) -> None:
    data = bytes(range(256)) * 8000
    code = "print('before', flush=True)\ndata[::-1]"
    result = jar.run(code, context={"data": data}, outputs=("*",))
    assert (result.value, result.stdout) == (data[::-1], "before\n")
    assert not result.warnings
    assert not result.files


def test_javascript_and_fuel_work_too(jar: Jar) -> None:
    assert jar.run("console.log('hey')", language="javascript").stdout == "hey\n"
    assert (jar.run("1 + 1", fuel=10**9).usage.fuel or 0) > 0
    assert jar.run("while True: pass", fuel=10**8).status is Status.FUEL_EXHAUSTED


def test_what_one_run_leaves_is_not_in_the_next(jar: Jar) -> None:
    jar.run("open('/tmp/left', 'w').write('x'); open('left', 'w').write('x')")
    assert jar.run("import os; [os.listdir('.'), os.listdir('/tmp')]").value == [["main.py"], []]


def test_a_mount_is_shown_read_only_and_a_writable_one_is_refused(jar: Jar, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("seen")
    program = """
try:
    open('data/new', 'w')
except OSError as error:
    refused = type(error).__name__
[open('data/data.txt').read(), refused]
"""
    shown = jar.run(program, mounts=(Mount(str(tmp_path), "data", "ro"),))
    assert (shown.value or [""])[0] == "seen"
    assert os.listdir(tmp_path) == ["data.txt"]
    with pytest.raises(PolicyUnenforceable) as refusal:
        jar.run(program, mounts=(Mount(str(tmp_path), "data", "rw"),))
    assert refusal.value.fields == ("mounts",)


def test_a_full_disk_is_named(jar: Jar) -> None:
    program = "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"
    result = jar.run(program, disk="20M")
    assert (result.status, result.limit_hit) == (Status.LIMIT, "disk")


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    """Else a program that computes would outlive a Belljar that was killed."""
    host = """
import os, sys
from belljar.backends.portable_wasm import PortableWasmBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request
engine = Engine(Settings(), backends={"wasm": PortableWasmBackend()})
emit = lambda event: print("out", flush=True) if type(event).__name__ == "Output" else None
loop = Request(code="print(1, flush=True)\\nwhile True: pass")
engine.run(loop, wishes={"timeout": 600}, emit=emit)
"""
    with subprocess.Popen([sys.executable, "-c", host], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"out\n"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        workers = [int(pid) for pid in children]
        assert len(workers) == 1
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return b"plain_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# -- what `auto` takes there


def chosen(code: str, **wishes: Any) -> Result:
    """As on a Mac without Docker: the backends in the order that its registry has."""
    host = replace(this_host(), root=False, platform="darwin", sandbox_exec=False)
    backends: dict[str, Backend] = {
        "wasm": PortableWasmBackend(platform="darwin"),
        "subprocess": PortableBackend(host=host),
    }
    with Engine(Settings(), backends=backends) as engine:
        return engine.run(Request(code=code), wishes={"modules": "any", **wishes})


def test_auto_takes_wasm_for_pure_python_and_warns_where_files_are_in_reach() -> None:
    pure = chosen("import json; json.loads('[1]')")
    assert (pure.backend, pure.value) == ("wasm", [1])
    assert not [warning for warning in pure.warnings if "files are not isolated" in warning]
    more = chosen("import numpy\nint(numpy.arange(3).sum())", network="any")
    assert (more.backend, more.isolation) == ("subprocess", "process")
    assert [warning for warning in more.warnings if "files are not isolated" in warning]

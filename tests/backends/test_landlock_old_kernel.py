"""`landlock` on a kernel whose Landlock cannot hold children, and where /tmp is in memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

from belljar.backends import landlock_plan
from belljar.backends.landlock import LandlockBackend
from belljar.backends.subprocess import SubprocessBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import PolicyUnenforceable
from belljar.linux import probe
from belljar.types import Request, Result

_FOUND = LandlockBackend().probe()
pytestmark = pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)
OLD = replace(probe.facts(), landlock_abi=min(2, probe.facts().landlock_abi))
STARTS = "import subprocess\nsubprocess.run(['/bin/true'], check=True)\n42"


def run(code: str, facts: Any = OLD, backend: str | None = None, **wishes: Any) -> Result:
    backends = {"landlock": LandlockBackend(facts=facts), "subprocess": SubprocessBackend()}
    with Engine(Settings(), backends=backends) as engine:
        return engine.run(Request(code=code), backend=backend, wishes=wishes)


def test_auto_prefers_a_backend_that_can_start_processes() -> None:
    moved = run(STARTS)
    assert (moved.backend, moved.value) == ("subprocess", 42)
    why = "cannot start other processes on this kernel (Landlock ABI 2)"
    assert why in (moved.backend_reason or "")
    assert any("isolates less than 'landlock'" in warning for warning in moved.warnings)
    stays = run("6 * 7")
    assert (stays.backend, stays.value) == ("landlock", 42)


@pytest.mark.skipif(probe.facts().landlock_abi < 6, reason="needs Landlock ABI 6")
def test_a_newer_landlock_starts_them() -> None:
    assert run(STARTS, facts=probe.facts()).backend == "landlock"


def test_the_floor_is_kept_and_the_result_says_why_a_fork_failed() -> None:
    floored = run(STARTS, min_isolation="landlock")
    assert floored.backend == "landlock" and not floored.success
    assert any("Linux 6.12" in warning for warning in floored.warnings), floored.warnings
    named = run(STARTS, backend="landlock")
    assert any('backend="subprocess"' in warning for warning in named.warnings), named.warnings
    other = run("raise ValueError('no')", backend="landlock")
    assert not any("Linux 6.12" in warning for warning in other.warnings)


@pytest.fixture
def tmp_in_memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    real = landlock_plan.file_system
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(landlock_plan.tempfile, "gettempdir", lambda: "/dev/shm")
    assert real("/dev/shm") == "tmpfs"
    return monkeypatch


def test_where_tmp_is_in_memory_runs_are_in_var_tmp(tmp_in_memory: pytest.MonkeyPatch) -> None:
    if landlock_plan.file_system("/var/tmp") == "tmpfs":
        pytest.skip("/var/tmp is in memory, too")
    result = run("import os; os.getcwd()", min_isolation="landlock")
    assert str(result.value).startswith("/var/tmp/belljar-")


def test_where_there_is_no_disk_the_refusal_names_the_way_out(
    tmp_in_memory: pytest.MonkeyPatch,
) -> None:
    tmp_in_memory.setattr(landlock_plan, "_ON_DISK", "/nonexistent")
    with pytest.raises(PolicyUnenforceable) as refusal:
        run("1", min_isolation="landlock")
    assert "/dev/shm is in memory: set TMPDIR to a directory on a disk" in str(refusal.value)
    assert "set TMPDIR to a directory on a disk" in str(refusal.value)

"""The landlock backend: fresh from a warm fork server every time, held without namespaces."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

import belljar
from belljar.backends import landlock_plan
from belljar.backends.landlock import LandlockBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import PolicyUnenforceable
from belljar.linux import probe
from belljar.policy import Policy
from belljar.resolve import resolve
from belljar.types import Mount, Request, Result, Status

_FOUND = LandlockBackend().probe()
pytestmark = pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)
POOR = replace(probe.facts(), userns=False, userns_problem="test", cgroup=None, landlock_abi=7)


class Jar:
    def __init__(self, **options: Any) -> None:
        self.backend = LandlockBackend(**{"facts": POOR, **options})
        self.engine = Engine(Settings(), backends={"landlock": self.backend})

    def run(self, code: str | None, *, level: str = "standard", **wanted: Any) -> Result:
        keys = ("command", "mounts", "files", "python", "language", "outputs")
        asked = {key: wanted.pop(key) for key in keys if key in wanted}
        wishes = {"modules": "any", **wanted}
        return self.engine.run(Request(code=code, **asked), level=level, wishes=wishes)


@pytest.fixture(scope="module")
def warm() -> Iterator[Jar]:
    jar = Jar()
    yield jar
    jar.engine.close()


def policy(**wishes: Any) -> Policy:
    return resolve("standard", wishes).policy


def test_a_process_is_used_once(warm: Jar) -> None:
    code = """
import builtins, os, sys
seen = (hasattr(builtins, "mark"), "MARK" in os.environ, "antigravity" in sys.modules)
builtins.mark = sys.modules["antigravity"] = 1
os.environ["MARK"] = "1"
seen
"""
    for _ in range(3):
        assert warm.run(code).value == (False,) * 3


def test_random_numbers_differ_between_runs(warm: Jar) -> None:
    assert len({warm.run("import random; random.random()").value for _ in range(4)}) == 4


def test_only_the_standard_descriptors_are_open(warm: Jar) -> None:
    code = """
import os
found = []
for fd in range(256):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
found
"""
    assert warm.run(code).value == [0, 1, 2, 3]  # 3 is the frame socket
    listing = warm.run(None, command=("sh", "-c", "for n in 3 4 5 6; do : >&$n; done 2>&1"))
    assert listing.stdout.count("Bad file descriptor") == 1  # a shell ends at the first


def test_files_left_open_are_flushed_as_python_does(warm: Jar) -> None:
    code = """
import atexit
kept = open("kept", "w"); kept.write("a")
class Cycle: pass
cycle = Cycle(); cycle.me = cycle; cycle.file = open("cycle", "w"); cycle.file.write("b")
late = open("late", "w"); atexit.register(late.write, "c")
"""
    result = warm.run(code, outputs=("*",))
    found = {name: file.data for name, file in result.files.items()}
    assert found == {"kept": b"a", "cycle": b"b", "late": b"c"}


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/proc/1/status", "/proc/self/maps", "/dev/shm", "/root"]
)
def test_what_no_program_needs_cannot_be_opened(warm: Jar, path: str) -> None:
    code = f"import os; os.close(os.open({path!r}, os.O_RDONLY))"
    result = warm.run(code)
    assert result.error is not None
    assert result.error.type == "PermissionError"


def test_other_interpreters_and_commands_are_executed(warm: Jar) -> None:
    result = warm.run("import sys; sys.version_info[0]", python=sys.executable)
    assert result.value == 3
    shell = warm.run(None, command=("sh", "-c", "cat main || echo none; exit 3"))
    assert (shell.exit_code, shell.stdout) == (3, "none\n")


def test_one_process_may_become_another_but_not_two(warm: Jar) -> None:
    demanding = {"min_isolation": "landlock"}
    assert warm.run(None, command=("echo", "hello"), **demanding).stdout == "hello\n"
    result = warm.run("import subprocess; subprocess.run(['true'])", **demanding)
    assert (result.status, result.limit_hit) == (Status.LIMIT, "pids")
    assert warm.run("import subprocess; subprocess.run(['true']).returncode").value == 0
    threads = "import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()"
    assert warm.run(threads, **demanding).stdout == "1\n"


def test_a_floor_gets_every_field_enforced_and_a_jail_is_refused(warm: Jar) -> None:
    report = warm.run("1", min_isolation="landlock").enforcement
    if landlock_plan.writes_are_counted(os.environ.get("TMPDIR", "/tmp")):
        assert {held.state for held in report.values()} == {"enforced"}
    with pytest.raises(PolicyUnenforceable) as refusal:
        warm.run("1", level="strict")
    assert "min_isolation" in refusal.value.fields


def test_a_memory_file_system_is_no_disk_whose_writes_are_counted() -> None:
    assert not landlock_plan.writes_are_counted("/dev/shm")
    assert not landlock_plan.writes_are_counted("/dev/shm/below")


@pytest.mark.parametrize(
    ("facts", "wishes", "expected"),
    [
        ({}, {}, "watched"),
        ({}, {"min_isolation": "landlock"}, "one"),
        ({}, {"processes": 1}, "one"),
        ({"landlock_abi": 5}, {}, "one"),
        ({"cgroup": object()}, {}, "group"),
        ({"cgroup": object()}, {"min_isolation": "landlock"}, "one"),
    ],
)
def test_how_many_processes_follows_from_who_can_hold_them(
    facts: dict[str, Any], wishes: dict[str, Any], expected: str
) -> None:
    host = replace(POOR, **facts)
    active = landlock_plan.active_layers(host, frozenset(), None)
    assert landlock_plan.children(policy(**wishes), host, active) == expected


def test_a_hidden_path_is_taken_out_or_refused(warm: Jar, tmp_path: Path) -> None:
    code = "open('/etc/passwd').read()"
    assert warm.run(code).success
    assert not warm.run(code, filesystem={"hidden": ["/etc"]}).success
    with pytest.raises(PolicyUnenforceable) as refusal:
        warm.run("1", filesystem={"hidden": ["/usr/share"]})
    assert refusal.value.fields == ("filesystem",)


def test_a_writable_directory_is_best_effort_because_of_what_tools_execute(
    warm: Jar, tmp_path: Path
) -> None:
    mounts = (Mount(str(tmp_path), "p", "rw"),)
    result = warm.run("open('p/new', 'w').write('x')", mounts=mounts)
    assert (tmp_path / "new").read_text() == "x"
    assert result.enforcement["mounts"].state == "best_effort"
    with pytest.raises(PolicyUnenforceable):
        warm.run("1", mounts=mounts, min_isolation="landlock")


@pytest.mark.parametrize("layer", landlock_plan.LAYERS)
def test_a_layer_that_is_off_is_named_in_the_result_and_the_rest_still_runs(layer: str) -> None:
    jar = Jar(disable=frozenset({layer}))
    try:
        result = jar.run("6 * 7")
        assert result.value == 42
        assert any(layer in warning for warning in result.warnings)
    finally:
        jar.engine.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="others have no capabilities to lose")
def test_root_inside_has_no_capability(warm: Jar) -> None:
    code = "import os; os.setgid(1)"
    assert not warm.run(code).success
    jar = Jar(disable=frozenset({"capabilities"}))
    try:
        assert jar.run(code).success  # the control arm
    finally:
        jar.engine.close()


def test_many_callers_get_their_own_answers(warm: Jar) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: warm.run(f"print({n})"), range(24)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(24)]


def test_a_zygote_that_was_killed_is_replaced() -> None:
    jar = Jar()
    try:
        assert jar.run("1").success
        fleet = jar.backend._fleet
        assert fleet is not None
        (zygote,) = fleet._zygotes.values()
        zygote.process.kill()
        zygote.process.wait()
        assert jar.run("2").value == 2
    finally:
        jar.engine.close()


def test_a_tables_program_starts_with_its_modules_loaded(warm: Jar) -> None:
    pytest.importorskip("pandas")
    code = "import sys; there = 'pandas' in sys.modules\nimport pandas\nthere"
    assert warm.run(code).value is True
    assert warm.run("import sys; 'pandas' in sys.modules").value is False


def test_closing_leaves_no_process() -> None:
    jar = Jar()
    jar.run("1")
    fleet = jar.backend._fleet
    assert fleet is not None
    pids = [zygote.process.pid for zygote in fleet._zygotes.values()]
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    jar.engine.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_an_interrupt_of_its_own_ends_it_by_that_signal(warm: Jar) -> None:
    result = warm.run("raise KeyboardInterrupt")
    assert (result.status, result.signal) == (Status.ERROR, signal.SIGINT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_guests_of_another_user_own_their_files() -> None:
    jar = Jar(user="63991:63991")
    found = jar.backend.probe()
    try:
        if not found.available:
            assert "cannot reach" in found.reason
            pytest.skip(found.reason)
        code = "import os; open('x', 'w').close(); (os.getuid(), os.stat('x').st_uid)"
        assert jar.run(code).value == (63991, 63991)
    finally:
        jar.engine.close()


def test_a_repository_that_it_cannot_protect_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    for name, mode, warned in (
        ("repository", "rw", True), ("repository", "ro", False), ("plain", "rw", False),
    ):  # fmt: skip
        mount = f"{tmp_path / name}:p:{mode}"
        result = belljar.run("1", backend="landlock", mounts=[mount])
        assert any("hooks and configuration" in text for text in result.warnings) is warned

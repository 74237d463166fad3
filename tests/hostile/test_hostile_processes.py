"""`belljar selftest` as a process: beside another one, and ended by signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import belljar
from belljar.backends import registry
from belljar.policy import Isolation
from belljar.testing import FakeBackend, hostile
from belljar.testing.hostile import Verdict, snapshot
from belljar.testing.hostile.private import private_directory, remove
from belljar.testing.hostile.world import subreaper
from belljar.types import Request, Result, Status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

Start = Callable[..., subprocess.Popen[bytes]]


def process_backends() -> list[str]:
    return [name for name in ("subprocess", "jail") if registry.load(name).probe().available]


@pytest.fixture
def shared() -> Iterator[Path]:
    """The temporary directory of all selftests that a test starts; its name is short."""
    path = Path(tempfile.mkdtemp(prefix="bj-"))
    path.chmod(0o711)  # control arms run as somebody else
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(tmp_path: Path, shared: Path) -> Iterator[Start]:
    """Starts selftests, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*words: str) -> subprocess.Popen[bytes]:
        source = str(Path(belljar.__file__).parent.parent)
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-m", "belljar", "selftest", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**kept, "PYTHONPATH": source, "TMPDIR": str(shared)},
            cwd=tmp_path,
        )
        started.append(process)
        return process

    with subreaper():  # whoever they lose becomes ours, and is seen
        yield begin
        for process in started:
            process.kill()
            process.communicate()
        snapshot.end_survivors(snapshot.Snapshot(kinds={"process": frozenset()}))


@pytest.mark.slow
def test_two_at_the_same_time_do_not_see_each_other(start: Start) -> None:
    both = [start("--backend", "subprocess", "--group", "output") for _ in range(2)]
    for process in both:
        told, _ = process.communicate(timeout=100)
        assert process.returncode == 0, told.decode()


def below(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for child, parent, _ in snapshot._processes():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def groups_of(pid: int) -> list[str]:
    named = re.compile(rf"belljar-{pid}-")
    return [
        name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if named.match(name)
    ]


# A tree that is stopped and has its own sessions; and one with a neighbour beside it. With so many
# processes each of them is in the middle of its work.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "case", "enough"),
    [
        (signal.SIGTERM, 143, "pr-008-double-stop-tree", 8),
        (signal.SIGINT, 130, "cp-004-procs-cpu-share", 11),
    ],
)
@pytest.mark.parametrize("backend", process_backends())
def test_a_signal_ends_it_and_nothing_is_left(
    start: Start,
    shared: Path,
    backend: str,
    number: signal.Signals,
    code: int,
    case: str,
    enough: int,
) -> None:
    before = set(snapshot.descendants())
    process = start("--backend", backend, "--case", case)
    deadline = time.monotonic() + 60
    while len(below(process.pid)) < enough:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    assert os.listdir(shared)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err.decode()
    assert f"ended by {number.name}" in err.decode()
    assert out == b""
    assert set(snapshot.descendants()) - before == set()
    assert os.listdir(shared) == []
    assert groups_of(process.pid) == []


def _is_thrown_away(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid in range(64_001, 65_000)
    except FileNotFoundError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="control arms need root")
def test_a_signal_ends_a_control_arm_too(start: Start, shared: Path) -> None:
    process = start("--backend", "subprocess", "--case", "cp-002-sleep", "--controls")
    deadline = time.monotonic() + 60
    while not any(_is_thrown_away(pid) for pid in below(process.pid)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not snapshot.descendants()
    assert os.listdir(shared) == []


def test_a_group_of_another_process_is_not_counted() -> None:
    """Its number may be that of nobody here: of another pid namespace that shares the tree."""
    me = os.getpid()
    assert not snapshot._is_ours("belljar-999999999-0a1b")
    assert not snapshot._is_ours(f"belljar-{me + 1}-0a1b")
    assert not snapshot._is_ours("belljar-run")
    assert snapshot._is_ours(f"belljar-{me}-0a1b")


def test_a_socket_elsewhere_is_not_counted_and_one_in_our_directory_is(shared: Path) -> None:
    with private_directory() as own, socket.socket(socket.AF_UNIX) as theirs:
        before = snapshot.Snapshot.take()
        theirs.bind(f"{shared}/belljar-selftest")
        assert snapshot.leftovers(before, 0) == []
        with socket.socket(socket.AF_UNIX) as ours:
            ours.bind(str(own / "left"))
            assert any("unix socket" in left for left in snapshot.leftovers(before, 0))
        (own / "left").unlink()


def test_a_temporary_directory_with_a_long_name_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_directory() as own, private_directory() as inner:
        assert len(str(own)) < 80
        assert inner == own
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(own)
    assert not own.exists()
    assert tempfile.gettempdir() == str(deep)


@pytest.mark.parametrize(
    ("mounts", "verdict"),
    [
        (["/var/lib/engine/x"] * 3, Verdict.HELD),  # somebody works deep in a directory of theirs
        (["/mnt"], Verdict.HELD),  # somebody's, once: it is not there again
        (["/mnt"] * 3, Verdict.BREACHED),
        (["/tmp/belljar-1-x/work/m"], Verdict.BREACHED),
    ],
)
def test_a_mount_of_another_program_is_not_ours_unless_it_comes_again(
    monkeypatch: pytest.MonkeyPatch, mounts: list[str], verdict: Verdict
) -> None:
    suite = hostile.load()
    there: list[str] = ["1 0 0:1 / / rw - ext4 disk rw"]
    read = snapshot._lines

    def lines(path: str) -> list[str]:
        return list(there) if path.endswith("mountinfo") else read(path)

    monkeypatch.setattr(snapshot, "_lines", lines)
    waiting = list(mounts)

    def respond(request: Request) -> Result:
        if request.code == "print(2+2)":
            return Result(status=Status.SUCCESS, exit_code=0, stdout="4\n")
        for where in waiting[:1]:
            there.append(f"{len(waiting) + 70} 1 0:9 / {where} rw - tmpfs none rw")
        waiting[:1] = []
        return Result(status=Status.SUCCESS, exit_code=0, stdout="R:HELD\n")

    case = suite["se-005-metadata-files"]
    backend = FakeBackend(respond, isolation=Isolation.PROCESS)
    with hostile.World(suite) as world, hostile.EngineSubject(backend) as subject:
        (outcome,) = hostile.Runner(suite, subject, world, patience=0.0).run([case])
    assert outcome.verdict is verdict


def test_what_another_thread_removes_meanwhile_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that did not come back in time removes its own directory when it does."""
    (tmp_path / "world" / "run").mkdir(parents=True)
    rmdir = os.rmdir

    def too_late(path: str, *, dir_fd: int | None = None) -> None:
        if os.path.basename(path) == "run":
            rmdir(path, dir_fd=dir_fd)
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", too_late)
    remove(tmp_path / "world")
    assert not (tmp_path / "world").exists()

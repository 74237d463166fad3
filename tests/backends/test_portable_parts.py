"""The parts of the portable backend one by one: the tree that ps shows, files by path, Windows."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from belljar.backends import portable_files, portable_posix, portable_windows
from belljar.backends.portable_posix import PosixTree
from belljar.backends.portable_tree import Launch
from belljar.errors import BackendFailed, RequestError
from belljar.files import collect
from belljar.files.copying import Wanted
from belljar.guest import protocol
from belljar.report import Report, run_frame
from belljar.testing.conformance.harness import marked_processes
from belljar.types import Request

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# -- the tree --------------------------------------------------------------------------------------

# A child in a session of its own starts a grandchild that keeps nothing of the run: no parent, no
# group and no environment. The child ends when it is told to, or at once.
LEAVES = """
import os, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.set_inheritable(writer, True)
        tail = "import os, sys, time; os.write(int(sys.argv[2]), b'x'); time.sleep(60)"
        os.execve(sys.executable, [sys.executable, "-S", "-c", tail, sys.argv[1], str(writer)], {})
    os.read(0, 1)
    os._exit(0)
os.read(reader, 1)
os.write(1, b"up")
os.wait()
os.write(1, b"left")
time.sleep(60)
"""


class Started:
    """A tree with our ends of its input and output."""

    def __init__(self, token: str, cleanup: ExitStack) -> None:
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        for fd in (self._stdin, self._stdout):
            cleanup.callback(os.close, fd)
        self.tree = PosixTree(
            Launch(
                argv=(sys.executable, "-S", "-c", LEAVES, token),
                env={},
                cwd="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                frames=(),
                token=os.urandom(16).hex(),
                ps="/bin/ps" if os.path.exists("/bin/ps") else "/usr/bin/ps",
            )
        )
        os.close(stdin)
        os.close(stdout)

    def hear(self, word: bytes) -> None:
        assert os.read(self._stdout, len(word)) == word

    def let_go(self) -> None:
        os.write(self._stdin, b"x")


@pytest.fixture
def started() -> Iterator[tuple[Started, str]]:
    token = f"belljar-canary-{os.urandom(8).hex()}"
    with ExitStack() as cleanup:
        run = Started(token, cleanup)
        yield run, token
        run.tree.kill()
        run.tree.reap()
        for pid in marked_processes(token):
            os.kill(pid, 9)


@on_linux
def test_who_was_seen_once_is_killed_wherever_it_went(started: tuple[Started, str]) -> None:
    run, token = started
    run.hear(b"up")
    assert run.tree.look().processes == 3
    run.let_go()
    run.hear(b"left")
    assert len(marked_processes(token)) == 2  # the first process and the one that left
    assert run.tree.kill() == 0
    assert marked_processes(token) == []


@on_linux
def test_who_left_before_anybody_looked_is_not_found(started: tuple[Started, str]) -> None:
    """The control arm of the test above, and the gap that the docstring admits."""
    run, token = started
    run.hear(b"up")
    run.let_go()
    run.hear(b"left")
    assert run.tree.kill() == 0
    assert len(marked_processes(token)) == 1


@on_linux
def test_the_first_process_keeps_its_id_until_it_is_reaped(started: tuple[Started, str]) -> None:
    run, _ = started
    run.hear(b"up")
    run.tree.kill()
    run.tree.wait_for_end()
    assert " Z " in Path(f"/proc/{run.tree.pid}/stat").read_text()


@on_linux
def test_limits_that_the_shell_refuses_are_our_failure_not_the_guest_s() -> None:
    portable_posix._try_limits("ulimit -n 64")
    with pytest.raises(BackendFailed, match="cannot set the limits"):
        portable_posix._try_limits("ulimit -n 64 && ulimit -n 65536000000")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("00:00:07", 7.0),
        ("01:02:03", 3723.0),
        ("2-00:00:01", 172801.0),
        ("0:00.25", 0.25),
        ("123:04.50", 7384.5),
    ],
)
def test_times_are_read_as_linux_and_macos_print_them(printed: str, expected: float) -> None:
    assert portable_posix.seconds(printed) == expected


# -- files by path ---------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "run" / "work"
    (work / "deep" / "er").mkdir(parents=True)
    (work / "given").write_text("given")
    return work


def test_changed_files_are_found_by_path_as_by_descriptor(work: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("canary")
    before = portable_files.snapshot(str(work))
    assert before == collect.snapshot(str(work))
    (work / "deep" / "er" / "new.csv").write_text("1,2")
    (work / "second.csv").hardlink_to(outside / "canary")
    (work / "link.csv").symlink_to(outside / "canary")
    (work / "door").symlink_to(outside, target_is_directory=True)
    found = portable_files.changed_files(str(work), before, Wanted(globs=("*.csv",)))
    assert set(found.files) == {"deep/er/new.csv", "second.csv"}
    assert found.files["deep/er/new.csv"].data == b"1,2"
    assert found.files["second.csv"].data is None
    assert found.files == collect.changed_files(str(work), before, Wanted(globs=("*.csv",))).files


def test_collecting_by_path_is_bounded(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_FILES", 2)
    monkeypatch.setattr(collect, "MAX_BYTES", 3)
    before = portable_files.snapshot(str(work))
    files = [work / f"f{number}" for number in range(3)]
    for file in files:
        file.write_text("12345")
    found = portable_files.changed_files(str(work), before, Wanted(globs=("*",)))
    assert len(found.files) == 2
    assert sum(len(entry.data or b"") for entry in found.files.values()) == 3
    told = " ".join(found.warnings)
    assert "first 2" in told
    assert "cut at" in told
    for file in files:
        file.unlink()
    monkeypatch.setattr(collect, "MAX_DEPTH", 1)
    (work / "deep" / "er" / "below").write_text("x")
    shallow = portable_files.changed_files(str(work), before, Wanted())
    assert "deeper than 1" in " ".join(shallow.warnings)


def test_a_tree_is_removed_by_path_and_links_are_not_followed(work: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_text("stays")
    (work / "door").symlink_to(canary, target_is_directory=True)
    (work / "deep" / "er").chmod(0)
    (work / "given").chmod(0)
    portable_files.remove_tree(str(work.parent))
    assert not work.parent.exists()
    assert (canary / "file").read_text() == "stays"
    portable_files.remove_tree(str(work.parent))  # what is gone already is no error


def test_names_that_windows_reads_as_drives_or_streams_are_refused() -> None:
    for name in ("C:evil", "file:stream", "dir/c:x"):
        with pytest.raises(RequestError, match="colon"):
            portable_windows.checked_names(["fine", name])
    portable_windows.checked_names(["fine", "dir/file.txt"])


# -- Windows, as far as it can be looked at from here ----------------------------------------------


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="sizes of 64-bit Windows")
def test_the_structures_have_the_size_that_windows_expects() -> None:
    sizes = {
        portable_windows.Accounting: 48,
        portable_windows.ExtendedLimits: 144,
        portable_windows.CpuRate: 8,
    }
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
    assert portable_windows.ExtendedLimits.io_counters.offset == 64
    assert portable_windows.ExtendedLimits.job_memory.offset == 120


def test_a_job_is_given_what_the_policy_says() -> None:
    wanted = {"memory": 64 << 20, "processes": 5, "cpus": 2.0, "cores": 8}
    limits, rate = portable_windows.job_limits(wanted)
    assert (limits.job_memory, limits.active_processes, limits.affinity) == (64 << 20, 5, 0b11)
    assert limits.flags == 0x2000 | 0x400 | 0x200 | 0x10 | 0x8
    assert rate is None
    limits, rate = portable_windows.job_limits({**wanted, "cpus": 0.5})
    assert (limits.affinity, rate and rate.rate) == (0b1, 625)
    limits, rate = portable_windows.job_limits({**wanted, "cpus": 8})
    assert (limits.flags & 0x10, rate) == (0, None)


def _moved(descriptor: int, at_least: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, at_least)
    os.close(descriptor)
    return moved


def test_the_boot_code_for_windows_brings_the_worker_up_on_its_descriptors() -> None:
    """With descriptors in place of handles, and the one Windows call that turns one into the other
    replaced by one that hands it back: the rest is what a guest on Windows executes."""
    to_guest, from_host = os.pipe()[::-1]
    from_guest, to_host = os.pipe()
    # Far from 10 and 11, the numbers that the worker itself takes.
    from_host, to_host = (_moved(descriptor, 100) for descriptor in (from_host, to_host))
    stand_in = (
        "import os,sys;os.O_BINARY=0;m=type(sys)('msvcrt');m.open_osfhandle=lambda h,f:h;"
        "sys.modules['msvcrt']=m;del os.set_blocking;"
    )
    code = stand_in + portable_windows.boot_code(from_host, to_host)
    guest = subprocess.Popen([sys.executable, "-I", "-c", code], pass_fds=(from_host, to_host))
    os.close(from_host)
    os.close(to_host)
    with open(to_guest, "wb") as sending:
        sending.write(run_frame(Request(code="import os; sorted(os.listdir('/proc/self/fd'))")))
    report = Report()
    with open(from_guest, "rb") as receiving:
        report.feed(receiving.read())
    assert guest.wait() == 0
    assert report.ended
    # The inherited numbers are gone: a child of the guest must not find them. Nor is there more to
    # read, when the program has come.
    assert "11" in report.value
    assert not {"10", str(from_host), str(to_host)} & set(report.value)
    assert code.endswith(protocol.boot_code(protocol.GUEST_DIR, 10, 11))


def test_job_objects_are_an_error_here_not_a_pretence() -> None:
    if sys.platform == "win32":
        pytest.skip("they exist here")
    with pytest.raises(OSError, match="no job objects"):
        portable_windows._Job({"memory": 1, "processes": 1, "cpus": 1, "cores": 1})
    with pytest.raises(OSError, match="no handles"):
        portable_windows.worker_code(0, 1)


def fake_ps(directory: Path, text: str) -> str:
    path = directory / "ps"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "text", ["echo 1,pid=,ppid=,stat=,rss=,time=", "true", "echo '1 1 0 S 100 00:00'"]
)
def test_a_ps_that_does_not_list_us_is_no_empty_machine(tmp_path: Path, text: str) -> None:
    with pytest.raises(BackendFailed, match="does not list this process"):
        portable_posix._processes(fake_ps(tmp_path, text), environments=False)


def test_each_column_is_asked_for_alone(tmp_path: Path) -> None:
    """After `-o pgid=` FreeBSD's ps takes all that follows as the heading of one column."""
    told = tmp_path / "argv"
    ps = fake_ps(tmp_path, f'echo "$@" > {told}; exec ps "$@"')
    assert portable_posix._processes(ps, environments=True)
    words = told.read_text().split()
    assert [after for word, after in itertools.pairwise(words) if word == "-o"] == [
        "pgid=", "pid=", "ppid=", "stat=", "rss=", "time=", "args=",
    ]  # fmt: skip

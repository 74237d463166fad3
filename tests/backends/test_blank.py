"""Interpreters that are started ahead: used once, or ended without a trace."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from belljar import cli
from belljar.backends import blank
from belljar.cli import main

SOURCE = str(Path(cli.__file__).parents[2])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's")


def test_what_was_started_ahead_is_taken_once_and_only_for_a_worker() -> None:
    blank.start_ahead()
    other = blank.take(worker=False)
    first, second = blank.take(worker=True), blank.take(worker=True)
    try:
        assert len({other.process.pid, first.process.pid, second.process.pid}) == 3
        assert not blank._ahead
    finally:
        for each in (other, first, second):
            each.end()
    assert first.process.returncode == 0


def test_what_nobody_needed_ends() -> None:
    blank.start_ahead()
    (ahead,) = blank._ahead
    blank.end_unused()
    assert ahead.process.returncode == 0
    assert not blank._ahead


def test_a_fork_of_the_host_does_not_take_what_is_its_parents() -> None:
    blank.start_ahead()
    (ahead,) = blank._ahead
    child = os.fork()
    if child == 0:
        taken = blank.take(worker=True)
        taken.end()
        os._exit(taken.process.pid == ahead.process.pid)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        blank.end_unused()


@pytest.mark.parametrize("words", [["run", "--nonsense"], ["run", "no-such-file.py"]])
def test_a_command_that_runs_nothing_leaves_no_interpreter(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[blank.Blank] = []
    monkeypatch.setattr(blank, "_ahead", started)
    start, seen = blank.start_ahead, []

    def noting_start() -> None:
        start()
        seen.extend(started)

    monkeypatch.setattr(blank, "start_ahead", noting_start)
    assert main(words) == 125
    assert [each.process.returncode for each in seen] == [0]


@pytest.mark.parametrize(
    ("words", "ahead"),
    [
        (["-c", "1"], True),
        (["--backend", "jail", "-c", "1"], True),
        (["--backend=jail", "-c", "1"], True),
        (["--backend=auto", "job.py"], True),
        (["--backend", "docker", "-c", "1"], False),
        (["--backend=wasm", "-c", "1"], False),
        (["--lang", "ruby", "-c", "1"], False),
        (["--python=python3.12", "-c", "1"], False),
        (["--explain", "-c", "1"], False),
        (["-c", "1", "--help"], False),
    ],
)
def test_which_commands_start_one_ahead(words: list[str], ahead: bool) -> None:
    assert cli._likely_jailed(words) is ahead


def test_it_has_nothing_of_its_hosts() -> None:
    """No environment, directory or session, and no descriptor that others wait for to be closed."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    started = blank.Blank(worker=True)
    try:
        os.close(writer)
        assert select.select([reader], [], [], 60)[0], "it keeps an inherited descriptor"
        assert os.read(reader, 1) == b""
        pid = started.process.pid
        environ = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
        told = {f"{name}={value}".encode() for name, value in blank._ENVIRONMENT.items()}
        assert set(environ) == told
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
        assert os.getsid(pid) == pid
    finally:
        os.close(reader)
        started.end()


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blank, "_END_SECONDS", 0.0)
    started = blank.Blank(worker=True)
    os.kill(started.process.pid, signal.SIGSTOP)
    started.end()
    assert started.process.returncode == -signal.SIGKILL


# What is imported before the interpreter is started is waited for before all else.
BEFORE = {
    "__future__", "_socket", "belljar", "belljar._version", "belljar.backends",
    "belljar.backends.blank", "belljar.cli", "belljar.linux", "belljar.linux.bare", "gc", "select",
}  # fmt: skip
# And these take milliseconds each, and a program in the jail needs none of them.
NEVER = {
    "asyncio", "bz2", "dataclasses", "inspect", "logging", "lzma", "pathlib", "queue", "random",
    "selectors", "shutil", "socket", "subprocess", "tempfile", "traceback",
}  # fmt: skip


def test_what_a_run_imports() -> None:
    code = (
        "import sys; at_first = set(sys.modules)\n"
        "import belljar.cli as cli; from belljar.backends import blank\n"
        "start = blank.start_ahead\n"
        "def noting_start():\n"
        "    global before; before = set(sys.modules) - at_first; start()\n"
        "blank.start_ahead = noting_start\n"
        "status = cli.main(['run', '--backend', 'jail', '-c', 'print(6 * 7)'])\n"
        "print(status, *sorted(before)); print(*sorted(set(sys.modules) - at_first))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {SOURCE!r})\n{code}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    printed, before, everything = done.stdout.splitlines()
    assert printed == "42"
    assert set(before.split()) <= {"0", *BEFORE}
    assert not NEVER & set(everything.split())


@pytest.mark.parametrize("forbidden", [False, True])
def test_our_own_modules_in_there_are_compiled_once(tmp_path: Path, forbidden: bool) -> None:
    """Unless the host's own are not to be either."""
    package = tmp_path / "belljar"
    shutil.copytree(
        Path(SOURCE) / "belljar", package, ignore=shutil.ignore_patterns("__pycache__", "wasm")
    )
    environ = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1" if forbidden else ""}
    subprocess.run(
        [sys.executable, "-m", "belljar", "run", "--backend", "jail", "-c", "1"],
        stdin=subprocess.DEVNULL,
        env=environ,
        check=True,
    )
    compiled = {path.name.partition(".")[0] for path in package.rglob("__pycache__/*.pyc")}
    assert {"zygote", "slot", "run_guest", "worker"} <= compiled or forbidden
    assert not (compiled and forbidden)

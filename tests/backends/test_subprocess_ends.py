"""How runs of `subprocess` end when something of ours breaks: nothing lives on, nothing is left."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import (
    FACTS,
    NO_NAMESPACES,
    control_groups,
    descriptors,
    gone,
    mark,
    marked,
    needs_namespaces,
    run,
    run_directories,
)

import belljar
from belljar.backends import run_directory
from belljar.backends.subprocess import SubprocessBackend
from belljar.errors import BackendFailed, BelljarError
from belljar.events import Event, Output
from belljar.linux import tree

SOURCE = str(Path(belljar.__file__).parents[1])

# A child of a child in a session of its own, which no signal ends but one.
DAEMON = """
import os, signal, sys, time
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (1, 2, 3, 15):
                signal.signal(number, signal.SIG_IGN)
            os.execvpe("sleep", ["sleep", "600"], os.environ)
        os._exit(0)
    os.wait()
for _ in range(int(os.environ.get("DAEMONS", "1"))):
    daemon()
print("up", flush=True)
time.sleep(600)
"""
HOSTS = [
    pytest.param({}, id="all there is"),
    pytest.param({"cgroup": None}, id="no cgroup"),
    pytest.param(NO_NAMESPACES, id="no namespaces"),
    pytest.param({**NO_NAMESPACES, "cgroup": None}, id="neither"),
]


class Left:
    """What a run left of itself, looked at afterwards."""

    def __init__(self) -> None:
        self.before = descriptors()

    def nothing(self) -> bool:
        return (
            descriptors() == self.before
            and not run_directories(os.getpid())
            and not control_groups(os.getpid())
        )


@pytest.fixture
def left() -> Left:
    run("1")  # whatever is made once and kept
    return Left()


class Broken(Exception):
    pass


def fail_on_output(event: Event) -> None:
    if isinstance(event, Output):
        raise Broken


@pytest.mark.parametrize("lacking", HOSTS)
def test_when_the_host_gives_up_in_mid_run_the_whole_tree_ends_first(
    left: Left, lacking: dict[str, Any]
) -> None:
    """As by a callback that raises, or an interrupt from the keyboard.

    A large tree, and more than once: a supervisor that we killed too soon would have ended a small
    one first, now and then.
    """
    for _ in range(3):
        token = mark()
        with pytest.raises(Broken):
            run(
                DAEMON,
                env={"MARK": token, "DAEMONS": "25"},
                lacking=lacking,
                emit=fail_on_output,
            )
        assert marked(token) == []
        assert left.nothing()


def test_an_interrupt_from_the_keyboard_ends_the_tree(left: Left) -> None:
    token = mark()

    def press(event: Event) -> None:
        if isinstance(event, Output):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(DAEMON, env={"MARK": token}, emit=press)
    assert marked(token) == []
    assert left.nothing()


def supervisor() -> int:
    (pid,) = [
        pid
        for pid in tree.descendants()
        if b"belljar.linux.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and _parent(pid) == os.getpid()
    ]
    return pid


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("lacking", HOSTS[:3] if FACTS.cgroup is not None else HOSTS[:1])
def test_a_supervisor_that_is_killed_is_our_failure_and_leaves_nobody(
    left: Left, lacking: dict[str, Any], number: int
) -> None:
    token = mark()
    if lacking.get("userns") is False and FACTS.cgroup is None:
        pytest.skip("with neither namespaces nor cgroups nobody is left to end the tree")

    def kill(event: Event) -> None:
        if isinstance(event, Output):
            os.kill(supervisor(), number)

    with pytest.raises(BackendFailed) as failure:
        run(DAEMON, env={"MARK": token}, lacking=lacking, emit=kill)
    assert failure.value.partial is not None
    assert failure.value.partial.stdout == "up\n"
    assert failure.value.retryable
    assert gone(token)
    assert left.nothing()


@pytest.mark.parametrize("lacking", HOSTS)
def test_a_supervisor_that_is_stopped_does_not_stop_us(
    left: Left, lacking: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer to our kill, so it is taken for broken, and ended itself."""
    if lacking == {**NO_NAMESPACES, "cgroup": None}:
        pytest.skip("with neither namespaces nor cgroups nobody is left to end the tree")
    monkeypatch.setattr("belljar.backends.supervise._KILL_SECONDS", 0.3)
    monkeypatch.setattr("belljar.backends.supervised._END_SECONDS", 0.3)
    token = mark()

    def stop(event: Event) -> None:
        if isinstance(event, Output):
            os.kill(supervisor(), signal.SIGSTOP)

    with pytest.raises(BackendFailed, match="could not be killed"):
        run(DAEMON, env={"MARK": token}, lacking=lacking, emit=stop, timeout=0.5)
    assert gone(token)
    assert left.nothing()


# -- the host dies


HOST = """
import sys
sys.path[:0] = {paths!r}
from processes import run
def up(event):
    if getattr(event, "data", b"") == b"up\\n":
        print("up", flush=True)
run({code!r}, env={{"MARK": {token!r}}}, lacking={lacking!r}, emit=up)
"""


def start_host(token: str, lacking: dict[str, Any]) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parent), SOURCE]
    program = HOST.format(paths=paths, code=DAEMON, token=token, lacking=lacking)
    host = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "up\n"
    return host


@pytest.mark.parametrize("lacking", HOSTS)
def test_when_the_host_is_killed_its_guests_die_and_the_next_host_clears_up(
    lacking: dict[str, Any],
) -> None:
    token = mark()
    with start_host(token, lacking) as host:
        assert len(marked(token)) >= 2
        host.kill()
        host.wait()
    assert gone(token)
    assert run_directories(host.pid)
    assert run("1 + 1").value == 2  # a new backend, which sweeps before its first run
    assert run_directories(host.pid) == []
    assert control_groups(host.pid) == []


@needs_namespaces
def test_a_host_that_ignores_its_children_gets_its_result() -> None:
    """An ignored SIGCHLD is inherited: the supervisor could not wait for anybody."""
    program = (
        "import signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        f"sys.path[:0] = {[SOURCE]!r}\nimport belljar\n"
        "result = belljar.run('import sys; sys.exit(3)', backend='subprocess')\n"
        "print(result.status, result.exit_code)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("error 3\n", "")


# -- what crashed hosts left


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_sweep_removes_what_nobody_holds_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = dead_pid()
    orphan, held = tmp_path / f"belljar-{dead}-orphan", tmp_path / f"belljar-{dead}-held"
    living, other = tmp_path / f"belljar-{os.getpid()}-living", tmp_path / f"belljar-{dead}"
    link, file = tmp_path / f"belljar-{dead}-link", tmp_path / f"belljar-{dead}-file"
    kept = tmp_path / "kept"
    for path in (orphan, held, living, other, kept):
        (path / "work").mkdir(parents=True)
    link.symlink_to(kept)
    file.touch()
    # As of a process in another pid namespace that shares this directory with us.
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        run_directory.sweep()
        assert not orphan.exists()
        assert all((path / "work").exists() for path in (held, living, other, kept))
        assert link.is_symlink() and file.exists()
    finally:
        os.close(lock)
    run_directory.sweep()
    assert not held.exists()  # the control arm


def test_a_directory_that_is_in_use_is_locked() -> None:
    with run_directory.made() as root:
        other = os.open(root, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        assert os.stat(root).st_mode & 0o777 == 0o700
    assert not os.path.exists(root)


# -- failures before the guest starts


def test_a_supervisor_that_cannot_be_started_leaves_nothing(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable, why in (
        ("/nonexistent/python", "could not be set up"),
        (shutil.which("true") or "/bin/true", "."),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(BackendFailed, match=why):
            run(command=["true"], stdin=b"x")
        assert left.nothing()
    monkeypatch.undo()
    assert run(command=["true"]).success  # the control arm


def test_running_out_of_descriptors_anywhere_is_our_failure_and_leaks_none() -> None:
    """A limit that rises by one: each time another step of the way fails."""
    run("1")
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(soft) if str(number) not in before]
    failed = 0
    for room in range(64):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], hard))
        try:
            result = run("6 * 7", stdin=b"x", timeout=10)
        except (BelljarError, OSError):
            failed += 1
        else:
            assert result.value == 42
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before
        assert not run_directories(os.getpid())
        assert not control_groups(os.getpid())
    assert failed > 5
    assert descriptors() == before


def test_what_the_kernel_will_not_start_is_told(left: Left) -> None:
    with pytest.raises(BackendFailed, match="too long"):
        run(command=["true"], env={"LARGE": "x" * (8 << 20)})
    assert left.nothing()


def test_a_file_whose_name_no_disk_takes_is_told(left: Left) -> None:
    with pytest.raises(BackendFailed, match="too long"):
        run("1", files={"n" * 300: b""})
    assert left.nothing()


def test_a_closed_backend_refuses() -> None:
    backend = SubprocessBackend()
    backend.close()
    with (
        belljar.Engine(belljar.Settings(), backends={"subprocess": backend}) as engine,
        pytest.raises(BelljarError, match="closed"),
    ):
        engine.run(belljar.Request(code="1"))


# -- many at once


@pytest.mark.slow
def test_runs_that_end_in_every_way_at_once_leave_nothing(left: Left) -> None:
    token = mark()
    ends = {
        "success": ("6 * 7", {}),
        "error": ("1/0", {}),
        "timeout": (DAEMON, {"timeout": 0.7}),
        "killed": ("import os; os.kill(os.getpid(), 9)", {}),
    }
    told: dict[str, list[str]] = {name: [] for name in ends}

    def work(name: str) -> None:
        code, options = ends[name]
        for _ in range(3):
            told[name].append(run(code, env={"MARK": token}, **options).status.value)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(name,)) for name in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert told == {name: [name] * 3 for name in ends}
    assert marked(token) == []
    assert left.nothing()


def test_a_timeout_ends_a_run_soon_after_its_time() -> None:
    began = time.monotonic()
    result = run(DAEMON, timeout=0.5)
    assert result.status.value == "timeout"
    assert result.kill is not None and result.kill.survivors == 0
    assert time.monotonic() - began < 20

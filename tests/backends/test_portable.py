"""The backend for macOS and Windows, run for real on Linux, where its POSIX half works as well.

The network is open in these runs, because this backend cannot close it here. As root it would
refuse every run (`test_portable_report.py`), so these tests tell it that it is not root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.base import Backend, Cancel
from belljar.backends.portable import PortableBackend
from belljar.backends.portable_plan import Host, this_host
from belljar.errors import BackendFailed
from belljar.testing.conformance import BackendConformance, Jar
from belljar.testing.conformance.harness import Watch, marked_processes
from belljar.types import Mount, Request, Result, Status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def ordinary_host(**changes: Any) -> Host:
    return replace(this_host(), root=False, **changes)


class OrdinaryUser(PortableBackend):
    def __init__(self, *, disable: frozenset[str] = frozenset(), **host: Any) -> None:
        super().__init__(disable=disable, host=ordinary_host(**host))


class OpenJar(Jar):
    """A jar whose programs have the network unless a test says otherwise."""

    def _asked(self, code: str, wanted: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
        return super()._asked(code, {"network": "any", **wanted})


@pytest.fixture
def jar() -> Iterator[OpenJar]:
    jar = OpenJar(OrdinaryUser(), "standard")
    yield jar
    jar.engine.close()


def without(*layers: str) -> OpenJar:
    return OpenJar(OrdinaryUser(disable=frozenset(layers)), "standard")


# What only the kernel could hold exactly, and ps four times a second cannot.
@pytest.mark.slow
class TestConformance(BackendConformance):
    def make_backend(self) -> Backend:
        return OrdinaryUser()

    def make_jar(self, backend: Backend) -> Jar:
        return OpenJar(backend, "standard")

    def test_a_fork_loop_is_stopped_at_its_number(self, jar: Jar) -> None:
        pytest.skip(f"processes is best_effort: {jar.held('processes').by}")

    def test_a_program_may_live_with_a_refused_fork(self, jar: Jar) -> None:
        pytest.skip(f"processes is best_effort: {jar.held('processes').by}")

    def test_the_host_can_still_fork_meanwhile(self, jar: Jar) -> None:
        pytest.skip(f"processes is best_effort: {jar.held('processes').by}")

    def test_many_processes_share_one_core(self, jar: Jar) -> None:
        pytest.skip("ps prints whole seconds here, and eight processes take long to use up one")

    def test_a_tight_chain_of_forks_is_gone(self, jar: Jar, open_dir: Path) -> None:
        pytest.skip("best_effort: see test_a_chain_of_forks_that_ps_cannot_see_is_not_denied")


# -- who is killed ---------------------------------------------------------------------------------

DAEMON = """
import os, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.set_inheritable(writer, True)
        tail = "import os, sys, time; os.write(int(sys.argv[2]), b'x'); time.sleep(60)"
        argv = [sys.executable, "-S", "-c", tail, "{token}", str(writer)]
        os.execve(sys.executable, argv, {env})
    os._exit(0)
os.close(writer)
os.read(reader, 1)
print("daemon is up", flush=True)
time.sleep(1)  # for whoever wants to look
"""
KEEPS, CHANGES = "os.environ", "{}"


@pytest.fixture
def token() -> Iterator[str]:
    """A word for a daemon's command line; whoever still has it afterwards is ended."""
    word = f"belljar-canary-{os.urandom(8).hex()}"
    yield word
    for pid in marked_processes(word):
        os.kill(pid, signal.SIGKILL)


def test_a_daemon_is_found_by_the_environment_it_kept(jar: OpenJar, token: str) -> None:
    during: list[int] = []
    watch = Watch(b"daemon is up", lambda: during.extend(marked_processes(token)))
    result = jar.run(DAEMON.format(token=token, env=KEEPS), emit=watch)
    assert result.success
    assert during, "the daemon was never up, so its absence means nothing"
    assert marked_processes(token) == []
    assert result.kill is not None
    assert result.kill.survivors == 0


def test_without_the_search_for_descendants_the_daemon_survives_and_is_counted(token: str) -> None:
    result = without("descendants").run(DAEMON.format(token=token, env=KEEPS))
    assert result.success
    assert marked_processes(token) != []
    assert result.kill is not None
    assert result.kill.survivors == 1
    assert any("survived" in warning for warning in result.warnings)


def test_a_daemon_that_changed_its_environment_is_gone_or_counted_as_a_survivor(
    jar: OpenJar, token: str
) -> None:
    """The limit of this backend: what no look has shown it cannot kill, but does not deny."""
    result = jar.run(DAEMON.format(token=token, env=CHANGES))
    left = len(marked_processes(token))
    assert result.kill is not None
    assert result.kill.survivors == left
    assert any("survived" in warning for warning in result.warnings) == bool(left)


def test_a_chain_of_forks_that_ps_cannot_see_is_not_denied(jar: OpenJar, tmp_path: Path) -> None:
    result = jar.run(
        """
        import os, time
        out = os.open("shown/beat", os.O_WRONLY | os.O_CREAT)
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            end, count = time.monotonic() + 15, 0
            while time.monotonic() < end and not os.path.exists("shown/stop"):
                count += 1
                os.pwrite(out, b"%09d" % count, 0)
                if count == 20:
                    os.write(writer, b"x")
                if os.fork():
                    os._exit(0)
            os._exit(0)
        os.read(reader, 1)
        """,
        mounts=(Mount(str(tmp_path), "shown", "rw"),),
    )
    beat = tmp_path / "beat"
    last = beat.read_text()
    threading.Event().wait(0.3)
    flies = beat.read_text() != last
    (tmp_path / "stop").touch()
    assert result.success
    assert result.kill is not None
    assert result.kill.survivors == int(flies)


# -- limits that the watchdog holds ----------------------------------------------------------------

FOREVER = "import signal\nwhile True: signal.pause()"


def reason(result: Result) -> str:
    assert result.kill is not None
    assert result.kill.survivors == 0
    return result.kill.reason


def test_memory_of_the_whole_tree_is_added_up(jar: OpenJar) -> None:
    code = "import os\nos.fork(), os.fork()\nx = bytearray(60 << 20)\n" + FOREVER
    result = jar.run(code, memory="128M", timeout=20)
    assert (result.status, reason(result)) == (Status.OOM, "oom")
    assert (result.usage.peak_memory or 0) > 128 << 20
    # The control arms: the limit raised, and nobody watching.
    assert reason(jar.run(code, memory="1G", timeout=1)) == "timeout"
    assert reason(without("watchdog").run(code, memory="128M", timeout=1)) == "timeout"


def test_too_many_processes_end_the_run(jar: OpenJar) -> None:
    code = "import os\nfor _ in range(24):\n    if os.fork() == 0: break\n" + FOREVER
    result = jar.run(code, processes=20, timeout=20)
    assert (result.status, result.limit_hit, reason(result)) == (Status.LIMIT, "pids", "pids")
    assert reason(jar.run(code, processes=25, timeout=1)) == "timeout"


def test_processor_time_past_the_share_ends_the_run(jar: OpenJar) -> None:
    if this_host().cores < 2:
        pytest.skip("this host has one core only")
    result = jar.run("while True: pass", cpus=0.1, timeout=20)
    assert (result.status, reason(result)) == (Status.TIMEOUT, "cpu")
    assert (result.usage.cpu or 0) >= 2
    assert reason(jar.run("while True: pass", cpus=0.9, timeout=1)) == "timeout"


def test_many_small_files_past_the_disk_limit_end_the_run(jar: OpenJar) -> None:
    code = "for n in range(8): open(f'f{n}', 'wb').write(bytes(1 << 20))\n" + FOREVER
    result = jar.run(code, disk="4M", timeout=20)
    assert (result.status, result.limit_hit, reason(result)) == (Status.LIMIT, "disk", "disk")
    assert reason(jar.run(code, disk="16M", timeout=1)) == "timeout"


def test_the_shell_sets_the_rlimits_and_is_gone(jar: OpenJar) -> None:
    code = """
        import os, resource
        parent = open(f"/proc/{os.getppid()}/comm").read()
        names = ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_CPU")
        [resource.getrlimit(getattr(resource, name)) for name in names] + [parent]
        """
    asked: dict[str, Any] = {"open_files": 64, "disk": "8M", "memory": "64M", "timeout": 7}
    *found, parent = jar.run(code, cpus=1, **asked).value
    assert found == [(n, n) for n in (0, 64, 8 << 20, (64 + 256) << 20, 12)]
    assert parent != "sh\n"
    assert without("rlimits").run(code, cpus=1, **asked).value[:-1] != found  # the control arm


def test_limits_past_all_measure_are_as_good_as_none(jar: OpenJar) -> None:
    huge: dict[str, Any] = {
        "timeout": 300,
        "memory": 1 << 60,
        "disk": 1 << 60,
        "open_files": 1 << 40,
    }
    assert jar.run("6 * 7", **huge).value == 42


# -- ours to keep in order -------------------------------------------------------------------------


def threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories are made during this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_callback_that_raises_ends_the_run_and_leaves_nothing(
    jar: OpenJar, token: str, scratch: Path
) -> None:
    def refuse() -> None:
        raise ZeroDivisionError("from the callback")

    before = threads_and_descriptors()
    code = DAEMON.format(token=token, env=KEEPS) + FOREVER
    with pytest.raises(ZeroDivisionError, match="from the callback"):
        jar.run(code, emit=Watch(b"daemon is up", refuse))
    assert marked_processes(token) == []
    assert threads_and_descriptors() == before
    assert list(scratch.iterdir()) == []


def test_a_ps_that_fails_is_our_failure_not_the_guest_s(scratch: Path) -> None:
    before = threads_and_descriptors()
    jar = OpenJar(OrdinaryUser(ps="/bin/false"), "standard")
    with pytest.raises(BackendFailed, match="ps ended with 1") as failure:
        jar.run(f"import os\nprint(os.getpid(), flush=True)\n{FOREVER}")
    assert failure.value.partial is not None
    assert not os.path.exists(f"/proc/{int(failure.value.partial.stdout)}")
    assert threads_and_descriptors() == before
    assert list(scratch.iterdir()) == []


def test_a_survivor_that_holds_every_stream_keeps_no_thread_of_ours(token: str) -> None:
    before = threads_and_descriptors()
    code = DAEMON.format(token=token, env=KEEPS)
    result = without("descendants").run(code, stdin=b"x" * (1 << 20))
    assert marked_processes(token) != []
    assert result.kill is not None
    assert result.kill.survivors == 1
    assert threads_and_descriptors() == before


def test_cancel_ends_the_tree(jar: OpenJar, token: str) -> None:
    with Cancel() as cancel:
        code = DAEMON.format(token=token, env=KEEPS) + FOREVER
        result = jar.run(code, emit=Watch(b"daemon is up", cancel.set), cancel=cancel)
    assert (result.status, reason(result)) == (Status.KILLED, "cancelled")
    assert marked_processes(token) == []


def test_directories_of_crashed_hosts_are_swept(scratch: Path, jar: OpenJar) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    abandoned = scratch / f"belljar-{ended.pid}-abandoned"
    (abandoned / "work").mkdir(parents=True)
    in_use, foreign = scratch / f"belljar-{os.getpid()}-in_use", scratch / "belljar-notes"
    in_use.mkdir()
    foreign.mkdir()
    assert jar.run("1").success
    assert sorted(scratch.iterdir()) == sorted([in_use, foreign])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_as_root_the_program_becomes_the_configured_user() -> None:
    # A command, because the interpreter of these tests may be in root's own directory.
    jar = OpenJar(PortableBackend(user="65534:65533"), "standard")
    code = "id -u; id -g; id -G; touch mine && stat -c %u mine; echo $TMPDIR"
    result = jar.run("", command=("sh", "-c", code))
    assert result.stdout.split()[:4] == ["65534", "65533", "65533", "65534"], result.stderr


def test_a_work_directory_that_cannot_be_made_is_our_failure(jar: OpenJar, scratch: Path) -> None:
    too_long = "x" * 300
    with pytest.raises(BackendFailed, match="work directory"):
        jar.run("1", files={too_long: b""})
    assert list(scratch.iterdir()) == []

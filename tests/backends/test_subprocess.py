"""What a guest of `subprocess` sees and runs, beyond what every backend has to show."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from processes import (
    ATTEMPT,
    FACTS,
    facts,
    needs_namespaces,
    needs_proc,
    run,
)

from belljar.backends.subprocess import SubprocessBackend
from belljar.config import Settings
from belljar.errors import CommandNotFound, ConfigError, RequestError
from belljar.policy import Ceiling
from belljar.types import Status

# -- what it sees


@needs_namespaces
@needs_proc
def test_a_guest_sees_itself_alone() -> None:
    seen = run(
        "import os, socket\n"
        "status = dict(l.split(':\\t', 1) for l in open('/proc/self/status'))\n"
        "{'pids': sorted(int(p) for p in os.listdir('/proc') if p.isdigit()),"
        " 'me': os.getpid(), 'host': socket.gethostname(), 'uid': os.getuid(),"
        " 'caps': {int(status[n], 16) for n in"
        " ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')} == {0},"
        " 'no_new_privs': status['NoNewPrivs'].strip(), 'seccomp': status['Seccomp'].strip(),"
        " 'session': os.getsid(0) == os.getpid(),"
        " 'ipc': [os.path.exists('/dev/shm/x'), os.listdir('/dev/shm')]}"
    ).value
    assert seen == {
        "pids": [1, 2], "me": 2, "host": "belljar", "uid": 1000, "caps": True,
        "no_new_privs": "1", "seccomp": "2" if FACTS.seccomp else "0", "session": True,
        "ipc": [False, []],
    }  # fmt: skip


@needs_namespaces
def test_run_is_hidden_even_where_landlock_is_not() -> None:
    code = "import os; os.listdir('/run')"
    assert run(code, disable=["landlock"]).value == []
    there = run(code, disable=["landlock", "namespaces"]).value  # the control arm
    assert set(there) == set(os.listdir("/run")) != set()


@needs_namespaces
def test_tmp_is_the_guests_own() -> None:
    planted = Path("/tmp") / f"belljar-canary-{os.getpid()}"
    planted.write_text("canary")
    code = (
        ATTEMPT + f"import tempfile\npath = {str(planted)!r}\n"
        "open('/tmp/mine', 'w').write('x')\n"
        "(os.path.exists(path), 'mine' in os.listdir('/tmp'), tempfile.gettempdir())"
    )
    try:
        assert tuple(run(code).value) == (False, True, "/tmp")
        assert not os.path.exists("/tmp/mine")
        # The control arm: with a mount namespace but without a private one.
        shown = run(
            f"import os; os.path.exists({str(planted)!r})", filesystem={"private_tmp": False}
        )
        assert shown.value is True
    finally:
        planted.unlink()


def test_the_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_TEST_SECRET", "hunter2")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    seen = run("import os; dict(os.environ)", env={"MINE": "1"}).value
    assert seen.pop("MINE") == "1"
    assert set(seen) <= {
        "PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE", "PWD", "TERM",
        "TZ", "USER", "LOGNAME", "GIT_CONFIG_NOSYSTEM", "PIP_DISABLE_PIP_VERSION_CHECK",
    }  # fmt: skip
    assert "hunter2" not in str(seen)


def test_a_library_to_preload_is_the_guests_affair_only() -> None:
    """The loader complains once for every process that it concerns."""
    result = run(command=["true"], env={"LD_PRELOAD": "/nonexistent/evil.so"})
    assert result.success
    assert result.stderr.count("evil.so") == 1
    assert run(command=["true"]).stderr == ""


def test_a_guest_has_its_three_descriptors_and_the_frame_socket() -> None:
    looked = run("import os; [int(fd) for fd in os.listdir('/proc/self/fd')]")
    if FACTS.proc_mount:
        standard = [fd for fd in looked.value if fd <= 2]
        others = [fd for fd in looked.value if fd > 2]
        assert standard == [0, 1, 2]
        assert len(others) == 2  # the frame socket, and the listing itself
    probe = "for fd in $(seq 3 250); do (: <&$fd) 2>/dev/null && echo $fd; done; true"
    assert run(command=["sh", "-c", probe]).stdout == ""


def test_a_descriptor_of_the_host_is_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("canary")
    fd = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        found = run(command=["sh", "-c", f"cat <&{fd}"])
    finally:
        os.close(fd)
    assert "canary" not in found.stdout
    assert found.exit_code != 0


def test_signals_begin_as_for_any_process() -> None:
    """Whatever the host ignores or blocks is not the guest's."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        status = run(command=["cat", "/proc/self/status"]).stdout
    finally:
        signal.signal(signal.SIGHUP, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    seen = dict(line.split(":\t", 1) for line in status.splitlines())
    assert [int(seen[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")] == [0, 0, 0]


# -- programs


def test_another_interpreter_runs_the_program(tmp_path: Path) -> None:
    code = "import sys; [sys.executable, list(sys.version_info[:2])]"
    here, version = run(code).value
    assert (here, version) == (sys.executable, list(sys.version_info[:2]))
    system = shutil.which("python3", path="/usr/bin")
    if system is None or os.path.realpath(system) == os.path.realpath(sys.executable):
        pytest.skip("there is no other interpreter here")
    there, _ = run(code, python=system).value
    assert os.path.realpath(there) == os.path.realpath(system)


def test_an_environment_is_an_interpreter() -> None:
    assert run("import sys; sys.prefix", python=sys.prefix).value == sys.prefix


@pytest.mark.parametrize("python", ["no-such-python", "/bin/true", "/etc/passwd", "/nonexistent"])
def test_what_is_no_interpreter_is_refused(python: str) -> None:
    with pytest.raises(RequestError) as refusal:
        run("1", python=python)
    assert refusal.value.field == "python"


def test_bash_and_javascript_run() -> None:
    told = run('echo "$1 $((6 * 7))"; cat; exit 3', language="bash", args=["a b"], stdin="in")
    assert (told.stdout, told.exit_code, told.status) == ("a b 42\nin", 3, Status.ERROR)
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = (
        "const fs = require('fs'); fs.writeFileSync('out.txt', 'written');"
        "console.log(process.argv.slice(2).join(), 6 * 7); process.exitCode = 4"
    )
    told = run(script, language="javascript", args=["x", "y"], outputs=["*.txt"])
    assert (told.stdout, told.exit_code) == ("x,y 42\n", 4)
    assert told.files["out.txt"].data == b"written"


def test_a_command_is_executed_and_not_interpreted() -> None:
    told = run(command=["printf", "%s|", "a b", "$HOME", "*"])
    assert told.stdout == "a b|$HOME|*|"
    told = run(command=["sort"], stdin="b\na\n", files={"unused": b""})
    assert told.stdout == "a\nb\n"
    with pytest.raises(CommandNotFound):
        run(command=["no-such-command"])


def test_input_that_nobody_reads_is_no_error() -> None:
    told = run(command=["true"], stdin=b"x" * (4 << 20))
    assert (told.status, told.exit_code) == (Status.SUCCESS, 0)


@pytest.mark.parametrize("number", [16, 17, 24])
def test_hardly_any_descriptors_are_the_guests_problem(number: int) -> None:
    told = run(command=["cat", "/etc/passwd"], open_files=number)
    assert told.success  # three for itself, one for the file
    asked = run("[open('/etc/passwd') for _ in range(100)]", open_files=number)
    assert asked.error is not None and asked.error.type == "OSError"


def test_a_time_limit_without_end_is_no_trouble() -> None:
    settings = Settings(ceiling=Ceiling(timeout=None))
    assert run("6 * 7", timeout=10**9, settings=settings).value == 42


# -- another user


@pytest.mark.parametrize(
    "user",
    ["", "root", "0", "0:0", "1000:0", "0:1000", "-1", "4294967295", "1:4294967295", "²", "1:2:3"],
)  # fmt: skip
def test_a_user_that_is_none_or_root_is_refused(user: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SubprocessBackend(user=user)
    assert refusal.value.field == "user"


def test_only_root_can_become_somebody_else() -> None:
    backend = SubprocessBackend(user="64997:64997", facts=facts(root=False))
    found = backend.probe()
    assert not found.available
    assert "root" in found.reason
    assert SubprocessBackend(user="64997").user == (64997, 64997)

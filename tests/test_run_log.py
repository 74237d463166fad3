"""The logger `belljar` says of each run what it was and how it ended, never what it contained."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from container_engines import TOGETHER

from belljar.api import Runner, build_request
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed, BelljarError
from belljar.stores.kernel_log import KernelLog
from belljar.testing import FakeBackend
from belljar.testing.fake import succeed
from belljar.types import Request, Result, Status

SECRET = "hunter2"


def engine(respond: Callable[[Request], Result] = succeed) -> Engine:
    return Engine(Settings(backend="fake"), backends={"fake": FakeBackend(respond)})


def lines(caplog: pytest.LogCaptureFixture, run: str) -> list[tuple[int, str]]:
    return [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.name == "belljar" and run in record.getMessage()
    ]


def test_a_run_is_a_line_at_its_start_and_one_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "belljar")
    code = f"print({SECRET!r})"
    with engine() as running:
        request = build_request(
            code=code, stdin=SECRET, env={"KEY": SECRET}, settings=running.settings
        )
        running.run(request, wishes={"timeout": 7, "memory": "128M"})
    (_, start), (_, end) = lines(caplog, request.id)
    for part in (
        "language=python",
        f"sha256={hashlib.sha256(code.encode()).hexdigest()}",
        "backend=fake",
        "timeout=7 ",
        "memory=128M",
        "network=off",
    ):
        assert part in start
    assert "status=success" in end and "seconds=" in end
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("code", "level", "status"),
    [
        ("1", logging.INFO, "success"),
        ("raise ValueError", logging.INFO, "error"),
        ("while True: pass", logging.WARNING, "timeout limit=timeout"),
    ],
)
def test_a_limit_that_was_hit_is_a_warning(
    caplog: pytest.LogCaptureFixture, code: str, level: int, status: str
) -> None:
    caplog.set_level(logging.INFO, "belljar")
    with Runner(backend="subprocess", timeout=0.5) as runner:
        result = runner.execute(code)
    found, text = lines(caplog, result.id)[-1]
    assert found == level
    status, _, limit = status.partition(" ")
    assert f"status={status} " in text and limit in text


def test_a_sandbox_that_breaks_is_an_error_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "belljar")

    def broken(_: Request) -> Result:
        raise BackendFailed("the pipe broke\n2026-01-01 INFO run forged")

    with engine(broken) as running, pytest.raises(BelljarError):
        running.run(build_request(code="1", settings=running.settings))
    last = caplog.records[-1]
    assert last.levelno == logging.ERROR and "code=backend_failed" in last.getMessage()
    assert "\n" not in last.getMessage()


def test_a_program_that_the_lint_refuses_is_told_of_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "belljar")
    with engine() as running:
        request = build_request(code="import os", settings=running.settings)
        result: Result = running.run(request, wishes={"modules": "safe"})
    assert result.status is Status.REFUSED
    (_, start), (_, end) = lines(caplog, request.id)
    assert "sha256=" in start and "status=refused" in end


def test_without_logging_nothing_is_said_and_nothing_imported() -> None:
    code = (
        "import sys, belljar\n"
        "belljar.run('1', backend='subprocess', timeout=5)\n"
        "assert 'logging' not in sys.modules, 'imported for a line that has no reader'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@TOGETHER
def test_a_container_is_told_of_at_its_creation_and_its_end(
    docker_engine: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_SOCKET_PATH", docker_engine.host)  # type: ignore[attr-defined]
    docker_engine.images("python")  # type: ignore[attr-defined]
    caplog.set_level(logging.INFO, "belljar")
    with Runner(backend="docker", fallback=False) as runner:
        result = runner.execute("1")
    (used,) = [text for _, text in lines(caplog, result.id) if "in container" in text]
    container = used.rpartition(" ")[2]
    told = [text for _, text in lines(caplog, container)]
    assert any("created: image=" in text and "sha256:" in text for text in told)
    assert f"container {container} removed" in told


def test_denials_of_the_kernels_log_are_repeated_with_the_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel writes a line of its own for a process that its filter ends."""
    kernel = KernelLog()
    if not kernel.readable:
        pytest.skip("this process may not read the kernel's log; as root it may")
    ended = "import ctypes, os; ctypes.CDLL(None).prctl(22, 1, 0, 0, 0); os.getpid()"
    child: list[int] = []

    def respond(_: Request) -> Result:
        process = subprocess.Popen([sys.executable, "-c", ended])
        process.wait()
        child.append(process.pid)
        time.sleep(0.2)  # audit's own thread writes the line
        return Result(status=Status.SUCCESS, exit_code=0)

    with engine(respond) as running:
        running.sinks.add(kernel)
        request = build_request(code="1", settings=running.settings)
        running.run(request)
        told = [text for text in caplog.messages if f" pid={child[0]} " in text]
    kernel.close()
    if not told:
        pytest.skip("this kernel writes no line for a process that seccomp ends")
    assert told[0].startswith(f"kernel, during run {request.id}: audit: type=1326")
    assert "\n" not in told[0]

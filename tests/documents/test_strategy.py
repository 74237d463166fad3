"""Document 003: one interface, a strategy that the environment names, a record of each run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER, Engine

import belljar
from belljar import Settings
from belljar.compat import strategy
from belljar.compat.strategy import (
    DockerSandbox,
    E2BSandbox,
    ExecutionResult,
    LocalSandbox,
    get_sandbox,
)
from belljar.errors import ConfigError, LanguageUnknown, NotBuiltYet

pytestmark = TOGETHER


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current directory, where records go; and no warning has been given yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(strategy, "_warned", set())
    return tmp_path


def records(where: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(where.glob("artifacts/executions/*"))]


def test_local_is_the_default_and_needs_nothing() -> None:
    sandbox = get_sandbox()
    assert isinstance(sandbox, LocalSandbox)
    done = sandbox.execute("print(6 * 7)")
    assert isinstance(done, ExecutionResult)
    assert (done.stdout, done.stderr, done.exit_code) == ("42\n", "", 0)
    assert done.duration > 0
    assert done.meta["runtime"] == "subprocess"
    assert done.meta["limits"]["timeout"] == 30


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [("import sys; sys.exit(7)", 7, ""), ("1 / 0", 1, "ZeroDivisionError"),
     ("import time; time.sleep(60)", 124, "1 s"), ("import os; os.kill(os.getpid(), 9)", 137, "")],
)  # fmt: skip
def test_how_a_program_ends_is_a_number(code: str, exit_code: int, stderr: str) -> None:
    done = get_sandbox().execute(code, timeout=1)
    assert done.exit_code == exit_code
    assert stderr in done.stderr


def test_the_language_goes_by_name_and_an_unknown_one_is_refused() -> None:
    assert get_sandbox().execute("echo $((6 * 7))", "bash").stdout == "42\n"
    with pytest.raises(LanguageUnknown):
        get_sandbox().execute("1", language="cobol")


def test_the_environment_configures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TYPE", "local")
    monkeypatch.setenv("SANDBOX_TIMEOUT_SEC", "1")
    done = get_sandbox().execute("import time; time.sleep(60)")
    assert (done.exit_code, done.meta["limits"]["timeout"]) == (124, 1)
    monkeypatch.setenv("SANDBOX_TYPE", "mainframe")
    with pytest.raises(ConfigError, match="mainframe"):
        get_sandbox()


def test_dangerous_imports_are_blocked_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_ = get_sandbox()
    assert open_.execute("import os; print('in')").stdout == "in\n"
    get_sandbox()
    warned = [r for r in caplog.records if "SANDBOX_BLOCK_DANGEROUS_IMPORTS" in r.getMessage()]
    assert len(warned) == 1  # once
    monkeypatch.setenv("SANDBOX_BLOCK_DANGEROUS_IMPORTS", "true")
    closed = get_sandbox()
    for module in ("os", "subprocess", "shutil", "socket"):
        done = closed.execute(f"import {module}")
        assert done.exit_code == 126 and module in done.stderr
        assert module in done.meta["blocked_imports"] and module in done.meta["refused"]
    assert closed.execute("import math; print(1)").stdout == "1\n"


def test_docker_is_a_container(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TYPE", "docker")
    monkeypatch.setenv("DOCKER_SOCKET_PATH", docker_engine.host)
    sandbox = get_sandbox()
    assert isinstance(sandbox, DockerSandbox)
    done = sandbox.execute("print(1)")
    assert (done.stdout, done.meta["runtime"]) == ("1\n", "docker")
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    assert sandbox.execute(code).exit_code == 1


def test_docker_without_an_engine_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SANDBOX_TYPE", "docker")
    monkeypatch.setenv("DOCKER_SOCKET_PATH", f"unix://{tmp_path}/none.sock")
    with caplog.at_level(logging.WARNING, "belljar"):
        done = get_sandbox().execute("print(1)")
    assert (done.stdout, done.meta["isolation"]) == ("1\n", "jail")
    assert any("'docker' could not be used" in text for text in done.meta["warnings"])
    assert any("'docker' could not be used" in record.getMessage() for record in caplog.records)


def test_e2b_is_not_built_yet_and_says_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TYPE", "e2b")
    for make in (get_sandbox, E2BSandbox):
        with pytest.raises(NotBuiltYet, match="E2BSandbox") as refusal:
            make()
        assert "SANDBOX_TYPE=docker" in refusal.value.available


# -- records


def test_a_failed_run_is_recorded_unless_the_environment_says_otherwise(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = get_sandbox()
    sandbox.execute("print('fine')")
    assert records(elsewhere) == []
    sandbox.execute("print('so far')\n1 / 0")
    (record,) = records(elsewhere)
    assert record["code"] == "print('so far')\n1 / 0"
    assert record["result"]["status"] == "error" and record["result"]["stdout"] == "so far\n"
    (path,) = elsewhere.glob("artifacts/executions/*.json")
    stamp, _, digest = path.stem.partition("_")
    assert stamp == record["time"] and record["sha256"].startswith(digest)
    assert path.stat().st_mode & 0o077 == 0

    monkeypatch.setenv("SANDBOX_STORE_CODE", "never")
    get_sandbox().execute("1 / 0")
    assert len(records(elsewhere)) == 1
    monkeypatch.setenv("SANDBOX_STORE_CODE", "always")
    get_sandbox().execute("print('fine')")
    assert [each["result"]["status"] for each in records(elsewhere)] == ["error", "success"]


def test_the_main_interface_records_too(elsewhere: Path) -> None:
    settings = Settings(store_code="always", artifacts=str(elsewhere / "deep" / "er"))
    with belljar.create_runner(backend="subprocess", settings=settings) as runner:
        runner.execute("1")
        assert runner.execute("import os", modules="safe").status == "refused"
    found = sorted((elsewhere / "deep" / "er").iterdir())
    statuses = [json.loads(path.read_text())["result"]["status"] for path in found]
    assert statuses == ["success", "refused"]
    with belljar.create_runner(backend="subprocess", settings=Settings()) as runner:
        runner.execute("1 / 0")
    assert records(elsewhere) == []  # the control arm


def test_a_record_that_cannot_be_written_is_a_warning_and_the_result_is_there(
    elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (elsewhere / "file").write_text("")
    settings = Settings(store_code="always", artifacts=str(elsewhere / "file" / "below"))
    with belljar.create_runner(backend="subprocess", settings=settings) as runner:
        assert runner.execute("6 * 7").value == 42
    assert "could not be written" in caplog.records[0].getMessage()

"""Document 001: three security levels, one runner interface."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pandas
import pytest
from container_engines import TOGETHER, Engine

from belljar import BelljarError, Settings
from belljar.compat.levels import (
    DockerRunner,
    InProcessRunner,
    JailRunner,
    LLMExecutor,
    SandboxConfig,
    SandboxedRunner,
    SandboxResult,
    SecurityLevel,
    SubprocessRunner,
    create_runner,
)
from belljar.errors import BackendUnavailable, NotBuiltYet

pytestmark = TOGETHER

KINDS = (InProcessRunner, SubprocessRunner, JailRunner, DockerRunner)


@pytest.fixture
def engine(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    docker_engine.images("data")
    monkeypatch.setenv("DOCKER_SOCKET_PATH", docker_engine.host)
    return docker_engine


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_SOCKET_PATH", f"unix://{tmp_path}/none.sock")


def test_the_levels_and_their_values() -> None:
    assert {level.name: level.value for level in SecurityLevel} == {
        "PERMISSIVE": "permissive", "STANDARD": "standard", "STRICT": "strict",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("level", "seconds", "megabytes", "modules"),
    [
        ("permissive", 60, 1024, {"pandas", "math", "statistics", "json", "numpy", "datetime"}),
        ("standard", 30, 512, {"pandas", "math", "statistics", "json"}),
        ("strict", 10, 256, {"math", "statistics", "json"}),
    ],
)
def test_each_level_has_its_configuration(
    level: str, seconds: float, megabytes: int, modules: set[str]
) -> None:
    config = SandboxConfig.for_level(SecurityLevel(level))
    assert (config.security_level.value, config.timeout_seconds) == (level, seconds)
    assert (config.max_memory_mb, set(config.allowed_modules)) == (megabytes, modules)


def test_the_defaults_are_standard_and_frozen() -> None:
    config = SandboxConfig()
    assert config == SandboxConfig.for_level(SecurityLevel.STANDARD)
    assert config.allowed_modules == ("pandas", "math", "statistics", "json")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout_seconds = 1  # type: ignore[misc]
    names = [field.name for field in dataclasses.fields(SandboxResult)]
    assert names == [
        "success", "result", "stdout", "stderr", "error", "execution_time_ms", "memory_used_mb",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_goes_in_and_a_value_comes_out(kind: type[Any], engine: Engine) -> None:
    frame = pandas.DataFrame({"x": [1, 2, 3]})
    with kind(SandboxConfig(timeout_seconds=60)) as runner:
        assert isinstance(runner, SandboxedRunner)
        done = runner.execute("print(len(df))\nint(df['x'].sum())", {"df": frame})
        assert (done.success, done.result, done.stdout, done.error) == (True, 6, "3\n", None)
        assert done.execution_time_ms > 0
        assert runner.execute("import math\nresult = math.floor(r)", {"r": 2.5}).result == 2
        back = runner.execute("df[df.x > 1]", {"df": frame}).result
        assert back["x"].tolist() == [2, 3]


@pytest.mark.parametrize("kind", (SubprocessRunner, JailRunner, DockerRunner))
def test_the_memory_limit_holds(kind: type[Any], engine: Engine) -> None:
    with kind(SandboxConfig(max_memory_mb=50)) as runner:
        done = runner.execute("x = 'a' * (100 * 1024 * 1024)", {})
        assert not done.success
        assert "MemoryError" in done.error or "killed" in done.error.lower()
        assert runner.execute("x = 'a' * 1024", {}).success  # the control arm


@pytest.mark.parametrize("kind", KINDS)
def test_the_timeout_holds(kind: type[Any], engine: Engine) -> None:
    config = SandboxConfig(timeout_seconds=1, allowed_modules=("time",))
    with kind(config) as runner:
        done = runner.execute("import time; time.sleep(10)", {})
        assert not done.success and "1 s" in done.error
        assert done.execution_time_ms < 2000
        assert runner.execute("import time; time.sleep(0.01)", {}).success  # the control arm


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_blocked_also_where_its_modules_are_allowed(
    kind: type[Any], engine: Engine
) -> None:
    code = "import urllib.request; urllib.request.urlopen('http://192.0.2.1', timeout=3)"
    with kind(SandboxConfig()) as runner:
        assert "urllib" in runner.execute(code, {}).error
    with kind(SandboxConfig(allowed_modules=("urllib",))) as runner:
        done = runner.execute(code, {})
        assert not done.success and "not allowed" not in done.error


@pytest.mark.parametrize("kind", KINDS)
def test_importing_by_call_does_not_get_around_the_list(kind: type[Any], engine: Engine) -> None:
    with kind(SandboxConfig()) as runner:
        for code in (
            "import os",
            "__import__('os')",
            "__import__('o' + 's')",
            "getattr(__builtins__, '__imp' + 'ort__')('os')",
            "import math\nmath.__loader__.load_module('os')",
        ):
            assert not runner.execute(code, {}).success, code
        assert runner.execute("import math", {}).success  # the control arm


def test_each_level_has_its_runner(engine: Engine) -> None:
    kinds = {level.value: type(create_runner(level)) for level in SecurityLevel}
    assert kinds == {
        "permissive": InProcessRunner, "standard": SubprocessRunner, "strict": DockerRunner,
    }  # fmt: skip
    assert type(create_runner()) is SubprocessRunner
    with create_runner(SecurityLevel.STRICT) as strict:
        assert strict.execute("import math\nmath.pi", {}).success


def test_a_configuration_that_is_stricter_than_the_level_counts(engine: Engine) -> None:
    config = SandboxConfig.for_level(SecurityLevel.STRICT)
    assert isinstance(create_runner(config=config), DockerRunner)


def test_strict_without_an_engine_is_a_jail_and_a_logged_warning(
    no_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    with create_runner(SecurityLevel.STRICT) as runner:
        assert isinstance(runner, JailRunner)
        assert runner.execute("import math\nmath.floor(2.5)", {}).result == 2
    assert "runs on 'jail'" in caplog.records[0].getMessage()


@pytest.fixture
def weak_host(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a plain process only."""
    from belljar.backends import registry

    kept = {name: registry.BUILT_IN[name] for name in ("docker", "subprocess")}
    monkeypatch.setattr(registry, "BUILT_IN", kept)
    monkeypatch.setattr(registry, "PREFERENCE", ("subprocess",))


def test_strict_on_a_weak_host_is_a_process_only_if_the_operator_allows_it(
    weak_host: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BackendUnavailable) as refusal:
        create_runner(SecurityLevel.STRICT)
    assert refusal.value.fix
    monkeypatch.setenv("BELLJAR_FALLBACK_ALLOW", "subprocess")
    with caplog.at_level(logging.WARNING, "belljar"), create_runner(SecurityLevel.STRICT) as runner:
        assert isinstance(runner, SubprocessRunner)
        assert runner.execute("import math\nmath.floor(2.5)", {}).result == 2
    assert any("'subprocess'" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("level", list(SecurityLevel))
def test_only_the_permissive_level_reads_the_data_directory(
    level: SecurityLevel, project: Path, engine: Engine
) -> None:
    settings = Settings(data_directory=str(project), docker_host=engine.host)
    config = dataclasses.replace(SandboxConfig.for_level(level), allowed_modules=("os",))
    read = f"open({str(project / 'data.txt')!r}).read()"
    write = f"open({str(project / 'data.txt')!r}, 'w')"
    with create_runner(level, config, settings=settings) as runner:
        done = runner.execute(read, {})
        if level is SecurityLevel.PERMISSIVE:
            assert done.result == "from the project\n"
        else:
            assert not done.success, done
        assert not runner.execute(write, {}).success
    assert (project / "data.txt").read_text() == "from the project\n"


def test_processors_are_all_one_or_a_half(engine: Engine) -> None:
    import os

    limits = {}
    for level in SecurityLevel:
        with create_runner(level) as runner:
            limits[level.value] = runner._runner.plan("1").policy.limits.cpus  # type: ignore[attr-defined]
    assert limits == {"permissive": os.cpu_count(), "standard": 1, "strict": 0.5}


def test_the_executor_of_the_document_is_not_built_yet() -> None:
    with pytest.raises(NotBuiltYet, match="LLMExecutor") as refusal:
        LLMExecutor(object())
    assert isinstance(refusal.value, BelljarError) and refusal.value.available

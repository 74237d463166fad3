"""Document 002: the operator's variables, languages by their own names, hardened containers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER
from container_engines import Engine as ContainerEngine

from belljar import Engine, Request
from belljar.config import load
from belljar.errors import ConfigError
from belljar.images import names, store

pytestmark = TOGETHER


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS", "300", "ceiling.timeout", 300),
        ("SANDBOX_DEFAULT_TIMEOUT_SECONDS", "30", "defaults.timeout", 30),
        ("SANDBOX_DEFAULT_MEMORY_LIMIT_MB", "256", "defaults.memory", 256 << 20),
        ("SANDBOX_DEFAULT_CPU_QUOTA_PERCENT", "50", "defaults.cpus", 0.5),
        ("SANDBOX_PID_LIMIT", "100", "defaults.processes", 100),
        ("SANDBOX_DEFAULT_USER_UID_GID", "1000:1000", "user", "1000:1000"),
        ("SANDBOX_DEFAULT_USER_UID_GID", "nobody", "user", "65534:65534"),
        ("DOCKER_SOCKET_PATH", "unix:///x.sock", "docker_host", "unix:///x.sock"),
        ("DOCKER_SOCKET_PATH", "/x.sock", "docker_host", "unix:///x.sock"),
    ],
)
def test_each_variable_is_a_setting(
    variable: str, text: str, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    settings = load()
    assert settings.to_dict()[key] == value
    assert settings.sources[key] == f"env {variable}"


def test_a_user_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_DEFAULT_USER_UID_GID", "no-such-user")
    with pytest.raises(ConfigError, match="no-such-user"):
        load()


@pytest.fixture
def operator(
    docker_engine: ContainerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """The document's settings and its kind of language file, on a real engine."""
    docker_engine.images("bash")
    for kind, image in (("python", "team/sandbox-python"), ("bash", "team/sandbox-bash")):
        docker_engine.api.json(
            "POST", f"/images/{names.image_name(kind)}/tag", {"repo": image, "tag": "1"}
        )
    (tmp_path / "python3.json").write_text(json.dumps({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}],
    }))  # fmt: skip
    version = ".".join(map(str, sys.version_info[:2]))
    file = tmp_path / "sandbox_languages.json"
    file.write_text(json.dumps({
        f"python{version}": {
            "image": "team/sandbox-python:1",
            "seccomp_profile": "python3.json",
            "default_memory_mb": 192,
            "allow_network": False,
        },
        "bash": {"image": "team/sandbox-bash:1", "seccomp_profile": "default"},
    }))  # fmt: skip
    for name, text in {
        "SANDBOX_LANGUAGE_CONFIG_FILE": str(file),
        "SANDBOX_TYPE": "docker",
        "SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS": "20",
        "SANDBOX_DEFAULT_TIMEOUT_SECONDS": "10",
        "SANDBOX_DEFAULT_CPU_QUOTA_PERCENT": "50",
        "SANDBOX_PID_LIMIT": "100",
        "SANDBOX_DEFAULT_USER_UID_GID": "1000:1000",
        "DOCKER_SOCKET_PATH": docker_engine.host,
    }.items():
        monkeypatch.setenv(name, text)
    with Engine() as engine:
        engine.python = f"python{version}"  # type: ignore[attr-defined]
        yield engine
    for image in ("team/sandbox-python:1", "team/sandbox-bash:1"):
        store.remove(docker_engine.api, image)


def test_a_language_of_the_file_runs_in_its_image_under_its_limits(operator: Any) -> None:
    code = "import os\ntry:\n    os.mkdir('x')\nexcept PermissionError:\n    print(os.getuid())"
    result = operator.run(Request(code=code, language=operator.python, stdin=b"in"))
    assert (result.status, result.stdout) == ("success", "1000\n"), result
    assert result.backend == "docker"
    plan = operator.plan(Request(code="1", language=operator.python))
    limits = plan.policy.limits
    assert plan.image == "team/sandbox-python:1"
    assert (limits.memory, limits.cpus, limits.processes) == (192 << 20, 0.5, 100)
    assert plan.policy.network.mode == "off"
    held = result.enforcement
    for words in ("read-only", "no capabilities", "no new privileges", "our seccomp profile"):
        assert words in held["filesystem"].by
    shell = operator.run(Request(code="read word; echo $word $UID", language="bash", stdin=b"in\n"))
    assert shell.stdout == "in 1000\n"


def test_a_timeout_above_the_global_maximum_is_the_maximum(operator: Any) -> None:
    plan = operator.plan(Request(code="1", language=operator.python), wishes={"timeout": 900})
    assert plan.policy.limits.timeout == 20
    assert any("lowered to the operator's ceiling 20" in text for text in plan.warnings)

"""Document 004: a sandbox manager that runs commands, and its configuration."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER

from belljar.api import build_request
from belljar.compat.manager import (
    FilesystemPolicy,
    NetworkPolicy,
    ResourceLimits,
    SandboxConfig,
    SandboxManager,
    SandboxNotEnabled,
)
from belljar.errors import (
    BackendUnavailable,
    ConfigError,
    NotBuiltYet,
    PolicyUnenforceable,
    RequestError,
)

pytestmark = TOGETHER

BACKENDS = ("docker", "firejail", "nsjail")


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A type whose backend is there; for nsjail also the jail, which takes over for it."""
    if request.param == "docker":
        monkeypatch.setenv("DOCKER_SOCKET_PATH", request.getfixturevalue("docker_engine").host)
        request.getfixturevalue("docker_engine").images("bash")
    elif request.param == "firejail":
        from belljar.backends.firejail import FirejailBackend

        found = FirejailBackend().probe()
        if not found.available:
            pytest.skip(f"{found.reason}; fix: {found.fix}")
    return str(request.param)


@pytest.fixture
def manager(kind: str) -> Iterator[SandboxManager]:
    made = SandboxManager(SandboxConfig(type=kind, enabled=True))
    yield made
    made.close()


def test_the_defaults_are_the_documents() -> None:
    config = SandboxManager().config
    assert (config.type, config.enabled, config.image, config.profile) == (
        "docker", False, None, None,
    )  # fmt: skip
    assert config.limits == ResourceLimits(
        cpu_percent=50, memory_mb=512, disk_mb=1024, timeout_seconds=60, max_processes=50
    )
    assert config.network == NetworkPolicy(enabled=False, allowed_hosts=(), blocked_ports=())
    assert config.filesystem.read_only == ("/",)
    assert config.filesystem.read_write == ("/tmp",)
    assert config.filesystem.hidden == ("/etc/passwd", "/etc/shadow")


def test_camel_case_is_read_as_well() -> None:
    given: dict[str, Any] = {
        "type": "firejail",
        "enabled": True,
        "limits": {"cpuPercent": 25, "memoryMB": 64, "diskMB": 32, "timeoutSeconds": 5,
                   "maxProcesses": 9},
        "network": {"enabled": True, "allowedHosts": ["a.test"], "blockedPorts": [25]},
        "filesystem": {"readOnly": ["/"], "readWrite": ["/tmp"], "hidden": [], "tempDir": "/x"},
    }  # fmt: skip
    assert SandboxConfig.from_dict(given) == SandboxConfig(
        type="firejail",
        enabled=True,
        limits=ResourceLimits(25, 64, 32, 5, 9),
        network=NetworkPolicy(True, ("a.test",), (25,)),
        filesystem=FilesystemPolicy(("/",), ("/tmp",), (), "/x"),
    )
    assert SandboxConfig.from_dict({"limits": {"memory_mb": 64}}).limits.memory_mb == 64
    with pytest.raises(RequestError, match=r"limits\.memoryGB"):
        SandboxConfig.from_dict({"limits": {"memoryGB": 1}})


def test_a_sandbox_that_is_off_runs_nothing() -> None:
    with pytest.raises(SandboxNotEnabled, match="Sandbox not enabled"):
        SandboxManager().execute("echo hi")
    assert not SandboxManager().is_enabled()


def test_an_unknown_type_is_named_and_vm_is_not_built_yet() -> None:
    with pytest.raises(RequestError, match="Unknown sandbox type: chroot"):
        SandboxManager(SandboxConfig(type="chroot"))
    with pytest.raises(NotBuiltYet, match="vm") as refusal:
        SandboxManager({"type": "vm"})
    assert refusal.value.available == BACKENDS


def test_a_command_runs_and_says_what_it_used(manager: SandboxManager) -> None:
    done = manager.execute("echo out; echo err >&2; echo x > /tmp/y; cat /tmp/y; exit 3")
    assert (done.success, done.exit_code) == (False, 3)
    assert (done.stdout, done.stderr) == ("out\nx\n", "err\n")
    usage = done.resource_usage
    assert usage.wall_time > 0 and usage.cpu_time is not None and usage.cpu_time >= 0
    assert usage.memory_peak is None or usage.memory_peak > 0
    assert manager.execute("true").success


def test_a_command_runs_for_asyncio_too(manager: SandboxManager) -> None:
    assert asyncio.run(manager.aexecute("echo hi")).stdout == "hi\n"


def test_cancelling_the_task_kills_the_command(manager: SandboxManager) -> None:
    """The command would sleep for a minute; the cancelled task ends when it is gone."""

    async def abandon() -> float:
        running = asyncio.create_task(manager.aexecute("sleep 60"))
        with pytest.raises(TimeoutError):  # the control arm: by itself it does not end
            await asyncio.wait_for(asyncio.shield(running), 3)
        began = time.monotonic()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        return time.monotonic() - began

    assert asyncio.run(abandon()) < 30


def test_the_limits_hold(manager: SandboxManager) -> None:
    done = manager.execute("sleep 60", timeout=1)
    assert (done.success, done.exit_code) == (False, 124) and "1 s" in done.stderr
    manager.config.limits.timeout_seconds = 1
    assert manager.execute("sleep 60").exit_code == 124
    manager.config.limits.timeout_seconds = 60
    manager.config.limits.memory_mb = 64
    big = "head -c 200000000 /dev/zero | tail"
    done = manager.execute(big)
    assert not done.success
    manager.config.limits.memory_mb = 512
    assert manager.execute(big).success  # the control arm


def test_the_host_is_hidden_and_the_network_is_off(manager: SandboxManager) -> None:
    own = Path("/etc/passwd").read_text()
    assert manager.execute("cat /etc/passwd /etc/shadow 2>/dev/null").stdout != own
    assert "root:" not in manager.execute("cat /etc/shadow 2>/dev/null").stdout
    assert not manager.execute("exec 3<>/dev/tcp/192.0.2.1/80").success
    assert not manager.execute("touch /usr/made").success


def test_a_command_starts_in_cwd_and_writes_there_only_if_it_is_listed(
    manager: SandboxManager, kind: str
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        place = Path(directory)
        place.chmod(0o777)
        (place / "given").write_text("from the host")
        (place / "given").chmod(0o644)
        shown = manager.execute("cat given; pwd", cwd=place)
        assert shown.stdout.startswith("from the host"), shown
        assert not manager.execute("touch made", cwd=place).success
        manager.config.filesystem.read_write = ("/tmp", str(place))
        assert manager.execute("touch made", cwd=place).success
        assert (place / "made").exists()


def test_a_temporary_directory_is_the_workspace(manager: SandboxManager, kind: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o777)
        if os.geteuid() == 0:
            os.chown(directory, 1000, 1000)
        manager.config.filesystem.temp_dir = directory
        done = manager.execute("pwd; echo kept > file")
        assert done.success, done
        assert done.stdout == (f"{directory}\n" if kind == "firejail" else "/workspace\n")
        assert manager.execute("cat file").stdout == "kept\n"
        assert Path(directory, "file").read_text() == "kept\n"


def test_hosts_that_are_listed_need_what_holds_them(manager: SandboxManager) -> None:
    manager.config.network = NetworkPolicy(enabled=True, allowed_hosts=("a.test",))
    with pytest.raises((PolicyUnenforceable, BackendUnavailable)) as refusal:
        manager.execute("true")
    if isinstance(refusal.value, PolicyUnenforceable):  # nsjail may not be installed
        assert "network" in refusal.value.fields


def test_without_an_engine_the_jail_takes_over_and_it_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DOCKER_SOCKET_PATH", f"unix://{tmp_path}/none.sock")
    manager = SandboxManager(SandboxConfig(enabled=True))
    with caplog.at_level(logging.WARNING, "belljar"):
        assert manager.execute("echo hi").stdout == "hi\n"
    manager.close()
    assert any("'docker' could not be used" in record.getMessage() for record in caplog.records)


# -- firejail's profiles


@pytest.fixture
def profiled(tmp_path: Path) -> Any:
    from belljar.backends.firejail import FirejailBackend

    found = FirejailBackend().probe()
    if not found.available:
        pytest.skip(f"{found.reason}; fix: {found.fix}")

    def make(text: str) -> SandboxManager:
        path = tmp_path / "mine.profile"
        path.write_text(text)
        return SandboxManager(SandboxConfig(type="firejail", enabled=True, profile=str(path)))

    return make


def test_a_profile_makes_the_sandbox_stricter(profiled: Any) -> None:
    plain = profiled("# nothing\n\ncaps.drop all\nnet   none\n")
    assert plain.execute("cat /etc/debian_version").stdout
    strict = profiled("blacklist /etc/debian_version\nnoexec /tmp\n")
    assert strict.execute("cat /etc/debian_version").stdout == ""
    code = "printf '#!/bin/sh\\necho ran' > /tmp/run; chmod +x /tmp/run; /tmp/run"
    assert plain.execute(code).stdout == "ran" + "\n"
    assert strict.execute(code).stdout == ""
    report = strict._runner.engine.plan(
        build_request(command=["true"]), backend="firejail"
    ).enforcement
    assert "firejail_profile" in report["filesystem"].by


@pytest.mark.parametrize(
    "line",
    [
        "include /etc/firejail/default.profile", "read-write /usr", "whitelist /home",
        "noblacklist /etc/shadow", "nowhitelist /x", "ignore nonewprivs", "caps.keep sys_admin",
        "net eth0", "keep-var-tmp", "writable-etc", "allow-debuggers", "bind /a,/b", "tmpfs /usr",
        "env LD_PRELOAD=/x", "blacklist ../etc", "blacklist /a/../b", "blacklist /a /b",
        "private-bin sh", "seccomp.keep mount", "nonewprivs no", "blacklist", "warn", "read-only ~",
        'blacklist "/x"', "noexec /a;b", "?HAS_NET: net none", "join 1", "name x\ninclude /y",
    ],
)  # fmt: skip
def test_a_profile_that_could_loosen_the_sandbox_is_refused(profiled: Any, line: str) -> None:
    manager = profiled(f"nonewprivs\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as refusal:
        manager.execute("true")
    assert refusal.value.field == "firejail_profile"


def test_a_profile_is_for_firejail_and_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="profile"):
        SandboxManager(SandboxConfig(type="docker", enabled=True, profile="x"))
    lost = SandboxConfig(type="firejail", enabled=True, profile=str(tmp_path / "lost"))
    with pytest.raises(ConfigError, match="cannot read"):
        SandboxManager(lost).execute("true")

"""The engines that other tests stand on: they start, work, and leave nothing behind."""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import container_engines
import pytest
from container_engines import TOGETHER, DockerEngine, Engine, PodmanEngine, PrivateEngine

from belljar.images import archive, store
from belljar.images.libraries import add_libraries
from belljar.images.tree import Tree

pytestmark = TOGETHER
SMALL = "belljar-test/small:1"


def firewall() -> list[str]:
    """The rules, without the times and the counts of packets among them."""
    told = subprocess.run(["iptables-save"], capture_output=True, text=True).stdout
    rules = [line.partition(" [")[0] for line in told.splitlines() if not line.startswith("#")]
    return sorted(rules)


def outside(engine: PrivateEngine) -> dict[str, object]:
    """What an engine might leave on a host: mounts, interfaces, routes, rules, settings, groups."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {
        "mounts": [line for line in mounts if str(engine.directory) in line],
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "routes": Path("/proc/net/route").read_text(),
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "rules": firewall(),
        "groups": sorted(
            str(path)
            for pattern in (engine.cgroup, f"*/{engine.cgroup}", "*/docker", "*/libpod_parent")
            for path in Path("/sys/fs/cgroup").glob(pattern)
        ),
        "run": sorted(name for name in os.listdir("/run") if "docker" in name or "cont" in name),
        "etc": os.path.exists("/etc/docker/key.json"),
        "var": sorted(name for name in os.listdir("/var/lib") if "containers" in name),
    }


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short name: an engine has sockets below it."""
    with tempfile.TemporaryDirectory(prefix="bj-") as made:
        yield Path(made) / "e"


def load_small_image(engine: Engine) -> None:
    """A shell and nothing else: these tests are about the engine."""
    tree = Tree()
    shell = os.path.realpath("/bin/bash")
    tree.copy(shell, "bash")
    tree.link("lib", "usr/lib")
    tree.link("lib64", "usr/lib64")
    add_libraries(tree, [shell])
    layer = archive.pack(tree, io.BytesIO())
    architecture = engine.api.json("GET", "/version")["Arch"]
    config = archive.image_config(
        [layer], architecture=architecture, created="2026-01-01T00:00:00Z", labels={}
    )
    store.load(engine.api, archive.docker_archive(SMALL, config, [layer]))


def start(engine: Engine, program: str) -> str:
    """A running container, by its id."""
    body = {
        "Image": SMALL,
        "Cmd": ["/bash", "-c", program],
        "OpenStdin": True,
        "HostConfig": {"NetworkMode": "none"},
    }
    made = str(engine.api.json("POST", "/containers/create", body=body)["Id"])
    engine.api.json("POST", f"/containers/{made}/start")
    return made


@pytest.mark.parametrize("kind", [DockerEngine, PodmanEngine])
def test_an_engine_runs_containers_and_leaves_nothing(
    kind: type[PrivateEngine], directory: Path
) -> None:
    if reason := container_engines.why_not(kind.name):
        pytest.skip(reason)
    private = kind(directory)
    before = outside(private)
    with private as engine:
        load_small_image(engine)
        ended = engine.api.json("POST", f"/containers/{start(engine, 'exit 7')}/wait")
        assert ended["StatusCode"] == 7
        start(engine, "read forever")  # still running when the engine is stopped
        assert container_engines.processes_naming(directory)
    assert container_engines.processes_naming(directory) == []
    assert not directory.exists()
    assert outside(private) == before


def test_an_engine_that_was_killed_leaves_nothing_either(directory: Path) -> None:
    if reason := container_engines.why_not("docker"):
        pytest.skip(reason)
    private = DockerEngine(directory)
    before = outside(private)
    with private as engine:
        load_small_image(engine)
        inside = engine.api.json("GET", f"/containers/{start(engine, 'read forever')}/json")
        assert container_engines.is_alive(inside["State"]["Pid"])
        assert engine.process is not None
        engine.process.kill()
        engine.process.wait()
    assert container_engines.processes_naming(directory) == []
    assert not container_engines.is_alive(inside["State"]["Pid"])
    assert outside(private) == before


def test_a_missing_program_is_a_reason_and_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TEST_DOCKER_HOST", raising=False)
    assert "dockerd is not installed" in container_engines.why_not("docker")
    with pytest.raises(container_engines.CannotHave, match="not installed"):
        DockerEngine(tmp_path / "engine").__enter__()

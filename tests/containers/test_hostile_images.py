"""Images made to lead an engine astray: links where it mounts, writes or looks (ra-004).

Whatever an engine makes of one, a run ends well or with a typed error, and the host's files, to
which the links point, stay as they are and stay unread.
"""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import container_backends
import pytest
from container_engines import Engine as ContainerEngine

from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BelljarError
from belljar.images import archive, host, store
from belljar.images.tree import Tree
from belljar.types import Request, Status

pytestmark = pytest.mark.slow

CANARY = "what no image may have"
# Path in the image -> what of the host it points to.
LINKS = {
    "dev": {"dev": "directory"},
    "dev-null": {"dev/null": "marker"},
    "terminals": {"dev/console": "marker", "dev/pts": "directory", "dev/ptmx": "marker"},
    "proc-and-sys": {"proc": "directory", "sys": "directory"},
    "passwd": {"etc/passwd": "canary", "etc/group": "canary"},
    "mount-targets": {"sandbox": "directory", "tmp": "directory"},
}


@pytest.fixture(scope="module")
def base() -> archive.PackedLayer:
    tree = Tree(dict(host.base().tree.entries))  # that one is everybody's
    for path in {name for links in LINKS.values() for name in links} & set(tree.entries):
        for inside in [
            each for each in tree.entries if each == path or each.startswith(f"{path}/")
        ]:
            del tree.entries[inside]
    return archive.pack(tree, io.BytesIO())


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[dict[str, str]]:
    directory = tmp_path / "directory"
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "canary").write_text(CANARY)
    (directory / "canary").chmod(0o666)
    yield {
        "directory": str(directory),
        "canary": str(directory / "canary"),
        "marker": str(tmp_path / "marker"),
    }
    assert os.listdir(directory) == ["canary"]
    assert (directory / "canary").read_text() == CANARY
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("backend", ["docker", "gvisor"])
@pytest.mark.parametrize("kind", LINKS)
def test_an_image_cannot_lead_the_engine_to_the_host(
    kind: str,
    backend: str,
    base: archive.PackedLayer,
    targets: dict[str, str],
    docker_engine: ContainerEngine,
) -> None:
    if reason := container_backends.why_not(backend):
        pytest.skip(reason)
    evil = Tree()
    for path, what in LINKS[kind].items():
        evil.link(path, targets[what])
    layers = [base, archive.pack(evil, io.BytesIO())]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = archive.image_config(
        layers, architecture=machine, created="2026-01-01T00:00:00Z", labels={}
    )
    name = f"belljar-tests/hostile-{kind}:1"
    store.load(docker_engine.api, archive.docker_archive(name, config, layers))
    code = """
import os
for path in ("/etc/passwd", "/dev/canary", "/proc/canary", "/sys/canary", "/sandbox/canary"):
    try:
        print(path, open(path).read())
    except OSError:
        pass
for path in ("/dev/null", "/dev/console", "/tmp/marker", "/sandbox/marker"):
    try:
        open(path, "w").write("by the guest")
    except OSError:
        pass
print("came to its end")
"""
    made = container_backends.KINDS[backend](docker_host=docker_engine.host, pool=0)
    try:
        with Engine(Settings(), backends={backend: made}) as engine:
            try:
                result = engine.run(
                    Request(code=code, image=name),
                    level="strict",
                    wishes={"modules": "any"},
                    backend=backend,
                )
            except BelljarError as error:
                assert error.message
            else:
                assert result.status in (Status.SUCCESS, Status.ERROR), result
                assert CANARY not in result.stdout + result.stderr
                if result.success:
                    assert result.stdout.endswith("came to its end\n")
    finally:
        store.remove(docker_engine.api, name)
    assert docker_engine.api.json("GET", "/containers/json", {"all": "1"}) == []

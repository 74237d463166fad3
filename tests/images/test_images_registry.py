"""Images from a registry: a real one, on this machine's loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from container_engines import TOGETHER, Engine

from belljar import cli
from belljar.errors import BelljarError
from belljar.images import build, names, store

pytestmark = TOGETHER
DEADLINE = 60


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`127.0.0.1:PORT`, where an empty registry listens; engines need no TLS for loopback."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed: scripts/test installs it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tmp_path = tmp_path_factory.mktemp("registry")
    config = tmp_path / "registry.yml"
    config.write_text(
        "version: 0.1\n"
        f"storage: {{filesystem: {{rootdirectory: {tmp_path}/data}}}}\n"
        f"http: {{addr: '{address}'}}\n"
    )
    log = tmp_path / "registry.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "serve", str(config)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        host, _, port = address.partition(":")
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)  # it has no way to tell us
        yield address
    finally:
        process.terminate()
        process.wait(DEADLINE)


@pytest.fixture(scope="module")
def pushed(docker_engine: Engine, registry: str) -> str:
    """The name of an image in the registry."""
    api, repository = docker_engine.api, f"{registry}/team/base"
    ours = names.image_name("python")
    api.json("POST", f"/images/{ours}/tag", {"repo": repository, "tag": "1.2.3"})
    headers = {"X-Registry-Auth": "e30="}
    told = api.stream("POST", f"/images/{repository}/push", {"tag": "1.2.3"}, b"", headers)
    store.watch(told, lambda line: None)
    return f"{repository}:1.2.3"


@pytest.fixture
def published(docker_engine: Engine, pushed: str) -> Iterator[str]:
    """The same, and only the registry has it."""
    repository = pushed.removesuffix(":1.2.3")
    forget(docker_engine, repository)
    yield pushed
    forget(docker_engine, repository)


def forget(engine: Engine, repository: str) -> None:
    """Remove every name that the engine has for the repository's images; our own image stays."""
    for image in engine.api.json("GET", "/images/json"):
        for name in [*(image["RepoTags"] or ()), *(image["RepoDigests"] or ())]:
            if name.startswith(repository):
                store.remove(engine.api, name)


def test_a_missing_base_is_pulled_pinned_and_recorded(
    docker_engine: Engine,
    published: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    assert not store.exists(docker_engine.api, published)
    words = ["images", "build", "bash", "--from-dockerfile", "--base", published]
    assert cli.main(words) == 0
    assert f"pulling {published}" in capfd.readouterr().err
    made = store.find(docker_engine.api, names.image_name("bash"))
    assert made is not None
    assert made.source == "dockerfile"
    assert made.base.startswith(published.removesuffix(":1.2.3") + "@sha256:")
    assert store.remove(docker_engine.api, made.name)


def test_nothing_is_pulled_unless_it_is_allowed(docker_engine: Engine, published: str) -> None:
    bases = {"BASE": published}
    with pytest.raises(BelljarError, match="belljar images pull"):
        build.from_dockerfile(docker_engine.api, "bash", lambda line: None, bases=bases, pull=False)
    assert not store.exists(docker_engine.api, published)


def test_pulling_tells_its_progress(docker_engine: Engine, published: str) -> None:
    said: list[str] = []
    store.pull(docker_engine.api, published, said.append)
    assert store.exists(docker_engine.api, published)
    assert said[0] == f"pulling {published}"
    assert any("Digest: sha256:" in line for line in said)


def test_the_command_pulls_an_image_and_a_run_never_does(
    docker_engine: Engine,
    published: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    program = ["run", "--backend", "docker", "--image", published, "-c", "print(6 * 7)"]
    assert cli.main(program) == 127
    assert f"belljar images pull {published}" in capfd.readouterr().err
    assert cli.main(["images", "pull", published]) == 0
    told = capfd.readouterr()
    assert told.out == f"pulled {published}\n"
    assert f"pulling {published}" in told.err and "Digest: sha256:" in told.err
    assert cli.main(program) == 0
    assert capfd.readouterr().out == "42\n"


def test_what_the_registry_lacks_is_a_clear_error(docker_engine: Engine, registry: str) -> None:
    with pytest.raises(BelljarError, match=r"not found|manifest unknown"):
        store.pull(docker_engine.api, f"{registry}/no/such:1", lambda line: None)

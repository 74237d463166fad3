"""An engine that is not there, goes away or has no room: typed errors that say what to do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_engines import TOGETHER, CannotHave, DockerEngine, kill_those_naming
from container_engines import Engine as ContainerEngine
from test_docker import Bench

from belljar import docker_api
from belljar.backends.docker import DockerBackend
from belljar.backends.gvisor import GvisorBackend
from belljar.errors import BackendFailed, BackendUnavailable, BelljarError
from belljar.events import Event, Output

pytestmark = TOGETHER


def unavailable(host: str) -> tuple[str, str]:
    found = DockerBackend(docker_host=host).probe()
    assert not found.available
    return found.reason, found.fix or ""


def test_no_socket_is_named_with_its_fix(tmp_path: Path) -> None:
    reason, fix = unavailable(f"unix://{tmp_path}/none.sock")
    assert "no socket" in reason
    assert "apt-get install docker.io" in fix


def test_a_stale_socket_is_told_from_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    reason, fix = unavailable(f"unix://{path}")
    assert "not running" in reason
    assert "start docker" in fix


def test_a_socket_of_others_is_a_question_of_permission() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to be somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = f"{folder}/closed.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            os.chmod(path, 0o600)
            for parent in Path(folder).parents:
                if not os.stat(parent).st_mode & 0o001:
                    pytest.skip(f"{parent} is closed to others already")
            os.seteuid(65534)
            try:
                reason, fix = unavailable(f"unix://{path}")
            finally:
                os.seteuid(0)
    assert "permission" in reason
    assert "usermod" in fix


def test_somebody_who_is_no_engine_is_not_taken_for_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mute.sock"))
        listener.listen()
        answering = os.fork()
        if answering == 0:
            peer, _ = listener.accept()
            peer.recv(4096)
            peer.sendall(b"220 smtp ready\r\n")
            os._exit(0)
        reason, _ = unavailable(f"unix://{tmp_path}/mute.sock")
        os.waitpid(answering, 0)
    assert "went away" in reason or "does not work" in reason


def test_places_are_looked_at_when_nobody_says_where(
    docker_engine: ContainerEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(docker_api, "places", lambda: [str(tmp_path / "a"), docker_engine.api.path])
    assert docker_api.connect().path == docker_engine.api.path
    monkeypatch.setattr(docker_api, "places", lambda: [str(tmp_path / "a")])
    with pytest.raises(BackendUnavailable, match="no Docker or Podman socket"):
        docker_api.connect()


def test_gvisor_without_runsc_says_so(docker_engine: ContainerEngine) -> None:
    found = GvisorBackend(docker_host=docker_engine.host, runtime="not-there").probe()
    assert not found.available
    assert "not-there" in found.reason
    assert "runsc" in (found.fix or "")


@pytest.fixture
def fragile() -> Iterator[DockerEngine]:
    """An engine of the test's own, whose data is in a small file system."""
    if os.geteuid() != 0:
        pytest.skip("starting a container engine of its own needs root")
    parent = Path(tempfile.mkdtemp(prefix="bj-"))
    data = parent / "e" / "data"
    data.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600m", "belljar-test", str(data)], capture_output=True
    )
    try:
        if mounted.returncode:
            pytest.skip("needs a mount")
        yield DockerEngine(parent / "e")
    finally:
        subprocess.run(["umount", str(data)], check=False)
        shutil.rmtree(parent)


@pytest.mark.slow
def test_an_engine_that_fills_up_dies_and_comes_back(fragile: DockerEngine) -> None:
    try:
        session = fragile.__enter__()
    except CannotHave as lacking:
        pytest.skip(str(lacking))
    try:
        session.images("python")
        bench = Bench(session)
        assert bench.run("1 + 1").value == 2
        no_room(bench, fragile.directory / "data" / "filler")
        dies_in_mid_run(bench, session, fragile)
        bench.engine.close()
    finally:
        kill_those_naming(fragile.directory)
        subprocess.run(["umount", "-l", str(fragile.directory / "data")], check=False)
        fragile.__exit__()


def no_room(bench: Bench, filler: Path) -> None:
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError:
            pass
    with pytest.raises(BackendFailed) as full:
        bench.run("1 + 1")
    assert "no space left" in full.value.message
    assert "docker system df" in str(full.value.fix)
    assert full.value.retryable
    filler.unlink()
    assert bench.run("1 + 1").value == 2


def dies_in_mid_run(bench: Bench, session: ContainerEngine, fragile: DockerEngine) -> None:
    process = session.process
    assert process is not None

    def kill(event: Event) -> None:
        if isinstance(event, Output):
            process.kill()
            process.wait()

    with pytest.raises(BackendFailed) as gone:
        bench.run("print('so far', flush=True)\nimport time; time.sleep(60)", emit=kill)
    assert "went away in mid-run" in gone.value.message
    assert gone.value.retryable
    assert gone.value.partial is not None
    assert gone.value.partial.stdout == "so far\n"
    with pytest.raises(BelljarError):  # and as long as it is away, that is said
        bench.run("1")
    # Its helper lives in the old one's namespace; and nobody may have buried it yet.
    kill_those_naming(fragile.directory)
    (fragile.directory / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)
    with (fragile.directory / "log").open("ab") as log:
        session.process = subprocess.Popen(
            process.args, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    fragile._wait()
    assert bench.run("1 + 1").value == 2
    assert session.api.json("GET", "/containers/json", {"all": "1"}) == []

"""Images in real engines: built from this host and from Dockerfiles, run, listed, removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from container_engines import TOGETHER, Engine

from belljar import __version__, cli
from belljar.errors import BelljarError
from belljar.images import build, names, store

pytestmark = TOGETHER
ENGINES = ["docker_engine", "podman_engine"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def command(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    return engine


def output_of(engine: Engine, image: str, *argv: str, runtime: str | None = None) -> str:
    """What a container without network and with a read-only root prints."""
    config = {"Type": "json-file"} if engine.host.endswith("docker/api.sock") else {}
    body: dict[str, Any] = {
        "Image": image, "Cmd": list(argv), "User": "1900000001:1900000001", "Tty": True,
        "HostConfig": {"NetworkMode": "none", "ReadonlyRootfs": True, "LogConfig": config,
                       "CapDrop": ["ALL"], **({"Runtime": runtime} if runtime else {})},
    }  # fmt: skip
    api = engine.api
    made = api.json("POST", "/containers/create", body=body)["Id"]
    try:
        api.json("POST", f"/containers/{made}/start")
        api.json("POST", f"/containers/{made}/wait")
        told = api.json("GET", f"/containers/{made}/logs", {"stdout": "1", "stderr": "1"})
        return told if isinstance(told, str) else json.dumps(told)
    finally:
        api.json("DELETE", f"/containers/{made}", {"force": "1"})


def lines() -> tuple[list[str], store.Say]:
    said: list[str] = []
    return said, said.append


def test_python_works_in_an_image_made_of_this_host(engine: Engine) -> None:
    code = "import ctypes, hashlib, json, sqlite3, ssl, zoneinfo, sys; print('prefix', sys.prefix)"
    assert "prefix /usr" in output_of(
        engine, names.image_name("python"), "python3", "-I", "-c", code
    )


def test_the_standard_library_comes_compiled(engine: Engine) -> None:
    code = "import json; print(open(json.__cached__, 'rb').read(8)[4:])"
    told = output_of(engine, names.image_name("python"), "python3", "-I", "-c", code)
    assert r"b'\x01\x00\x00\x00'" in told  # an unchecked hash, PEP 552


def test_the_image_tells_where_it_comes_from(engine: Engine) -> None:
    image = store.find(engine.api, names.image_name("python"))
    assert image is not None
    assert (image.source, image.version, image.kind) == ("host", __version__, "python")
    code = (
        "import hashlib, json; record = json.load(open('/usr/share/belljar/image.json'))\n"
        "wrong = [p for p, h in record['files'].items() if h.startswith('sha256:') and\n"
        "         h[7:] != hashlib.sha256(open('/' + p, 'rb').read()).hexdigest()]\n"
        "print(json.dumps([record['content'], record['belljar'], len(record['files']), wrong]))"
    )
    told = json.loads(output_of(engine, names.image_name("python"), "python3", "-I", "-c", code))
    assert told[:2] == [image.content, __version__]
    assert told[2] > 500
    # The engine puts files of its own over these.
    assert set(told[3]) <= {
        "etc/hosts",
        "etc/hostname",
        "etc/resolv.conf",
        "etc/passwd",
        "etc/group",
    }


def test_building_again_changes_nothing(engine: Engine) -> None:
    name = names.image_name("python")
    before = store.find(engine.api, name)
    said, say = lines()
    assert list(build.from_host(engine.api, ["python"], say)) == [before]
    assert f"{name} is there already, with the same content" in said


def test_images_share_their_base(engine: Engine) -> None:
    made = list(build.from_host(engine.api, ["python", "bash"], lambda line: None))
    assert [image.kind for image in made] == ["python", "bash"]
    layers = [
        engine.api.json("GET", f"/images/{image.name}/json")["RootFS"]["Layers"] for image in made
    ]
    assert layers[0][0] == layers[1][0]
    assert "5" in output_of(engine, names.image_name("bash"), "bash", "-c", "seq 9 | sed -n 5p")


def test_node_works_in_its_image(docker_engine: Engine) -> None:
    docker_engine.images("node")
    told = output_of(
        docker_engine, names.image_name("node"), "node", "-e", "console.log(String(6*7))"
    )
    assert told.strip() == "42"


def test_an_image_runs_under_gvisor(docker_engine: Engine) -> None:
    if "runsc" not in docker_engine.api.json("GET", "/info")["Runtimes"]:
        pytest.skip("runsc is not installed: scripts/test installs it")
    code = "print(open('/proc/version').read())"
    argv = ("python3", "-I", "-c", code)
    assert "4.4.0" in output_of(docker_engine, names.image_name("python"), *argv, runtime="runsc")
    assert "4.4.0" not in output_of(docker_engine, names.image_name("python"), *argv)


@pytest.fixture
def base(engine: Engine) -> Iterator[str]:
    """An image to build on, as a registry would have given it."""
    name = "belljar-test/base:1"
    engine.api.json("POST", f"/images/{names.image_name('python')}/tag",
                    {"repo": "belljar-test/base", "tag": "1"})  # fmt: skip
    yield name
    store.remove(engine.api, name)


def test_a_dockerfile_builds_on_a_recorded_base(engine: Engine, base: str) -> None:
    said, say = lines()
    engine.images("bash")
    made = build.from_dockerfile(engine.api, "bash", say, bases={"BASE": base}, pull=False)
    assert made.source == "dockerfile"
    assert "sha256:" in made.base
    assert any("building belljar/bash" in line for line in said)
    record = output_of(engine, made.name, "cat", names.RECORD)
    assert json.loads(record)["base"] == made.base
    # The host's own build takes the name back and leaves no nameless image behind.
    assert [image.source for image in build.from_host(engine.api, ["bash"], say)] == ["host"]
    ours = [image.name for image in store.images(engine.api)]
    assert "<none>" not in ours


def test_a_base_that_is_nowhere_is_a_clear_error(engine: Engine) -> None:
    bases = {"BASE": "localhost:1/no/such:1"}
    with pytest.raises(BelljarError, match="no/such"):
        build.from_dockerfile(engine.api, "bash", lambda line: None, bases=bases, pull=False)
    # With pulling allowed it is the engine that tells why it cannot.
    with pytest.raises(BelljarError):
        build.from_dockerfile(engine.api, "bash", lambda line: None, bases=bases)


def test_the_command_lists_builds_and_removes(
    command: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    name = names.image_name("bash")
    assert cli.main(["images", "build", "bash"]) == 0
    told = capfd.readouterr()
    assert name in told.out
    assert "collecting" in told.err
    assert cli.main(["images"]) == 0
    listed = capfd.readouterr().out
    assert name in listed and "host:" in listed and "python 3." in listed
    assert cli.main(["images", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["images"]
    assert name in [image["name"] for image in found]
    assert cli.main(["images", "remove", "bash"]) == 0
    assert capfd.readouterr().out == f"removed {name}\n"
    assert cli.main(["images", "remove", "bash"]) == 127
    assert "belljar images build bash" in capfd.readouterr().err


def test_the_command_removes_no_image_of_others(
    command: Engine, base: str, capfd: pytest.CaptureFixture[str]
) -> None:
    other = "belljar-test/none-of-ours:1"
    assert cli.main(["images", "remove", other]) == 127
    assert other in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["build", "fortran"], ["fetch"], ["list", "python"], ["remove"], ["build", "--base", "x"],
     ["pull"], ["pull", "python"], ["pull", names.image_name("data")]],
)  # fmt: skip
def test_a_wrong_command_line_is_refused(
    words: list[str], docker_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    assert cli.main(["images", *words]) == 125


def test_no_engine_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    assert cli.main(["images"]) == 127
    assert "fix:" in capfd.readouterr().err

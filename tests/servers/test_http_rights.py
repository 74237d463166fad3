"""A remote caller has the rights that the operator gives, never those of the server's process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, serving

from belljar.backends.base import Plan, best_effort
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BelljarError, PolicyUnenforceable
from belljar.policy import Ceiling, Isolation
from belljar.servers.http import wire
from belljar.servers.remote import NotAllowed, Rights, bounded
from belljar.testing import FakeBackend
from belljar.types import Status


def plan(options: dict[str, Any], rights: Rights | None = None, **configured: Any) -> Plan:
    """What a server with these settings would do with a request."""
    backends = {"fake": FakeBackend()}
    backends["fake"].isolation = Isolation.VM
    engine = Engine(bounded(Settings(**configured)), backends=backends)
    job = wire.parse(json.dumps({"code": "1", **options}).encode(), engine, rights or Rights())
    return engine.plan(job.request, level=job.level, wishes=job.wishes, backend=job.backend)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "host" / "secret.txt"
    path.parent.mkdir()
    path.write_text("of the host")
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"mounts": ["{dir}:here"]},
        {"mounts": ["{dir}:here:rw"]},
        {"mounts": ["/no/such/directory:here"]},
        {"filesystem": {"read_only": ["{dir}"]}},
        {"filesystem": {"read_write": ["{dir}"]}},
        {"filesystem": {}},
        {"policy": {"filesystem": {"read_only": ["{dir}"]}}},
        {"python": "/usr/bin/python3"},
        {"python": "python3"},
        {"image": "debian"},
        {"network": "any"},
        {"network": ["example.com"]},
        {"policy": {"network": {"mode": "any"}}},
    ],
)
def test_by_default_nothing_of_the_host_is_reachable(
    server: Server, secret: Path, options: dict[str, Any]
) -> None:
    text = json.dumps({"code": "1", **options}).replace("{dir}", str(secret.parent))
    with server.client() as client:
        answer = client.post("/v1/run", content=text, headers={"Content-Type": "application/json"})
    told = answer.json()
    assert (answer.status_code, told["code"]) == (403, "not_allowed"), told
    assert told["field"].rpartition(".")[2] in options or "policy" in options
    assert "does not exist" not in told["detail"]


def test_a_refusal_does_not_tell_whether_a_path_exists(server: Server, secret: Path) -> None:
    details = set()
    for path in (str(secret.parent), "/no/such/directory"):
        with server.client() as client:
            answer = client.post("/v1/run", json={"code": "1", "mounts": [f"{path}:x"]})
        details.add(answer.json()["detail"].replace(path, ""))
    assert len(details) == 1


@pytest.fixture(scope="module")
def generous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("generous")
    words = ("--allow-mounts", "ro", "--allow-network", "any", "--set", "ceiling.timeout=5s")
    with serving(directory, *words) as server:
        yield server


def test_what_the_operator_allows_is_reachable(generous: Server, secret: Path) -> None:
    """The control arm: the same requests on a server that was told to allow them."""
    result = generous.run("open('here/secret.txt').read()", mounts=[f"{secret.parent}:here"])
    assert result["value"] == "of the host"
    assert generous.run("1", network="any")["status"] == "success"


def test_allowed_mounts_are_no_more_than_was_allowed(generous: Server, secret: Path) -> None:
    with generous.client() as client:
        for mode in ("rw", "rw,unprotected"):
            body = {"code": "1", "mounts": [f"{secret.parent}:here:{mode}"]}
            assert client.post("/v1/run", json=body).status_code == 403


def test_a_number_past_the_ceiling_is_lowered_with_a_warning(generous: Server) -> None:
    result = generous.run("1", timeout=3600)
    assert any("lowered to the operator's ceiling 5" in each for each in result["warnings"])


@pytest.mark.parametrize("options", [{"backend": "inprocess"}, {}])
def test_no_request_reaches_the_servers_own_process(
    server: Server, options: dict[str, Any]
) -> None:
    body = {"code": "import os; os.getpid()", "level": "permissive", "modules": "any", **options}
    with server.client() as client:
        answer = client.post("/v1/run", json=body)
    if "backend" in options:
        assert answer.status_code == 422
        assert "min_isolation" in answer.json()["fields"]
    else:
        assert answer.json()["value"] != server.process.pid
        assert answer.json()["isolation"] != "none"


def test_the_operators_own_fallback_does_not_open_the_servers_process() -> None:
    engine = Engine(bounded(Settings(backend="inprocess", fallback_allow=("inprocess",))))
    job = wire.parse(b'{"code": "1", "level": "permissive"}', engine, Rights())
    with engine, pytest.raises(BelljarError):
        engine.run(job.request, level=job.level, wishes=job.wishes, backend=job.backend)


@pytest.mark.parametrize(
    ("configured", "asked", "floor"),
    [
        ({}, {}, "process"),
        ({}, {"level": "permissive"}, "process"),
        ({}, {"level": "strict"}, "jail"),
        ({"level": "strict"}, {}, "jail"),
        ({"level": "strict"}, {"level": "standard"}, "jail"),
        ({"level": "strict"}, {"level": "permissive"}, "jail"),
        ({"level": "strict"}, {"level": "permissive", "min_isolation": "process"}, "jail"),
        ({"level": "strict"}, {"level": "permissive", "min_isolation": "vm"}, "vm"),
        ({"level": "strict"}, {"policy": {"min_isolation": "none"}, "level": "standard"}, "jail"),
        ({"level": "permissive"}, {}, "process"),
        ({"defaults": {"min_isolation": "gvisor"}}, {"level": "permissive"}, "gvisor"),
        ({"ceiling": Ceiling(min_isolation=Isolation.JAIL)}, {"level": "permissive"}, "jail"),
    ],
)
def test_the_floor_is_never_below_the_operators(
    configured: dict[str, Any], asked: dict[str, Any], floor: str
) -> None:
    assert plan(asked, **configured).policy.min_isolation.value == floor


def test_limits_without_a_ceiling_have_one_on_a_server() -> None:
    asked = dict.fromkeys(("memory", "disk", "output", "displays", "processes"), 2**50)
    asked["value"] = 2**30
    limits = plan({**asked, "open_files": 2**40, "cpus": 2**40}).policy.limits
    assert limits.memory <= 4 << 30
    assert limits.output <= 64 << 20
    assert max(limits.displays, limits.value) <= 64 << 20
    assert limits.processes <= 1024
    assert limits.open_files <= 4096
    assert limits.cpus <= 1024
    assert limits.timeout <= 300


def test_an_operators_own_ceiling_and_defaults_stand() -> None:
    own = Ceiling(memory=8 << 30, output=1 << 30)
    limits = plan({"memory": "16G", "output": "2G"}, ceiling=own).policy.limits
    assert (limits.memory, limits.output) == (8 << 30, 1 << 30)
    assert plan({}, defaults={"memory": "6G"}).policy.limits.memory == 6 << 30


def test_what_the_operator_gives_every_program_stays_given() -> None:
    found = plan({}, defaults={"network": "any", "filesystem": {"read_only": ["/srv"]}}).policy
    assert found.network.mode == "any"
    assert found.filesystem.read_only == ("/srv",)


def test_rights_do_not_lift_the_ceiling() -> None:
    ceiling = Ceiling(network="off", mounts="none")
    rights = Rights(network="any", mounts="rw", images=True)
    for options in ({"network": "any"}, {"mounts": ["/tmp:x"]}):
        with pytest.raises(BelljarError, match="past the operator's ceiling"):
            plan(options, rights, ceiling=ceiling)


def test_an_interpreter_must_be_on_the_operators_list() -> None:
    with pytest.raises(NotAllowed, match="listed none"):
        plan({"python": "/usr/bin/python3"})
    listed = Ceiling(interpreters=("/usr/bin/python3",))
    assert plan({"python": "/usr/bin/python3"}, ceiling=listed).request.python


def test_a_backend_off_this_host_must_be_configured() -> None:
    class Elsewhere(FakeBackend):
        off_host = True

    def parse(**configured: Any) -> object:
        engine = Engine(bounded(Settings(**configured)), backends={"far": Elsewhere()})
        return wire.parse(b'{"code": "1", "backend": "far"}', engine, Rights())

    with pytest.raises(NotAllowed, match="another host"):
        parse()
    assert parse(backend="far")
    assert parse(fallback_allow=("far",))


def test_a_backend_that_leaves_the_hosts_files_open_is_refused_unless_allowed() -> None:
    """As `subprocess` on a kernel without Landlock, where a plain run of the library is allowed."""
    held = {"filesystem": best_effort("file permissions: what this user can read")}

    def result(settings: Settings) -> Status:
        fake = FakeBackend(isolation=Isolation.PROCESS, enforcement=held)
        with Engine(settings, backends={"fake": fake}) as engine:
            job = wire.parse(b'{"code": "1", "backend": "fake"}', engine, Rights())
            return engine.run(job.request, wishes=job.wishes, backend=job.backend).status

    with pytest.raises(PolicyUnenforceable) as refusal:
        result(bounded(Settings()))
    assert refusal.value.fields == ("filesystem",)
    assert result(bounded(Settings(), Rights(host_files=True))) is Status.SUCCESS
    assert result(Settings()) is Status.SUCCESS  # the control arm

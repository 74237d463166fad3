"""The pure half of the container backends: profiles, plans, packets, owners. No engine needed."""

from __future__ import annotations

import json
import marshal
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.backends import agent_link, docker_plan, docker_report
from belljar.backends.docker import DockerBackend
from belljar.backends.docker_container import DEADLINE, OWNER, amiss, orphaned, owner
from belljar.backends.docker_facts import EngineFacts, read
from belljar.backends.docker_seccomp import everything_but, profile
from belljar.backends.gvisor import GvisorBackend
from belljar.docker_api import socket_path
from belljar.errors import BackendUnavailable
from belljar.guest import agent, protocol
from belljar.linux import seccomp, seccomp_jail
from belljar.policy import Policy, level_policy
from belljar.types import Mount, Request

FACTS = EngineFacts(
    socket="/run/engine.sock",
    name="Docker 99",
    podman=False,
    rootless=False,
    remapped=False,
    machine="x86_64",
    cgroup_version=2,
    memory=True,
    swap=True,
    cpu=True,
    pids=True,
    seccomp=True,
    cores=4,
    bridge=True,
    runtimes=("runc", "runsc"),
    sockets_counted=True,
    here=True,
)


def planned(
    request: Request | None = None,
    policy: Policy | None = None,
    facts: EngineFacts = FACTS,
    *,
    runtime: str | None = None,
    disable: frozenset[str] = frozenset(),
) -> docker_plan.Spec:
    active = docker_plan.active_layers(facts, disable, runtime is not None)
    return docker_plan.spec(
        policy or level_policy("strict"),
        request or Request(code="1"),
        facts,
        active,
        image="an/image",
        image_id="sha256:1",
        runtime=runtime,
        user=None,
    )


def ordered(spec: docker_plan.Spec, facts: EngineFacts = FACTS) -> dict[str, Any]:
    return docker_plan.container(
        spec.shape, facts, {}, ["python3"], seccomp="PROFILE", empty="/empty"
    )


def test_a_container_is_ordered_with_everything_closed() -> None:
    body = ordered(planned())
    host = body["HostConfig"]
    uid = int(body["User"].split(":")[0])
    assert uid > 1_000_000_000
    assert host["NetworkMode"] == "none"
    assert body["NetworkDisabled"] is True
    assert host["ReadonlyRootfs"] is True
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], [])
    assert host["SecurityOpt"] == ["no-new-privileges", "seccomp=PROFILE"]
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert host["NanoCpus"] == 500_000_000
    assert host["PidsLimit"] == 51  # the agent is one of them
    assert host["LogConfig"]["Type"] == "none"
    assert "Privileged" not in host
    assert "Binds" not in host
    assert host["Mounts"] == []
    assert set(host["Tmpfs"]) == {"/sandbox", "/tmp", "/dev/shm"}
    assert all("nosuid" in each and "nodev" in each for each in host["Tmpfs"].values())
    assert body["StdinOnce"] is True


def test_two_containers_run_as_different_users() -> None:
    users = {ordered(planned())["User"] for _ in range(10)}
    assert len(users) == 10


def test_a_mapped_engine_gets_a_user_that_it_can_map() -> None:
    for facts in (replace(FACTS, rootless=True), replace(FACTS, remapped=True)):
        uid = int(ordered(planned(facts=facts), facts)["User"].split(":")[0])
        assert 1000 < uid < 65536


def test_the_memory_file_systems_make_up_the_disk() -> None:
    for size in (1 << 20, 4 << 20, 123_456_789, 1 << 30):
        parts = docker_plan.scratch(size)
        assert sum(part for _, part in parts) == size
        assert all(part > 0 for _, part in parts)


@pytest.mark.parametrize("layer", docker_plan.LAYERS)
def test_every_layer_changes_what_is_ordered(layer: str) -> None:
    full, less = planned(), planned(disable=frozenset({layer}))
    if layer in ("rlimits", "output_cap"):
        assert (full.rlimits, full.shape.layers) != (less.rlimits, less.shape.layers)
        return
    whole, lacking = ordered(full), ordered(less)
    for body in (whole, lacking):
        if layer != "user":
            body["User"] = body["HostConfig"]["Tmpfs"] = ""
    assert whole != lacking


def test_gvisor_is_ordered_without_what_it_cannot_do() -> None:
    host = ordered(planned(runtime="runsc"))["HostConfig"]
    assert host["Runtime"] == "runsc"
    assert host["PidsLimit"] >= 512
    assert not any("seccomp" in option for option in host["SecurityOpt"])


def test_the_profile_is_the_jail_s_policy() -> None:
    document = json.loads(profile("x86_64"))
    allowed, refused = set(), {}
    for rule in document["syscalls"]:
        if not rule["args"] and rule["action"] == "SCMP_ACT_ALLOW":
            allowed.update(rule["names"])
        elif not rule["args"]:
            refused.update(dict.fromkeys(rule["names"], rule["errnoRet"]))
    conditioned = {name for rule in document["syscalls"] if rule["args"] for name in rule["names"]}
    assert conditioned == {
        *seccomp_jail.CONDITIONED, *seccomp.ONLY_ITSELF, "fcntl", "memfd_create", "mmap"
    }  # fmt: skip
    watches = {"inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch"}
    assert allowed == set(seccomp_jail.ALLOWED) - conditioned - watches - {"openat2"}
    assert all(refused[name] == 38 for name in watches)
    assert all(refused[name] == 1 for name in seccomp_jail.CLOSED)
    assert refused["clone3"] == refused["io_uring_setup"] == refused["openat2"] == 38
    assert document["architectures"] == ["SCMP_ARCH_X86_64"]
    assert not conditioned & (allowed | set(refused))


def test_the_strict_profile_takes_more_away() -> None:
    plain, strict = (json.loads(profile("x86_64", each)) for each in (False, True))

    def outright(document: dict[str, Any], action: str) -> set[str]:
        rules = [each for each in document["syscalls"] if not each["args"]]
        return {name for each in rules if each["action"] == action for name in each["names"]}

    lost = outright(strict, "SCMP_ACT_ERRNO") - outright(plain, "SCMP_ACT_ERRNO")
    assert lost == {"memfd_create", "sched_setaffinity"}
    assert outright(plain, "SCMP_ACT_ALLOW") == outright(strict, "SCMP_ACT_ALLOW")
    shared = {"index": 3, "value": 0x4_002F, "valueTwo": 0x21, "op": "SCMP_CMP_MASKED_EQ"}
    maps = [each for each in strict["syscalls"] if each["args"] == [shared]]
    assert [each["action"] for each in maps] == ["SCMP_ACT_ERRNO"]
    sockets = [each for each in strict["syscalls"] if each["names"] == ["socket"]]
    assert sockets
    assert all(each["action"] == "SCMP_ACT_ERRNO" for each in sockets)


def test_everything_but_some_numbers_is_matched_once() -> None:
    values = (0x5412, 0x541C, 0, 0xFFFF_FFFF)
    pairs = everything_but(values)
    rng = random.Random(1)
    near = [(value + delta) & 0xFFFF_FFFF for value in values for delta in (-2, -1, 0, 1, 2)]
    for number in (*near, *(rng.getrandbits(32) for _ in range(2000))):
        matches = sum(number & mask == wanted for mask, wanted in pairs)
        assert matches == (0 if number in values else 1), hex(number)


def test_what_the_kernel_says_is_compared_with_the_order() -> None:
    shape = planned().shape
    good: dict[str, Any] = {
        "pid": 1, "uid": 5, "sealed": True, "capabilities": 0, "no_new_privileges": True,
        "seccomp": True, "read_only": True, "interfaces": [], "memory": shape.memory, "swap": 0,
        "pids": shape.processes, "cpus": shape.cpus, "reached": ["signals"],
    }  # fmt: skip
    assert amiss(shape, good) == []
    wrong: dict[str, Any] = {
        "pid": 2, "uid": 0, "sealed": False, "capabilities": 1, "no_new_privileges": False,
        "seccomp": False, "read_only": False, "interfaces": ["eth0"], "memory": 1 << 62,
        "swap": 4096, "pids": None, "cpus": None,
    }  # fmt: skip
    for name, value in wrong.items():
        assert len(amiss(shape, {**good, name: value})) == 1, name
    for reached in ("streams", "memory", "environment", "limits", "priority", "cores"):
        assert len(amiss(shape, {**good, "reached": [reached]})) == 1, reached
    assert len(amiss(shape, {**good, "reached": None})) == 2  # an agent that did not try
    assert amiss(shape, None)


def test_what_a_guest_of_gvisor_may_do_to_its_agent() -> None:
    shape = planned(runtime="runsc").shape
    good: dict[str, Any] = {
        "pid": 1, "uid": 5, "sealed": True, "capabilities": 0, "no_new_privileges": False,
        "seccomp": False, "read_only": True, "interfaces": [],
        "reached": ["environment", "priority", "cores"],
    }  # fmt: skip
    assert amiss(shape, good) == []
    for reached in ("streams", "memory", "signals", "limits"):
        assert len(amiss(shape, {**good, "reached": [reached]})) == 1, reached


def test_the_buffers_of_sockets_are_limited_where_the_memory_limit_leaves_them_out() -> None:
    version_1 = replace(FACTS, cgroup_version=1)
    assert planned().shape.sockets == 0
    assert planned(facts=version_1, runtime="runsc").shape.sockets == 0
    shape = planned(facts=version_1).shape
    assert shape.sockets == shape.memory // 4
    uncounted = planned(facts=replace(version_1, sockets_counted=False)).shape
    assert (uncounted.sockets, uncounted.families) == (0, ("unix",))


def test_memory_is_promised_only_where_sockets_are_counted_or_closed() -> None:
    uncounted = replace(FACTS, cgroup_version=1, sockets_counted=False)

    def memory(facts: EngineFacts, mode: str, *disable: str) -> str:
        policy = level_policy("standard")
        policy = replace(policy, network=replace(policy.network, mode=mode))
        active = docker_plan.active_layers(facts, frozenset(disable), False)
        report = docker_report.enforcement(policy, Request(code="1"), facts, active, gvisor=False)
        return report["memory"].state

    for facts in (FACTS, replace(FACTS, cgroup_version=1)):
        assert memory(facts, "off") == memory(facts, "any") == "enforced"
    assert memory(uncounted, "off") == "enforced"
    assert memory(uncounted, "any") == "best_effort"
    assert memory(FACTS, "off", "seccomp") == "best_effort"  # huge pages


def test_sockets_with_a_name_are_closed_beside_mounts_without_a_network(tmp_path: Path) -> None:
    mounted = Request(code="1", mounts=(Mount(str(tmp_path), "shown", "ro"),))
    assert planned().shape.families == ("unix", "inet")
    assert planned(mounted).shape.families == ("inet",)
    policy = level_policy("strict")
    opened = replace(policy, network=replace(policy.network, mode="any"))
    assert planned(mounted, opened).shape.families == ("unix", "inet")
    open_profile, closed = (
        json.loads(profile("x86_64", families=each)) for each in (("unix", "inet"), ("inet",))
    )
    for document, unix in ((open_profile, "SCMP_ACT_ALLOW"), (closed, "SCMP_ACT_ERRNO")):
        rules = [each for each in document["syscalls"] if each["names"] == ["socket"]]
        found = {
            rule["action"]
            for rule in rules
            for condition in rule["args"]
            if seccomp_jail.AF_UNIX & condition["value"] == condition["valueTwo"]
        }
        assert found == {unix}
    # A datagram pair can be turned to any name: 2 is its kind.
    for document, kinds in ((open_profile, set(range(16))), (closed, {1, 5})):
        assert {kind for kind in range(16) if pair_of(document, 1, kind)} == kinds
        assert not pair_of(document, 2, 1)


def pair_of(document: dict[str, Any], family: int, kind: int) -> bool:
    """Whether the profile lets a program make this pair; it must say so in one voice."""
    given = (family, kind | 0o2000000)  # SOCK_CLOEXEC
    actions = {
        rule["action"]
        for rule in document["syscalls"]
        if rule["names"] == ["socketpair"]
        and all(given[each["index"]] & each["value"] == each["valueTwo"] for each in rule["args"])
    }
    assert len(actions) == 1, (given, actions)
    return actions == {"SCMP_ACT_ALLOW"}


def test_in_gvisor_the_agent_is_another_user_than_the_guest() -> None:
    body = ordered(planned(runtime="runsc"))
    guest = body["Entrypoint"][-1]
    assert body["User"] == "0:0"
    assert int(guest.split(":")[0]) > 1_000_000_000
    assert f"uid={guest.split(':')[0]}" in body["HostConfig"]["Tmpfs"]["/sandbox"]
    assert body["HostConfig"]["CapAdd"] == docker_plan.AGENT_RIGHTS
    linux = ordered(planned())
    assert linux["Entrypoint"] == ["python3"]
    assert linux["HostConfig"]["CapAdd"] == []


def test_what_shows_the_host_is_masked_by_either_engine() -> None:
    assert set(docker_plan.MASKED) == set(ordered(planned())["HostConfig"]["MaskedPaths"])
    podman = replace(FACTS, podman=True)
    options = ordered(planned(facts=podman), podman)["HostConfig"]["SecurityOpt"]
    (masked,) = (each for each in options if each.startswith("mask="))
    assert set(masked.removeprefix("mask=").split(":")) == set(docker_plan.MASKED)


def plan_with(
    backend: DockerBackend, request: Request, policy: Policy | None = None
) -> dict[str, Any]:
    policy = policy or level_policy("standard")
    active = docker_plan.active_layers(FACTS, backend.disabled, backend.gvisor)
    report = docker_report.enforcement(policy, request, FACTS, active, gvisor=backend.gvisor)
    return {name: held.state for name, held in report.items()}


def test_a_mount_that_shows_the_engine_s_socket_is_refused(tmp_path: Path) -> None:
    for source in ("/run", "/", "/var/run"):
        request = Request(code="1", mounts=(Mount(source, "shown", "ro"),))
        assert plan_with(DockerBackend(), request)["mounts"] == "absent", source
    control = Request(code="1", mounts=(Mount(str(tmp_path), "shown", "ro"),))
    assert plan_with(DockerBackend(), control)["mounts"] == "enforced"


def test_what_is_hidden_is_covered_by_something_empty(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "key").write_text("secret")
    policy = level_policy("strict")
    hidden = (str(tmp_path / "secret"), str(tmp_path / "key"))
    policy = replace(policy, filesystem=replace(policy.filesystem, hidden=hidden))
    request = Request(code="1", mounts=(Mount(str(tmp_path), "shown", "ro"),))
    mounts = ordered(planned(request, policy))["HostConfig"]["Mounts"]
    assert [(each["Source"], each["Target"], each["ReadOnly"]) for each in mounts] == [
        (str(tmp_path), "/sandbox/shown", True),
        ("/empty", "/sandbox/shown/secret", True),
        ("/dev/null", "/sandbox/shown/key", True),
    ]


def test_a_podman_has_no_large_place_to_write_to() -> None:
    podman = replace(FACTS, podman=True)
    places = ordered(planned(facts=podman), podman)["HostConfig"]["Tmpfs"]
    assert {"/run", "/var/tmp"} <= set(places)
    assert all("size=" in options for options in places.values())


def test_processes_are_refused_by_gvisor_only_if_they_are_asked_for() -> None:
    policy = level_policy("strict")
    request = Request(code="1")
    assert plan_with(GvisorBackend(), request, policy)["processes"] == "best_effort"
    asked = replace(policy, explicit=frozenset({"processes"}))
    assert plan_with(GvisorBackend(), request, asked)["processes"] == "absent"
    assert plan_with(DockerBackend(), request, asked)["processes"] == "enforced"


INFO: dict[str, Any] = {
    "ServerVersion": "4.3.1", "CgroupVersion": "1", "CgroupDriver": "cgroupfs",
    "MemoryLimit": True, "SwapLimit": True, "CpuCfsQuota": True, "PidsLimit": True, "NCPU": 2,
    "SecurityOptions": ["name=seccomp,profile=default"], "Runtimes": {"runc": {}},
}  # fmt: skip
VERSION = {"Arch": "amd64", "Components": [{"Name": "Podman Engine"}]}


def test_a_rootless_podman_without_limits_is_refused_whatever_it_claims() -> None:
    as_root = read("/s", INFO, VERSION, controllers=None, bridge=True, limits_sockets=False)
    assert as_root.memory and as_root.pids and as_root.cpu
    assert not as_root.sockets_counted
    rootless = {**INFO, "Rootless": True, "SecurityOptions": ["name=seccomp", "name=rootless"]}
    hollow = read(
        "/s", rootless, VERSION, controllers=("memory", "pids", "cpu"), bridge=True,
        limits_sockets=False,
    )  # fmt: skip
    partly = read(
        "/s", {**rootless, "CgroupVersion": "2"}, VERSION, controllers=("memory",), bridge=True,
        limits_sockets=False,
    )  # fmt: skip
    whole = read(
        "/s",
        {**rootless, "CgroupVersion": "2"},
        VERSION,
        controllers=("cpu", "memory", "pids"),
        bridge=True,
        limits_sockets=False,
    )
    for facts in (hollow, partly):
        assert not (facts.memory and facts.pids and facts.cpu)
        report = docker_report.enforcement(
            level_policy("standard"),
            Request(code="1"),
            facts,
            docker_plan.active_layers(facts, frozenset(), False),
            gvisor=False,
        )
        assert report["memory"].state == "absent"
        problem = DockerBackend()._unfit(facts)
        assert problem is not None
        assert "without limits" in problem[0]
    assert whole.memory and whole.pids and whole.cpu
    assert whole.sockets_counted
    assert DockerBackend()._unfit(whole) is None


def test_an_orphan_is_told_by_its_owner_or_else_by_its_deadline() -> None:
    now = 1_000_000.0
    late, early = str(int(now + 60)), str(int(now - 60))
    assert not orphaned({OWNER: owner(), DEADLINE: early}, now)  # we are here: not an orphan
    host, namespace, _, _ = owner().split(":")
    dead = f"{host}:{namespace}:{os.getpid()}:1"  # a process of that number, but started otherwise
    assert orphaned({OWNER: dead, DEADLINE: late}, now)
    elsewhere = f"another-host:{namespace}:{os.getpid()}:1"
    assert not orphaned({OWNER: elsewhere, DEADLINE: late}, now)
    assert orphaned({OWNER: elsewhere, DEADLINE: early}, now)
    assert not orphaned({OWNER: "nonsense", DEADLINE: "nonsense"}, now)


def mixed(stream: int, data: bytes) -> bytes:
    return bytes((stream, 0, 0, 0)) + len(data).to_bytes(4, "big") + data


def test_packets_are_found_in_an_engine_s_stream_however_it_is_cut() -> None:
    payloads = [b"", b"x", b"hello" * 1000]
    packets = b"".join(protocol.encode(agent.STDOUT, each) for each in payloads)
    stream = b"".join(
        mixed(1, packets[at : at + 7]) + mixed(2, b"complaint") for at in range(0, len(packets), 7)
    )
    for size in (1, 3, 8, 13, 4096, len(stream)):
        incoming = agent_link.Incoming()
        found: list[protocol.Frame] = []
        for at in range(0, len(stream), size):
            found += incoming.feed(stream[at : at + size])
        assert [frame.payload for frame in found] == payloads
        assert incoming.complaint.startswith(b"complaintcomplaint")
        assert len(incoming.complaint) <= 8192


@pytest.mark.parametrize(
    "stream",
    [
        mixed(7, b"x"),
        mixed(1, protocol.encode(0x7F, b"")),
        mixed(1, bytes((agent.STDOUT,)) + b"\xff\xff\xff\xff"),
    ],
    ids=["stream", "kind", "length"],
)
def test_what_no_agent_sends_is_refused(stream: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        agent_link.Incoming().feed(stream)


def test_a_start_message_of_any_size_fits_into_packets() -> None:
    message = {"argv": ["x" * (3 << 20)], "files": []}
    packets = agent_link.start_packets(message, [b"y" * (2 << 20), b""])
    frames = protocol.Decoder(agent.FROM_HOST, agent.MAX_PACKET).feed(b"".join(packets))
    data = b"".join(frame.payload for frame in frames if frame.kind == agent.START)
    assert marshal.loads(data[4:]) == message
    assert sum(len(frame.payload) for frame in frames if frame.kind == agent.FILE) == 2 << 20


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:2375", "ssh://host", "npipe:////x", "docker"])
def test_only_unix_sockets_are_spoken_to(host: str) -> None:
    with pytest.raises(BackendUnavailable) as refusal:
        socket_path(host)
    assert "ssh" in str(refusal.value.fix)
    assert socket_path("unix:///run/docker.sock") == "/run/docker.sock"


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown layers"):
        DockerBackend(disable=frozenset({"magic"}))


def test_a_disk_that_memory_cannot_hold_is_refused() -> None:
    policy = level_policy("strict")
    large = replace(
        policy, limits=replace(policy.limits, disk=1 << 31), explicit=frozenset({"disk"})
    )
    report = docker_report.enforcement(
        large,
        Request(code="1"),
        FACTS,
        docker_plan.active_layers(FACTS, frozenset(), False),
        gvisor=False,
    )
    assert report["disk"].state == "absent"

"""What the subprocess backend claims on hosts of all kinds, and what it tells its supervisor.

Everything here is pure: the hosts are made up, nothing starts.
"""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.api import build_request
from belljar.backends import process_plan
from belljar.backends.base import FIELDS, Plan
from belljar.backends.process_plan import LAYERS, Spec
from belljar.backends.subprocess import SubprocessBackend
from belljar.errors import BackendUnavailable, CommandNotFound, PolicyUnenforceable
from belljar.linux import seccomp
from belljar.linux.cgroup import Home
from belljar.linux.probe import HostFacts
from belljar.resolve import resolve
from belljar.types import Enforcement

FULL = HostFacts(
    machine="x86_64",
    root=False,
    userns=True,
    proc_mount=True,
    landlock_abi=7,
    seccomp=True,
    cgroup=Home(2, ("/sys/fs/cgroup/user.slice",)),
    cpus=(0, 1, 2, 3),
)
NO_NAMESPACES = replace(FULL, userns=False, userns_problem="EPERM", proc_mount=False)
NO_CGROUP = replace(FULL, cgroup=None)


def plan(
    facts: HostFacts = FULL,
    *,
    code: str | None = "1",
    command: tuple[str, ...] = (),
    mounts: Any = (),
    user: str | None = None,
    disable: tuple[str, ...] = (),
    level: str = "standard",
    **wishes: Any,
) -> Plan:
    backend = SubprocessBackend(facts=facts, user=user, disable=frozenset(disable))
    request = build_request(code=None if command else code, command=command, mounts=mounts)
    resolved = resolve(level, wishes, mounts=request.mounts)
    return backend.compile(resolved.policy, request)


def spec(facts: HostFacts = FULL, **rest: Any) -> Spec:
    found = plan(facts, **rest).spec
    assert isinstance(found, Spec)
    return found


def report(facts: HostFacts = FULL, **rest: Any) -> dict[str, str]:
    return {name: held.state for name, held in plan(facts, **rest).enforcement.items()}


def by(field: str, facts: HostFacts = FULL, **rest: Any) -> str:
    return plan(facts, **rest).enforcement[field].by


def refusal(facts: HostFacts = FULL, **rest: Any) -> PolicyUnenforceable:
    with pytest.raises(PolicyUnenforceable) as refused:
        plan(facts, **rest)
    return refused.value


# -- whole reports


def test_a_full_host_enforces_everything_but_the_disk() -> None:
    assert plan().enforcement == {
        "timeout": Enforcement(
            state="enforced", by="the host's clock, then the kernel ends the pid namespace"
        ),
        "memory": Enforcement(state="enforced", by="cgroup v2 memory controller, the whole tree"),
        "cpus": Enforcement(state="enforced", by="cgroup v2 cpu controller"),
        "processes": Enforcement(state="enforced", by="cgroup v2 pids controller"),
        "disk": Enforcement(
            state="best_effort",
            by="RLIMIT_FSIZE for each file and a watchdog over the work directory",
        ),
        "output": Enforcement(
            state="enforced", by="the host keeps head and tail and drops the rest"
        ),
        "value": Enforcement(
            state="enforced",
            by="the host counts what it decodes, and drops a value past its budget",
        ),
        "displays": Enforcement(
            state="enforced",
            by="the host counts what it keeps, and drops a display past the budget",
        ),
        "open_files": Enforcement(state="enforced", by="RLIMIT_NOFILE"),
        "network": Enforcement(
            state="enforced",
            by="an empty network namespace, and seccomp for the other socket families",
        ),
        "filesystem": Enforcement(state="enforced", by="Landlock ABI 7 and read-only mounts"),
        "mounts": Enforcement(state="enforced", by="none asked for"),
    }


@pytest.mark.parametrize(
    ("facts", "weaker"),
    [
        (FULL, {}),
        (NO_NAMESPACES, {}),
        (NO_CGROUP, {"memory": "best_effort"}),
        (replace(NO_NAMESPACES, cgroup=None),
         {"memory": "best_effort", "processes": "best_effort", "timeout": "best_effort"}),
        (replace(FULL, landlock_abi=0), {"filesystem": "best_effort"}),
        (replace(FULL, landlock_abi=1), {}),
        (replace(NO_NAMESPACES, landlock_abi=2),
         {"filesystem": "best_effort", "timeout": "best_effort"}),
        (replace(NO_NAMESPACES, landlock_abi=5), {"timeout": "best_effort"}),
        (replace(FULL, seccomp=False), {"network": "best_effort"}),
        (replace(NO_NAMESPACES, seccomp=False, cgroup=None), None),
    ],
    ids=["full", "no namespaces", "no cgroup", "neither", "no Landlock", "Landlock ABI 1",
         "no namespaces, ABI 2", "no namespaces, ABI 5", "no seccomp", "no network protection"],
)  # fmt: skip
def test_a_poorer_host_says_exactly_what_it_lacks(
    facts: HostFacts, weaker: dict[str, str] | None
) -> None:
    if weaker is None:
        assert refusal(facts).fields == ("network",)
        return
    expected = dict.fromkeys(FIELDS, "enforced") | {"disk": "best_effort"} | weaker
    assert report(facts) == expected


def test_an_ordinary_user_without_cgroups_holds_processes_by_rlimit_in_his_namespace() -> None:
    assert "RLIMIT_NPROC" in by("processes", NO_CGROUP)
    assert (resource.RLIMIT_NPROC, 52) in spec(NO_CGROUP).rlimits
    # Root is exempt from that limit: there the watchdog counts.
    root = replace(NO_CGROUP, root=True)
    assert report(root)["processes"] == "best_effort"
    assert not [number for number, _ in spec(root).rlimits if number == resource.RLIMIT_NPROC]
    assert (spec(root).watch or {})["processes"] == 50
    # Another user of root's is not.
    assert report(root, user="1000:1000")["processes"] == "enforced"
    # Where a cgroup counts there is one limit only: it would not see what the other refuses.
    assert not [number for number, _ in spec().rlimits if number == resource.RLIMIT_NPROC]


# -- files


def test_root_without_landlock_is_refused_unless_guests_become_somebody_else() -> None:
    root = replace(FULL, root=True, landlock_abi=0)
    assert refusal(root).fields == ("filesystem",)
    assert report(root, user="1000:1000")["filesystem"] == "best_effort"
    assert report(replace(root, landlock_abi=7))["filesystem"] == "enforced"


@pytest.mark.parametrize(
    ("facts", "how"),
    [
        (FULL, "Landlock ABI 7 and read-only mounts"),
        (NO_NAMESPACES, "Landlock ABI 7, and seccomp for modes, owners and times"),
        (replace(NO_NAMESPACES, seccomp=False), "does not hold modes, owners and times"),
        (replace(NO_NAMESPACES, landlock_abi=2), "does not hold truncation"),
    ],
)
def test_what_landlock_does_not_hold_is_held_by_something_else_or_admitted(
    facts: HostFacts, how: str
) -> None:
    backend = SubprocessBackend(facts=facts, disable=frozenset({"output_cap"}))
    made = backend.compile(resolve("standard", {}).policy, build_request(code="1"))
    assert how in made.enforcement["filesystem"].by
    closed_by_seccomp = "read_only_mounts" not in made.spec.layers
    assert bool(made.spec.ignored_calls) == closed_by_seccomp
    assert ("chmod" in made.spec.ignored_calls) == closed_by_seccomp
    assert ("truncate" in made.spec.closed_calls) == (facts.landlock_abi < 3)


def test_hidden_paths_need_a_mount_namespace_and_landlock() -> None:
    hidden: dict[str, Any] = {"filesystem": {"hidden": ["/srv/secret"]}}
    assert spec(**hidden).hide == ("/run", "/sys", "/srv/secret")
    assert refusal(NO_NAMESPACES, **hidden).fields == ("filesystem",)
    assert refusal(replace(FULL, landlock_abi=0), **hidden).fields == ("filesystem",)
    assert spec(NO_NAMESPACES).hide == ()
    shown: dict[str, Any] = {"filesystem": {"read_only": ["/sys/fs/cgroup"]}}
    assert spec(**shown).hide == ("/run",)


def test_read_only_inside_writable_is_frozen_or_refused(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    nested: dict[str, Any] = {
        "filesystem": {"read_write": [str(tmp_path)], "read_only": [str(inner)]}
    }
    assert str(inner) in spec(**nested).freeze
    assert refusal(NO_NAMESPACES, **nested).fields == ("filesystem",)
    beside: dict[str, Any] = {
        "filesystem": {"read_write": [str(inner)], "read_only": [str(tmp_path)]}
    }
    assert report(NO_NAMESPACES, **beside)["filesystem"] == "enforced"  # the control arm


def test_secrets_of_etc_are_not_among_what_a_guest_may_read() -> None:
    shown = spec().read_only
    for path in ("/etc", "/etc/ssl", "/etc/shadow", "/etc/ssl/private", "/root", "/home", "/"):
        assert path not in shown
    assert "/etc/ssl/certs" in shown  # the control arm: certificates are


def test_proc_is_shown_only_if_it_is_the_guests_own() -> None:
    assert "/proc" in spec().read_only
    for facts in (replace(FULL, proc_mount=False), NO_NAMESPACES):
        assert "/proc" not in spec(facts).read_only


# -- mounts


def test_a_relative_mount_is_a_link_that_landlock_holds(tmp_path: Path) -> None:
    read = spec(mounts=[f"{tmp_path}:data"])
    assert read.links == (("data", str(tmp_path)),)
    assert str(tmp_path) in read.read_only
    assert str(tmp_path) not in read.read_write
    written = spec(mounts=[f"{tmp_path}:data:rw"])
    assert str(tmp_path) in written.read_write
    assert report(mounts=[f"{tmp_path}:data"])["mounts"] == "enforced"


@pytest.mark.parametrize(
    ("facts", "mounts", "why"),
    [
        (FULL, ["{}:/elsewhere"], "relative destination"),
        (FULL, ["{}:a", "/usr/share:a/b"], "holds another mount"),
        (replace(FULL, landlock_abi=0), ["{}:a:ro"], "read-only needs Landlock"),
        (NO_NAMESPACES, ["{}:a:rw", "{}/inner:b:ro"], "needs namespaces"),
    ],
)
def test_a_mount_that_cannot_be_held_is_refused(
    tmp_path: Path, facts: HostFacts, mounts: list[str], why: str
) -> None:
    (tmp_path / "inner").mkdir()
    refused = refusal(facts, mounts=[mount.format(tmp_path) for mount in mounts])
    assert refused.fields == ("mounts",)
    assert why in str(refused)


def test_a_host_path_may_be_shown_at_its_own_place(tmp_path: Path) -> None:
    same = spec(mounts=[f"{tmp_path}:{tmp_path}"])
    assert same.links == ()
    assert str(tmp_path) in same.read_only


@pytest.mark.parametrize(
    "asked",
    [{"mounts": ["/tmp:box:rw"]}, {"mounts": ["/tmp:box"]},
     {"filesystem": {"read_write": ["/tmp"]}}, {"filesystem": {"read_only": ["/tmp"]}},
     {"filesystem": {"private_tmp": False}}],
    ids=str,
)  # fmt: skip
def test_who_asks_for_the_hosts_tmp_does_not_get_a_private_one(asked: dict[str, Any]) -> None:
    assert not spec(**asked).private_tmp
    assert spec().private_tmp


# -- network


def test_a_list_of_hosts_is_refused() -> None:
    assert refusal(network=["example.org"]).fields == ("network",)


@pytest.mark.parametrize(
    ("facts", "network", "families", "empty"),
    [
        (FULL, "off", (2, 10), True),
        (NO_NAMESPACES, "off", (), True),
        (FULL, "any", (2, 10, 16), False),
        (NO_NAMESPACES, "any", (2, 10, 16), False),
    ],
)
def test_socket_families_follow_the_network(
    facts: HostFacts, network: str, families: tuple[int, ...], empty: bool
) -> None:
    made = spec(facts, network=network)
    assert made.socket_families == families
    assert made.empty_network is empty
    assert 1 not in made.socket_families  # AF_UNIX would reach the host's daemons


# -- limits


@pytest.mark.parametrize(
    ("cpus", "state", "cores"),
    [(1, "enforced", 1), (3, "enforced", 3), (4, "enforced", 4), (64, "enforced", 4),
     (0.5, "best_effort", 1), (1.5, "best_effort", 2), (4.5, "enforced", 4)],
)  # fmt: skip
def test_without_cgroups_whole_cores_are_held_by_affinity(
    cpus: float, state: str, cores: int
) -> None:
    made = plan(NO_CGROUP, cpus=cpus)
    assert made.enforcement["cpus"].state == state
    assert made.spec.cores == cores
    # The program must not be able to take more of them.
    assert "sched_setaffinity" in made.spec.closed_calls
    wanted = cpus * 30 if state == "best_effort" else 0
    assert made.spec.watch["cpu"] == wanted
    # And who cannot keep it from that says so.
    loose = plan(replace(NO_CGROUP, seccomp=False), cpus=cpus)
    assert loose.enforcement["cpus"].state == "best_effort"


def test_with_cgroups_the_kernel_counts_and_cores_are_free() -> None:
    made = spec()
    assert made.cores == 0
    assert "sched_setaffinity" not in made.closed_calls
    assert made.watch == {"every": 0.2, "memory": 0, "processes": 0, "cpu": 0, "disk": 1 << 30}


def test_memory_that_nobody_would_count_cannot_be_made() -> None:
    assert not set(seccomp.UNCOUNTED_MEMORY) & set(spec().closed_calls)
    assert set(seccomp.UNCOUNTED_MEMORY) <= set(spec(NO_CGROUP).closed_calls)


def test_without_an_ipc_namespace_the_hosts_is_closed() -> None:
    assert not set(seccomp.SHARED_IPC) & set(spec().closed_calls)
    assert set(seccomp.SHARED_IPC) <= set(spec(NO_NAMESPACES).closed_calls)


def test_limits_become_rlimits() -> None:
    made = dict(spec(memory="100M", disk="10M", open_files=64).rlimits)
    assert made[resource.RLIMIT_NOFILE] == 64
    assert made[resource.RLIMIT_FSIZE] == 10 << 20
    assert made[resource.RLIMIT_DATA] == (100 << 20) + (1 << 30)
    assert made[resource.RLIMIT_CORE] == 1


def test_fuel_is_not_for_processes() -> None:
    assert refusal(fuel=1000).fields == ("fuel",)


def test_strict_is_refused_with_the_fields_that_are_too_weak() -> None:
    refused = refusal(level="strict")
    assert {"min_isolation", "disk"} <= set(refused.fields)
    assert all(name in str(refused) for name in refused.fields)
    poorer = refusal(replace(NO_CGROUP, landlock_abi=0), level="strict")
    assert {"min_isolation", "disk", "memory", "cpus", "filesystem"} <= set(poorer.fields)


# -- layers


def differences(facts: HostFacts, layer: str) -> set[str]:
    whole = plan(facts, disable=("output_cap",) if layer != "output_cap" else ()).enforcement
    less = plan(facts, disable=tuple({"output_cap", layer})).enforcement
    return {name for name in whole if whole[name] != less[name]}


@pytest.mark.parametrize(
    ("facts", "layer", "fields"),
    [
        (FULL, "namespaces", {"timeout", "network", "filesystem"}),
        (FULL, "read_only_mounts", {"filesystem"}),
        (FULL, "landlock", {"filesystem"}),
        (FULL, "seccomp", {"network"}),
        (FULL, "cgroup", {"memory", "cpus", "processes"}),
        (FULL, "rlimits", {"disk", "open_files"}),
        (FULL, "watchdog", {"disk"}),
        (FULL, "output_cap", {"output", "value", "displays"}),
        (NO_NAMESPACES, "subreaper", {"timeout"}),
        (NO_CGROUP, "watchdog", {"memory", "disk"}),
        (NO_CGROUP, "rlimits", {"memory", "processes", "disk", "open_files"}),
        (NO_CGROUP, "seccomp", {"network", "cpus"}),
    ],
)
def test_each_layer_switched_off_changes_the_report(
    facts: HostFacts, layer: str, fields: set[str]
) -> None:
    assert differences(facts, layer) == fields


def test_a_backend_with_a_layer_off_says_so_in_every_plan() -> None:
    made = plan(disable=("landlock", "seccomp"))
    assert made.warnings == ("layers switched off for a test: landlock, seccomp",)
    assert "landlock" not in made.spec.layers
    assert plan().warnings == ()


def test_an_unknown_layer_is_an_error() -> None:
    with pytest.raises(ValueError, match="moat"):
        SubprocessBackend(disable=frozenset({"moat"}))


def test_without_namespaces_there_are_no_mounts_to_make_read_only() -> None:
    assert "read_only_mounts" not in spec(NO_NAMESPACES).layers
    assert set(spec().layers) == set(LAYERS)
    assert SubprocessBackend(facts=NO_NAMESPACES).layers == tuple(
        sorted(set(LAYERS) - {"namespaces", "read_only_mounts"})
    )


# -- programs


def test_python_runs_in_our_worker_and_others_by_their_interpreter() -> None:
    python = spec()
    assert (python.worker, python.file, python.argv[1]) == (True, "main.py", "-I")
    command = spec(command=("sh", "-c", "exit 3"))
    assert not command.worker
    assert command.file is None
    assert os.path.basename(command.argv[0]) == "sh"
    assert command.argv[1:] == ("-c", "exit 3")


def test_a_command_is_looked_for_where_the_guest_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "only-on-the-hosts-path"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandNotFound) as refused:
        spec(command=(tool.name,))
    assert refused.value.field == "command"


def test_a_language_that_is_not_installed_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    backend = SubprocessBackend(facts=FULL)
    request = build_request(code="1", language="javascript")
    with pytest.raises(BackendUnavailable) as refused:
        backend.compile(resolve("standard", {}).policy, request)
    assert refused.value.fix == "apt-get install nodejs"


def test_a_host_says_what_it_lacks_and_what_follows() -> None:
    assert list(process_plan.shortcomings(FULL, None)) == []
    poor = HostFacts(
        machine="riscv64", root=True, userns=False, userns_problem="EPERM", proc_mount=False,
        landlock_abi=0, seccomp=False, seccomp_problem="no table", cgroup=None, cpus=(0,),
    )  # fmt: skip
    told = " ".join(process_plan.shortcomings(poor, None))
    for word in ("user namespaces", "Landlock", "seccomp", "cgroup", "root"):
        assert word in told

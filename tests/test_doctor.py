"""What the doctor says about a host, and the command it prescribes."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from belljar import doctor
from belljar.backends.base import Availability, best_effort
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendUnavailable
from belljar.policy import Isolation
from belljar.testing import FakeBackend


@pytest.mark.parametrize(
    ("present", "words", "fix"),
    [
        (
            {"/proc/sys/user/max_user_namespaces": "0"},
            "everybody",
            "user.max_user_namespaces=15000",
        ),
        (
            {"/proc/sys/kernel/unprivileged_userns_clone": "0"},
            "ordinary users",
            "kernel.unprivileged_userns_clone=1",
        ),
        (
            {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"},
            "AppArmor",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"/.dockerenv": ""}, "seccomp profile", "--security-opt seccomp"),
        ({"/proc/self/status": "Name:\tx\nSeccomp:\t2\n"}, "seccomp profile", "--security-opt"),
        ({}, "the kernel refuses", "CONFIG_USER_NS"),
        # The same switches in their other position are not to blame.
        (
            {
                "/proc/sys/user/max_user_namespaces": "63000",
                "/proc/sys/kernel/unprivileged_userns_clone": "1",
                "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "0",
            },
            "the kernel refuses",
            "CONFIG_USER_NS",
        ),
    ],
)
def test_refused_namespaces_are_traced_to_the_switch_that_refuses_them(
    present: dict[str, str], words: str, fix: str
) -> None:
    finding = doctor.namespaces("Operation not permitted", present.get)
    assert finding.state == "missing"
    assert words in finding.detail
    assert "Operation not permitted" in finding.detail
    assert finding.fix is not None
    assert fix in finding.fix


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_each_kernel_protection_is_reported_as_the_kernel_answered() -> None:
    from belljar.linux.probe import facts

    real = facts()
    lacking = replace(
        real,
        userns=False,
        userns_problem="EPERM",
        proc_mount=False,
        proc_mount_problem="EPERM",
        landlock_abi=0,
        seccomp=False,
        seccomp_problem="EINVAL",
        cgroup=None,
    )
    states = {
        finding.name: finding.state
        for finding in doctor.kernel_protections(lacking, lambda path: None)
    }
    assert states == {
        "namespaces": "missing",
        "own /proc": "warn",
        "landlock": "missing",
        "seccomp": "missing",
        "cgroup": "warn",
    }
    for finding in doctor.kernel_protections(lacking, lambda path: None):
        assert finding.fix
    offering = replace(lacking, userns=True, proc_mount=True, landlock_abi=4, seccomp=True)
    better = {f.name: f for f in doctor.kernel_protections(offering, lambda path: None)}
    assert better["namespaces"].state == better["seccomp"].state == "ok"
    assert "4" in better["landlock"].detail
    assert "own /proc" not in better


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_where_namespaces_are_forbidden_the_doctor_says_what_serves_meanwhile() -> None:
    from belljar.linux.probe import facts

    forbidden = replace(facts(), userns=False, userns_problem="EPERM", landlock_abi=7, seccomp=True)
    switch = {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}
    finding = doctor.kernel_protections(forbidden, switch.get)[0]
    assert "landlock serves" in finding.detail
    assert finding.fix == "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    nothing = doctor.kernel_protections(replace(forbidden, landlock_abi=0), switch.get)[0]
    assert "landlock serves" not in nothing.detail


def test_root_is_warned_about() -> None:
    assert doctor.user(0).state == "warn"
    assert doctor.user(1000).state == "ok"


def test_too_little_memory_for_one_run_is_warned_about() -> None:
    meminfo = "MemTotal:  8000000 kB\nMemAvailable:  300000 kB\n"
    assert doctor.memory(meminfo, 256 << 20).state == "ok"
    short = doctor.memory(meminfo, 512 << 20)
    assert (short.state, "512 MiB" in short.detail) == ("warn", True)
    assert doctor.memory(None, 1).state == "warn"


def test_an_engine_socket_must_answer(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    assert doctor.engine_socket("docker", [str(path)], "install it").state == "missing"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert doctor.engine_socket("docker", ["", str(path)], "install it").state == "ok"
        assert doctor.engine_socket("docker", [f"unix://{path}"], "install it").state == "ok"
    stale = doctor.engine_socket("docker", [str(path)], "install it")
    assert stale.state == "missing"
    assert str(path) in stale.detail


def test_a_remote_engine_is_named_but_not_called() -> None:
    finding = doctor.engine_socket("docker", ["tcp://192.0.2.1:2375"], "install it")
    assert (finding.state, "192.0.2.1" in finding.detail) == ("warn", True)


def test_the_host_report_names_every_part_and_a_fix_for_what_is_missing() -> None:
    findings = doctor.host(Settings())
    names = {finding.name for finding in findings}
    assert {"kernel", "architecture", "python", "memory", "docker", "node", "bwrap"} <= names
    for finding in findings:
        assert finding.state == "ok" or finding.fix or finding.name == "memory", finding
        assert os.linesep not in finding.detail


def report_of(backend: FakeBackend, **settings: object) -> doctor.BackendReport:
    engine = Engine(Settings(**settings), backends={backend.name: backend})  # type: ignore[arg-type]
    (report,) = doctor.backend_reports(engine)
    return report


def test_a_backend_that_holds_the_levels_policy_is_usable() -> None:
    report = report_of(FakeBackend(isolation=Isolation.JAIL), level="strict")
    assert report.usable
    assert report.enforcement["memory"].state == "enforced"


def test_a_backend_below_the_levels_floor_is_not_usable_and_says_which_field() -> None:
    weak = FakeBackend(isolation=Isolation.PROCESS, enforcement={"disk": best_effort("a watchdog")})
    assert report_of(weak, level="standard").usable
    report = report_of(weak, level="strict")
    assert not report.usable
    assert report.available
    assert set(report.lacking) == {"min_isolation", "disk"}
    assert report.fix


def test_a_missing_backend_shows_its_reason_and_its_fix() -> None:
    missing = FakeBackend(
        availability=Availability(available=False, reason="no daemon", fix="start the daemon")
    )
    report = report_of(missing)
    assert (report.usable, report.available) == (False, False)
    assert (report.problem, report.fix) == ("no daemon", "start the daemon")


def test_a_backend_that_cannot_even_be_loaded_is_reported_not_raised() -> None:
    class Broken(Engine):
        def backend(self, name: str) -> FakeBackend:
            raise BackendUnavailable("cannot be imported", fix="pip install it")

    (report,) = doctor.backend_reports(Broken(Settings(), backends={"x": FakeBackend()}))
    assert (report.name, report.usable, report.fix) == ("x", False, "pip install it")

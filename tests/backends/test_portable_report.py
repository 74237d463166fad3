"""What the backend for macOS and Windows says it holds, on each platform; nothing is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.base import FIELDS, Plan
from belljar.backends.portable import PortableBackend
from belljar.backends.portable_plan import SANDBOX_EXEC, Host
from belljar.errors import BackendUnavailable, CommandNotFound, ConfigError, PolicyUnenforceable
from belljar.resolve import resolve
from belljar.types import Mount, Request

COMMON: dict[str, Any] = {"root": False, "cores": 8, "ps": "/bin/ps", "sandbox_exec": False}
LINUX = Host(platform="linux", **COMMON)
MAC = Host(platform="darwin", **{**COMMON, "sandbox_exec": True})
WINDOWS = Host(platform="win32", system_root="C:\\Windows", **{**COMMON, "ps": None})
EVERYWHERE = pytest.mark.parametrize("host", [LINUX, MAC, WINDOWS], ids=lambda host: host.platform)


def compiled(
    host: Host, *, request: Request | None = None, user: str | None = None, **wishes: Any
) -> Plan:
    request = request or Request(code="1")
    policy = resolve("standard", {"network": "any", **wishes}, mounts=request.mounts).policy
    return PortableBackend(host=host, user=user).compile(policy, request)


def refused(host: Host, **wanted: Any) -> PolicyUnenforceable:
    with pytest.raises(PolicyUnenforceable) as refusal:
        compiled(host, **wanted)
    return refusal.value


@EVERYWHERE
def test_every_field_is_accounted_for(host: Host) -> None:
    plan = compiled(host)
    assert set(FIELDS) <= set(plan.enforcement)
    assert all(held.by.strip() for held in plan.enforcement.values())
    assert all(held.state != "absent" for held in plan.enforcement.values())


def test_what_the_platform_only_approximates_is_best_effort() -> None:
    approximate = {"timeout", "memory", "cpus", "processes", "disk", "filesystem"}
    for host in (LINUX, MAC, WINDOWS):
        report = compiled(host).enforcement
        assert {name for name, held in report.items() if held.state == "best_effort"} >= approximate
    assert compiled(MAC).enforcement["open_files"].state == "enforced"


def test_a_default_that_nothing_holds_is_named_and_a_wish_is_refused() -> None:
    plan = compiled(WINDOWS)
    assert plan.enforcement["open_files"].by == "nothing on Windows holds this"
    assert [warning for warning in plan.warnings if warning.startswith("open_files")]
    assert refused(WINDOWS, open_files=64).fields == ("open_files",)
    # The control arm: where something holds it, the same wish is granted without a word.
    held = compiled(MAC, open_files=64)
    assert held.enforcement["open_files"].state == "enforced"
    assert not [warning for warning in held.warnings if warning.startswith("open_files")]


@pytest.mark.parametrize("host", [LINUX, WINDOWS], ids=lambda host: host.platform)
def test_a_network_that_cannot_be_closed_is_refused_with_the_way_out(host: Host) -> None:
    refusal = refused(host, network="off")
    assert refusal.fields == ("network",)
    assert 'network="any"' in (refusal.fix or "")
    assert compiled(host, network="any").enforcement["network"].by == "open, as the policy asks"


def test_on_macos_sandbox_exec_closes_the_network_as_far_as_we_know() -> None:
    closed, opened = compiled(MAC, network="off"), compiled(MAC, network="any")
    assert closed.enforcement["network"].state == "best_effort"
    assert "untested" in closed.enforcement["network"].by
    command, profile, _ = seatbelt(closed)
    assert command == SANDBOX_EXEC
    assert "(deny network*)" in profile
    assert "(deny network*)" not in seatbelt(opened)[1]
    assert compiled(LINUX, network="any").spec.seatbelt is None


def seatbelt(plan: Plan, run: str = "/private/run") -> tuple[str, str, dict[str, str]]:
    """(the command, its profile, the paths that the profile names)"""
    command, *given, flag, profile = plan.spec.seatbelt.command(run)
    assert (flag, set(given[::2])) == ("-p", {"-D"})
    return command, profile, dict(word.split("=", 1) for word in given[1::2])


def test_on_macos_sandbox_exec_holds_files_as_far_as_we_know(tmp_path: Path) -> None:
    plan = compiled(MAC, request=Request(code="1", mounts=(Mount(str(tmp_path), "data", "rw"),)))
    _, profile, paths = seatbelt(plan)
    assert paths["RUN"] == "/private/run"
    assert paths["HOME"] == os.path.realpath(os.path.expanduser("~"))
    assert paths["WRITE0"] == os.path.realpath(tmp_path)
    # Later rules win: what is denied comes before what is allowed of it.
    for what in ("file-write*", "file-read-data"):
        assert 0 < profile.index(f"(deny {what}") < profile.index(f"(allow {what}")
    written = profile[profile.index("(allow file-write*") : profile.index("(deny file-read-data")]
    assert '(param "RUN")' in written
    assert '(param "WRITE0")' in written
    assert "HOME" not in written
    assert "READ" not in written
    home = paths["HOME"] + "/"
    assert all(path.startswith(home) for name, path in paths.items() if name.startswith("READ"))


def test_every_result_says_that_files_are_not_isolated() -> None:
    for host in (LINUX, MAC, WINDOWS):
        (warning,) = (words for words in compiled(host).warnings if "not isolated" in words)
        assert 'backend="wasm"' in warning


@EVERYWHERE
@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("network", {"network": ["pypi.org"]}),
        ("filesystem", {"filesystem": {"hidden": ["/etc"]}}),
        ("filesystem", {"filesystem": {"read_only": ["/etc"]}}),
        ("fuel", {"fuel": 1000}),
        ("min_isolation", {"min_isolation": "jail"}),
        ("mounts", {"request": Request(code="1", mounts=(Mount("/data", "data", "ro"),))}),
        ("mounts", {"request": Request(code="1", mounts=(Mount("/data", "/other", "rw"),))}),
    ],
    ids=["hosts", "hidden", "read only", "fuel", "floor", "mount ro", "mount elsewhere"],
)
def test_what_nothing_here_can_hold_is_refused_by_name(
    host: Host, field: str, wanted: dict[str, Any]
) -> None:
    assert field in refused(host, **wanted).fields


def test_a_writable_mount_is_a_link_in_the_work_directory() -> None:
    plan = compiled(MAC, request=Request(code="1", mounts=(Mount("/data", "in/data", "rw"),)))
    assert plan.enforcement["mounts"].state == "best_effort"
    assert plan.spec.links == (("in/data", "/data"),)


def test_root_is_refused_until_there_is_a_user_to_become() -> None:
    root = Host(platform="darwin", **{**COMMON, "root": True})
    assert refused(root).fields == ("filesystem",)
    assert compiled(root, user="501:20").enforcement["filesystem"].state == "best_effort"
    assert PortableBackend(host=root, user="501:20").probe().available


@pytest.mark.parametrize("host", [MAC, WINDOWS], ids=lambda host: host.platform)
def test_a_user_that_cannot_be_become_makes_the_backend_unavailable(host: Host) -> None:
    found = PortableBackend(host=host, user="501:20").probe()
    assert (found.available, "user" in found.reason, bool(found.fix)) == (False, True, True)
    assert PortableBackend(host=host).probe().available  # the control arm


@pytest.mark.parametrize("user", ["root", "0:0", "501:staff", "-1", ""])
def test_a_user_is_numbers_and_not_root(user: str) -> None:
    with pytest.raises(ConfigError, match="user"):
        PortableBackend(host=MAC, user=user)


def test_without_ps_the_backend_is_unavailable_except_where_a_job_object_knows() -> None:
    found = PortableBackend(host=Host(platform="freebsd", **{**COMMON, "ps": None})).probe()
    assert (found.available, "ps" in found.reason, bool(found.fix)) == (False, True, True)
    assert PortableBackend(host=WINDOWS).probe().available


@pytest.mark.parametrize("host", [MAC, WINDOWS], ids=lambda host: host.platform)
def test_an_untested_platform_says_so(host: Host) -> None:
    assert any("not been tested" in note for note in PortableBackend(host=host).probe().notes)


def test_each_layer_that_is_off_shows_in_the_report_and_in_a_warning() -> None:
    policy = resolve("standard", {"network": "any"}).policy
    whole = compiled(MAC).enforcement
    for layer in PortableBackend.layers:
        backend = PortableBackend(host=MAC, disable=frozenset({layer}))
        plan = backend.compile(policy, Request(code="1"))
        assert plan.enforcement != whole, layer
        assert any(layer in warning for warning in plan.warnings)
        assert any(layer in note for note in backend.probe().notes)
    with pytest.raises(ValueError, match="unknown layers"):
        PortableBackend(disable=frozenset({"landlock"}))


def test_enough_cores_for_everybody_need_no_watching() -> None:
    plan = compiled(MAC, cpus=8)
    assert (plan.enforcement["cpus"].state, plan.spec.watched.cpu) == ("enforced", 0.0)
    fewer = compiled(MAC, cpus=2, timeout=10)
    assert (fewer.enforcement["cpus"].state, fewer.spec.watched.cpu) == ("best_effort", 20.0)


def test_what_a_job_object_holds_is_not_watched_too() -> None:
    plan = compiled(WINDOWS, memory="64M", processes=5, cpus=0.5, disk="1M")
    assert dict(plan.spec.job) == {"memory": 64 << 20, "processes": 5, "cpus": 0.5, "cores": 8}
    watched = plan.spec.watched
    assert (watched.memory, watched.processes, watched.cpu, watched.disk) == (0, 0, 0.0, 1 << 20)
    assert plan.spec.ulimits == ()


def test_a_command_that_is_not_installed_is_told_before_the_run() -> None:
    with pytest.raises(CommandNotFound, match="no-such-command"):
        compiled(MAC, request=Request(command=("no-such-command",)))
    assert compiled(LINUX, request=Request(command=("sh",))).spec.argv[0].endswith("/sh")


def test_a_bash_that_is_really_wsl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(code="echo", language="bash")
    for path, is_wsl in (("C:\\WINDOWS\\system32\\bash.exe", True), ("D:\\git\\bash.exe", False)):
        monkeypatch.setattr("belljar.language_host.installed", lambda *_, path=path: path)
        if is_wsl:
            with pytest.raises(BackendUnavailable, match="WSL"):
                compiled(WINDOWS, request=request)
        else:
            assert compiled(WINDOWS, request=request).spec.argv == (path, "main.sh")

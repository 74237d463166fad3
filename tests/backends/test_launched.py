"""Bubblewrap, firejail and nsjail: what the tool makes, what our stage adds, and what if it fails.

Conformance and the hostile suite run on each of them elsewhere; here is what is theirs alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import gone, mark, marked

import belljar
from belljar.backends import launched_plan, registry, tools
from belljar.backends.base import Availability, Cancel
from belljar.backends.bubblewrap import BubblewrapBackend
from belljar.backends.launched import LaunchedBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed, BackendUnavailable, PolicyUnenforceable
from belljar.linux import probe
from belljar.testing.conformance.harness import directory_with_a_mount
from belljar.types import Mount, Request, Result, Status

TOOLS = ("bubblewrap", "firejail", "nsjail")
SOURCE = str(Path(belljar.__file__).parents[1])


class Jar:
    def __init__(self, name: str, **options: Any) -> None:
        backend = registry.load(name, **options)
        assert isinstance(backend, LaunchedBackend)
        self.backend = backend
        self.engine = Engine(Settings(), backends={name: backend})

    def run(self, code: str | None, *, level: str = "standard", **wanted: Any) -> Result:
        keys = ("command", "mounts", "files", "language", "outputs", "env")
        asked = {key: wanted.pop(key) for key in keys if key in wanted}
        return self.engine.run(
            Request(code=code, **asked),
            level=level,
            wishes={"modules": "any", **wanted},
            backend=self.backend.name,
        )


def jar_of(name: str, **options: Any) -> Jar:
    jar = Jar(name, **options)
    found = jar.backend.probe()
    if not found.available:
        pytest.skip(f"{name}: {found.reason}")
    return jar


@pytest.fixture(params=TOOLS)
def jar(request: pytest.FixtureRequest) -> Iterator[Jar]:
    jar = jar_of(request.param)
    yield jar
    jar.engine.close()


# -- what is in there


def test_strict_runs_and_every_field_is_enforced(jar: Jar) -> None:
    result = jar.run("6 * 7", level="strict")
    assert result.value == 42
    assert {held.state for held in result.enforcement.values()} == {"enforced"}
    assert result.isolation == "jail"


def test_the_guest_is_nobody_special_and_alone(jar: Jar) -> None:
    code = """
import os
found = []
for fd in range(256):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
facts = dict(line.rstrip("\\n").split(":\\t", 1) for line in open("/proc/self/status"))
(os.getuid(), found, len([p for p in os.listdir("/proc") if p.isdigit()]) <= 3,
 [int(facts["Cap" + name], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")],
 facts["NoNewPrivs"], int(facts["Seccomp_filters"]) >= 2)
"""
    assert jar.run(code).value == (1000, [0, 1, 2, 3], True, [0] * 5, "1", True)


def test_nothing_of_the_host_is_told(jar: Jar, tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("canary")
    paths = (
        "/etc/shadow", "/etc/passwd-", "/root/.bashrc", "/sys/kernel", "/dev/kmsg", "/dev/vda",
        "/var/log", "/run/systemd", "/run/docker.sock", str(tmp_path / "canary"),
    )  # fmt: skip
    code = f"""
import os
def opens(path):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).close()
        return True
    except OSError:
        return False
[path for path in {paths!r} if opens(path)]
"""
    assert jar.run(code).value == []
    assert [path for path in paths if os.path.exists(path)]  # the control arm


def test_the_host_s_parts_of_proc_are_covered_unless_that_is_switched_off(jar: Jar) -> None:
    code = """
try:
    found = len(open("/proc/interrupts").read())
except OSError:
    found = 0
found
"""
    assert jar.run(code).value == 0
    bare = jar_of(jar.backend.name, disable=frozenset({"proc_masks"}))
    assert bare.run(code).value > 0


def test_seccomp_keeps_namespaces_closed_and_they_open_without_it(jar: Jar) -> None:
    code = "import ctypes; ctypes.CDLL(None).unshare(0x10000000)"
    assert jar.run(code).value == -1
    bare = jar_of(jar.backend.name, disable=frozenset({"seccomp"}))
    result = bare.run(code)
    assert result.value == 0
    assert any("seccomp" in warning for warning in result.warnings)


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("layer", launched_plan.LAYERS)
def test_a_layer_that_is_off_is_named_and_the_rest_still_runs(name: str, layer: str) -> None:
    result = jar_of(name, disable=frozenset({layer})).run("6 * 7")
    assert result.value == 42
    assert any(layer in warning for warning in result.warnings)


def test_an_exit_code_and_a_signal_are_told_apart(jar: Jar) -> None:
    """The tools themselves say 137 for both."""
    left = jar.run("import os; os._exit(137)")
    assert (left.status, left.exit_code, left.signal) == (Status.ERROR, 137, None)
    killed = jar.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (killed.status, killed.exit_code, killed.signal) == (Status.KILLED, None, 9)


def test_a_signal_to_everybody_ends_the_guest_and_tells_no_lie(jar: Jar) -> None:
    code = """
import os, signal
for pid in (-1, 1, os.getppid()):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"here"
"""
    result = jar.run(code)
    assert result.value == "here" or result.status is Status.KILLED, result
    assert result.kill is not None
    assert result.kill.survivors == 0
    assert jar.run("1").success


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ({"language": "bash", "code": "echo bash $((6*7)); pwd > made"}, "bash 42\n"),
        ({"language": "javascript", "code": "console.log('js', 6*7)"}, "js 42\n"),
        ({"command": ("sh", "-c", "echo sh; exit 3"), "code": None}, "sh\n"),
    ],
    ids=["bash", "javascript", "command"],
)
def test_other_languages_run(jar: Jar, asked: dict[str, Any], printed: str) -> None:
    result = jar.run(**asked)
    assert result.stdout == printed, result
    assert result.exit_code == (3 if "command" in asked else 0)
    assert ("made" in result.files) == (asked.get("language") == "bash")


# -- files


def test_a_writable_project_keeps_what_tools_execute(jar: Jar, tmp_path: Path) -> None:
    hooks = tmp_path / ".git" / "hooks"
    hooks.mkdir(parents=True)
    (tmp_path / ".git" / "config").write_text("[core]\n")
    code = """
import os
planted = []
for path in (".git/hooks/pre-commit", ".git/config", ".mcp.json", ".envrc", ".vscode/tasks.json",
             ".claude/settings.json", ".bashrc"):
    try:
        os.makedirs(os.path.dirname("p/" + path), exist_ok=True)
        open("p/" + path, "w").write("planted")
        planted.append(path)
    except OSError:
        pass
for path in (".git", ".envrc"):
    try:
        os.rename("p/" + path, "p/moved")
        planted.append(path)
    except OSError:
        pass
open("p/result.txt", "w").write("written")
open("p/.git/index", "w").write("written")
planted
"""
    result = jar.run(code, mounts=(Mount(str(tmp_path), "p", "rw"),))
    assert result.value == [], result
    assert (tmp_path / "result.txt").read_text() == "written"  # the control arm
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "result.txt"]
    assert (tmp_path / "result.txt").stat().st_uid == os.geteuid()
    assert list(hooks.iterdir()) == []


def test_a_part_of_a_mount_is_hidden(jar: Jar, tmp_path: Path) -> None:
    for name in ("shown", "keys"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
    (tmp_path / "token").write_text("token")
    mounts = (Mount(str(tmp_path), "p", "ro"),)
    hidden = [str(tmp_path / "keys"), str(tmp_path / "token")]
    code = """
def read(path):
    try:
        return open(path).read()
    except OSError:
        return ""
[read("p/shown/text"), read("p/keys/text"), read("p/token")]
"""
    assert jar.run(code, mounts=mounts).value == ["shown", "keys", "token"]
    result = jar.run(code, mounts=mounts, filesystem={"hidden": hidden})
    assert result.value == ["shown", "", ""]


@pytest.fixture
def mounted_below() -> Iterator[Path]:
    with directory_with_a_mount() as directory:
        yield directory


WRITE_BELOW = """
try:
    open("p/inner/file", "w").close()
except OSError:
    pass
"""


@pytest.mark.parametrize("disabled", [(), ("landlock",)], ids=["whole", "without Landlock"])
@pytest.mark.parametrize("name", TOOLS)
def test_a_file_system_below_a_read_only_mount_is_read_only(
    name: str, disabled: tuple[str, ...], mounted_below: Path
) -> None:
    jar = jar_of(name, disable=frozenset(disabled))
    assert jar.run(WRITE_BELOW, mounts=(Mount(str(mounted_below), "p", "ro"),)).success
    assert list((mounted_below / "inner").iterdir()) == []
    assert jar.run(WRITE_BELOW, mounts=(Mount(str(mounted_below), "p", "rw"),)).success
    assert (mounted_below / "inner" / "file").exists()  # the control arm


@pytest.mark.parametrize("name", ["bubblewrap", "nsjail"])
def test_a_tool_that_leaves_a_mount_writable_is_found_out(
    name: str, mounted_below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = jar_of(name)
    module = sys.modules[type(jar.backend).__module__]
    monkeypatch.setitem(module._BIND, "ro", module._BIND["rw"])  # type: ignore[attr-defined]
    with pytest.raises(BackendFailed, match="read-only mounts"):
        jar.run("1", mounts=(Mount(str(mounted_below), "p", "ro"),))


def test_a_hidden_directory_takes_no_files(jar: Jar, tmp_path: Path) -> None:
    """They would be memory that a watchdog does not count."""
    (tmp_path / "keys").mkdir()
    code = """
import errno, os
try:
    os.chmod("p/keys", 0o700)
except OSError:
    pass
try:
    os.mkdir("p/keys/made")
    word = "made"
except OSError as error:
    word = errno.errorcode[error.errno]
word
"""
    mounts = (Mount(str(tmp_path), "p", "rw"),)
    refused = jar.run(code, mounts=mounts, filesystem={"hidden": [str(tmp_path / "keys")]})
    assert refused.value in ("EROFS", "EACCES", "EPERM", "ENOENT"), refused
    assert jar.run(code, mounts=mounts).value == "made"  # the control arm


def test_all_that_a_run_writes_counts_as_disk(jar: Jar) -> None:
    code = """
import time
for place in ("/tmp/a", "/dev/shm/b", "c"):
    with open(place, "wb", buffering=0) as file:
        for _ in range(3):
            file.write(bytes(1 << 20))
time.sleep(wait)
"""
    full = jar.run(code.replace("wait", "10"), disk="8M")
    assert (full.status, full.limit_hit) == (Status.LIMIT, "disk"), full
    assert jar.run(code.replace("wait", "0.2"), disk="16M").success


def test_too_many_files_end_the_run(jar: Jar) -> None:
    code = """
import os, time
for number in range(count):
    os.close(os.open(str(number), os.O_CREAT))
time.sleep(wait)
"""
    many = jar.run(code.replace("count", "6000").replace("wait", "10"), disk="1M")
    assert (many.status, many.limit_hit) == (Status.LIMIT, "disk"), many
    assert jar.run(code.replace("count", "3000").replace("wait", "0.2"), disk="1M").success


def test_firejail_refuses_paths_that_it_would_read_as_patterns(tmp_path: Path) -> None:
    jar = jar_of("firejail")
    odd = tmp_path / "a*b"
    odd.mkdir()
    with pytest.raises(PolicyUnenforceable) as refusal:
        jar.run("1", mounts=(Mount(str(odd), "p", "ro"),))
    assert refusal.value.fields == ("mounts",)
    with pytest.raises(PolicyUnenforceable):
        jar.run("1", mounts=(Mount(str(tmp_path), "/elsewhere", "ro"),))
    assert jar.run("1", mounts=(Mount(str(tmp_path), "p", "ro"),)).success


# -- the tool is not there, or is broken, or lies


@pytest.mark.parametrize("name", TOOLS)
def test_a_missing_tool_is_said_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = registry.load(name).probe()
    assert not found.available
    assert "is not installed" in found.reason
    assert found.fix in ("apt-get install bubblewrap", "apt-get install firejail") or (
        name == "nsjail" and found.fix is not None
    )


def fake(directory: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool of that name that does what `script` says, once it has been found to work."""
    tool = directory / name
    tool.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 9.9.9 && exit\n{script}\n')
    tool.chmod(0o4755)
    monkeypatch.setattr(tools, "PATH", f"{directory}:/usr/bin:/bin")


RUN_AS_IT_IS = 'while [ "$1" != -- ]; do shift; done\nshift\nexec "$@"'


def test_a_tool_that_runs_a_program_with_no_sandbox_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Firejail does that, with exit code 0, where it takes itself to be in a sandbox already."""
    fake(tmp_path, "firejail", RUN_AS_IT_IS, monkeypatch)
    jar = Jar("firejail")
    monkeypatch.setattr(jar.backend, "probe", lambda: Availability(available=True))
    with pytest.raises(BackendFailed, match=r"host's: .*pid, ipc, uts, net"):
        jar.run("1", level="permissive")
    assert not os.path.exists("/tmp/.belljar")  # nor did it touch the host's files first


def test_a_program_that_is_in_our_own_namespaces_is_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(
        tmp_path, "firejail", 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"', monkeypatch
    )
    found = Jar("firejail").backend.probe()
    assert not found.available
    assert "not in namespaces of its own" in found.reason


def test_the_words_of_a_tool_that_fails_are_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, "bwrap", "echo 'bwrap: no room at the inn' >&2; exit 1", monkeypatch)
    jar = Jar("bubblewrap")
    monkeypatch.setattr(jar.backend, "probe", lambda: Availability(available=True))
    with pytest.raises(BackendFailed, match="no room at the inn") as failure:
        jar.run("1")
    assert failure.value.retryable


def test_what_a_tool_says_is_not_the_program_s_output(jar: Jar) -> None:
    result = jar.run("import sys; print('out'); print('err', file=sys.stderr)")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


# -- the end

HOST = """
import sys
sys.path.insert(0, {source!r})
from belljar.backends import registry
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request
engine = Engine(Settings(), backends={{ {name!r}: registry.load({name!r}) }})
def up(event):
    if getattr(event, "data", b"") == b"up\\n":
        print("up", flush=True)
engine.run(Request(code={code!r}, env={{"MARK": {token!r}}}), wishes={{"modules": "any"}}, emit=up)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(60)
"""


def test_when_the_host_is_killed_its_guests_die(jar: Jar) -> None:
    token = mark()
    program = HOST.format(source=SOURCE, name=jar.backend.name, code=DAEMON, token=token)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        assert len(marked(token)) >= 2  # the control arm: they were there
        host.kill()
        host.wait()
    assert gone(token)
    assert jar.run("1 + 1").value == 2


def test_cancelling_kills_the_guest(jar: Jar) -> None:
    with Cancel() as cancel:
        cancel.set()
        result = jar.engine.run(
            Request(code="import time; time.sleep(60)"), wishes={"modules": "any"}, cancel=cancel
        )
    assert (result.status, result.signal) == (Status.KILLED, signal.SIGKILL)
    assert result.kill is not None
    assert result.kill.survivors == 0


# -- other hosts


def test_firejail_serves_a_host_without_user_namespaces() -> None:
    jar = jar_of("firejail", facts=replace(probe.facts(), userns=False, userns_problem="test"))
    result = jar.run("import os; os.getuid()")
    assert result.value == os.geteuid()
    if probe.facts().cgroup is not None:  # else nothing would count processes, and it is refused
        assert jar.run("6 * 7", level="strict").value == 42


@pytest.mark.parametrize("name", ["bubblewrap", "nsjail"])
def test_the_others_say_what_they_lack_without_user_namespaces(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, registry.load(name).program, "exit 1", monkeypatch)  # type: ignore[attr-defined]
    for tool in tmp_path.iterdir():
        tool.chmod(0o755)
    facts = replace(probe.facts(), userns=False, userns_problem="switched off")
    found = registry.load(name, facts=facts).probe()
    assert not found.available
    assert "switched off" in found.reason
    assert found.fix


def test_a_set_uid_bubblewrap_of_a_user_has_its_disk_watched() -> None:
    facts = replace(probe.facts(), root=False)
    backend = BubblewrapBackend(facts=facts)
    usual = tools.Tool(path="/usr/bin/bwrap", version=(0, 8, 0), setuid=False)
    assert backend.sized(usual)
    assert backend.oddities(usual) == ()
    setuid = replace(usual, setuid=True)
    assert not backend.sized(setuid)
    assert "set-uid" in backend.oddities(setuid)[0]
    assert "older than 0.7" in backend.oddities(replace(usual, version=(0, 6, 1)))[0]


def test_without_control_groups_the_watchdog_holds_memory(jar: Jar) -> None:
    poor = jar_of(jar.backend.name, facts=replace(probe.facts(), cgroup=None))
    hog = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    assert poor.run(hog, memory="128M").status is Status.OOM
    files = """
import time
for number in range(100):
    open(f"/tmp/{number}", "wb").write(bytes(1 << 20))
x = bytearray(90 << 20)
time.sleep(10)
"""
    assert poor.run(files, memory="160M", disk="120M").status is Status.OOM
    assert poor.run("x = bytearray(100 << 20)\nlen(x)", memory="256M").value == 100 << 20


def test_what_only_root_may_read_of_the_system_is_hidden(jar: Jar) -> None:
    plan = jar.engine.plan(Request(code="1"), wishes={"modules": "any"}, backend=jar.backend.name)
    hidden = {at: inside for _, at, _, inside in plan.spec.sandbox.show}
    assert ("private", "hide") in hidden["/etc/ssl"]


def test_a_tool_outside_of_system_directories_is_named_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "a-sandbox-of-ours"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    with pytest.raises(BackendUnavailable, match="not installed"):
        tools.find(tool.name, None, "get it")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BackendUnavailable, match="only system directories") as refusal:
        tools.find(tool.name, None, "get it")
    assert str(tool) in (refusal.value.fix or "")

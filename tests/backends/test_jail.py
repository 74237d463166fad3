"""The jail: fresh from a warm fork server every time, whoever asked before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from belljar.backends import fleet as fleet_module
from belljar.backends import jail_plan, warmth
from belljar.backends.base import Cancel
from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import PolicyUnenforceable, RequestError
from belljar.linux import probe
from belljar.types import Mount, Request, Result, Status

pytestmark = pytest.mark.skipif(
    not JailBackend().probe().available, reason=JailBackend().probe().reason
)


class Jar:
    def __init__(self, **options: Any) -> None:
        self.backend = JailBackend(**options)
        self.engine = Engine(Settings(), backends={"jail": self.backend})

    def run(self, code: str | None, *, level: str = "standard", **wanted: Any) -> Result:
        keys = ("command", "mounts", "files", "python", "language", "outputs")
        asked = {key: wanted.pop(key) for key in keys if key in wanted}
        cancel = wanted.pop("cancel", None)
        request = Request(code=code, **asked)
        return self.engine.run(
            request, level=level, wishes={"modules": "any", **wanted}, cancel=cancel
        )


@pytest.fixture
def jar() -> Iterator[Jar]:
    jar = Jar()
    yield jar
    jar.engine.close()


@pytest.fixture(scope="module")
def warm() -> Iterator[Jar]:
    jar = Jar()
    yield jar
    jar.engine.close()


def test_strict_runs_and_every_field_is_enforced(warm: Jar) -> None:
    result = warm.run("6 * 7", level="strict")
    assert result.value == 42
    assert {held.state for held in result.enforcement.values()} == {"enforced"}
    assert result.isolation == "jail"


def test_a_jail_is_used_once(warm: Jar) -> None:
    code = """
import builtins, os, sys
seen = (hasattr(builtins, "mark"), "MARK" in os.environ, os.path.exists("/tmp/mark"),
        os.path.exists("/dev/shm/mark"), "antigravity" in sys.modules)
builtins.mark = sys.modules["antigravity"] = 1
os.environ["MARK"] = "1"
for path in ("/tmp/mark", "/dev/shm/mark"):
    open(path, "w").close()
seen
"""
    for _ in range(5):
        assert warm.run(code).value == (False,) * 5


def test_random_numbers_differ_between_runs(warm: Jar) -> None:
    values = {warm.run("import random; random.random()").value for _ in range(5)}
    assert len(values) == 5


def test_the_guest_is_process_two_of_a_world_with_nobody_else(warm: Jar) -> None:
    code = "import os; (os.getpid(), os.getuid(), {p for p in os.listdir('/proc') if p.isdigit()})"
    keeper = {"3"} if probe.facts().cgroup is not None else set()  # of its memory: it never runs
    seen = [warm.run(code).value for _ in range(20)]
    # Only a jail that was parked has a keeper, and parking goes on beside the runs.
    assert (2, 1000, {"2"} | keeper) in seen
    assert all(each in ((2, 1000, {"2"}), (2, 1000, {"2"} | keeper)) for each in seen)


def test_only_the_standard_descriptors_are_open(warm: Jar) -> None:
    code = """
import os
found = []
for fd in range(1024):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
found
"""
    assert warm.run(code, open_files=1024).value == [0, 1, 2, 3]  # 3 is the frame socket


def test_the_root_shows_nothing_of_the_host(warm: Jar, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "canary").write_text("canary")
    code = f"""
import os
[path for path in ("/etc/shadow", "/root/.bashrc", "/sys", "/dev/kmsg", "/old",
                   {str(tmp_path / "canary")!r}) if os.path.exists(path)]
"""
    assert warm.run(code).value == []


def test_proc_shows_the_runs_limits_and_nothing_of_the_host(warm: Jar) -> None:
    """A program that may look has files there; all that the kernel has besides is covered."""
    code = """
import os
shown = {}
for name in sorted(os.listdir("/proc")):
    path = "/proc/" + name
    if name.isdigit() or os.path.islink(path):
        continue
    try:
        shown[name] = len(os.listdir(path)) if os.path.isdir(path) else open(path).read()
    except PermissionError:
        shown[name] = "closed"
shown
"""
    shown = warm.run(code, memory="300M", cpus=1).value
    kept = {name: text for name, text in shown.items() if text}
    assert set(kept) == {
        "cpuinfo", "loadavg", "meminfo", "stat", "swaps", "uptime", "version", "vmstat",
    }  # fmt: skip
    assert {"sys", "kallsyms", "cmdline", "interrupts"} <= set(shown)
    assert kept["meminfo"].startswith(f"MemTotal:       {300 << 10:>8} kB\n")
    assert kept["cpuinfo"].count("processor") == 1
    assert [line[:5] for line in kept["stat"].splitlines()[:3]] == ["cpu  ", "cpu0 ", "intr "]
    # Nor has it those files where the source gives no reason to have them.
    assert warm.run("import os\nlen(os.listdir(chr(47) + 'pr' + 'oc')) < 8").value is True


def test_the_root_cannot_be_written_to(warm: Jar) -> None:
    code = """
import os
bad = []
for path in ("/x", "/usr/x", "/etc/x", "/etc/passwd", "/dev/x", "/home/x", "/.belljar/x",
             "/.probe"):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK))
        bad.append(path)
    except OSError:
        pass
bad
"""
    assert warm.run(code).value == []


@pytest.mark.parametrize("layer", jail_plan.LAYERS)
def test_a_layer_that_is_off_is_named_in_the_result_and_the_rest_still_runs(layer: str) -> None:
    jar = Jar(disable=frozenset({layer}))
    try:
        result = jar.run("6 * 7")
        assert result.value == 42
        assert any(layer in warning for warning in result.warnings)
    finally:
        jar.engine.close()


def test_without_seccomp_a_new_user_namespace_is_made() -> None:
    jar = Jar(disable=frozenset({"seccomp"}))
    try:
        assert jar.run("import ctypes; ctypes.CDLL(None).unshare(0x10000000)").value == 0
    finally:
        jar.engine.close()


def test_a_new_user_namespace_is_refused(warm: Jar) -> None:
    assert warm.run("import ctypes; ctypes.CDLL(None).unshare(0x10000000)").value == -1


def test_a_program_that_names_sockets_has_a_loopback_of_its_own(warm: Jar) -> None:
    code = """
import socket
server = socket.create_server(("127.0.0.1", 8080))
client = socket.create_connection(("127.0.0.1", 8080))
server.accept()[0].sendall(b"hello")
client.recv(10)
"""
    assert warm.run(code).value == b"hello"
    assert warm.run(code).value == b"hello"  # the port is free again: it is another network


# A guess from the source chooses the kind of network: these programs are guessed to need none.
UNREAD = """
import builtins, os
socket = vars(builtins)["__imp" + "ort__"]("socket")
def attempt(family, kind=socket.SOCK_STREAM):
    try:
        socket.socket(family, kind).close()
    except OSError as error:
        return error.errno
"""
SOCKETS = "(attempt(socket.AF_UNIX), attempt(socket.AF_INET), attempt(socket.AF_INET6, 2))"


def test_a_run_without_a_network_of_its_own_makes_pairs_of_sockets_and_no_others(warm: Jar) -> None:
    pair = "socket.socketpair()[0].close()\n"
    assert warm.run(UNREAD + pair + SOCKETS).value == (97, 97, 97)
    assert warm.run("import socket\n" + UNREAD + pair + SOCKETS).value == (None, None, None)
    datagrams = UNREAD + "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].close()"
    assert "Protocol not supported" in str(warm.run(datagrams).error)
    assert warm.run("import socket\n" + datagrams).success


def test_no_two_runs_at_a_time_are_in_one_network(warm: Jar) -> None:
    code = """
import os, time
open("here", "w").close(); time.sleep(1)
os.stat("/proc/self/ns/net").st_ino, open("/proc/self/net/unix").read().count("\\n")
"""
    keep_pairs = UNREAD + "kept = [socket.socketpair() for _ in range(50)]\n" + code
    with ThreadPoolExecutor(4) as pool:
        crowd = [pool.submit(warm.run, keep_pairs) for _ in range(3)]
        alone = pool.submit(warm.run, code).result().value
        others = [each.result().value for each in crowd]
    assert len({inode for inode, _ in (alone, *others)}) == 4
    assert os.stat("/proc/self/ns/net").st_ino not in {inode for inode, _ in (alone, *others)}
    assert alone[1] < 20
    assert all(count > 100 for _, count in others)  # control: such pairs are listed
    # The next run in a network that was used finds none of the sockets that were in it.
    assert warm.run(code.replace("sleep(1)", "sleep(0)")).value[1] < 20


def test_without_namespaces_a_run_is_in_the_host_s_network() -> None:
    jar = Jar(disable=frozenset({"namespaces"}))
    try:
        seen = jar.run("import os; os.stat('/proc/self/ns/net').st_ino").value
        assert seen == os.stat("/proc/self/ns/net").st_ino
    finally:
        jar.engine.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_managers_and_pools_of_multiprocessing_work(warm: Jar, method: str) -> None:
    code = f"""
import multiprocessing
def double(number):
    return number * 2
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    with context.Manager() as manager, context.Pool(2) as pool:
        shared = manager.dict(a=1)
        result = [shared["a"], *pool.map(double, [1, 2])]
"""
    result = warm.run(code)
    assert result.value == [1, 2, 4], result.stderr


@pytest.mark.parametrize(
    ("code", "sockets"),
    [
        ("print(1)", False),
        ("import json, os.path\nfrom collections import abc", False),
        ("import pandas as pd", False),
        ("import logging", False),
        ("import logging.handlers", True),
        ("import socket", True),
        ("x = 1; import socket", True),
        ("import my_module", True),
        ("__import__('socket')", True),
        ("exec(source)", True),
        ("import os\nos.system('curl localhost')", True),
        ("import os\nos.execv('/bin/sh', [])", True),
        ("import os\nos.posix_spawn('/bin/sh', [], {})", True),
        ("import sys\nsys.modules['x']", True),
    ],
)
def test_what_is_not_known_to_need_no_sockets_gets_them(code: str, sockets: bool) -> None:
    assert warmth.of_request(Request(code=code)).sockets is sockets
    assert warmth.of_request(Request(code=code, files={"json.py": b""})).sockets


def test_files_left_open_are_flushed_as_python_does(warm: Jar) -> None:
    code = """
import atexit
kept = open("kept", "w"); kept.write("a")
class Cycle: pass
cycle = Cycle(); cycle.me = cycle; cycle.file = open("cycle", "w"); cycle.file.write("b")
late = open("late", "w"); atexit.register(late.write, "c")
"""
    result = warm.run(code, outputs=("*",))
    assert {name: file.data for name, file in result.files.items()} == {
        "kept": b"a",
        "cycle": b"b",
        "late": b"c",
    }


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('words')", 1),
        ("import os; os._exit(9)", 9),
    ],
)
def test_exit_codes_are_the_program_s(warm: Jar, code: str, expected: int) -> None:
    assert warm.run(code).exit_code == expected


def test_an_interrupt_of_its_own_ends_it_by_that_signal(warm: Jar) -> None:
    result = warm.run("raise KeyboardInterrupt")
    assert (result.status, result.signal) == (Status.ERROR, signal.SIGINT)


def test_signals_to_init_from_inside_end_nothing(warm: Jar) -> None:
    code = """
import os, signal
for number in range(1, 32):
    try:
        os.kill(1, number)
    except OSError:
        pass
"still here"
"""
    assert warm.run(code).value == "still here"


def test_a_disk_that_memory_cannot_hold_is_refused(warm: Jar) -> None:
    with pytest.raises(PolicyUnenforceable) as refusal:
        warm.run("1", memory="64M", disk="1G")
    assert refusal.value.fields == ("disk",)
    assert warm.run("1", memory="64M", disk="32M").success


def test_files_that_do_not_fit_are_refused(warm: Jar) -> None:
    with pytest.raises(RequestError) as refusal:
        warm.run("1", disk="1M", files={"big": bytes(2 << 20)})
    assert refusal.value.field == "files"


def test_all_that_a_run_writes_counts_as_disk(warm: Jar) -> None:
    code = """
for place in ("/tmp/a", "/dev/shm/b", "c"):
    with open(place, "wb", buffering=0) as file:
        for _ in range(3):
            file.write(bytes(1 << 20))
"""
    result = warm.run(code, disk="8M")
    assert (result.status, result.limit_hit) == (Status.LIMIT, "disk")
    assert warm.run(code, disk="16M").success


def test_another_interpreter_runs_in_the_jail(warm: Jar) -> None:
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("no second interpreter here")
    result = warm.run("import sys; sys.executable", python="/usr/bin/python3")
    assert result.value == "/usr/bin/python3"


def test_a_command_runs_in_the_jail(warm: Jar) -> None:
    result = warm.run(None, command=("sh", "-c", "id -u; pwd; ls /; exit 3"))
    assert result.exit_code == 3
    assert result.stdout.splitlines()[:2] == ["1000", "/sandbox/run/work"]
    assert "root" not in result.stdout.split() or not os.path.isdir("/root/.ssh")


def test_many_callers_get_their_own_answers(warm: Jar) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: warm.run(f"print({n})"), range(40)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(40)]


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline


def test_a_zygote_that_was_killed_is_replaced(jar: Jar) -> None:
    assert jar.run("1").success
    fleet = jar.backend._fleet
    assert fleet is not None
    (zygote,) = fleet._zygotes.values()
    below = _below(zygote.process.pid)
    zygote.process.kill()
    zygote.process.wait()
    _wait_until_gone(below)  # a run that one of them had begun would fail, as it should
    assert jar.run("2").value == 2


@pytest.mark.parametrize(("tidy", "replaced"), [(False, True), (True, False)])
def test_a_zygote_that_served_many_runs_is_replaced_unless_leftovers_are_counted(
    monkeypatch: pytest.MonkeyPatch, tidy: bool, replaced: bool
) -> None:
    monkeypatch.setattr(fleet_module, "RUNS_A_ZYGOTE", 3)
    jar = Jar(tidy=tidy)
    try:
        zygotes = set()
        for _ in range(5):
            assert jar.run("1").success
            assert jar.backend._fleet is not None
            zygotes |= {each.process.pid for each in jar.backend._fleet._zygotes.values()}
    finally:
        jar.backend.close()
    assert len(zygotes) == 1 + replaced


def test_a_parked_jail_that_was_killed_is_not_handed_out(jar: Jar) -> None:
    for _ in range(3):
        assert jar.run("1").success
    fleet = jar.backend._fleet
    assert fleet is not None
    (zygote,) = fleet._zygotes.values()
    parked = _below(zygote.process.pid)[2:]
    assert parked
    for pid in parked:
        with contextlib.suppress(ProcessLookupError):  # it died with another one
            os.kill(pid, signal.SIGKILL)
    _wait_until_gone(parked)
    assert jar.run("2").value == 2


def test_closing_leaves_no_process_and_no_control_group() -> None:
    jar = Jar()
    before = _groups(jar)
    for _ in range(3):
        jar.run("1")
    fleet = jar.backend._fleet
    assert fleet is not None
    (zygote,) = fleet._zygotes.values()
    below = _below(zygote.process.pid)
    assert len(below) >= 2  # the control arm: there was something
    jar.engine.close()
    assert [pid for pid in below if os.path.exists(f"/proc/{pid}")] == []
    assert _groups(jar) == before


def test_cancelling_kills_the_guest(warm: Jar) -> None:
    with Cancel() as cancel:
        cancel.set()
        result = warm.run("import time; time.sleep(60)", cancel=cancel)
    assert (result.status, result.signal) == (Status.KILLED, signal.SIGKILL)
    assert result.kill is not None
    assert result.kill.survivors == 0


def test_a_writable_project_keeps_what_tools_execute(warm: Jar, tmp_path: Path) -> None:
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
    result = warm.run(code, mounts=(Mount(str(tmp_path), "p", "rw"),))
    assert result.value == [], result
    assert (tmp_path / "result.txt").read_text() == "written"  # the control arm
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "result.txt"]
    assert (tmp_path / "result.txt").stat().st_uid == os.geteuid()
    assert list(hooks.iterdir()) == []


def test_a_set_id_file_cannot_be_left_in_a_mount(warm: Jar, tmp_path: Path) -> None:
    code = """
import os
for make in (lambda: os.chmod("p/f", 0o4755), lambda: os.open("p/g", os.O_CREAT, 0o6755)):
    try:
        make()
    except PermissionError:
        continue
open("p/f", "w").close()
try:
    os.chmod("p/f", 0o4755)
except PermissionError:
    pass
os.chmod("p/f", 0o755)
"""
    result = warm.run(code, mounts=(Mount(str(tmp_path), "p", "rw"),))
    assert result.success, result
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o755
    assert not (tmp_path / "g").exists()


def test_a_tables_program_starts_with_its_modules_loaded(warm: Jar) -> None:
    pytest.importorskip("pandas")
    if sys.prefix.startswith("/tmp/"):
        pytest.skip("an interpreter below /tmp is shown to each run, not to the zygote")
    code = "import sys; there = 'pandas' in sys.modules\nimport pandas\nthere"
    assert warm.run(code).value is True
    assert warm.run("import sys; 'pandas' in sys.modules").value is False


def _groups(jar: Jar) -> set[str]:
    """The control groups of this process."""
    home = jar.backend.facts.cgroup
    return {
        name
        for directory in (home.directories if home is not None else ())
        for name in os.listdir(directory)
        if name.startswith(f"belljar-{os.getpid()}-")
    }


def _below(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    children: dict[int, list[int]] = {}
    for line in listed.stdout.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(0), [])
        found += below
        pending += below
    return found


def test_the_worker_does_not_say_where_we_are_installed(warm: Jar) -> None:
    """It is loaded outside, and guests find it where they see it."""
    code = """
import sys
seen = set()
for name, module in list(sys.modules.items()):
    if name.startswith("belljar_guest."):
        seen |= {module.__file__, module.__spec__.origin, module.__cached__ or ""}
        seen |= {thing.__code__.co_filename for thing in vars(module).values()
                 if hasattr(thing, "__code__")}
sorted(seen), sys.flags.dont_write_bytecode, sys.dont_write_bytecode
"""
    seen, *no_bytecode = warm.run(code).value
    assert "/.belljar/worker.py" in seen
    assert all(path.startswith("/.belljar/") or path in ("", "<belljar>") for path in seen)
    assert no_bytecode == [1, True]


def test_a_program_that_imports_nothing_starts_with_little(warm: Jar) -> None:
    """Every module of the zygote's is a cost of its start, and of every fork."""
    code = "import sys; sorted(name for name in sys.modules if not name.startswith('_'))"
    there = set(warm.run(code).value)
    heavy = {"collections", "contextlib", "enum", "functools", "importlib", "inspect", "json", "re"}
    heavy |= {"shutil", "signal", "socket", "subprocess", "threading", "typing", "warnings"}
    blank = subprocess.run(
        [sys.executable, "-I", "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not heavy & there - set(blank.stdout.split())

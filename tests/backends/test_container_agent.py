"""The agent in a container is out of the guest's reach, and the host believes no more than it has
to: every test on Docker with runc, on Podman and on gVisor."""

from __future__ import annotations

import marshal
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import container_engines
import pytest
from container_engines import TOGETHER
from test_docker import Bench

from belljar.backends import agent_link, docker_plan
from belljar.backends.docker import DockerBackend
from belljar.backends.docker_watch import AgentWatch
from belljar.backends.gvisor import GvisorBackend
from belljar.errors import BackendFailed
from belljar.guest import agent, protocol
from belljar.types import Mount, Result, Status

pytestmark = [pytest.mark.slow, TOGETHER]
KINDS: dict[str, tuple[str, type[DockerBackend]]] = {
    "docker": ("docker", DockerBackend),
    "podman": ("podman", DockerBackend),
    "gvisor": ("docker", GvisorBackend),
}
Make = Callable[..., Bench]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if reason := container_engines.why_not(KINDS[name][0]):
        pytest.skip(reason)
    if name == "gvisor" and not shutil.which("runsc"):
        pytest.skip("runsc is not installed")
    return name


@pytest.fixture
def make(kind: str) -> Iterator[Make]:
    """Makes benches of this kind; what they leave is an error."""
    made: list[Bench] = []
    engine, backend = KINDS[kind]

    def one(**options: Any) -> Bench:
        made.append(Bench(container_engines.session(engine), kind=backend, **options))
        return made[-1]

    yield one
    for each in made:
        each.engine.close()
        assert each.containers() == []


FORGE = """
import json, os, sys, time
def say(kind, value):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    os.write(fd, bytes([kind]) + len(data).to_bytes(4, "big") + data)
try:
    fd = os.open("/proc/1/fd/1", os.O_WRONLY)
except OSError as error:
    print("refused", error.errno)
    sys.exit(7)
say(0x96, {"status": 0, "cpu": 0.0, "peak": 1, "survivors": 0, "kill": 0.0, "oom_kills": 0})
if FILE:
    say(0x97, {"path": FILE.encode().hex(), "size": 5, "data": True})
    say(0x98, b"HELLO")
say(0x99, {"warnings": ["forged"]})
time.sleep(1)
os._exit(7)
"""


def forged(bench: Bench, file: str = "") -> Result:
    return bench.run(FORGE.replace("FILE", repr(file)), outputs=("**",))


def test_a_guest_cannot_write_its_own_result(make: Make) -> None:
    result = forged(make(), "../../escaped")
    assert (result.status, result.exit_code) == (Status.ERROR, 7)
    assert result.stdout == "refused 13\n"
    assert "../../escaped" not in result.files
    assert result.warnings == ()


def test_a_forged_result_is_believed_only_with_the_guest_s_user_given_up(
    kind: str, make: Make
) -> None:
    """The control arm, and the second line: a name that leads out of the directory is no file."""
    if kind != "gvisor":
        pytest.skip("there the agent is closed to its own user")
    loose = make(disable=frozenset({"user"}))
    lied = forged(loose)
    assert (lied.status, lied.exit_code) == (Status.SUCCESS, 0)
    assert "forged" in lied.warnings
    for name in ("../../escaped", "/tmp/escaped", "a//b", "."):
        outside = forged(loose, name)
        assert outside.files == {}
        assert outside.truncated
        assert any("a file's name" in each for each in outside.warnings)


def test_an_agent_that_a_guest_can_reach_is_not_given_a_program(
    kind: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ability is tried, whatever the engine and its version promise."""
    bench = make()
    assert bench.run("1").success  # the control arm
    if kind == "gvisor":
        monkeypatch.setattr(docker_plan.Shape, "apart", property(lambda shape: False))
        with pytest.raises(BackendFailed, match="an agent that the guest cannot reach"):
            bench.run("1")
    else:
        modules = marshal.loads(agent_link.boot()[4:])
        source = modules["belljar_guest.agent"]
        modules["belljar_guest.agent"] = source.replace("sealed = seal(False)", "sealed = True")
        assert modules["belljar_guest.agent"] != source
        data = marshal.dumps(modules, 2)
        monkeypatch.setattr(agent_link, "boot", lambda: len(data).to_bytes(4, "big") + data)
        with pytest.raises(BackendFailed, match="an agent that the guest cannot reach"):
            bench.run("1")
        monkeypatch.undo()
        monkeypatch.setattr(bench.backend, "_seccomp", lambda *asked: "unconfined")
        with pytest.raises(BackendFailed, match="whose limits the guest cannot change"):
            bench.run("1")


def test_signals_and_traces_do_not_reach_the_agent(make: Make) -> None:
    result = make().run("""
        import ctypes, os, signal
        for name in ("SIGSTOP", "SIGTERM", "SIGINT", "SIGCHLD", "SIGKILL"):
            try:
                os.kill(1, getattr(signal, name))
            except PermissionError:
                pass
        reached = []
        for name in ("fd/0", "fd/2", "mem", "cwd/", "root/"):
            try:
                os.close(os.open("/proc/1/" + name, os.O_RDONLY))
                reached.append(name)
            except OSError:
                pass
        open("kept", "w").write("x")
        [reached, os.getppid(), ctypes.CDLL(None).ptrace(16, 1, 0, 0)]
        """)
    assert result.value == [[], 1, -1]
    assert "kept" in result.files
    assert result.usage.wall < 3  # a stopped agent would be killed only after five seconds


BREAK = """
import os, resource, time
open("kept", "w").write("x")
print("before", flush=True)
try:
    resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1))
    print("limited", flush=True)
except PermissionError:
    print("refused", flush=True)
time.sleep(1)
"""


def test_a_guest_cannot_limit_its_agent(kind: str, make: Make) -> None:
    held = make().run(BREAK)
    assert held.success
    assert held.stdout == "before\nrefused\n"
    assert "kept" in held.files
    # The control arm. An agent that is damaged is a result, which no caller should try again.
    loose = make(disable=frozenset({"user" if kind == "gvisor" else "seccomp"}))
    broken = loose.run(BREAK)
    assert broken.status is Status.KILLED
    assert "before\nlimited\n".startswith(broken.stdout)  # as far as the agent got
    assert broken.truncated
    assert any("the agent ended without a report" in each for each in broken.warnings)


def test_a_guest_cannot_slow_its_agent_down(kind: str, make: Make) -> None:
    code = """
        import os
        done = []
        for name, act in (
            ("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 5)),
            ("its user's priority", lambda: os.setpriority(os.PRIO_USER, 0, 5)),
            ("cores", lambda: os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})),
            ("policy", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))),
        ):
            try:
                act()
                done.append(name)
            except OSError:
                pass
        os.nice(1)
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        done
        """
    if kind == "gvisor":
        pytest.skip("its priorities and cores are numbers that change nothing")
    assert make().run(code).value == []
    loose = make(disable=frozenset({"seccomp"})).run(code)  # the control arm
    assert {"priority", "cores"} <= set(loose.value)


def test_files_that_did_not_all_come_are_not_passed_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends between EXIT and DONE."""
    bench = make()
    code = "for i in range(40): open(f'f{i:02}', 'wb').write(b'x' * 300_000)"
    whole = bench.run(code, outputs=("*",), memory="128M", disk="32M")
    assert (len(whole.files), whole.truncated, whole.warnings) == (40, False, ())
    take, seen = AgentWatch._take, []

    def lose(watch: AgentWatch, packet: protocol.Frame) -> None:
        take(watch, packet)
        seen.append(packet.kind)
        if seen.count(agent.DATA) == 9:
            watch._socket.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(AgentWatch, "_take", lose)
    part = bench.run(code, outputs=("*",), memory="128M", disk="32M")
    assert (part.status, part.exit_code) == (Status.SUCCESS, 0)  # the kernel's, through the agent
    assert part.truncated
    assert any("files may be missing or cut" in each for each in part.warnings)
    assert 0 < len(part.files) < 40
    assert any(file.truncated for file in part.files.values())


def test_a_packet_that_no_agent_sends_ends_the_run_and_not_the_host(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    take = AgentWatch._take

    def garble(watch: AgentWatch, packet: protocol.Frame) -> None:
        take(watch, packet)
        if packet.kind == agent.STDOUT:
            take(watch, protocol.Frame(agent.DONE, packet.payload))  # before there is an EXIT

    monkeypatch.setattr(AgentWatch, "_take", garble)
    result = bench.run("print('up', flush=True)\nimport time; time.sleep(30)", timeout=20)
    assert (result.status, result.stdout) == (Status.KILLED, "up\n")
    assert result.usage.wall < 15
    assert any("malformed" in each for each in result.warnings)


def test_the_names_of_many_files_do_not_cost_the_result(make: Make) -> None:
    result = make().run(
        """
        import os
        deep = ("d" * 200 + "/") * 8
        os.makedirs(deep)
        open(deep + "x", "w").write("1")
        for i in range(1000):
            os.link(deep + "x", deep + "n" * 200 + f"{i:04}")
        """,
        outputs=("*",),
    )
    assert result.success
    assert result.truncated
    assert 500 < len(result.files) < 700  # names take at most 1 MiB, as on every backend
    assert len(result.warnings) == 22
    assert all(len(each) <= 200 for each in result.warnings)
    assert any("has a second hard link" in each for each in result.warnings)
    assert "more warnings about files" in result.warnings[-1]


BUFFERS = """
import socket
kept, sent = [], 0
for _ in range(120):
    to = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    to.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
    to.bind(("127.0.0.1", 0))
    by = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    by.setblocking(False)
    kept += [to, by]
    for _ in range(8):
        try:
            by.sendto(bytes(60000), to.getsockname())
        except OSError:
            break
words = next(line.split() for line in open("/proc/net/sockstat") if line.startswith("UDP:"))
int(words[words.index("mem") + 1]) * 4096
"""


def test_buffers_of_sockets_are_limited(
    kind: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    facts = bench.backend._engine()[1]
    if kind == "gvisor" or facts.cgroup_version == 2:
        pytest.skip("they are counted as memory here")
    if not facts.sockets_counted:
        pytest.skip("this process may not limit them: see the test of that")
    limit = 64 << 20
    held = bench.run(BUFFERS, memory=limit)
    assert held.value <= limit // 4 + (1 << 20), held
    monkeypatch.setattr(docker_plan, "own_socket_limit", lambda *asked: False)
    assert bench.run(BUFFERS, memory=limit).value > limit // 4 + (4 << 20)  # the control arm
    monkeypatch.undo()
    # One that cannot be set is noticed.
    monkeypatch.setattr("belljar.backends.docker_container.limit_sockets", lambda *asked: None)
    with pytest.raises(BackendFailed, match="socket buffers"):
        bench.run("1", memory=limit)


def test_sockets_that_nothing_counts_are_closed(kind: str, make: Make) -> None:
    if kind == "gvisor":
        pytest.skip("its sockets are memory of its own")
    facts = make().backend._engine()[1]
    poor = make(facts=replace(facts, cgroup_version=1, sockets_counted=False))
    code = """
        import socket
        made = []
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
            try:
                socket.socket(family).close()
                made.append(int(family))
            except OSError:
                pass
        one, other = socket.socketpair()
        made
        """
    if facts.cgroup_version == 1:
        result = poor.run(code)
        assert result.value == [1]
        assert result.enforcement["memory"].state == "enforced"
    if facts.sockets_counted:
        assert make().run(code).value == [1, 2, 10]  # the control arm


def test_a_daemon_s_socket_in_a_mount_is_not_reached(kind: str, make: Make, tmp_path: Path) -> None:
    heard: list[bytes] = []
    directory = tmp_path / "run"
    directory.mkdir()
    for each in (*reversed(directory.parents), directory):
        if each.is_relative_to(tmp_path.parent):
            each.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(directory / "s"))
        os.chmod(directory / "s", 0o666)
        daemon.listen()

        def serve() -> None:
            while True:
                try:
                    connection = daemon.accept()[0]
                except OSError:
                    return
                with connection:
                    heard.append(connection.recv(99))

        thread = threading.Thread(target=serve)
        thread.start()
        code = """
            import socket
            with socket.socket(socket.AF_UNIX) as made:
                made.connect("/sandbox/run/s")
                made.sendall(b"guest")
            """
        mounts = (Mount(str(directory), "run", "ro"),)
        try:
            assert make().run(code, mounts=mounts).status is Status.ERROR
            assert heard == []
            if kind != "gvisor":  # which connects to no socket of the host's by itself
                loose = make(disable=frozenset({"seccomp"}))
                assert loose.run(code, mounts=mounts).success  # the control arm
        finally:
            daemon.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert heard == ([] if kind == "gvisor" else [b"guest"])


def test_what_a_user_has_few_of_is_closed(kind: str, make: Make) -> None:
    code = """
        import ctypes, errno, fcntl, mmap, os
        libc = ctypes.CDLL(None, use_errno=True)
        told = []
        told.append(libc.inotify_init1(0) >= 0 or errno.errorcode[ctypes.get_errno()])
        for flags in (0x40000, 0):
            try:
                flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                mmap.mmap(-1, 2 << 20, flags=flags).close()
                told.append("mapped")
            except OSError as error:
                told.append(errno.errorcode[error.errno])
        for flags in (4, 0):
            try:
                os.close(os.memfd_create("x", flags))
                told.append("file")
            except OSError as error:
                told.append(errno.errorcode[error.errno])
        reader, writer = os.pipe()
        for fd, command, argument in ((reader, 1031, 1 << 17), (os.open(".", 0), 1026, 1)):
            try:
                fcntl.fcntl(fd, command, argument)
                told.append("done")
            except OSError as error:
                told.append(errno.errorcode[error.errno])
        told
        """
    if kind == "gvisor":
        pytest.skip("these are its own kernel's, made anew for each run")
    held = make().run(code).value
    assert held == ["ENOSYS", "ENOMEM", "mapped", "EINVAL", "file", "EPERM", "EPERM"]
    loose = make(disable=frozenset({"seccomp"})).run(code).value  # the control arm
    assert (loose[0], loose[4:]) == (True, ["file", "done", "done"])


def test_the_host_s_hardware_and_neighbours_are_masked(kind: str, make: Make) -> None:
    code = """
        import os
        found = {}
        for name in ("/proc/config.gz", "/proc/iomem", "/proc/interrupts", "/proc/diskstats",
                     "/proc/cmdline", "/proc/partitions", "/sys/block"):
            try:
                is_directory = os.path.isdir(name)
                found[name] = len(os.listdir(name) if is_directory else open(name, "rb").read())
            except FileNotFoundError:
                pass
        found["/proc/meminfo"] = len(open("/proc/meminfo", "rb").read())
        found
        """
    found = make().run(code).value
    assert found.pop("/proc/meminfo") > 0  # the control arm
    if kind == "gvisor":
        pytest.skip("its /proc and /sys are its own")
    assert len(found) >= 5
    assert set(found.values()) == {0}

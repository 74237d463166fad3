"""What a guest of `subprocess` reaches for and does not get, each with its control arm."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import (
    ATTEMPT,
    FACTS,
    NO_NAMESPACES,
    needs_landlock,
    needs_namespaces,
    needs_seccomp,
    run,
)

from belljar.linux import seccomp
from belljar.types import Mount, Status


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory on the host that no guest is shown, and which is not below /tmp."""
    path = Path("/var/tmp") / f"belljar-outside-{os.getpid()}"
    path.mkdir()
    (path / "secret").write_text("canary")
    (path / "secret").chmod(0o600)
    yield path
    shutil.rmtree(path)


# -- sockets


FAMILIES = {"unix": 1, "netlink": 16, "packet": 17, "alg": 38, "vsock": 40, "xdp": 44}
SOCKETS = (
    ATTEMPT + "import socket\n"
    "def make(family):\n    socket.socket(family, socket.SOCK_RAW if family == 16 else "
    "socket.SOCK_DGRAM if family == 1 else socket.SOCK_STREAM).close()\n"
    "def pair(kind):\n    [end.close() for end in socket.socketpair(socket.AF_UNIX, kind)]\n"
    f"found = {{name: attempt(lambda: make(number)) for name, number in {FAMILIES!r}.items()}}\n"
    "found['inet'] = attempt(lambda: make(2))\n"
    "found['stream pair'] = attempt(lambda: pair(socket.SOCK_STREAM))\n"
    "found['datagram pair'] = attempt(lambda: pair(socket.SOCK_DGRAM))\n"
    "found"
)


@needs_seccomp
@pytest.mark.parametrize("lacking", [{}, NO_NAMESPACES], ids=["namespaces", "none"])
def test_only_the_sockets_of_an_empty_network_can_be_made(lacking: dict[str, Any]) -> None:
    found = run(SOCKETS, lacking=lacking).value
    alone = bool(FACTS.userns and not lacking)
    assert found.pop("inet") == ("done" if alone else "EAFNOSUPPORT")
    assert found.pop("stream pair") == "done"
    assert found.pop("datagram pair") == "EPROTONOSUPPORT"
    assert found == dict.fromkeys(FAMILIES, "EAFNOSUPPORT")
    free = run(SOCKETS, disable=["seccomp"]).value  # the control arm
    assert (free["unix"], free["netlink"], free["datagram pair"]) == ("done", "done", "done")


@pytest.fixture
def daemon(outside: Path) -> Iterator[tuple[Path, socket.socket]]:
    """Two sockets as a daemon has them: one takes connections, the other, returned, datagrams."""
    stream, letters = (
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    )
    stream.bind(str(outside / "docker.sock"))
    letters.bind(str(outside / "log"))
    stream.listen()
    for name in ("docker.sock", "log"):
        (outside / name).chmod(0o777)

    def serve() -> None:
        try:
            while True:
                client, _ = stream.accept()
                with client:
                    client.sendall(b"welcome")
        except OSError:  # closed, which ends the test
            return

    server = threading.Thread(target=serve)
    server.start()
    letters.setblocking(False)
    yield outside, letters
    stream.shutdown(socket.SHUT_RDWR)
    stream.close()
    letters.close()
    server.join()


DAEMON = (
    ATTEMPT + "import socket, sys\nbase = sys.argv[1]\n"
    "def connect():\n"
    "    s = socket.socket(socket.AF_UNIX); s.connect(base + '/docker.sock')\n"
    "    assert s.recv(7) == b'welcome'; s.close()\n"
    "def send():\n"
    "    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "    a.sendto(b'hello', base + '/log'); a.close(); b.close()\n"
    "[attempt(connect), attempt(send)]"
)


@needs_seccomp
@pytest.mark.parametrize("lacking", [{}, NO_NAMESPACES], ids=["namespaces", "none"])
def test_a_daemons_socket_cannot_be_reached(
    daemon: tuple[Path, socket.socket], lacking: dict[str, Any]
) -> None:
    """Landlock does not hold connect(): with the path named, only seccomp stands in between."""
    base, letters = str(daemon[0]), daemon[1]
    held = run(DAEMON, args=[base], lacking=lacking)
    assert held.value == ["EAFNOSUPPORT", "EPROTONOSUPPORT"]
    with pytest.raises(BlockingIOError):
        letters.recv(100)
    # The control arm: even a directory that is only to be read, or not shown at all, is enough.
    free = run(DAEMON, args=[base], mounts=[f"{base}:box"], lacking=lacking, disable=["seccomp"])
    assert free.value == ["done", "done"]
    assert letters.recv(100) == b"hello"


# -- the host's files


METADATA = (
    ATTEMPT + "import sys\npath = sys.argv[1] + '/secret'\n"
    "{'chmod': attempt(lambda: os.chmod(path, 0o777)),"
    " 'utime': attempt(lambda: os.utime(path, (1, 1))),"
    " 'xattr': attempt(lambda: os.setxattr(path, b'user.x', b'1')),"
    " 'chown': attempt(lambda: os.chown(path, os.getuid(), os.getgid())),"
    " 'truncate': attempt(lambda: os.truncate(path, 0)),"
    " 'read': attempt(lambda: open(path).close())}"
)


def untouched(path: Path) -> bool:
    info = (path / "secret").stat()
    return (info.st_mode & 0o777, info.st_size) == (0o600, 6) and info.st_mtime > 1


@needs_landlock
@pytest.mark.parametrize(
    ("lacking", "disable"),
    [({}, []), (NO_NAMESPACES, []), ({}, ["read_only_mounts"])],
    ids=["read-only mounts", "no namespaces", "seccomp alone"],
)
def test_modes_times_and_owners_of_the_hosts_files_stay_as_they_are(
    outside: Path, lacking: dict[str, Any], disable: list[str]
) -> None:
    """The guest has the host's own uid, and Landlock does not hold these calls."""
    told = run(METADATA, args=[str(outside)], lacking=lacking, disable=disable).value
    assert untouched(outside)
    assert os.listxattr(outside / "secret") == []
    assert (told["truncate"], told["read"]) in (("EROFS", "EACCES"), ("EACCES", "EACCES"))


@needs_landlock
def test_without_those_two_layers_the_hosts_files_can_be_spoilt(outside: Path) -> None:
    """The control arm."""
    told = run(METADATA, args=[str(outside)], disable=["read_only_mounts", "seccomp"]).value
    assert (told["chmod"], told["utime"]) == ("done", "done")
    assert (outside / "secret").stat().st_mode & 0o777 == 0o777


def test_in_its_own_directory_a_guest_sets_modes_and_times() -> None:
    code = (
        "import os, shutil\nopen('a', 'w').write('x')\n"
        "os.chmod('a', 0o640)\nos.utime('a', (5, 5))\n"
        "shutil.copy2('a', 'b')\ninfo = os.stat('b')\n(info.st_mode & 0o777, info.st_mtime)"
    )
    if FACTS.userns:
        assert tuple(run(code).value) == (0o640, 5)
    # Where there is nothing but seccomp to hold them, they do nothing, and nothing fails.
    assert run(code, lacking=NO_NAMESPACES).success


@needs_landlock
def test_kernel_settings_cannot_be_opened_for_writing() -> None:
    paths = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj")
    code = ATTEMPT + f"[attempt(lambda: os.open(path, os.O_WRONLY)) for path in {paths!r}]"
    assert set(run(code).value) <= {"EACCES", "EROFS", "ENOENT"}
    if FACTS.proc_mount:
        # Not even where Landlock is missing: the mount itself is read-only.
        assert "done" not in run(code, disable=["landlock"]).value


def test_no_core_is_written() -> None:
    code = "print(resource.getrlimit(resource.RLIMIT_CORE), flush=True)\nos.abort()"
    result = run(f"import os, resource\n{code}")
    assert (result.status, result.signal) == (Status.ERROR, signal.SIGABRT)
    assert result.stdout == "(1, 1)\n"
    assert result.files == {}


# -- mounts


def test_a_read_only_mount_can_be_read_and_a_writable_one_written(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("hello")
    code = (
        ATTEMPT + "def write(name):\n    with open('box/' + name, 'w') as f: f.write('x')\n"
        "[open('box/given').read(), attempt(lambda: write('new')),"
        " attempt(lambda: write('given')), attempt(lambda: os.unlink('box/given')),"
        " attempt(lambda: os.chmod('box/given', 0o777))]"
    )
    text, *refused = run(code, mounts=[f"{tmp_path}:box:ro"]).value
    assert text == "hello"
    assert set(refused[:3]) <= {"EACCES", "EROFS"}
    assert (tmp_path / "given").read_text() == "hello"
    assert os.listdir(tmp_path) == ["given"]
    written = run(code, mounts=[f"{tmp_path}:box:rw"])  # the control arm
    assert written.value == ["hello", "done", "done", "done", "ENOENT"]
    assert os.listdir(tmp_path) == ["new"]
    assert written.files == {}  # what is mounted is not among the files of the run


@pytest.mark.parametrize("disable", [[], ["read_only_mounts"]], ids=["both", "freeze alone"])
@needs_namespaces
@needs_landlock
def test_read_only_inside_writable_stays_read_only(tmp_path: Path, disable: list[str]) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/file").write_text("canary")
    code = (
        ATTEMPT + "import sys\nbase = sys.argv[1]\n"
        "def write(name):\n    with open(base + name, 'w') as f: f.write('x')\n"
        "[attempt(lambda: write('/beside')), attempt(lambda: write('/inner/file'))]"
    )
    rules = {"read_write": [str(tmp_path)], "read_only": [str(tmp_path / "inner")]}
    told = run(code, args=[str(tmp_path)], filesystem=rules, disable=disable).value
    assert told[0] == "done"
    assert told[1] in ("EROFS", "EACCES")
    assert (tmp_path / "inner/file").read_text() == "canary"
    free = run(code, args=[str(tmp_path)], filesystem={"read_write": [str(tmp_path)]})
    assert free.value == ["done", "done"]  # the control arm


@needs_namespaces
@needs_landlock
def test_a_hidden_path_is_empty_even_inside_one_that_is_shown(outside: Path) -> None:
    code = "import os, sys; os.listdir(sys.argv[1])"
    shown = {"read_only": [str(outside)]}
    assert run(code, args=[str(outside)], filesystem=shown).value == ["secret"]
    inside = outside / "inside"
    inside.mkdir()
    (inside / "more").touch()
    assert run(code, args=[str(inside)], filesystem=shown).value == ["more"]
    hidden = {**shown, "hidden": [str(inside)]}
    assert run(code, args=[str(inside)], filesystem=hidden).value == []


@needs_namespaces
def test_the_hosts_tmp_can_be_mounted(tmp_path: Path) -> None:
    planted = Path("/tmp") / f"belljar-canary-{os.getpid()}"
    planted.write_text("canary")
    try:
        result = run(f"open('box/{planted.name}').read()", mounts=["/tmp:box:ro"])
    finally:
        planted.unlink()
    assert result.value == "canary"


# -- limits without control groups


@needs_seccomp
def test_memory_that_the_watchdog_would_not_see_cannot_be_made() -> None:
    code = (
        ATTEMPT + "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def segment():\n    if libc.shmget(0, 4096, 0o1600) < 0:\n"
        "        raise OSError(ctypes.get_errno(), 'shmget')\n"
        "[attempt(lambda: os.memfd_create('x')), attempt(segment)]"
    )
    assert run(code, lacking={"cgroup": None}).value == ["EPERM", "EPERM"]
    if FACTS.cgroup is not None:
        assert run(code).value == ["done", "done"]  # the control arm: there it is counted


@needs_seccomp
def test_cores_that_were_not_given_cannot_be_taken() -> None:
    if len(FACTS.cpus) < 2:
        pytest.skip("one core is all there is")
    code = (
        ATTEMPT + f"done = attempt(lambda: os.sched_setaffinity(0, {set(FACTS.cpus)!r}))\n"
        "[done, len(os.sched_getaffinity(0))]"
    )
    assert run(code, cpus=1, lacking={"cgroup": None}).value == ["EPERM", 1]
    loose = run(code, cpus=1, lacking={"cgroup": None}, disable=["seccomp"])  # the control arm
    assert loose.value == ["done", len(FACTS.cpus)]
    assert loose.enforcement["cpus"].state == "best_effort"


@needs_seccomp
def test_the_hosts_shared_memory_is_closed_where_there_is_no_ipc_namespace() -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x62656C6C ^ os.getpid()
    segment = libc.shmget(key, 4096, 0o1600)
    assert segment >= 0
    code = (
        ATTEMPT + "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"def find():\n    if libc.shmget({key}, 4096, 0) < 0:\n"
        "        raise OSError(ctypes.get_errno(), 'shmget')\n"
        "attempt(find)"
    )
    try:
        assert run(code, lacking=NO_NAMESPACES).value == "EPERM"
        if FACTS.userns and FACTS.cgroup is not None:
            assert run(code).value == "ENOENT"  # in a namespace of its own there is none
        free = run(code, lacking=NO_NAMESPACES, disable=["seccomp"])  # the control arm
        assert free.value == "done"
    finally:
        libc.shmctl(segment, 0, None)


# -- system calls


@needs_seccomp
def test_the_kernel_refuses_every_call_that_the_table_denies() -> None:
    column = ("x86_64", "aarch64").index(FACTS.machine)
    numbers = {
        name: seccomp._TABLE[name][column]
        for name in (*seccomp.DENIED, *seccomp.ABSENT)
        if seccomp._TABLE[name][column] is not None
    }
    code = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\nfound = {}\n"
        f"for name, number in {numbers!r}.items():\n"
        "    ctypes.set_errno(0)\n"
        "    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1\n"
        "    found[name] = errno.errorcode[ctypes.get_errno()]\n"
        "found"
    )
    expected = dict.fromkeys(numbers, "EPERM")
    expected |= {name: "ENOSYS" for name in seccomp.ABSENT if name in numbers}
    assert run(code).value == expected


@needs_seccomp
def test_namespaces_of_its_own_are_refused_to_a_guest() -> None:
    code = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "[libc.unshare(0x10000000), errno.errorcode.get(ctypes.get_errno())]"
    )
    assert run(code).value == [-1, "EPERM"]
    assert run(code, disable=["seccomp"]).value[0] == 0  # the control arm


@needs_namespaces
def test_no_signal_of_the_guest_ends_its_init() -> None:
    code = (
        "import os, signal, time\n"
        "sent = 0\n"
        "for number in set(signal.valid_signals()):\n"
        "    try: os.kill(1, number)\n"
        "    except PermissionError: continue\n"
        "    sent += 1\n"
        "time.sleep(0.3)\n"  # long enough for an init that would end to take us with it
        "sent"
    )
    held = run(code)
    assert held.success
    free = run(code, disable=["landlock"])
    assert free.success, free
    assert free.value > 50  # these arrived: it is init itself that does not mind them


# -- what root alone may read


ROOTS_PROC = ("slabinfo", "vmallocinfo", "timer_list", "pagetypeinfo", "kpagecount")
READ_ROOTS_PROC = f"""
import os
found = []
for name in {ROOTS_PROC}:
    try:
        descriptor = os.open("/proc/" + name, os.O_RDONLY)
        if os.read(descriptor, 4096):
            found.append(name)
    except OSError:
        continue
found
"""


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read them at all")
def test_root_does_not_read_in_proc_what_only_root_may() -> None:
    here = [name for name in ROOTS_PROC if os.path.exists(f"/proc/{name}")]
    free = run(READ_ROOTS_PROC, disable=["namespaces", "landlock"]).value
    assert sorted(free) == sorted(here), "the control arm: without its own /proc the guest reads it"
    assert run(READ_ROOTS_PROC).value == []
    own = run("import os; sorted(os.listdir('/proc/self/fd')) != [], os.path.exists('/proc/1')")
    assert own.value == (True, True)


@needs_seccomp
def test_a_set_id_file_can_be_left_in_a_mount_only_without_seccomp(tmp_path: Path) -> None:
    code = ATTEMPT + (
        "open('p/f', 'w').close()\n"
        "[attempt(lambda: os.chmod('p/f', 0o4755)),"
        " attempt(lambda: os.open('p/g', os.O_CREAT, 0o2755))]"
    )
    mount = Mount(str(tmp_path), "p", "rw")
    assert run(code, mounts=(mount,)).value == ["EPERM", "EPERM"]
    assert not [path for path in tmp_path.iterdir() if path.stat().st_mode & 0o6000]
    assert run(code, mounts=(mount,), disable=["seccomp"]).value == ["done", "done"]
    assert (tmp_path / "f").stat().st_mode & 0o4000  # the control arm

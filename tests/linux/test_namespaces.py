"""Namespaces of one's own: what is inside, what is hidden, and what cannot be changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import fresh
import pytest

from belljar.linux import probe

FACTS = probe.facts()
pytestmark = pytest.mark.skipif(not FACTS.userns, reason=FACTS.userns_problem or "none")

# Each program runs in a process of its own, in a mount namespace if `mounts` is true.
INSIDE = """
import json, os
from belljar.linux import namespaces

def attempt(act):
    try:
        act()
    except OSError as error:
        return error.errno
    return 0

def inside(act, *, mounts=True, network=True):
    reader, writer = os.pipe()
    namespaces.enter(network=network)
    pid = os.fork()
    if pid == 0:
        if mounts:
            namespaces.own_mounts()
        os.write(writer, json.dumps(act()).encode())
        os._exit(0)
    os.close(writer)
    told = open(reader).read()
    os.waitpid(pid, 0)
    return json.loads(told)
"""


def test_a_process_inside_is_alone_under_another_name() -> None:
    code = (
        INSIDE
        + """
import socket

def look():
    namespaces.mount_proc()
    return {
        "pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid(), "host": os.uname().nodename,
        "processes": [name for name in os.listdir("/proc") if name.isdigit()],
        "interfaces": [name for _, name in socket.if_nameindex()],
    }

def answer():
    return inside(look)
"""
    )
    if not FACTS.proc_mount:
        pytest.skip(FACTS.proc_mount_problem)
    assert fresh.ask(code) == {
        "pid": 1, "uid": 1000, "gid": 1000, "host": "belljar", "processes": ["1"],
        "interfaces": ["lo"],
    }  # fmt: skip


@pytest.mark.parametrize("network", [True, False])
def test_loopback_works_in_an_empty_network_and_the_hosts_stays_where_it_is_asked_for(
    network: bool,
) -> None:
    code = (
        INSIDE
        + """
import socket

def look():
    listener = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(listener.getsockname()).close()
    return os.readlink("/proc/self/ns/net")

def answer(network):
    return inside(look, mounts=False, network=network)
"""
    )
    mine = os.readlink("/proc/self/ns/net")
    assert (fresh.ask(code, network) != mine) is network


WRITES = """
def change(path):
    before = os.stat(path)
    return {
        "chmod": attempt(lambda: os.chmod(path, 0o640)),
        "utime": attempt(lambda: os.utime(path, (1, 1))),
        "xattr": attempt(lambda: os.setxattr(path, b"user.x", b"1")),
        "truncate": attempt(lambda: os.truncate(path, 3)),
        "open": attempt(lambda: open(path, "a").close()),
        "rename": attempt(lambda: (os.rename(path, path + "2"), os.rename(path + "2", path))),
        "chown": attempt(lambda: os.chown(path, before.st_uid, before.st_gid)),
    }
"""


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    found = {}
    for name in ("outside", "box", "box/frozen", "box/frozen/open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("canary")
        found[name] = str(tmp_path / name / "file")
    return {"base": str(tmp_path), **found}


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "the control arm"])
def test_only_what_is_writable_can_be_changed_in_any_way(
    places: dict[str, str], closed: bool
) -> None:
    """Landlock would let modes, owners, times and attributes of every file be changed."""
    code = (
        INSIDE
        + WRITES
        + """
def answer(places, closed):
    base = places.pop("base")
    def act():
        if closed:
            namespaces.read_only_except(
                [base + "/box", base + "/box/frozen/open", base + "/nowhere"],
                [base + "/box/frozen", base + "/nowhere"],
            )
        return {name: change(path) for name, path in places.items()}
    return inside(act)
"""
    )
    told = fresh.ask(code, places, closed)
    written = {name for name, codes in told.items() if set(codes.values()) == {0}}
    if not closed:
        assert written == {"outside", "box", "box/frozen", "box/frozen/open"}
        return
    assert written == {"box", "box/frozen/open"}
    for name in ("outside", "box/frozen"):
        assert set(told[name].values()) == {errno.EROFS}
        assert Path(places[name]).read_text() == "canary"
        assert Path(places[name]).stat().st_mtime > 1


def test_a_single_file_may_be_writable(places: dict[str, str]) -> None:
    code = (
        INSIDE
        + """
def answer(inner, outer):
    def act():
        namespaces.read_only_except([inner], [])
        return [attempt(lambda: open(path, "a").close()) for path in (inner, outer)]
    return inside(act)
"""
    )
    assert fresh.ask(code, places["box"], places["outside"]) == [0, errno.EROFS]


def test_devices_can_be_written_on_a_read_only_mount() -> None:
    code = (
        INSIDE
        + """
def answer():
    def act():
        namespaces.read_only_except([], [])
        return [attempt(lambda: open("/dev/null", mode).close()) for mode in ("w", "a", "r+b")]
    return inside(act)
"""
    )
    assert fresh.ask(code) == [0, 0, 0]


def test_what_is_hidden_is_empty_and_stays_as_it_was_outside(places: dict[str, str]) -> None:
    code = (
        INSIDE
        + """
def answer(directory, file):
    def act():
        namespaces.hide(directory)
        namespaces.hide(file)
        namespaces.hide(directory + "-that-is-not-there")
        return [os.listdir(directory), open(file).read(),
                attempt(lambda: os.mkdir(directory + "/new"))]
    return inside(act)
"""
    )
    directory = os.path.dirname(places["outside"])
    assert fresh.ask(code, directory, places["box"]) == [[], "", errno.EROFS]
    assert os.listdir(directory) == ["file"]
    assert Path(places["box"]).read_text() == "canary"


def test_a_private_tmp_shows_what_is_kept_and_nothing_else(tmp_path: Path) -> None:
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("the tests' own directory is not below /tmp")
    for name in ("private", "kept", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "kept/file").write_text("kept")
    (tmp_path / "single").write_text("single")
    (tmp_path / "other/file").write_text("canary")
    code = (
        INSIDE
        + """
def answer(base):
    def act():
        kept = [base + "/kept", base + "/single", "/usr"]
        namespaces.private_tmp("/tmp", base + "/private", kept)
        open("/tmp/new", "w").write("new")
        return {
            "kept": open(base + "/kept/file").read(),
            "single": open(base + "/single").read(),
            "other": os.path.exists(base + "/other/file"),
            "top": sorted(os.listdir("/tmp")),
        }
    return inside(act)
"""
    )
    told = fresh.ask(code, str(tmp_path))
    first = str(tmp_path).split("/")[2]
    assert told == {
        "kept": "kept", "single": "single", "other": False, "top": sorted(["new", first]),
    }  # fmt: skip
    assert (tmp_path / "private/new").read_text() == "new"
    assert not os.path.exists("/tmp/new")


def test_a_directory_in_memory_is_bounded(tmp_path: Path) -> None:
    code = (
        INSIDE
        + """
def answer(path):
    def act():
        namespaces.memory_directory(path, 1 << 20)
        with open(path + "/small", "wb") as file:
            file.write(bytes(1 << 19))
        return attempt(lambda: open(path + "/big", "wb", buffering=0).write(bytes(8 << 20)) and
                       open(path + "/more", "wb", buffering=0).write(bytes(8 << 20)))
    return inside(act)
"""
    )
    assert fresh.ask(code, str(tmp_path)) == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []

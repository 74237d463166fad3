"""Landlock: which bits each version of the kernel takes, and what a confined process can do."""

from __future__ import annotations

import errno
from pathlib import Path

import fresh
import pytest

from belljar.linux import landlock

needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")

# linux/landlock.h: the first bit that each version added, and where the list ends.
FIRST_OF = {1: 0, 2: 13, 3: 14, 5: 15}


@pytest.mark.parametrize(
    ("version", "bits"), [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (6, 16), (7, 16), (99, 16)]
)
def test_each_version_is_asked_for_all_that_it_can_hold(version: int, bits: int) -> None:
    assert landlock._ALL_BY_ABI.get(version, (1 << 16) - 1) == (1 << bits) - 1
    assert 1 << FIRST_OF[3] == landlock.TRUNCATE
    assert 1 << FIRST_OF[5] == landlock.IOCTL_DEV


CONFINED = """
import os
from belljar.linux import landlock, syscalls

def attempt(act):
    try:
        act()
    except OSError as error:
        return error.errno
    return 0

def write(path):
    with open(path, "w") as file:
        file.write("x")

def answer(on, base):
    os.chdir(base)
    if on:
        syscalls.no_new_privileges()
        landlock.restrict(["shown", "/usr", "/lib", "/lib64", "nowhere"], ["box"], ["/dev/null"])
    return {
        "read shown": attempt(lambda: open("shown/a").close()),
        "list shown": attempt(lambda: os.listdir("shown")),
        "write shown": attempt(lambda: write("shown/a")),
        "make in shown": attempt(lambda: os.mkdir("shown/new")),
        "remove shown": attempt(lambda: os.unlink("shown/b")),
        "truncate shown": attempt(lambda: os.truncate("shown/a", 0)),
        "read hidden": attempt(lambda: open("hidden/a").close()),
        "list hidden": attempt(lambda: os.listdir("hidden")),
        "write hidden": attempt(lambda: write("hidden/new")),
        "write box": attempt(lambda: write("box/new")),
        "link out of box": attempt(lambda: os.link("hidden/a", "box/stolen")),
        "move into box": attempt(lambda: os.rename("hidden/b", "box/moved")),
        "fifo in box": attempt(lambda: os.mkfifo("box/fifo")),
        "through a link": attempt(lambda: (os.symlink("../hidden/a", "box/l"), open("box/l"))),
        "null": attempt(lambda: write("/dev/null")),
        "zero": attempt(lambda: open("/dev/zero").close()),
        "proc": attempt(lambda: open("/proc/self/status").close()),
    }
"""


@pytest.fixture
def places(tmp_path: Path) -> Path:
    for name in ("shown", "hidden", "box"):
        (tmp_path / name).mkdir()
        for file in ("a", "b"):
            (tmp_path / name / file).write_text("canary")
    return tmp_path


@needs_landlock
def test_a_confined_process_reads_and_writes_what_it_was_given(places: Path) -> None:
    told = fresh.ask(CONFINED, True, str(places))
    allowed = {"read shown", "list shown", "write box", "fifo in box", "null"}
    if landlock.abi() < 3:  # there the backends close the call by seccomp
        assert told.pop("truncate shown") == 0
        (places / "shown/a").write_text("canary")
    assert {what for what, code in told.items() if code == 0} == allowed
    refused = {code for what, code in told.items() if what not in allowed}
    assert refused <= {errno.EACCES, errno.EXDEV}
    assert (places / "shown/a").read_text() == "canary"
    assert sorted(path.name for path in (places / "hidden").iterdir()) == ["a", "b"]


def test_the_same_process_unconfined_can_do_all_of_it(places: Path) -> None:
    """The control arm."""
    told = fresh.ask(CONFINED, False, str(places))
    assert {what for what, code in told.items() if code != 0} == set()


@needs_landlock
@pytest.mark.skipif(landlock.abi() < 6, reason="scopes came with ABI 6")
@pytest.mark.parametrize("confined", [True, False])
def test_a_confined_process_cannot_signal_others_or_find_abstract_sockets(confined: bool) -> None:
    code = """
import os, signal, socket
from belljar.linux import landlock, syscalls

def answer(on):
    outside = os.fork()
    if outside == 0:
        signal.pause()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0belljar-test-%d" % os.getpid())
    listener.listen()
    name = listener.getsockname()
    inside = os.fork()
    if inside == 0:
        if on:
            syscalls.no_new_privileges()
            landlock.restrict(["/usr"], [], [])
        code = 0
        try:
            os.kill(outside, 0)
        except PermissionError:
            code |= 1
        try:
            socket.socket(socket.AF_UNIX).connect(name)
        except PermissionError:
            code |= 2
        os._exit(code)
    told = os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])
    os.kill(outside, 9)
    os.waitpid(outside, 0)
    return told
"""
    assert fresh.ask(code, confined) == (3 if confined else 0)

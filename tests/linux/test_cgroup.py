"""Control groups: made with the limits asked for, emptied, removed, and swept after a crash."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.errors import BackendFailed
from belljar.linux import cgroup
from belljar.linux.cgroup import Group, Home

HOME = cgroup.find()
needs_cgroup = pytest.mark.skipif(HOME is None, reason="no control group can be made here")
MIB = 1 << 20
LINUX = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])


def home() -> Home:
    assert HOME is not None
    return HOME


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(home(), os.urandom(8).hex(), memory=64 * MIB, processes=5, cpus=0.5)
    yield made
    made.kill()
    made.remove()


def started(group: Group, code: str) -> subprocess.Popen[str]:
    """A Python program inside the group; it has said something when this returns."""
    join = f"for p in {group.procs!r}: open(p, 'w').write('0')\n"
    process = subprocess.Popen(
        [sys.executable, "-c", join + code], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def ended(process: subprocess.Popen[str]) -> int:
    with process:
        return process.wait(30)


@needs_cgroup
def test_the_kernel_was_told_the_limits(group: Group) -> None:
    names = (
        {"memory.limit_in_bytes": str(64 * MIB), "pids.max": "5", "cpu.cfs_quota_us": "50000"}
        if home().version == 1
        else {"memory.max": str(64 * MIB), "pids.max": "5", "cpu.max": "50000 100000"}
    )
    for name, value in names.items():
        found = [Path(p).parent / name for p in group.procs if (Path(p).parent / name).exists()]
        assert [path.read_text().strip() for path in found] == [value]


@needs_cgroup
def test_members_are_listed_and_killed(group: Group) -> None:
    process = started(group, "print(flush=True); import time; time.sleep(60)")
    assert group.members() == [process.pid]
    group.kill()
    assert ended(process) == -signal.SIGKILL


@needs_cgroup
def test_refused_forks_are_counted_and_after_release_every_fork_is(group: Group) -> None:
    code = (
        "import os, time\nmade = 0\n"
        "try:\n    while made < 20:\n        if os.fork() == 0: time.sleep(60)\n        made += 1\n"
        "except BlockingIOError: pass\nprint(made, flush=True); time.sleep(60)"
    )
    assert group.forks_refused() == 0
    process = started(group, code)
    assert len(group.members()) == 5
    assert group.forks_refused() == 1
    group.kill()
    assert ended(process) == -signal.SIGKILL


@needs_cgroup
def test_an_oom_kill_is_counted_and_the_peak_is_known(group: Group) -> None:
    assert group.oom_kills() == 0
    process = started(group, "print(flush=True); x = bytearray(200 << 20)")
    assert ended(process) == -signal.SIGKILL
    assert group.oom_kills() >= 1
    peak = group.peak_memory()
    assert peak is None or 32 * MIB < peak <= 64 * MIB


@needs_cgroup
def test_counting_starts_again_for_the_next_run(group: Group) -> None:
    ended(started(group, "print(flush=True); x = bytearray(200 << 20)"))
    assert group.oom_kills() >= 1
    assert (group.peak_memory() or 64 * MIB) > 32 * MIB
    for _ in range(2):
        group.renew(9)
        assert (group.oom_kills(), group.forks_refused()) == (0, 0)
        assert ended(started(group, "print(flush=True); x = bytearray(b'x') * (9 << 20)")) == 0
        peak = group.peak_memory()
        if home().version == 1 or LINUX >= (6, 12):
            assert peak is not None and 9 * MIB <= peak < 32 * MIB
        else:
            assert peak is None  # it would be the first run's


@needs_cgroup
def test_a_controller_that_was_taken_away_is_noticed_also_if_it_comes_again() -> None:
    if home().version != 2 or os.geteuid() != 0:
        pytest.skip("version 1 has a hierarchy for each controller; and only root owns all of it")
    above = Path(home().directories[0], f"above-{os.urandom(4).hex()}")
    above.mkdir()
    switch = above / "cgroup.subtree_control"
    switch.write_text("+cpu +memory +pids")
    inside = Home(2, (str(above),))
    limits = {"memory": 8 * MIB, "processes": 5, "cpus": 1}
    groups = [Group(inside, os.urandom(8).hex(), **limits) for _ in range(3)]
    for group in groups:
        group.confirm()
    late = Group(inside, os.urandom(8).hex(), **limits)  # one that was not asked before
    groups.append(late)
    try:
        switch.write_text("-cpu")
        with pytest.raises(BackendFailed, match="lost a controller"):
            groups[0].confirm()
        with pytest.raises(BackendFailed, match=r"cpu\.max"):
            Group(inside, os.urandom(8).hex(), **limits)
        switch.write_text("+cpu")
        for group in (groups[1], late):
            with pytest.raises(BackendFailed, match="lost a controller"):
                group.confirm()
        switch.write_text("-pids")
        with pytest.raises(BackendFailed, match="lost a controller"):
            groups[2].forks_refused()
    finally:
        for group in groups:
            group.remove()
        above.rmdir()


@needs_cgroup
def test_a_group_with_a_living_member_is_not_removed_in_silence(group: Group) -> None:
    process = started(group, "print(flush=True); import time; time.sleep(60)")
    with pytest.raises(BackendFailed, match="cannot be removed"):
        cgroup._remove(str(Path(group.procs[0]).parent), seconds=0.05)
    group.kill()
    ended(process)


@needs_cgroup
def test_removal_leaves_nothing_and_may_be_repeated() -> None:
    made = Group(home(), os.urandom(8).hex(), memory=MIB, processes=1, cpus=1)
    before = len(os.listdir("/proc/self/fd"))
    made.remove()
    assert not any(Path(path).parent.exists() for path in made.procs)
    assert len(os.listdir("/proc/self/fd")) == before - 1  # the lock
    made.remove()


@needs_cgroup
def test_two_groups_of_one_name_are_refused_and_the_first_lives_on(group: Group) -> None:
    name = Path(group.procs[0]).parent.name.rsplit("-", 1)[1]
    process = started(group, "print(flush=True); import time; time.sleep(60)")
    try:
        with pytest.raises(BackendFailed):
            Group(home(), name, memory=MIB, processes=1, cpus=1)
    finally:
        group.kill()
        ended(process)


@needs_cgroup
def test_a_group_below_a_tighter_one_is_made_all_the_same() -> None:
    if home().version != 1:
        pytest.skip("version 2 lets a group ask for more than its parent has")
    outer = Group(home(), os.urandom(8).hex(), memory=64 * MIB, processes=50, cpus=0.1)
    try:
        inside = Home(1, tuple(str(Path(path).parent) for path in outer.procs))
        inner = Group(inside, os.urandom(8).hex(), memory=8 * MIB, processes=5, cpus=1)
        inner.remove()
    finally:
        outer.remove()


# -- sweeping


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_behind(pid: int) -> list[Path]:
    name = f"belljar-{pid}-{os.urandom(8).hex()}"
    paths = [Path(directory) / name for directory in home().directories]
    for path in paths:
        path.mkdir()
    return paths


@needs_cgroup
def test_a_sweep_kills_and_removes_what_a_crashed_process_left() -> None:
    paths = left_behind(dead_pid())
    join = f"for p in {[str(path / 'cgroup.procs') for path in paths]!r}: open(p, 'w').write('0')\n"
    survivor = subprocess.Popen(
        [sys.executable, "-c", join + "print(flush=True); import time; time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert survivor.stdout is not None
    survivor.stdout.readline()
    cgroup.sweep(home())
    assert not any(path.exists() for path in paths)
    assert ended(survivor) == -signal.SIGKILL


@needs_cgroup
def test_a_sweep_leaves_alone_what_lives() -> None:
    of_a_process = left_behind(os.getpid())
    # As of a process in another pid namespace: its number is nobody's here, but it holds the lock.
    locked = left_behind(dead_pid())
    holder = os.open(locked[0], os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        cgroup.sweep(home())
        assert all(path.exists() for path in (*of_a_process, *locked))
    finally:
        os.close(holder)
    cgroup.sweep(home())
    assert not any(path.exists() for path in locked)  # the control arm
    for path in of_a_process:
        path.rmdir()


@needs_cgroup
def test_a_group_is_locked_as_long_as_it_lives(group: Group) -> None:
    directory = os.open(Path(group.procs[0]).parent, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(directory)


def test_a_process_of_another_pid_namespace_is_not_taken_for_ourselves(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("0\n17\n0\n")
    assert cgroup._members(str(tmp_path)) == [17]


# -- finding a home, in hierarchies as other machines have them


class Hierarchy:
    """Directories that get files when they are made, as the kernel's do, by their parent's name."""

    def __init__(self, root: Path, files: dict[str, tuple[str, ...]]) -> None:
        self.root, self.files = root, files
        self._mkdir = os.mkdir
        for directory in files:
            (root / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def give(self, own: str, controllers: str) -> None:
        group = self.root / own.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.controllers").write_text(controllers + "\n")

    def make(self, path: str) -> None:
        parent = "/" + str(Path(path).parent.relative_to(self.root)).removeprefix(".")
        if parent not in self.files:
            raise PermissionError(13, "Permission denied", path)
        self._mkdir(path)
        for name in self.files[parent]:
            (Path(path) / name).touch()


_rmdir = os.rmdir


def clear(path: str) -> None:
    """The kernel's directories can be removed with the files that it made in them."""
    for file in Path(path).iterdir():
        file.unlink()
    _rmdir(path)


ALL = ("cgroup.procs", "memory.max", "pids.max", "cpu.max")
SESSION = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope"
APP = SESSION.rsplit("/", 1)[0]
MANAGER = APP.rsplit("/", 1)[0]


EVERY = "cpuset cpu io memory pids"
SERVICE = "/system.slice/some.service"


@pytest.mark.parametrize(
    ("own", "given", "files", "found"),
    [
        # systemd's user manager: no controllers inside our own scope, all of them beside it.
        (SESSION, EVERY, {SESSION: ("cgroup.procs",), APP: ALL, MANAGER: ALL}, APP),
        # A manager that was not given the cpu controller: better none than half.
        (SESSION, EVERY, {SESSION: ("cgroup.procs",), APP: ALL[:3], MANAGER: ALL[:3]}, None),
        # A session over ssh: nothing belongs to us.
        ("/user.slice/user-1000.slice/session-3.scope", EVERY, {}, None),
        # A service of root's: the root group has cpu as long as somebody is logged in.
        (SERVICE, "memory pids", {SERVICE: ALL[:1], "/system.slice": ALL[:3], "/": ALL}, None),
        # The same with Delegate=yes.
        (SERVICE, EVERY, {SERVICE: ALL[:1], "/system.slice": ALL, "/": ALL}, "/system.slice"),
        # Root in the root group, as in a container with its own cgroup namespace.
        ("/", EVERY, {"/": ALL}, "/"),
        # A cgroup namespace whose root is beside us.
        ("/../other", None, {"/": ALL}, "/"),
    ],
    ids=["delegated", "without cpu", "not ours", "others' cpu", "service", "root", "namespace"],
)
def test_version_2_is_used_where_all_controllers_are_ours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    given: str | None,
    files: dict[str, tuple[str, ...]],
    found: str | None,
) -> None:
    hierarchy = Hierarchy(tmp_path, files)
    if given is not None:
        hierarchy.give(own, given)
    monkeypatch.setattr(cgroup, "_own_paths", lambda: {"": own})
    monkeypatch.setattr(cgroup, "_mounts", lambda: {"2": str(tmp_path)})
    monkeypatch.setattr("belljar.linux.cgroup.os.mkdir", hierarchy.make)
    monkeypatch.setattr("belljar.linux.cgroup.os.rmdir", clear)
    expected = None if found is None else Home(2, (os.path.normpath(f"{tmp_path}/{found}"),))
    got = cgroup.find()
    assert (got and Home(got.version, tuple(map(os.path.normpath, got.directories)))) == expected
    assert not list(tmp_path.rglob("belljar-*"))  # the trial is cleared away


def test_a_host_without_any_hierarchy_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_mounts", lambda: {})
    assert cgroup.find() is None


def test_no_trial_group_is_left_behind() -> None:
    if HOME is None:
        pytest.skip("no control group can be made here")
    mine = f"belljar-{os.getpid()}-"

    def groups() -> list[str]:
        # A runner of another test may keep groups of its own: only what is new counts.
        return [
            os.path.join(directory, name)
            for directory in HOME.directories
            for name in os.listdir(directory)
            if name.startswith(mine)
        ]

    before = groups()
    assert cgroup.find() == HOME
    assert not set(groups()) - set(before)

"""What a hostile index, or a hostile name in a git directory, cannot hide from the guard.

Each attack is tried on git itself first: without the guard the submodule's config is obeyed.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.backends import git_index, protect
from belljar.backends.git_metadata import Guard

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b", "GIT_EDITOR": "true",
    }  # fmt: skip
    words = ("git", "-c", "safe.directory=*", *words)
    return subprocess.run(words, cwd=where, env=env, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    git(tmp_path, "init", "-q", "-b", "main", str(made))
    (made / "file").write_text("x")
    git(made, "add", "file")
    git(made, "commit", "-qm", "first")
    return made


def none_of_ours(_: str) -> bool:
    return False


def repository(place: Path) -> bytes:
    """A repository; its commit. `arm` makes it run a command when git looks at it."""
    place.mkdir(parents=True)
    git(place, "init", "-q")
    (place / "x").write_text("x")
    git(place, "add", "x")
    git(place, "commit", "-qm", "x")
    return bytes.fromhex(git(place, "rev-parse", "HEAD").stdout.strip())


def arm(place: Path, mark: Path) -> None:
    with open(place / ".git/config", "a") as config:
        config.write(f'[core]\n\tfsmonitor = "touch {mark}; false"\n')


def entry(name: bytes, commit: bytes, mode: int = 0o160000, length: int | None = None) -> bytes:
    flags = min(len(name), 0xFFF) if length is None else length
    made = struct.pack(">24xI12x20sH", mode, commit, flags) + name
    return made + bytes(8 - len(made) % 8)


def index(*entries: bytes, version: int = 2, count: int = 0, extensions: bytes = b"") -> bytes:
    data = struct.pack(">4sII", b"DIRC", version, count or len(entries)) + b"".join(entries)
    data += extensions
    return data + hashlib.sha1(data).digest()


ATTACKS: dict[str, tuple[str, str, int]] = {
    "as git writes it": ("a/sub", "a/sub", 0o160000),
    "unused bits of the mode": ("a/sub", "a/sub", 0o160644),
    "high bits of the mode": ("a/sub", "a/sub", 0o360000),
    "two slashes": ("a/sub", "a//sub", 0o160000),
    "a slash at the end": ("a/sub", "a/sub/", 0o160000),
    "a way up": ("a/sub", "a/../a/sub", 0o160000),
    "absolute": ("a/sub", "{project}/a/sub", 0o160000),
    "longer than descriptors can be open": ("a/sub", "d/" * 1500 + "sub", 0o160000),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("guarded", [False, True], ids=["control", "guarded"])
def test_git_obeys_no_submodule_that_the_guard_did_not_see(
    project: Path, tmp_path: Path, attack: str, guarded: bool
) -> None:
    place, name, mode = ATTACKS[attack]
    guard = Guard(str(project))
    commit = repository(project / place)
    arm(project / place, tmp_path / "mark")
    if name.startswith("d/"):
        bury(project, project / place)
    full = name.format(project=project).encode()
    (project / ".git/index").write_bytes(index(entry(full, commit, mode)))
    warnings = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        warnings = guard.clean(none_of_ours) if guarded else []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    git(project, "status")
    assert (tmp_path / "mark").exists() is not guarded
    assert bool(warnings) is guarded
    subprocess.run(["rm", "-rf", str(project)], check=True)  # too deep for shutil


def bury(project: Path, place: Path) -> None:
    before = os.open(".", os.O_RDONLY)
    os.chdir(project)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        os.rename(place, "sub")
    finally:
        os.fchdir(before)
        os.close(before)


def threads(offset: int, count: int, end: int) -> bytes:
    blocks = struct.pack(">4sIIII", b"IEOT", 12, 1, offset, count)
    digest = hashlib.sha1(b"IEOT" + struct.pack(">I", 12)).digest()
    return blocks + struct.pack(">4sII", b"EOIE", 24, end) + digest


def test_an_index_is_refused_where_git_could_find_other_entries_than_a_plain_reader(
    project: Path,
) -> None:
    plain, one = entry(b"file", bytes(20), 0o100644), b"\1" * 20
    size = 12 + len(plain)
    versions = {
        "its own offsets": (index(plain, extensions=threads(12, 1, size)), ""),
        "other offsets": (index(plain, extensions=threads(20, 1, size)), "cannot be read"),
        "another count": (index(plain, extensions=threads(12, 2, size)), "cannot be read"),
        "another end": (index(plain, extensions=threads(12, 1, size + 8)), "cannot be read"),
        "a zero in a name": (index(entry(b"a\0bcdefg", one, length=8)), "cannot be read"),
        "a shorter name": (index(entry(b"abcdefgh", one, length=3)), "cannot be read"),
    }
    git_directory = os.open(project / ".git", os.O_RDONLY)
    try:
        for what, (data, problem) in versions.items():
            (project / ".git/index").write_bytes(data)
            assert problem in git_index.links(git_directory)[1], what
            assert bool(problem) is bool(git_index.links(git_directory)[1]), what
    finally:
        os.close(git_directory)


def test_names_that_grow_with_every_entry_take_little_memory_and_time(project: Path) -> None:
    count = 60_000
    entries = [
        struct.pack(">24xI32xH", 0o160000, min(number + 1, 0xFFF)) + b"\0a\0"
        for number in range(count)
    ]
    (project / ".git/index").write_bytes(index(*entries, version=4))
    guard = Guard(str(project))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    assert any("index" in warning for warning in guard.clean(none_of_ours))
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_git_writes_through_no_link_that_a_run_left(project: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile"

    def attack() -> None:
        profile.write_text("mine\n")
        head = git(project, "rev-parse", "HEAD").stdout
        (project / ".git/MERGE_HEAD").write_text(head)
        (project / ".git/MERGE_MSG").write_text("a command\n")
        for name in ("COMMIT_EDITMSG", "logs/HEAD"):
            (project / ".git" / name).unlink(missing_ok=True)
            (project / ".git" / name).symlink_to(profile)

    attack()
    git(project, "commit")
    assert "a command" in profile.read_text()
    (project / ".git/COMMIT_EDITMSG").unlink()
    (project / ".git/logs/HEAD").unlink()
    guard = Guard(str(project))
    attack()
    assert len(guard.clean(none_of_ours)) == 2
    git(project, "commit")
    assert profile.read_text() == "mine\n"


def test_a_link_that_was_there_before_the_run_stays(project: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    (project / ".git/logs/HEAD").unlink()
    (project / ".git/logs/HEAD").symlink_to(tmp_path / "log")
    guard = Guard(str(project))
    assert guard.clean(none_of_ours) == []
    assert (project / ".git/logs/HEAD").is_symlink()


def pick_with_a_strategy(project: Path, mark: Path) -> None:
    """What `git cherry-pick --continue` goes on with: a strategy that is a program of the run's."""
    head = git(project, "rev-parse", "HEAD").stdout
    (project / "git-merge-x").mkdir(exist_ok=True)
    (project / "evil").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (project / "evil").chmod(0o755)
    sequencer = project / ".git/sequencer"
    sequencer.mkdir()
    (sequencer / "head").write_text(head)
    (sequencer / "todo").write_text(f"pick {head.strip()} 1\n" * 2)
    (sequencer / "opts").write_text("[options]\n\tstrategy = x/../evil\n")


@pytest.mark.parametrize("guarded", [False, True], ids=["control", "guarded"])
def test_no_program_of_a_run_is_a_strategy_of_cherry_pick(
    project: Path, tmp_path: Path, guarded: bool
) -> None:
    (project / "file").write_text("y")
    git(project, "commit", "-qam", "second")
    guard = Guard(str(project))
    pick_with_a_strategy(project, tmp_path / "mark")
    if guarded:
        (warning,) = guard.clean(none_of_ours)
        assert "sequencer" in warning
        git(project, "reset", "-q", "--hard")
    git(project, "cherry-pick", "--continue")
    assert (tmp_path / "mark").exists() is not guarded


def test_a_directory_that_the_user_made_during_the_run_is_renamed_and_not_deleted(
    project: Path,
) -> None:
    guard = Guard(str(project))
    (project / ".git/rebase-merge").mkdir()
    (project / ".git/rebase-merge/todo").write_text("work")
    (warning,) = guard.clean(none_of_ours)
    (aside,) = (project / ".git").glob("rebase-merge.*")
    assert (aside / "todo").read_text() == "work"
    assert aside.name in warning


def test_what_a_run_left_does_not_count_as_there_before_for_one_that_began_meanwhile(
    project: Path,
) -> None:
    left = project / ".git/rebase-merge"
    first = Guard(str(project))
    left.mkdir()
    second = Guard(str(project))
    assert first.clean(none_of_ours)
    left.mkdir(exist_ok=True)
    assert second.clean(none_of_ours)
    assert not left.exists()
    left.mkdir()
    assert Guard(str(project)).clean(none_of_ours) == []  # the control: nothing else goes on
    assert left.exists()


def test_thousands_of_names_cause_a_few_warnings(project: Path) -> None:
    with protect.placeholders([str(project)]) as warnings:
        for number in range(3000):
            (project / ".git" / f"{number}").write_text("")
    assert len(warnings) < 50
    assert sum(map(len, warnings)) < 10_000
    assert len(list((project / ".git").iterdir())) < 30


def test_honest_indexes_are_read_in_every_version(project: Path) -> None:
    for number in range(300):
        (project / f"{number}{'x' * (number % 70)}").write_text("")
    git(project, "add", "-A")
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},deep/sub")
    steps: list[Callable[[], object]] = [
        lambda: git(project, "update-index", "--index-version", "4"),
        lambda: git(project, "-c", "index.threads=4", "update-index", "--force-write-index"),
        lambda: git(project, "status", "-u"),
        lambda: git(project, "update-index", "--index-version", "2"),
    ]
    git_directory = os.open(project / ".git", os.O_RDONLY)
    try:
        for step in steps:
            step()
            assert git_index.links(git_directory) == ({"deep/sub"}, "")
    finally:
        os.close(git_directory)

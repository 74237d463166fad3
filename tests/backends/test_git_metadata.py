"""What git obeys in a mounted project: which names are closed, and what is removed after a run.

The run is played by these tests, as what writes between `Guard(...)` and `clean`. That git itself
then executes nothing is tested on every backend by the conformance suite.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import unprivileged

from belljar.backends import git_metadata, protect
from belljar.backends.git_metadata import Guard

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n"


def git(where: Path, *words: str) -> str:
    env = {
        "PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }  # fmt: skip
    words = ("git", "-c", "safe.directory=*", "-c", "protocol.file.allow=always", *words)
    return subprocess.run(
        words, cwd=where, env=env, check=True, capture_output=True, text=True
    ).stdout


def none_of_ours(_: str) -> bool:
    return False


def repository(at: Path) -> None:
    """A repository that was not there before, as a program would leave it."""
    for name in ("objects", "refs"):
        (at / name).mkdir(parents=True)
    (at / "HEAD").write_text("ref: refs/heads/main\n")
    (at / "config").write_text(CONFIG)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    git(tmp_path, "init", "-q", str(made))
    (made / "file").write_text("x")
    git(made, "add", "file")
    git(made, "commit", "-qm", "first")
    return made


def add_link(project: Path, path: str) -> None:
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},{path}")


def many_files(project: Path) -> None:
    for number in range(50):
        (project / f"a{'x' * number}").write_text("")
    git(project, "add", "-A")


def version(number: int) -> Callable[[Path], None]:
    return lambda project: git(project, "update-index", "--index-version", str(number)) and None


def extended(project: Path) -> None:
    (project / "later").write_text("")
    git(project, "add", "-N", "later")  # a flag that only version 3 has


@pytest.mark.parametrize(
    "prepare",
    [version(2), extended, version(4), lambda p: git(p, "update-index", "--split-index") and None],
    ids=["version 2", "version 3", "version 4", "split"],
)
def test_a_new_submodule_is_found_in_any_index_and_set_aside(
    project: Path, prepare: Callable[[Path], None]
) -> None:
    guard = Guard(str(project))
    many_files(project)
    prepare(project)
    repository(project / "z/sub/.git")
    add_link(project, "z/sub")
    many_files(project)
    (warning,) = guard.clean(none_of_ours)
    assert "z/sub/.git'" in warning
    assert not (project / "z/sub/.git").exists()
    (aside,) = (project / "z/sub").iterdir()
    assert (aside / "config").read_text() == CONFIG  # nothing is lost


def test_a_link_that_hides_in_a_shared_index_is_found(project: Path) -> None:
    guard = Guard(str(project))
    repository(project / "sub/.git")
    add_link(project, "sub")
    git(project, "update-index", "--split-index")
    assert b"sub" not in (project / ".git/index").read_bytes()  # it stands in the shared one
    guard.clean(none_of_ours)
    assert not (project / "sub/.git").exists()


def test_an_index_that_cannot_be_read_but_holds_a_link_is_set_aside(project: Path) -> None:
    guard = Guard(str(project))
    repository(project / "sub/.git")
    add_link(project, "sub")
    index = project / ".git/index"
    data = bytearray(index.read_bytes())
    data[7] = 9  # a version of the future
    index.write_bytes(data)
    assert any("cannot be read" in warning for warning in guard.clean(none_of_ours))
    assert not index.exists()


def test_a_submodule_that_was_there_is_left_alone(tmp_path: Path, project: Path) -> None:
    git(tmp_path, "init", "-q", "other")
    git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "x")
    git(project, "submodule", "add", "-q", str(tmp_path / "other"), "sub")
    # A repository that is its own, with the index entry alone: as `git add` makes it.
    shutil.copytree(tmp_path / "other", project / "own")
    add_link(project, "own")
    later()
    guard = Guard(str(project))
    (project / "sub/new").write_text("x")
    git(project / "own", "commit", "-q", "--allow-empty", "-m", "y")
    assert guard.clean(none_of_ours) == []
    assert (project / "own/.git").is_dir()


@pytest.mark.parametrize(
    "name", ["config", "config.worktree", "commondir", "hooks/post-index-change"]
)
def test_a_submodule_of_its_own_that_was_changed_is_set_aside(
    tmp_path: Path, project: Path, name: str
) -> None:
    git(tmp_path, "init", "-q", str(project / "own"))
    add_link(project, "own")
    later()
    guard = Guard(str(project))
    (project / "own/.git" / name).write_text("changed")
    assert len(guard.clean(none_of_ours)) == 1
    assert not (project / "own/.git").exists()


def test_a_submodule_inside_one_that_was_there_is_found(tmp_path: Path, project: Path) -> None:
    git(tmp_path, "init", "-q", str(project / "own"))
    add_link(project, "own")
    later()
    guard = Guard(str(project))
    repository(project / "own/deep/.git")
    add_link(project / "own", "deep")
    guard.clean(none_of_ours)
    assert (project / "own/.git").exists()
    assert not (project / "own/deep/.git").exists()


def later() -> None:
    """Past the tick in which the file system last gave a time."""
    import time

    time.sleep(0.02)


def test_links_are_removed_and_not_followed(tmp_path: Path, project: Path) -> None:
    kept = tmp_path / "kept"
    repository(kept / ".git")
    guard = Guard(str(project))
    (project / ".git/rebase-merge").symlink_to(kept)
    (project / "sub").symlink_to(kept)
    add_link(project, "sub")
    (project / ".git/index").rename(project / "index")
    (project / ".git/index").symlink_to("../index")
    warnings = guard.clean(none_of_ours)
    assert len(warnings) == 2
    assert (kept / ".git/config").read_text() == CONFIG
    assert not os.path.lexists(project / ".git/rebase-merge")
    assert not os.path.lexists(project / ".git/index")


def test_another_processes_placeholders_stay_and_what_takes_their_place_does_not(
    project: Path,
) -> None:
    with protect.placeholders([str(project)]):
        guard = Guard(str(project))  # as in another process, where they are not known
        assert guard.clean(none_of_ours) == []
        common = project / ".git/commondir"
        assert common.read_text() == ".\n"
        common.unlink()
        common.write_text("../evil\n")
        assert len(guard.clean(none_of_ours)) == 1
        assert not common.exists()


def test_a_repository_with_its_directory_elsewhere_is_closed_there(project: Path) -> None:
    (project / ".git").rename(project / ".bare")
    (project / ".git").write_text("gitdir: ./.bare\n")
    git(project, "status")
    inside = dict(protect.inside(str(project)))
    assert inside[".git"] == "ro"
    assert inside[".bare"] == "rw"
    assert {inside[f".bare/{name}"] for name in ("config", "hooks", "commondir")} == {"ro"}


def test_a_bare_repository_is_closed_and_its_other_names_are_anything(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--bare", "bare")
    bare = tmp_path / "bare"
    assert {("config", "ro"), ("hooks", "ro")} <= set(protect.inside(str(bare)))
    guard = Guard(str(bare))
    (bare / "result.txt").write_text("x")
    (bare / "gitdir").write_text("../evil")
    (warning,) = guard.clean(none_of_ours)
    assert "gitdir'" in warning
    assert (bare / "result.txt").exists()
    assert (bare / "HEAD").exists()


def test_placeholders_are_gone_afterwards_and_git_is_not_disturbed_meanwhile(project: Path) -> None:
    def names() -> set[str]:
        return {str(path.relative_to(project)) for path in project.rglob("*")}

    before = names()
    with protect.placeholders([str(project)]) as warnings:
        assert names() > before
        (project / "file").write_text("y")
        git(project, "commit", "-qam", "second")
        git(project, "worktree", "list")
    assert warnings == []
    assert {name for name in names() - before if not name.startswith(".git/objects")} <= {
        ".git/index", ".git/COMMIT_EDITMSG",
    }  # fmt: skip


def test_what_git_is_to_ignore_is_what_is_held_by_placeholders() -> None:
    from belljar.guest import protocol

    path = protect.environment(protocol.GUEST_DIR)["GIT_CONFIG_VALUE_0"]
    ignored = {line for line in Path(path).read_text().splitlines() if line.startswith("/")}
    files = {f"/{name}" for name in protect.FILES}
    assert ignored == files | {f"/{name}/" for name in protect.DIRECTORIES}


@pytest.mark.parametrize("data", [b"", b"DIRC", b"DIRC\0\0\0\2\0\0\0\xff", bytes(100)])
def test_an_index_of_garbage_is_no_surprise(project: Path, data: bytes) -> None:
    guard = Guard(str(project))
    (project / ".git/index").write_bytes(data + b"\0\0\xe0\0")
    assert any("index" in warning for warning in guard.clean(none_of_ours))
    assert git_metadata.directories(str(project)) == (".git",)


def test_a_repository_that_an_earlier_run_left_is_set_aside_once_it_is_a_submodule(
    project: Path,
) -> None:
    first = Guard(str(project))
    repository(project / "sub/.git")
    repository(project / "other/innocent")
    assert first.clean(none_of_ours) == []  # git does not enter them
    later()
    second = Guard(str(project))
    (project / "other/innocent").rename(project / "other/.git")
    add_link(project, "sub")
    add_link(project, "other")
    assert len(second.clean(none_of_ours)) == 2
    assert not (project / "sub/.git").exists()
    assert not (project / "other/.git").exists()


@pytest.mark.parametrize("closed", [".git", "sub", "own/.git", "own/.git/hooks"])
def test_taking_away_the_right_to_list_hides_nothing(tmp_path: Path, closed: str) -> None:
    """Git enters a directory that it may search; listing it takes another right."""
    for path in (tmp_path, *list(tmp_path.parents)[:-2]):
        path.chmod(0o777)

    def as_a_user() -> list[bool]:
        project = tmp_path / "project"
        git(tmp_path, "init", "-q", str(project))
        git(project, "init", "-q", "own")
        add_link(project, "own")
        later()
        guard = Guard(str(project))
        repository(project / "sub/.git")
        add_link(project, "sub")
        (project / "own/.git/config").write_text(CONFIG)
        (project / closed).chmod(0o311)
        guard.clean(none_of_ours)
        return [(project / name / ".git").exists() for name in ("own", "sub")]

    assert unprivileged.call(as_a_user) == [False, False]


def test_set_id_bits_are_taken_at_any_depth_and_told_of_a_few(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    for number in range(100):
        (top / f"{number}").touch()
        (top / f"{number}").chmod(0o4755)
    before = os.open(".", os.O_RDONLY)
    os.chdir(top)
    try:
        for _ in range(1200):  # more than functions can be nested
            os.mkdir("d")
            os.chdir("d")
        Path("deep").touch()
        Path("deep").chmod(0o2755)
        warnings = protect.strip_set_id([str(top)], 0)
        assert Path("deep").stat().st_mode & 0o7777 == 0o755
    finally:
        os.fchdir(before)
        os.close(before)
        subprocess.run(["rm", "-rf", str(top / "d")], check=True)
    assert not [file for file in top.iterdir() if file.stat().st_mode & 0o6000]
    assert 20 <= len(warnings) < 30


def test_set_id_bits_are_taken_from_no_file_that_a_link_leads_to(tmp_path: Path) -> None:
    """Another run on the same mount puts a link in the place of a file that is being looked at."""
    victim, top = tmp_path / "victim", tmp_path / "top"
    victim.touch()
    victim.chmod(0o600)
    top.mkdir()
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            (tmp_path / "file").touch()
            (tmp_path / "file").chmod(0o4777)
            os.rename(tmp_path / "file", top / "f")
            os.symlink(victim, tmp_path / "link")
            os.rename(tmp_path / "link", top / "f")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(2000):
            protect.strip_set_id([str(top)], 0)
    finally:
        over.set()
        swapping.join()
    assert victim.stat().st_mode & 0o7777 == 0o600

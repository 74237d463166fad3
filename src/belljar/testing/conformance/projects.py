"""Conformance: a project of the host's that a program may write, and what git does there later.

What counts is the host's own git after the run. Each attack leaves something that makes the next
`git status` execute a command, which makes a marker; the control arm is the same attack in a mount
that is not protected.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ...types import Mount, Result
from .harness import Backed, Jar

_PLAIN = {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "protocol.file.allow", "GIT_CONFIG_VALUE_1": "always",
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b", "LC_ALL": "C",
}  # fmt: skip

# Every attack is tried to its end, whatever is refused on the way.
_TRIED = """
    import os
    def tried(act, *args, **named):
        try:
            return act(*args, **named)
        except OSError:
            return None
    def wrote(path, text, mode="w"):
        with open(path, mode) as file:
            file.write(text)
    config = ('[core]\\n\\trepositoryformatversion = 0\\n\\tbare = false\\n\\tworktree = '
              + worktree + '\\n\\tfsmonitor = "touch \\'' + marker + '\\'; false"\\n')
    def repository(at):
        for path in ("", "/objects", "/refs"):
            tried(os.makedirs, at + path)
        tried(wrote, at + "/HEAD", "ref: refs/heads/master\\n")
        tried(wrote, at + "/config", config)
"""
# name: (what the program does, the work tree that its config names)
_ATTACKS = {
    "commondir": ("repository('p/evil'); tried(wrote, 'p/.git/commondir', '../evil')", ".."),
    "a submodule's config": (
        "tried(wrote, 'p/.git/modules/known/config', config)",
        "../../../known",
    ),
    "a submodule's .git file": (
        "repository('p/evil'); tried(os.unlink, 'p/known/.git');"
        " tried(wrote, 'p/known/.git', 'gitdir: ../evil')",
        "../known",
    ),
    "a submodule's place": (
        "tried(os.rename, 'p/known', 'p/other'); repository('p/known/.git')",
        "..",
    ),
    "a new submodule": (
        "repository('p/sub/.git'); tried(os.unlink, 'p/.git/index');"
        " tried(wrote, 'p/.git/index', index, 'wb')",
        "..",
    ),
    "a submodule with unused bits in its mode": (
        "repository('p/sub/.git'); tried(os.unlink, 'p/.git/index');"
        " tried(wrote, 'p/.git/index', strange, 'wb')",
        "..",
    ),
    "a submodule by a name that is not normal": (
        "repository('p/deep/sub/.git'); tried(os.unlink, 'p/.git/index');"
        " tried(wrote, 'p/.git/index', crooked, 'wb')",
        "..",
    ),
    "a bare repository at the top": (
        "tried(os.unlink, 'p/.git/HEAD'); repository('p')",
        ".",
    ),
}  # fmt: skip


class Projects(Backed):
    @pytest.fixture
    def project(self, open_dir: Path) -> Iterator[Path]:
        """A repository with one commit and one submodule, which any user may write."""
        if shutil.which("git") is None:
            pytest.skip("git is not installed on this host")
        other = open_dir / "other"
        project = open_dir / "project"
        for path in (other, project):
            git(open_dir, "init", "-q", "-b", "master", str(path))
            (path / "file").write_text("given\n")
            git(path, "add", "file")
            git(path, "commit", "-qm", "first")
        git(project, "submodule", "add", "-q", str(other), "known")
        git(project, "commit", "-qm", "second")
        opened(project)
        yield project

    @pytest.mark.parametrize("protect", [True, False], ids=["protected", "unprotected"])
    @pytest.mark.parametrize("attack", _ATTACKS)
    def test_the_hosts_git_executes_nothing_that_a_run_has_left(
        self, jar: Jar, project: Path, attack: str, protect: bool
    ) -> None:
        marker = project.parent / "executed"
        steps, worktree = _ATTACKS[attack]
        context = {
            "marker": str(marker),
            "worktree": worktree,
            "index": index_with_a_submodule(project),
            "strange": index_of(b"sub", 0o160644),
            "crooked": index_of(b"deep//sub", 0o160000),
        }
        asked: dict[str, Any] = {"mounts": (Mount(str(project), "p", "rw", protect),)}
        jar.needs(**asked)
        git(project, "status")
        assert not marker.exists()  # the project is harmless
        result = jar.run(f"{_TRIED}    {steps}\n", context=context, **asked)
        assert result.success, result
        git(project, "status", check=False)
        held = protect and jar.protects
        assert marker.exists() == (not held), result

    def test_what_git_needs_stays_and_other_new_names_are_removed_and_reported(
        self, jar: Jar, project: Path
    ) -> None:
        mounts = (Mount(str(project), "p", "rw"),)
        jar.needs(mounts=mounts)
        code = """
            import os
            for name in ("FETCH_HEAD", "MERGE_MSG", "COMMIT_EDITMSG", "refs/heads/new", "gitdir"):
                with open("p/.git/" + name, "w") as file:
                    file.write("0" * 40)
            os.makedirs("p/.git/rebase-merge/deep")
            with open("p/.git/rebase-merge/git-rebase-todo", "w") as file:
                file.write("exec false")
            os.symlink("../file", "p/.git/remotes")
            """
        result = jar.run(code, mounts=mounts)
        assert result.success, result
        names = {path.name for path in (project / ".git").iterdir()}
        assert names >= {"FETCH_HEAD", "MERGE_MSG", "COMMIT_EDITMSG"}
        assert (project / ".git/refs/heads/new").exists()
        assert (project / "file").exists()
        if jar.protects:
            assert names.isdisjoint({"rebase-merge", "gitdir", "remotes", "commondir"})
            for name in ("rebase-merge", "gitdir", "remotes"):
                assert any(f".git/{name}'" in warning for warning in result.warnings), name
        else:
            assert names >= {"rebase-merge", "gitdir"}

    def test_git_works_in_a_protected_project(self, jar: Jar, project: Path) -> None:
        jar.needs_children()
        mounts = (Mount(str(project), "p", "rw"),)
        jar.needs(mounts=mounts)
        code = """
            import os, shutil, subprocess
            given = "GIT_CONFIG_COUNT" in os.environ  # some backends tell git what to ignore
            counted = ("GIT_CONFIG_COUNT", "GIT_CONFIG_KEY", "GIT_CONFIG_VALUE")
            for name, value in plain.items():
                if not (given and name.startswith(counted)):
                    os.environ[name] = value
            log = []
            def git(*words):
                done = subprocess.run(("git", *words), cwd="p", capture_output=True, text=True)
                log.append((words, done.returncode, done.stdout + done.stderr))
            def wrote(name, text):
                with open("p/" + name, "a") as file:
                    file.write(text)
            if shutil.which("git"):
                try:
                    git("checkout", "-q", "-b", "side"); wrote("file", "side\\n")
                    git("commit", "-qam", "side"); git("checkout", "-q", "master")
                    wrote("new", "new\\n"); git("add", "new"); git("commit", "-qm", "new")
                    git("merge", "-q", "-m", "merged", "side")
                    wrote("file", "later\\n"); git("stash", "-q"); git("stash", "pop", "-q")
                    git("tag", "v1"); git("gc", "-q"); git("status", "--porcelain")
                except PermissionError:
                    log.clear()  # a run is one process here
            log
            """
        result = jar.run(code, context={"plain": _PLAIN}, mounts=mounts)
        assert result.success, result
        if not result.value:
            pytest.skip("git is not in this sandbox, or it may start no process")
        assert [step for step in result.value if step[1]] == [], result.value
        assert result.value[-1][2] == " M file\n"  # no placeholder of ours is in the way
        assert subjects(project) == {"first", "second", "side", "new", "merged"}
        assert (project / "file").read_text() == "given\nside\nlater\n"
        assert git(project, "status", "--porcelain") == " M file\n"
        git(project, "fsck")
        assert told_of_removals(result) == []


def git(where: Path, *words: str, check: bool = True) -> str:
    """What the host's git prints there, with no configuration but the repository's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ("git", *words), cwd=where, env=kept | _PLAIN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


def subjects(project: Path) -> set[str]:
    return set(git(project, "log", "--format=%s").split())


def told_of_removals(result: Result) -> list[str]:
    return [each for each in result.warnings if "removed" in each or "set-aside" in each]


def index_with_a_submodule(project: Path) -> bytes:
    """What `git add` makes of a repository in the directory `sub`."""
    index = project / ".git" / "index"
    before = index.read_bytes()
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    made = index.read_bytes()
    index.write_bytes(before)
    index.chmod(0o666)
    return made


def index_of(name: bytes, mode: int) -> bytes:
    """An index that git would not write, but obeys."""
    entry = struct.pack(">24xI12x20sH", mode, b"\1" * 20, len(name)) + name
    data = struct.pack(">4sII", b"DIRC", 2, 1) + entry + bytes(8 - len(entry) % 8)
    return data + hashlib.sha1(data).digest()


def opened(top: Path) -> None:
    for path in (top, *top.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)

"""A guest's files land below the chosen directory and nowhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from belljar.cli import outputs
from belljar.types import File


def collected(**files: bytes | None) -> dict[str, File]:
    return files_named(files)


def files_named(files: dict[str, bytes | None]) -> dict[str, File]:
    return {name: File(path=name, size=len(data or b""), data=data) for name, data in files.items()}


def test_collected_files_are_written_and_the_others_are_not(tmp_path: Path) -> None:
    files = files_named({"a.txt": b"A", "deep/er/b.txt": b"B", "uncollected": None})
    done = outputs.write(files, str(tmp_path / "new"), globs=["*"])
    assert done.names == ["a.txt", "deep/er/b.txt"]
    assert not done.problems
    assert (tmp_path / "new" / "a.txt").read_bytes() == b"A"
    assert (tmp_path / "new" / "deep" / "er" / "b.txt").read_bytes() == b"B"
    assert not (tmp_path / "new" / "uncollected").exists()


def test_what_exists_is_overwritten_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    done = outputs.write(collected(a=b"guest"), str(tmp_path), globs=["*"])
    assert "--force" in done.problems["a"]
    assert (tmp_path / "a").read_bytes() == b"mine"
    done = outputs.write(collected(a=b"guest"), str(tmp_path), globs=["*"], force=True)
    assert done.names == ["a"]
    assert (tmp_path / "a").read_bytes() == b"guest"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a/../../up", "", ".", "nul\0byte"])
@pytest.mark.parametrize("force", [False, True])
def test_a_name_that_leaves_the_directory_is_refused(
    tmp_path: Path, name: str, force: bool
) -> None:
    here = tmp_path / "here"
    done = outputs.write(files_named({name: b"x"}), str(here), globs=["*"], force=force)
    assert list(done.problems) == [name]
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


@pytest.mark.parametrize("force", [False, True])
def test_links_below_the_directory_are_not_followed(tmp_path: Path, force: bool) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_bytes(b"alive")
    here = tmp_path / "here"
    here.mkdir()
    (here / "dir").symlink_to(outside)
    (here / "file").symlink_to(outside / "canary")
    (here / "dangling").symlink_to(outside / "new")
    files = files_named({"dir/x": b"x", "file": b"x", "dangling": b"x"})
    done = outputs.write(files, str(here), globs=["*"], force=force)
    assert "dir/x" in done.problems
    assert set(done.names) == ({"file", "dangling"} if force else set())
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"canary": b"alive"}


def test_the_chosen_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert outputs.write(collected(a=b"x"), str(tmp_path / "link"), globs=["*"]).names == ["a"]


def test_hidden_files_come_out_only_when_a_glob_names_them(tmp_path: Path) -> None:
    files = files_named({".git/hooks/pre-commit": b"x", "a/.env": b"x"})
    assert set(outputs.write(files, str(tmp_path), globs=["*"]).problems) == set(files)
    assert list(tmp_path.iterdir()) == []
    assert outputs.write(files, str(tmp_path), globs=["*", ".env"]).names == list(files)


def test_written_files_are_never_executable(tmp_path: Path) -> None:
    outputs.write(collected(script=b"#!/bin/sh\n"), str(tmp_path), globs=["*"])
    assert not stat.S_IMODE(os.stat(tmp_path / "script").st_mode) & 0o111


def test_a_file_in_the_way_of_a_directory_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    (tmp_path / "d").mkdir()
    files = files_named({"a/b": b"x", "d": b"x"})
    done = outputs.write(files, str(tmp_path), globs=["*"], force=True)
    assert set(done.problems) == {"a/b", "d"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]

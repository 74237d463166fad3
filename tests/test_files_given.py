"""Directories of the host as `files=`: what of them a program gets, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from belljar.api import build_request
from belljar.errors import RequestError
from belljar.files import given


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    (top / "src" / "deep").mkdir(parents=True)
    (top / "empty").mkdir()
    (top / "README").write_text("read me")
    (top / "src" / "a.py").write_text("a")
    (top / "src" / "deep" / "b.bin").write_bytes(b"\0\xff")
    (top / ".hidden").write_text("h")
    return top


def test_a_directory_gives_every_regular_file_below_it(project: Path) -> None:
    wanted = {
        "p/.hidden": b"h",
        "p/README": b"read me",
        "p/src/a.py": b"a",
        "p/src/deep/b.bin": b"\0\xff",
    }
    assert build_request(code="1", files={"p": project}).files == wanted
    listed = build_request(code="1", files=[project]).files
    assert listed == {f"project{name[1:]}": data for name, data in wanted.items()}


def test_directories_files_and_contents_go_together(project: Path) -> None:
    files = {"p/src": project / "src", "p/README": project / "README", "text": "content"}
    request = build_request(code="1", files=files)
    assert set(request.files) == {"p/src/a.py", "p/src/deep/b.bin", "p/README", "text"}


def test_a_file_that_two_sources_give_is_refused(project: Path) -> None:
    with pytest.raises(RequestError, match="given twice"):
        build_request(code="1", files={"p": project, "p/README": b"x"})


def test_the_programs_own_name_is_refused_inside_a_directory_too(project: Path) -> None:
    program = project / "main.py"
    program.mkdir()
    (program / "inside").write_text("x")
    with pytest.raises(RequestError, match="program itself"):
        build_request(code="1", files=[program])


def test_a_text_is_never_a_directory(project: Path) -> None:
    """A request that came as JSON cannot name what is on the host."""
    assert build_request(code="1", files={"p": str(project)}).files == {"p": str(project).encode()}


def test_links_and_special_files_are_refused_and_a_link_to_the_top_is_not(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("canary")
    (tmp_path / "way").symlink_to(project)
    assert "w/README" in build_request(code="1", files={"w": tmp_path / "way"}).files
    for make in (
        lambda path: path.symlink_to(tmp_path / "secret"),
        lambda path: path.symlink_to(tmp_path),
        os.mkfifo,
    ):
        odd = project / "src" / "odd"
        make(odd)
        with pytest.raises(RequestError, match="odd") as refusal:
            build_request(code="1", files={"p": project})
        assert "mounts" in str(refusal.value.fix)
        odd.unlink()
    assert build_request(code="1", files={"p": project}).files  # the control arm


@pytest.mark.parametrize(
    ("bound", "least", "problem"),
    [("MAX_FILES", 4, "files"), ("MAX_BYTES", 11, "MiB"), ("MAX_DEPTH", 2, "deep")],
)
def test_a_directory_past_a_bound_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, bound: str, least: int, problem: str
) -> None:
    monkeypatch.setattr(given, bound, least)
    assert len(build_request(code="1", files={"p": project}).files) == 4  # the control arm
    monkeypatch.setattr(given, bound, least - 1)
    with pytest.raises(RequestError, match=problem):
        build_request(code="1", files={"p": project})

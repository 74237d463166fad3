"""Conformance: a mount at a place of the caller's choice, and a program that starts in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ...errors import RequestError
from ...types import Mount
from .harness import Backed, Jar

_WHERE = """
    import os, mine, given
    with open("made", "w") as file:
        file.write(mine.WORD + given.WORD)
    os.getcwd(), os.path.isfile(__file__) or "main.py not written", os.path.exists("given.py")
"""


class Places(Backed):
    @pytest.fixture
    def shown(self, open_dir: Path) -> Path:
        """A directory with one module, which any user may write."""
        shown = open_dir / "project"
        (shown / "deep").mkdir(parents=True)
        for place in (shown, shown / "deep"):
            place.chmod(0o777)
            (place / "mine.py").write_text(f"WORD = {place.name!r}")
            (place / "mine.py").chmod(0o644)
        return shown

    @pytest.mark.parametrize("start", ["", "/deep"])
    @pytest.mark.parametrize("at", ["/app", "/mnt/project", "project"])
    def test_a_program_starts_in_the_mount_that_workdir_names(
        self, jar: Jar, shown: Path, at: str, start: str
    ) -> None:
        asked: dict[str, Any] = {"mounts": (Mount(str(shown), at, "rw"),)}
        jar.needs(**asked)
        files = {"given.py": b"WORD = ' given'"}
        result = jar.run(_WHERE, workdir=at + start, files=files, **asked)
        assert result.success, result
        place, _, beside = result.value
        real = str(shown) + start
        assert place == at + start if at.startswith("/") else place.endswith((at + start, real))
        assert not beside  # the run's own files are not in the project
        made = shown / start.lstrip("/") / "made"
        assert made.read_text() == f"{made.parent.name} given"
        assert "made" not in result.files  # and what is in the project is not collected

    def test_a_command_starts_in_the_mount_that_workdir_names(self, jar: Jar, shown: Path) -> None:
        jar.needs_processes()
        asked: dict[str, Any] = {"mounts": (Mount(str(shown), "project", "rw"),)}
        jar.needs(**asked)
        result = jar.run(
            "", command=["sh", "-c", "cat mine.py; pwd > made"], workdir="project", **asked
        )
        assert result.success, result
        assert result.stdout == "WORD = 'project'"
        assert (shown / "made").read_text().strip().endswith("project")

    def test_a_program_of_another_language_starts_there_too(self, jar: Jar, shown: Path) -> None:
        jar.needs_processes()
        if shutil.which("bash") is None:
            pytest.skip("bash is not installed on this host")
        asked: dict[str, Any] = {"mounts": (Mount(str(shown), "project", "rw"),)}
        jar.needs(**asked)
        code = 'echo "$1" > made; test -e "$0"'
        result = jar.run(code, language="bash", args=["word"], workdir="project", **asked)
        assert result.success, result
        assert (shown / "made").read_text() == "word\n"

    def test_a_directory_of_files_may_be_the_start(self, jar: Jar) -> None:
        files = {"inner/data.txt": b"here"}
        assert jar.run("open('data.txt').read()", files=files, workdir="inner").value == "here"

    @pytest.mark.parametrize("where", ["/etc", "elsewhere", "/app/missing", "/appendix", "/"])
    def test_a_start_outside_of_what_is_shown_is_refused(
        self, jar: Jar, shown: Path, where: str
    ) -> None:
        with pytest.raises(RequestError) as refusal:
            jar.run("1", workdir=where, mounts=(Mount(str(shown), "/app", "rw"),))
        assert refusal.value.field == "workdir"

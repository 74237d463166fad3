"""Where a Python is found, and what a guest is shown of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from belljar import interpreter


def test_a_prefix_may_have_python3_only(tmp_path: Path) -> None:
    """As /usr of Debian."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    assert interpreter.locate(str(tmp_path)) == str(tmp_path / "bin" / "python3")


def test_a_way_through_directories_that_a_guest_does_not_see_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`../venv/bin/python app.py` leaves the dots in sys.executable."""
    directory, name = os.path.split(sys.executable)
    (tmp_path / "sub").mkdir()
    (tmp_path / "bin").symlink_to(directory)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "sub" / ".." / "bin" / name))
    found = interpreter.find.__wrapped__(None).executable
    assert found == os.path.join(os.path.realpath(directory), name)

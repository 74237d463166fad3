"""What the documents' programs share: a project, and an environment without settings of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what a test sets; and no belljar.toml in the current directory."""
    for name in os.environ:
        if name.startswith(("SANDBOX_", "BELLJAR_", "DOCKER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("belljar.config.OPERATOR_FILE", str(tmp_path / "operator.toml"))


@pytest.fixture
def project() -> Iterator[Path]:
    """An ordinary user's project. Not below tmp_path, whose parents other users may not enter."""
    with tempfile.TemporaryDirectory(prefix="project-") as directory:
        path = Path(directory)
        path.chmod(0o755)
        (path / "data.txt").write_text("from the project\n")
        (path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
        if os.geteuid() == 0:
            for each in (path, *path.iterdir()):
                os.chown(each, 1000, 1000)
        yield path

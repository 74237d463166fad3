"""The address to report holes to, as the metadata of a built package has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parent.parent
GITHUB = "https://github.com/someone/belljar"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The parts of this project that its metadata is made of, in a repository of their own."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    version = tmp_path / "src/belljar/_version.py"
    version.parent.mkdir(parents=True)
    version.write_bytes((ROOT / "src/belljar/_version.py").read_bytes())
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def urls(project: Path) -> dict[str, str]:
    return ProjectMetadata(str(project), PluginManager()).core.urls


def test_the_address_given_to_a_build_is_where_holes_are_reported(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELLJAR_REPOSITORY", "https://git.example.org/team/belljar/")
    assert urls(project) == {"Repository": "https://git.example.org/team/belljar"}
    monkeypatch.setenv("BELLJAR_REPOSITORY", "our server")
    with pytest.raises(ValueError, match="BELLJAR_REPOSITORY"):
        urls(project)


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://github.com/someone/belljar.git", GITHUB),
        ("https://someone:token@github.com/someone/belljar", GITHUB),
        ("git@github.com:someone/belljar.git", GITHUB),
        ("ssh://git@github.com:22/someone/belljar.git", GITHUB),
        ("/srv/git/belljar", ""),
        ("https://10.0.0.7/belljar", ""),
        ("https://mirror.internal/belljar", ""),
        ("http://github.com/someone/belljar", ""),
        ("", ""),
    ],
)
def test_otherwise_it_is_the_origin_if_others_can_open_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, origin: str, address: str
) -> None:
    monkeypatch.delenv("BELLJAR_REPOSITORY", raising=False)
    if origin:
        subprocess.run(["git", "-C", project, "remote", "add", "origin", origin], check=True)
    security = {"Security": f"{address}/security/advisories/new"}
    assert urls(project) == ({"Repository": address, **security} if address else {})

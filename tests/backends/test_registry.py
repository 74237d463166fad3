"""Backends by name: ours, other people's, and none."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from belljar.backends import registry
from belljar.backends.base import Availability
from belljar.errors import BackendUnavailable
from belljar.policy import Isolation

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_names_we_ship_are_those_of_pyproject() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][registry.GROUP] == registry.BUILT_IN


def test_auto_prefers_only_backends_that_exist_and_are_a_boundary() -> None:
    assert set(registry.PREFERENCE) <= set(registry.BUILT_IN)
    ranks = [registry.RUNGS[name].rank for name in registry.PREFERENCE]
    assert min(ranks) >= Isolation.PROCESS.rank
    above = ("wasm", "gvisor")  # where a floor or fuel asks for them: docs/choosing.md
    others = [registry.RUNGS[name].rank for name in registry.PREFERENCE if name not in above]
    assert others == sorted(others, reverse=True)  # the strongest comes first


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_each_of_ours_loads_answers_a_probe_and_closes(name: str) -> None:
    backend = registry.load(name)
    assert backend.name == name
    assert backend.isolation is registry.RUNGS[name]
    found = backend.probe()
    assert isinstance(found, Availability)
    assert found.available or found.reason
    backend.close()


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable) as refusal:
        registry.load("moon")
    assert all(name in str(refusal.value) for name in ("'moon'", *registry.names()))
    assert refusal.value.fix == "belljar backends"


def test_a_backend_gets_the_options_that_it_names_and_no_others() -> None:
    plain = registry.load("inprocess", user="1000:1000", colour="blue")
    assert plain.name == "inprocess"
    held = registry.load("subprocess", user="1000:1000", colour="blue")
    assert held.user == (1000, 1000)  # type: ignore[attr-defined]
    assert registry.load("subprocess", user=None).user is None  # type: ignore[attr-defined]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody else's package with entry points of all kinds."""
    (tmp_path / "moonbase.py").write_text(
        "class Moon:\n    name = 'moon'\n\nclass Impostor:\n    name = 'impostor'\n"
    )
    metadata = tmp_path / "moonbase-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moonbase\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[belljar.backends]\nmoon = moonbase:Moon\nbroken = moonbase_absent:Thing\n"
        "hollow = moonbase:Nothing\nsubprocess = moonbase:Impostor\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "moonbase", raising=False)
    return tmp_path


def test_other_peoples_backends_come_through_the_same_door(installed: Path) -> None:
    assert {"moon", "broken", "hollow"} <= set(registry.names())
    assert registry.names()[: len(registry.BUILT_IN)] == tuple(registry.BUILT_IN)
    assert registry.load("moon").name == "moon"


@pytest.mark.parametrize("name", ["broken", "hollow"])
def test_a_backend_that_cannot_be_imported_is_unavailable(installed: Path, name: str) -> None:
    with pytest.raises(BackendUnavailable) as refusal:
        registry.load(name)
    assert f"{name!r} cannot be imported" in str(refusal.value)


def test_nobody_takes_the_name_of_one_of_ours(installed: Path) -> None:
    assert registry.names().count("subprocess") == 1
    assert registry.load("subprocess").name == "subprocess"


def test_no_backend_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys; from belljar.backends import registry\n"
        "homes = [target.split(':')[0] for target in registry.BUILT_IN.values()]\n"
        "print(*[home for home in homes if home in sys.modules])"
    )
    source = str(Path(registry.__file__).parents[2])
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == ""

"""`belljar wasm`: what is there, and what is missing, with the command that makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from belljar.cli import main
from belljar.wasm import build, cache


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "GUESTS", {"python": str(tmp_path / "python.wasm")})


def test_status_says_how_to_get_what_is_missing(
    nothing_built: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["wasm", "status"]) == 0
    assert "python      not built: belljar wasm build" in capfd.readouterr().out


def test_prepare_without_guests_is_told_the_fix(
    nothing_built: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "library", lambda: cache.Library("99.0.0", "/nowhere"))
    assert main(["wasm", "prepare"]) == 127
    assert "belljar wasm build" in capfd.readouterr().err


def test_prepare_without_an_engine_is_told_the_fix(
    nothing_built: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "library", lambda: None)
    assert main(["wasm", "prepare"]) == 127
    assert "belljar[wasm]" in capfd.readouterr().err


def test_status_is_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["wasm", "status", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert set(found["guests"]) == {"python", "javascript"}


def test_clear_removes_what_was_compiled(
    nothing_built: None, capfd: pytest.CaptureFixture[str]
) -> None:
    left = Path(cache.directory(), "old.cwasm")
    left.write_bytes(b"x")
    assert main(["wasm", "clear"]) == 0
    assert not left.exists()

"""The cache of compiled guests: private, checked, and bound to what it was made with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from belljar.errors import BackendUnavailable
from belljar.wasm import build, cache

LIBRARY = cache.Library("50.0.1", "/nowhere/wasmtime")


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "python.wasm"
    path.write_bytes(b"\0asm")
    (tmp_path / "python.wasm.json").write_text(json.dumps({"sha256": "ab" * 32, "key": "k"}))
    return str(path)


def compiled(guest: str, *, fuel: bool = False) -> Path:
    path = Path(cache.directory(), cache.name(guest, fuel=fuel, installed=LIBRARY))
    path.write_bytes(b"code")
    path.chmod(0o644)
    Path(f"{path}.json").write_text(json.dumps({"size": 4, "memory": 65536}))
    return path


def find(guest: str, *, fuel: bool = False) -> cache.Compiled | None:
    return cache.find(guest, fuel=fuel, installed=LIBRARY)


def test_what_is_there_and_untouched_is_found(guest: str) -> None:
    assert find(guest) is None
    path = compiled(guest)
    assert find(guest) == cache.Compiled(str(path), 65536)
    assert find(guest, fuel=True) is None


def test_the_directory_is_closed_to_others(guest: str) -> None:
    place = cache.directory()
    assert os.stat(place).st_mode & 0o777 == 0o700
    os.chmod(place, 0o755)
    assert os.stat(cache.directory()).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_could_write_is_not_used(guest: str, mode: int) -> None:
    path = compiled(guest)
    path.chmod(mode)
    assert find(guest) is None


def test_a_link_and_half_a_file_are_not_used(guest: str, tmp_path: Path) -> None:
    path = compiled(guest)
    path.write_bytes(b"cod")
    assert find(guest) is None
    path.unlink()
    (tmp_path / "else").write_bytes(b"code")
    path.symlink_to(tmp_path / "else")
    assert find(guest) is None


def test_a_directory_of_somebody_else_s_is_refused(guest: str) -> None:
    place = cache.directory()
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(place, 12345, 12345)
    with pytest.raises(BackendUnavailable, match="belongs to uid 12345"):
        cache.directory()


def test_a_link_instead_of_the_directory_is_refused(guest: str, tmp_path: Path) -> None:
    place = Path(cache.directory())
    place.rmdir()
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackendUnavailable, match="not a directory"):
        cache.directory()


def test_a_name_holds_all_that_compiled_code_is_bound_to(guest: str) -> None:
    names = {
        cache.name(guest, fuel=False, installed=LIBRARY),
        cache.name(guest, fuel=True, installed=LIBRARY),
        cache.name(guest, fuel=False, installed=cache.Library("51.0.0", "")),
    }
    noted = {"sha256": "cd" * 32, "key": "k"}
    Path(f"{guest}.json").write_text(json.dumps(noted))
    names.add(cache.name(guest, fuel=False, installed=LIBRARY))
    assert len(names) == 4


def test_a_guest_that_cannot_be_compiled_is_told_and_leaves_nothing(guest: str) -> None:
    library = cache.library()
    if library is None:
        pytest.skip("wasmtime is not installed")
    said: list[str] = []
    with pytest.raises(Exception, match="could not be compiled"):
        cache.prepare(guest, fuel=False, installed=library, say=said.append)
    assert said
    left = [name for name in os.listdir(cache.directory()) if not name.endswith(".lock")]
    assert left == []


def test_the_package_s_guest_is_what_its_sources_make() -> None:
    if not build.description(build.PYTHON):
        pytest.skip("the guest has not been built")
    assert build.is_current(build.PYTHON), "belljar wasm build"

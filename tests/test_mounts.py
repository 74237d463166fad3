"""Mounts: what could surprise is refused by name, and the same mount without the surprise works."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.backends import protect
from belljar.errors import PolicyError
from belljar.policy import Ceiling, level_policy
from belljar.policy_fields import parse_mount
from belljar.resolve import resolve
from belljar.types import Mount, Request


def link_loop(at: Path) -> str:
    (at / "loop").symlink_to(at / "loop")
    return str(at / "loop")


@pytest.mark.parametrize(
    ("src", "dst", "mode", "field"),
    [
        (lambda at: f"{at}/../{at.name}", "in", "ro", "mounts.src"),
        (lambda at: f"{at}\0", "in", "ro", "mounts.src"),
        (lambda at: f"{at}/\ud800", "in", "ro", "mounts.src"),
        (lambda at: f"{at}/missing", "in", "ro", "mounts.src"),
        (link_loop, "in", "ro", "mounts.src"),
        (lambda at: f"{at}/{'x' * 5000}", "in", "ro", "mounts.src"),
        (lambda at: "", "in", "ro", "mounts.src"),
        (lambda at: "/", "in", "ro", "mounts.src"),
        (lambda at: "//", "in", "ro", "mounts.src"),
        (lambda at: "/.", "in", "ro", "mounts.src"),
        (lambda at: "/proc/self/root", "in", "ro", "mounts.src"),
        (str, "../in", "ro", "mounts.dst"),
        (str, "a/../../in", "ro", "mounts.dst"),
        (str, "/work/..", "ro", "mounts.dst"),
        (str, "in\0", "ro", "mounts.dst"),
        (str, "", "ro", "mounts.dst"),
        (str, ".", "ro", "mounts.dst"),
        (str, "./.", "ro", "mounts.dst"),
        (str, "/", "ro", "mounts.dst"),
        (str, "//", "ro", "mounts.dst"),
        (str, "in", "rwx", "mounts.mode"),
        (str, "in", "", "mounts.mode"),
    ],
)
def test_a_mount_that_could_surprise_is_refused(
    tmp_path: Path, src: Callable[[Path], str], dst: str, mode: Any, field: str
) -> None:
    with pytest.raises(PolicyError) as refusal:
        parse_mount(Mount(src(tmp_path), dst, mode))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("dst", "clean"),
    [("in", "in"), ("a//b/./c/", "a/b/c"), ("/data", "/data"), ("//data", "/data")],
)
def test_the_same_mount_without_the_surprise_is_accepted(
    tmp_path: Path, dst: str, clean: str
) -> None:
    assert parse_mount(Mount(str(tmp_path), dst, "rw")) == Mount(
        os.path.realpath(tmp_path), clean, "rw"
    )


def test_a_symlink_source_is_shown_as_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert parse_mount(Mount(str(tmp_path / "link"), "in")).src == os.path.realpath(
        tmp_path / "real"
    )


def test_a_symlink_to_the_root_is_refused_as_the_root(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(PolicyError) as refusal:
        parse_mount(Mount(str(tmp_path / "link"), "in"))
    assert refusal.value.field == "mounts.src"


def test_a_mount_may_be_written_as_text(tmp_path: Path) -> None:
    real = os.path.realpath(tmp_path)
    assert parse_mount(f"{tmp_path}:in") == Mount(real, "in", "ro")
    assert parse_mount(f"{tmp_path}:in:rw") == Mount(real, "in", "rw")


@pytest.mark.parametrize("text", ["", "a", "a:b:ro:x", ":in", "/tmp:", 5, None, b"/tmp:in"])
def test_text_that_is_no_mount_is_refused(text: object) -> None:
    with pytest.raises(PolicyError) as refusal:
        parse_mount(text)
    assert refusal.value.field.startswith("mounts")


@given(src=st.text(max_size=20), dst=st.text(max_size=20), mode=st.text(max_size=3))
def test_any_text_is_a_plain_mount_or_a_refusal(src: str, dst: str, mode: Any) -> None:
    try:
        mount = parse_mount(Mount(src, dst, mode))
    except PolicyError as refusal:
        assert refusal.field.startswith("mounts")
        return
    assert os.path.isabs(mount.src) and mount.src != "/"
    assert mount.mode in ("ro", "rw")
    assert ".." not in mount.dst.split("/") and mount.dst not in ("/", "//", ".", "")


@pytest.mark.parametrize(
    ("ceiling", "mode", "accepted"),
    [
        ("none", "ro", False), ("ro", "ro", True), ("ro", "rw", False), ("rw", "rw", True),
        ("rw", "rw,unprotected", False), ("unprotected", "rw,unprotected", True),
    ],
)  # fmt: skip
def test_mounts_are_bound_by_the_ceiling(
    tmp_path: Path, ceiling: Any, mode: Any, accepted: bool
) -> None:
    mount = parse_mount(f"{tmp_path}:in:{mode}")

    def ask() -> Any:
        return resolve("standard", {}, mounts=(mount,), ceiling=Ceiling(mounts=ceiling))

    if accepted:
        assert ask().mounts == (mount,)
    else:
        with pytest.raises(PolicyError) as refusal:
            ask()
        assert refusal.value.field == "mounts"


def test_the_protection_of_metadata_is_given_up_only_in_so_many_words(tmp_path: Path) -> None:
    real = os.path.realpath(tmp_path)
    assert parse_mount(f"{tmp_path}:in:rw") == Mount(real, "in", "rw", protect=True)
    assert parse_mount(f"{tmp_path}:in:rw,unprotected") == Mount(real, "in", "rw", protect=False)
    for mode in ("ro,unprotected", "unprotected", "rw,", "rw,unprotected,"):
        with pytest.raises(PolicyError, match="is not ro or rw"):
            parse_mount(f"{tmp_path}:in:{mode}")
    for mount in (Mount(real, "in", "ro", False), Mount(real, "in", "rw", 0)):  # type: ignore[arg-type]
        with pytest.raises(PolicyError) as refusal:
            parse_mount(mount)
        assert refusal.value.field == "mounts.protect"


def test_unprotected_paths_are_bound_by_the_ceiling() -> None:
    asked = {"filesystem": {"read_write": ["/srv"], "protect": False}}
    assert not resolve("standard", asked, ceiling=Ceiling()).policy.filesystem.protect
    with pytest.raises(PolicyError, match="past the operator's ceiling 'rw'"):
        resolve("standard", asked, ceiling=Ceiling(mounts="rw"))


def test_who_mounts_a_path_twice_has_it_protected_unless_both_give_it_up(tmp_path: Path) -> None:
    policy = level_policy("standard")
    kept, bare = (Mount(str(tmp_path), name, "rw", name == "kept") for name in ("kept", "bare"))
    assert protect.unprotected(policy, Request(code="", mounts=(kept, bare))) == frozenset()
    assert protect.unprotected(policy, Request(code="", mounts=(bare,))) == {
        os.path.realpath(tmp_path)
    }


@pytest.mark.parametrize(
    ("ceiling", "key", "accepted"),
    [
        ("none", "read_only", False),
        ("ro", "read_only", True),
        ("ro", "read_write", False),
        ("rw", "read_write", True),
    ],
)
def test_paths_are_bound_by_the_ceiling_of_mounts(ceiling: Any, key: str, accepted: bool) -> None:
    def ask() -> Any:
        return resolve("standard", {"filesystem": {key: ["/srv"]}}, ceiling=Ceiling(mounts=ceiling))

    if accepted:
        assert getattr(ask().policy.filesystem, key) == ("/srv",)
    else:
        with pytest.raises(PolicyError) as refusal:
            ask()
        assert refusal.value.field == f"filesystem.{key}"

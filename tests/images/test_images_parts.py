"""The parts that images are made of: names, trees, layers, compiled files. No engine needed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from belljar import __version__
from belljar.errors import BackendUnavailable, RequestError
from belljar.images import archive, build, bytecode, host, libraries, names, packages
from belljar.images.tree import Tree, normal


@pytest.mark.parametrize(
    ("language", "kind"),
    [("python", "python"), ("javascript", "node"), ("node", "node"), ("bash", "bash")],
)
def test_each_language_has_its_image(language: str, kind: str) -> None:
    assert names.image_for(language) == f"belljar/{kind}:{__version__}"


@pytest.mark.parametrize("language", ["ruby", "python3.10", "nodejs18", "python3"])
def test_a_language_without_an_image_says_what_to_do(language: str) -> None:
    with pytest.raises(BackendUnavailable, match="image="):
        names.image_for(language)


def test_a_missing_image_names_the_command() -> None:
    error = names.missing(names.image_name("data"), "the engine")
    assert error.fix == "belljar images build data"
    assert "belljar images pull debian:12" in str(names.missing("debian:12", "the engine"))


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(RequestError, match="python, node, bash, data"):
        build.check("fortran")


@pytest.mark.parametrize(
    ("path", "place"),
    [("/bin/sh", "usr/bin/sh"), ("/lib64/ld.so", "usr/lib64/ld.so"), ("/usr/bin/x", "usr/bin/x"),
     ("bin", "bin"), ("/opt/lib/x", "opt/lib/x")],
)  # fmt: skip
def test_paths_lie_below_usr(path: str, place: str) -> None:
    assert normal(path) == place


def test_a_setuid_bit_does_not_reach_an_image(tmp_path: Path) -> None:
    program = tmp_path / "su"
    program.write_bytes(b"#!/bin/sh\n")
    program.chmod(0o4755)
    tree = Tree()
    tree.copy(str(program), "usr/bin/su")
    assert tree.entries["usr/bin/su"].mode == 0o755


def test_what_a_link_leads_to_is_copied(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"text")
    (tmp_path / "link").symlink_to("real")
    tree = Tree()
    tree.copy(str(tmp_path / "link"), "etc/link")
    assert tree.entries["etc/link"].content() == b"text"
    assert tree.entries["etc/link"].mode == 0o644


def test_an_upper_layer_holds_only_what_is_new(tmp_path: Path) -> None:
    shared = tmp_path / "lib.so"
    shared.write_bytes(b"library")
    lower, upper = Tree(), Tree()
    for tree in (lower, upper):
        tree.copy(str(shared), "usr/lib/lib.so")
    upper.write("usr/bin/new", b"program")
    assert [path for path, _ in upper.without(lower).files()] == ["usr/bin/new"]


def test_equal_trees_make_equal_layers_whatever_the_order_and_the_time(tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"same")
    one, two = Tree(), Tree()
    one.copy(str(source), "a/file")
    one.write("b", b"data")
    os.utime(source, (1, 1))
    two.write("b", b"data")
    two.copy(str(source), "a/file")
    packed = [archive.pack(tree, io.BytesIO()) for tree in (one, two)]
    assert packed[0].digest == packed[1].digest
    two.write("c", b"more")
    assert archive.pack(two, io.BytesIO()).digest != packed[0].digest


def test_an_archive_is_what_engines_load() -> None:
    tree = Tree()
    tree.write("etc/hello", b"hello")
    layer = archive.pack(tree, io.BytesIO())
    config = archive.image_config(
        [layer], architecture="amd64", created="2026-01-01T00:00:00Z", labels={"a": "b"}
    )
    whole = b"".join(archive.docker_archive("belljar/x:1", config, [layer]))
    with tarfile.open(fileobj=io.BytesIO(whole)) as opened:
        manifest = json.load(opened.extractfile("manifest.json"))[0]  # type: ignore[arg-type]
        assert manifest["RepoTags"] == ["belljar/x:1"]
        told = json.load(opened.extractfile(manifest["Config"]))  # type: ignore[arg-type]
        assert told["rootfs"]["diff_ids"] == [f"sha256:{layer.digest}"]
        inner = opened.extractfile(manifest["Layers"][0])
        with tarfile.open(fileobj=inner) as files:
            info = files.getmember("etc/hello")
            assert (info.uid, info.gid, info.mtime, info.mode) == (0, 0, 0, 0o644)


def test_compiled_files_are_used_without_asking_the_source(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("value = 1\n")
    (tmp_path / "template.py").write_text("this is {no} Python\n")
    tree = Tree()
    for file in ("module.py", "template.py"):
        tree.copy(str(tmp_path / file), f"opt/{file}")
    tag = sys.implementation.cache_tag
    bytecode.add_bytecode(tree, sys.executable, tag)
    compiled = [path for path, _ in tree.files(suffix=".pyc")]
    assert compiled == [f"opt/__pycache__/module.{tag}.pyc"]
    cache = tmp_path / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / f"module.{tag}.pyc").write_bytes(tree.entries[compiled[0]].content())
    source.write_text("value = 2\n")
    code = "import module; print(module.value)"
    run = [sys.executable, "-B", "-c", code]
    told = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1"]


def test_the_libraries_of_a_program_are_found_where_the_loader_finds_them() -> None:
    found = dict(libraries.loaded_by([os.path.realpath("/bin/bash")]))
    assert "libc.so.6" in found
    assert all(os.path.isfile(path) for path in found.values())


def test_a_host_without_ldd_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "defpath", "/nonexistent")
    with pytest.raises(BackendUnavailable, match="from-dockerfile"):
        libraries.loaded_by(["/bin/sh"])


def test_the_base_shows_no_path_of_this_host() -> None:
    tree = host.base().tree
    short = "{}.{}".format(*sys.version_info)
    assert f"usr/bin/python{short}" in tree
    assert f"usr/lib/python{short}/json/__init__.py" in tree
    assert (
        f"usr/lib/python{short}/json/__pycache__/__init__.{sys.implementation.cache_tag}.pyc"
        in tree
    )
    roots = {path.partition("/")[0] for path in tree.entries}
    assert roots <= {
        "bin", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys",
        "tmp", "usr", "var", "workspace",
    }  # fmt: skip
    # Only the record of how this Python was configured names where it was built.
    prefix = os.fsencode(sys.base_prefix)
    naming = [p for p, e in tree.files(suffix=".pyc") if prefix + b"/lib" in e.content()]
    assert prefix == b"/usr" or all("_sysconfigdata" in path for path in naming)


def test_the_same_host_gives_the_same_base_in_another_process() -> None:
    code = (
        "import json\n"
        "from belljar.images import archive, host\n"
        "tree = host.base().tree\n"
        "made = {path: str(each.data) for path, each in tree.entries.items() if each.data}\n"
        "print(json.dumps([archive.hashes(tree), made]))"
    )

    def told(seed: str) -> tuple[dict[str, str], dict[str, str]]:
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        hashes, made = json.loads(ran.stdout)
        return hashes, made

    for _ in range(5):
        (one, made), (other, also) = told("7"), told("11")
        if one == other:  # else somebody changed the host meanwhile
            break
    different = {path for path in {*one, *other} if one.get(path) != other.get(path)}
    assert {path: (made.get(path), also.get(path)) for path in different} == {}
    assert archive.content_digest(one).startswith("sha256:")


def test_packages_come_with_what_they_require_and_without_extras() -> None:
    chosen = packages.with_requirements(["pandas"])
    assert {"pandas", "numpy", "python-dateutil"} <= chosen.keys()
    assert "pytest" not in chosen


def test_nothing_installed_is_a_clear_error() -> None:
    with pytest.raises(BackendUnavailable, match="belljar\\[data\\]"):
        packages.layer(["no-such-distribution-at-all"])


@pytest.mark.parametrize("kind", names.KINDS)
def test_each_kind_has_a_dockerfile_whose_bases_are_pinned(kind: str) -> None:
    text = build.dockerfile(kind)
    for line in text.splitlines():
        if line.startswith(("ARG BASE", "ARG NODE")):
            tag = line.partition(":")[2]
            assert tag[:1].isdigit() and tag.count(".") == 2, f"not pinned by version: {line}"
    assert "FROM ${BASE}" in text
    assert names.RECORD in text

"""A host directory that files are written into under names that a guest chose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import belljar
from belljar.backends import registry
from belljar.errors import RequestError
from belljar.files.destination import Destination, NotWritten
from belljar.testing.fake import FakeBackend
from belljar.types import File, Result, Status


@pytest.fixture(autouse=True)
def no_descriptor_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    leads = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    opened = [os.readlink(lead) for lead in leads if lead.is_symlink()]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []


def refused(destination: Destination, name: str) -> str:
    with pytest.raises(NotWritten) as refusal:
        destination.write(name, b"x")
    return str(refusal.value)


def test_files_are_written_below_and_directories_made(tmp_path: Path) -> None:
    with Destination(str(tmp_path / "new" / "er"), ["*"]) as into:
        into.write("a/b/c", b"one")
        into.write("a/d", b"")
    assert (tmp_path / "new/er/a/b/c").read_bytes() == b"one"
    assert (tmp_path / "new/er/a/d").read_bytes() == b""


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../up", "nul\0", "", "x" * 300, "d"])
def test_names_that_lead_out_or_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "into" / "d").mkdir(parents=True)
    with Destination(str(tmp_path / "into"), ["*"]) as into:
        assert refused(into, name)
    assert [path.name for path in tmp_path.iterdir()] == ["into"]


@pytest.mark.parametrize("replace", [False, True])
def test_no_link_is_written_through(tmp_path: Path, replace: bool) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("the host's")
    top = tmp_path / "into"
    top.mkdir()
    (top / "dir").symlink_to(outside)
    (top / "link").symlink_to(outside / "file")
    (top / "dangling").symlink_to(outside / "new")
    with Destination(str(top), ["*"], replace=replace) as into:
        refused(into, "dir/planted")
        for name in ("link", "dangling"):
            if replace:
                into.write(name, b"replaced")
                assert not (top / name).is_symlink()
            else:
                assert refused(into, name) == "exists"
        into.write("plain", b"x")  # the control arm
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "the host's"


def test_a_file_that_is_there_is_replaced_only_if_the_caller_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with Destination(str(tmp_path), ["*"]) as into:
        assert refused(into, "a") == "exists"
    assert (tmp_path / "a").read_text() == "old"
    with Destination(str(tmp_path), ["*"], replace=True) as into:
        into.write("a", b"new")
    assert (tmp_path / "a").read_text() == "new"


def test_a_hidden_name_needs_a_glob_that_names_hidden_ones(tmp_path: Path) -> None:
    with Destination(str(tmp_path), ["*", "*.txt"]) as into:
        assert "hidden" in refused(into, ".git/hooks/x")
        assert "hidden" in refused(into, "a/.b")
    with Destination(str(tmp_path), ["*", ".b"]) as into:
        into.write("a/.b", b"x")
    assert (tmp_path / "a/.b").read_bytes() == b"x"


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_breaks_off_leaves_nothing(tmp_path: Path, replace: bool) -> None:
    with Destination(str(tmp_path), ["*"], replace=replace) as into:
        new = into.create("a")
        new.write(b"half")
        new.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with Destination(str(tmp_path), ["*"]) as into:
        new = into.create("a")
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, new._fd)
        os.close(full)
        with pytest.raises(NotWritten, match="No space left"):
            new.write(b"x")
    assert list(tmp_path.iterdir()) == []


# -- through the engine


def engine(answer: Result) -> belljar.Runner:
    fake = FakeBackend(lambda _: answer)
    return belljar.Runner(
        engine=belljar.Engine(belljar.Settings(), backends={"fake": fake}), backend="fake"
    )


def test_what_a_backend_left_in_memory_is_written_by_the_engine(tmp_path: Path) -> None:
    files = {
        "a": File(path="a", size=1, data=b"A"),
        "../b": File(path="../b", size=1, data=b"B"),
        "c": File(path="c", size=1),
    }
    into = tmp_path / "into"
    with engine(Result(status=Status.SUCCESS, files=files)) as runner:
        result = runner.execute("1", outputs=["a"], outputs_to=into)
    assert {name: (file.data, file.saved) for name, file in result.files.items()} == {
        "a": (None, str(into / "a")),
        "../b": (None, None),
        "c": (None, None),
    }
    assert [path.name for path in tmp_path.iterdir()] == ["into"]
    assert any("'../b' was not written" in warning for warning in result.warnings)


@pytest.mark.parametrize("path", ["", "a\0b", "up/../there", "a-file", "a-file/below"])
def test_a_directory_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    started: list[object] = []
    fake = FakeBackend(lambda request: started.append(request) or Result(status=Status.SUCCESS))
    made = belljar.Engine(belljar.Settings(), backends={"fake": fake})
    with belljar.Runner(engine=made, backend="fake") as runner:
        with pytest.raises((RequestError, belljar.PolicyError)) as refusal:
            runner.execute("1", outputs_to=path)
        assert refusal.value.field == "outputs_to"
        assert not started
        runner.execute("1", outputs_to="here")  # the control arm
    assert started


@pytest.mark.skipif(
    not registry.load("jail").probe().available, reason="needs a backend that mounts"
)
def test_a_program_that_puts_a_link_in_place_of_the_directory_does_not_lead_elsewhere(
    tmp_path: Path,
) -> None:
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    for path in (tmp_path, shared, elsewhere):
        path.chmod(0o777)
    code = f"""
import os
os.rename("shared/into", "shared/moved")
os.symlink({str(elsewhere)!r}, "shared/into")
open("made", "w").write("x")
"""
    result = belljar.run(
        code,
        backend="jail",
        mounts=[f"{shared}:shared:rw"],
        outputs=["made"],
        outputs_to=shared / "into",
    )
    assert result.success, result
    assert (shared / "into").is_symlink()  # the control arm: the program could do it
    assert list(elsewhere.iterdir()) == []
    assert (shared / "moved" / "made").read_text() == "x"


@pytest.mark.skipif(
    not registry.load("jail").probe().available,
    reason="needs a disk of its own",
)
def test_a_large_output_does_not_pass_through_the_hosts_memory(tmp_path: Path) -> None:
    size = 192 << 20
    code = f"""
with open("big", "wb") as file:
    for _ in range({size} >> 20):
        file.write(b"x" * (1 << 20))
"""
    options = {"backend": "jail", "memory": "1G", "disk": "512M", "timeout": 60}

    def grown(**to: object) -> int:
        peak = _reset_peak()
        result = belljar.run(code, **options, **to)  # type: ignore[arg-type]
        assert result.success, result
        assert result.changes[0].size == size
        return _peak() - peak

    belljar.run("open('a', 'w').write('x')", outputs_to=tmp_path / "warm", **options)  # type: ignore[arg-type]
    assert grown(outputs_to=tmp_path / "into") < 32 << 20
    assert (tmp_path / "into" / "big").stat().st_size == size
    assert grown(outputs=["big"], outputs_total=size) > size // 2  # the control arm


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

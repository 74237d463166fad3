"""A work directory that a hostile program left: what is read of it, what is not, and its end."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import unprivileged
from hypothesis import given
from hypothesis import strategies as st

from belljar.errors import RequestError
from belljar.files import collect
from belljar.files.copying import Wanted
from belljar.files.names import checked_name
from belljar.types import Result, Status


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def changed(
    work: Path, *globs: str, before: dict[str, collect.Stamp] | None = None
) -> collect.Collected:
    return collect.changed_files(str(work), before or {}, Wanted(globs=globs))


# -- names that come in


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "..", "../x", "a/../../x", "a/..", ".", "./", "//", "a\0b", "\ud800", 3],
)
def test_a_name_that_is_not_below_the_work_directory_is_refused(name: object) -> None:
    with pytest.raises(RequestError) as refusal:
        checked_name("files", name)
    assert refusal.value.field == "files"


@pytest.mark.parametrize(
    ("name", "clean"),
    [("a", "a"), ("./a//b/", "a/b"), ("..a/b..", "..a/b.."), ("ü\n", "ü\n"), ("\udcff", "\udcff")],
)
def test_other_names_are_taken_as_they_are_meant(name: str, clean: str) -> None:
    assert checked_name("files", name) == clean


@given(st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "", "a", "/"])).map("/".join))
def test_no_text_leads_out_of_the_work_directory(name: str) -> None:
    try:
        clean = checked_name("files", name)
    except RequestError:
        return
    assert os.path.normpath(os.path.join("/w", clean)).startswith("/w/")
    os.fsencode(clean)


def test_inputs_are_written_and_nothing_is_written_over(work: Path) -> None:
    collect.write_inputs(str(work), {"a/b/c.txt": b"one", "d": b""})
    assert (work / "a/b/c.txt").read_bytes() == b"one"
    assert (work / "d").read_bytes() == b""
    with pytest.raises(FileExistsError):
        collect.write_inputs(str(work), {"d": b"two"})


# -- what changed


def test_new_and_changed_files_are_listed_and_given_ones_are_not(work: Path) -> None:
    for name in ("same", "longer", "rewritten", "replaced"):
        (work / name).write_text("text")
    before = collect.snapshot(str(work))
    (work / "longer").write_text("longer text")
    (work / "replaced").unlink()
    (work / "replaced").write_text("text")
    (work / "sub").mkdir()
    (work / "sub/new").write_text("new")
    # A program may set back the time of a file it changed: it counts as changed all the same.
    old = (work / "rewritten").stat()
    (work / "rewritten").write_text("TEXT")
    os.utime(work / "rewritten", ns=(old.st_atime_ns, old.st_mtime_ns))

    found = changed(work, before=before)
    assert sorted(found.files) == ["longer", "replaced", "rewritten", "sub/new"]
    assert {file.data for file in found.files.values()} == {None}
    assert found.files["longer"].size == len("longer text")
    assert found.warnings == []


def test_a_glob_without_a_slash_matches_anywhere_and_one_with_a_slash_is_anchored(
    work: Path,
) -> None:
    for name in ("a.csv", "sub/b.csv", "sub/deep/c.csv", "d.txt"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)

    def read(*globs: str) -> list[str]:
        found = changed(work, *globs)
        return sorted(path for path, file in found.files.items() if file.data is not None)

    assert read("*.csv") == ["a.csv", "sub/b.csv", "sub/deep/c.csv"]
    assert read("sub/*.csv") == ["sub/b.csv", "sub/deep/c.csv"]
    assert read("sub/b.csv", "d.txt") == ["d.txt", "sub/b.csv"]
    assert read() == []
    assert changed(work, "d.txt").files["d.txt"].data == b"d.txt"


# -- traps


def test_links_are_neither_followed_nor_listed(work: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("canary")
    (work / "plain.txt").write_text("mine")
    (work / "link.txt").symlink_to(secret / "key.txt")
    (work / "directory").symlink_to(secret)
    (work / "loop").symlink_to("loop")
    found = changed(work, "*")
    assert {path: file.data for path, file in found.files.items()} == {"plain.txt": b"mine"}


def test_a_work_directory_that_became_a_link_is_not_followed(work: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("canary")
    work.rmdir()
    work.symlink_to(secret)
    found = changed(work, "*")
    assert found.files == {}
    assert "could not be opened" in found.warnings[0]
    assert changed(secret, "*").files["key.txt"].data == b"canary"  # the control arm


def test_a_link_that_takes_a_files_place_after_the_look_is_not_opened(
    work: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("canary")
    (work / "plain").write_text("mine")
    (work / "link").symlink_to(tmp_path / "secret")
    parent = os.open(work, os.O_RDONLY)
    try:
        assert collect._open_regular(parent, "link") == -1
        with open(collect._open_regular(parent, "plain")) as plain:
            assert plain.read() == "mine"  # the control arm
    finally:
        os.close(parent)


@pytest.mark.timeout(60)
def test_fifos_sockets_and_devices_are_passed_over(work: Path) -> None:
    os.mkfifo(work / "fifo.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(work / "socket.txt"))
    if os.geteuid() == 0:
        os.mknod(work / "zero.txt", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    (work / "plain.txt").write_text("mine")
    assert list(changed(work, "*").files) == ["plain.txt"]


def test_a_file_with_a_second_name_is_listed_but_not_read(work: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("canary")
    os.link(tmp_path / "other", work / "linked.txt")
    found = changed(work, "*")
    assert found.files["linked.txt"].data is None
    assert "hard link" in found.warnings[0]
    (tmp_path / "other").unlink()
    assert changed(work, "*").files["linked.txt"].data == b"canary"  # the control arm


def test_a_sparse_file_costs_no_more_than_the_bound(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MAX_BYTES", 1 << 20)
    with open(work / "a-sparse", "wb") as file:
        file.truncate(1 << 40)
    (work / "b-small").write_bytes(b"x")
    found = changed(work, "*")
    sparse = found.files["a-sparse"]
    assert (sparse.size, sparse.truncated) == (1 << 40, True)
    # One budget for all files: whichever came first, together they are within it.
    assert sum(len(file.data or b"") for file in found.files.values()) == 1 << 20
    assert any("cut" in warning for warning in found.warnings)


@pytest.mark.timeout(60)
def test_a_file_that_grows_while_it_is_read_is_cut(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MAX_BYTES", 4 << 20)
    stop, begun = threading.Event(), threading.Event()

    def grow() -> None:
        with open(work / "growing", "ab", buffering=0) as file:
            while not stop.is_set() and file.tell() < 256 << 20:
                file.write(b"x" * (1 << 16))
                begun.set()

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        assert begun.wait(10)
        found = changed(work, "*")
    finally:
        stop.set()
        writer.join()
    assert 0 < len(found.files["growing"].data or b"") <= 4 << 20


def close_everything(work: Path) -> None:
    (work / "closed/deeper").mkdir(parents=True)
    (work / "closed/deeper/result.txt").write_text("found")
    (work / "closed/deeper/result.txt").chmod(0)
    (work / "closed/deeper").chmod(0)
    (work / "closed").chmod(0)
    work.chmod(0)


def open_to_all(path: Path) -> None:
    """pytest's own directories are for its user only."""
    while path != path.parent and path != Path("/tmp"):
        path.chmod(0o777)
        path = path.parent


def test_a_tree_without_any_rights_is_collected_and_removed(tmp_path: Path) -> None:
    open_to_all(tmp_path)

    def collect_it() -> tuple[bool, dict[str, bytes | None], bool]:
        work = tmp_path / "work"
        work.mkdir()
        close_everything(work)
        try:
            os.listdir(work)
            closed = False
        except PermissionError:
            closed = True
        found = changed(work, "*")
        close_again = work / "closed"
        close_again.chmod(0)
        work.chmod(0)
        collect.remove_tree(str(work))
        return closed, {name: file.data for name, file in found.files.items()}, work.exists()

    closed, files, left = unprivileged.call(collect_it)
    assert closed  # the control arm: by plain calls nothing could be seen
    assert files == {"closed/deeper/result.txt": b"found"}
    assert not left


def deep(work: Path, levels: int) -> None:
    """A chain of directories, longer than any path may be."""
    here = os.open(work, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 20, dir_fd=here)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with open(os.open("end.txt", os.O_CREAT | os.O_WRONLY, dir_fd=here), "w") as file:
        file.write("end")
    os.close(here)


def test_a_deep_tree_is_listed_to_a_depth_and_removed_to_the_end(work: Path) -> None:
    deep(work, 3000)
    found = changed(work, "*")
    assert found.files == {}
    assert "deeper than" in found.warnings[0]
    collect.remove_tree(str(work))
    assert not work.exists()


def test_a_tree_within_the_depth_is_listed(work: Path) -> None:
    deep(work, collect.MAX_DEPTH)
    found = changed(work, "*")
    assert [file.data for file in found.files.values()] == [b"end"]
    assert found.warnings == []


def test_of_twenty_thousand_files_the_first_are_listed_and_all_are_removed(work: Path) -> None:
    for number in range(20_000):
        os.close(os.open(work / str(number), os.O_CREAT | os.O_WRONLY))
    found = changed(work, "*")
    assert len(found.files) == collect.MAX_FILES
    assert found.warnings == [f"only the first {collect.MAX_FILES} changed files are listed"]
    collect.remove_tree(str(work))
    assert not work.exists()


def test_listing_ends_in_time(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "a").write_text("a")
    assert "a" in changed(work).files
    monkeypatch.setattr(collect, "MAX_SECONDS", -1.0)
    found = changed(work)
    assert found.files == {}
    assert "stopped" in found.warnings[0]


def test_strange_names_are_listed_and_stay_strict_json(work: Path) -> None:
    names = [b"\xff\xfe.txt", b"a\nb.txt", b"\x1b[31m.txt", "ü\u202e.txt".encode(), b"-rf .txt"]
    for name in names:
        with open(os.fsencode(work) + b"/" + name, "wb") as file:
            file.write(name)
    os.link(os.fsencode(work) + b"/" + names[0], os.fsencode(work) + b"/second\xff")
    found = changed(work, "*")
    assert {os.fsencode(path) for path in found.files} == {*names, b"second\xff"}
    result = Result(
        status=Status.SUCCESS, files=found.files, warnings=tuple(found.warnings), stdout="\udcff"
    )
    written = json.dumps(result.to_dict(), allow_nan=False).encode("utf-8", "strict")
    listed = json.loads(written)["files"]
    assert "a\nb.txt" in listed
    assert len(listed) == len(found.files)
    assert not any("\ud800" <= char <= "\udfff" for name in listed for char in name)


# -- removal


def test_removal_deletes_links_and_not_what_they_lead_to(work: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "canary").write_text("alive")
    (work / "sub").mkdir()
    (work / "sub/link").symlink_to(kept)
    (work / "file").symlink_to(kept / "canary")
    collect.remove_tree(str(work))
    assert not work.exists()
    assert (kept / "canary").read_text() == "alive"


def test_a_link_in_place_of_the_tree_is_not_followed(work: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "canary").write_text("alive")
    work.rmdir()
    work.symlink_to(kept)
    with pytest.raises(OSError):
        collect.remove_tree(str(work))
    assert (kept / "canary").read_text() == "alive"


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    collect.remove_tree(str(tmp_path / "never"))


def test_nothing_beside_the_tree_is_needed_or_touched(work: Path) -> None:
    """A name beside the tree could be made first by somebody else, in a directory like /tmp."""
    beside = Path(f"{work}.gone")
    beside.mkdir()
    (beside / "canary").write_text("alive")
    (work / "sub/subsub").mkdir(parents=True)
    collect.remove_tree(str(work))
    assert not work.exists()
    assert (beside / "canary").read_text() == "alive"


@pytest.mark.timeout(60)
def test_what_a_dying_process_still_writes_is_removed_too(work: Path) -> None:
    (work / "sub").mkdir()
    inside = os.open(work / "sub", os.O_RDONLY)
    begun, written = threading.Event(), threading.Event()

    def write() -> None:
        for number in range(500):
            try:
                os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY, dir_fd=inside))
            except FileNotFoundError:  # the directory is gone, as it should be
                break
            begun.set()
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(10)
        collect.remove_tree(str(work))
        assert not work.exists()
    finally:
        writer.join()
        os.close(inside)
    assert written.is_set()


def test_long_names_are_cut_in_warnings_and_counted(work: Path) -> None:
    deep = work / ("d" * 250) / ("\x01" * 250)
    deep.mkdir(parents=True)
    (deep / "first").write_bytes(b"x")
    for number in range(100):
        os.link(deep / "first", deep / f"{number}-{'e' * 200}")
    found = changed(work, "*")
    alike = [text for text in found.warnings if "hard link" in text]
    assert len(alike) == 21
    assert alike[-1] == "and 81 more: has a second hard link and was not read"
    assert max(map(len, found.warnings)) < 300


def test_names_are_listed_up_to_a_bound(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (work / f"{number:02}-{'n' * 97}").write_bytes(b"")
    assert (len(changed(work).files), changed(work).truncated) == (20, False)
    monkeypatch.setattr(collect, "MAX_NAMES", 1000)
    found = changed(work)
    assert (len(found.files), found.truncated) == (10, True)
    assert found.warnings == [
        "only the first 10 changed files are listed: names take at most 1000 bytes"
    ]


def test_warnings_of_any_collector_are_bounded() -> None:
    assert collect.bounded(["a", "b"]) == ["a", "b"]
    kept = collect.bounded(["x" * 5000] * 500)
    assert len(kept) == 101
    assert max(map(len, kept)) < 1100
    assert kept[-1] == "and 400 more warnings"

"""Conformance: files in, files out, and a work directory that is the run's alone."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ... import languages
from ...errors import BackendFailed, PolicyError, PolicyUnenforceable, RequestError
from ...types import Mount, Status
from .harness import Backed, Jar, Watch


class Files(Backed):
    def test_given_files_are_in_the_work_directory(self, jar: Jar) -> None:
        given = {
            "a.txt": b"text",
            "deep/er/b.bin": bytes(range(256)),
            "sp ace/ü.txt": b"",
            "c": b"x",
        }
        result = jar.run(
            "{path: open(path, 'rb').read() for path in paths}",
            files=given,
            context={"paths": list(given)},
        )
        assert result.value == given

    @pytest.mark.parametrize("name", ["../up.txt", "/etc/abs.txt", "a/../../up", "nul\0", "", "."])
    def test_a_file_outside_the_work_directory_is_refused(self, jar: Jar, name: str) -> None:
        with pytest.raises(RequestError) as refusal:
            jar.run("1", files={name: b"x"})
        assert refusal.value.field.startswith("files")

    def test_the_work_directory_starts_with_what_was_given_and_nothing_else(self, jar: Jar) -> None:
        code = "import os; sorted(os.listdir('.'))"
        own = {languages.find("python").file}  # some backends write the program there, some do not
        assert set(jar.run(code, files={"mine": b""}).value) - own == {"mine"}
        assert set(jar.run(code).value) - own == set()

    def test_changed_files_are_listed_and_asked_ones_have_their_content(self, jar: Jar) -> None:
        result = jar.run(
            """
            import os
            os.makedirs("out/deep")
            open("out/deep/report.csv", "wb").write(b"a,b\\n\\x00")
            open("notes.txt", "w").write("not asked for")
            open("old.txt", "a").write(" and more")
            """,
            files={"old.txt": b"given", "untouched.txt": b"given"},
            outputs=("*.csv",),
        )
        assert result.success, result
        assert set(result.files) == {"out/deep/report.csv", "notes.txt", "old.txt"}
        report = result.files["out/deep/report.csv"]
        assert (report.data, report.size, report.truncated) == (b"a,b\n\x00", 5, False)
        assert report.path == "out/deep/report.csv"
        assert (result.files["notes.txt"].data, result.files["notes.txt"].size) == (None, 13)

    def test_changes_say_what_was_created_changed_and_deleted(self, jar: Jar) -> None:
        result = jar.run(
            """
            import os
            os.mkdir("out")
            open("out/table.csv", "w").write("a,b")
            open("old.txt", "a").write(" and more")
            os.remove("gone.txt")
            """,
            files={"old.txt": b"given", "gone.txt": b"given", "untouched.txt": b"given"},
        )
        assert result.success, result
        told = {change.path: change for change in result.changes}
        assert {path: change.kind for path, change in told.items()} == {
            "out/table.csv": "created",
            "old.txt": "changed",
            "gone.txt": "deleted",
        }
        assert (told["gone.txt"].size, told["gone.txt"].sha256) == (None, None)
        for path, content in (("out/table.csv", b"a,b"), ("old.txt", b"given and more")):
            assert told[path].size == len(content)
            assert told[path].sha256 == hashlib.sha256(content).hexdigest()
        assert told["out/table.csv"].mime_type == "text/csv"
        assert jar.run("1", files={"a": b"x"}).changes == ()  # the control arm

    def test_files_are_written_to_a_directory_instead_of_memory(
        self, jar: Jar, open_dir: Path, tmp_path: Path
    ) -> None:
        canary, into = open_dir / "canary", tmp_path / "into"
        canary.write_text("canary-content")
        canary.chmod(0o644)
        into.mkdir()
        (into / "there").write_text("the host's")
        (into / "leads").symlink_to(open_dir)
        data = bytes(range(256)) * 4096 * 3
        result = jar.run(
            f"""
            import os
            os.makedirs("deep/er")
            open("deep/er/big.bin", "wb").write(bytes(range(256)) * 4096 * 3)
            open("there", "w").write("the program's")
            open(".hidden", "w").write("x")
            os.mkdir("leads")
            open("leads/planted", "w").write("x")
            try:
                os.symlink({str(canary)!r}, "link")
            except PermissionError:
                pass  # wasm refuses links that lead out as they are made
            """,
            outputs=("*",),
            outputs_to=str(into),
        )
        assert result.success, result
        big = result.files["deep/er/big.bin"]
        assert (big.data, big.saved) == (None, str(into / "deep/er/big.bin"))
        assert (into / "deep/er/big.bin").read_bytes() == data
        hashes = {change.path: change.sha256 for change in result.changes}
        assert hashes["deep/er/big.bin"] == hashlib.sha256(data).hexdigest()
        # Nothing is replaced, hidden or put behind a link, and a warning says so.
        assert (into / "there").read_text() == "the host's"
        assert [path.name for path in open_dir.iterdir()] == ["canary"]
        for name in ("there", ".hidden", "leads/planted"):
            assert result.files[name].saved is None
            assert any(name in warning for warning in result.warnings), result.warnings
        assert sorted(path.name for path in into.iterdir()) == ["deep", "leads", "there"]

    def test_files_that_come_out_are_cut_at_their_caps(self, jar: Jar, tmp_path: Path) -> None:
        code = "for name in 'ab': open(name, 'wb').write(b'x' * 3000)"
        for to in ("", str(tmp_path / "into")):
            wanted: dict[str, Any] = {"outputs": ("*",), **({"outputs_to": to} if to else {})}
            capped: list[tuple[dict[str, Any], list[int]]] = [
                ({"outputs_each": 1000}, [1000, 1000]),
                ({"outputs_total": 4000}, [1000, 3000]),
                ({}, [3000, 3000]),  # the control arm
            ]
            for caps, sizes in capped:
                result = jar.run(code, **wanted, **caps)
                assert result.success, result
                saved = [file.saved for file in result.files.values()]
                came = [
                    len(Path(place).read_bytes() if place else file.data or b"")
                    for place, file in zip(saved, result.files.values(), strict=True)
                ]
                assert sorted(came) == sizes
                assert [file.truncated for file in result.files.values()] == [
                    length < 3000 for length in came
                ]
                assert any("were cut at" in warning for warning in result.warnings) == bool(caps)
                hashes = {change.path: change.sha256 for change in result.changes}
                assert [hashes[path] is None for path in result.files] == [n < 3000 for n in came]
                for place in saved:
                    if place:
                        Path(place).unlink()

    def test_a_glob_with_a_slash_is_anchored(self, jar: Jar) -> None:
        result = jar.run(
            "import os; os.mkdir('out')\nfor p in ('x.txt', 'out/x.txt'): open(p, 'w').write(p)",
            outputs=("out/*.txt",),
        )
        assert result.files["out/x.txt"].data == b"out/x.txt"
        assert result.files["x.txt"].data is None

    def test_outputs_survive_a_program_that_fails(self, jar: Jar) -> None:
        result = jar.run("open('partial', 'w').write('so far')\n1 / 0", outputs=("partial",))
        assert result.status is Status.ERROR
        assert result.files["partial"].data == b"so far"

    def test_outputs_survive_a_timeout(self, jar: Jar) -> None:
        jar.needs(timeout=1)
        code = "f = open('partial', 'w'); f.write('so far'); f.flush()\nwhile True: pass"
        result = jar.run(code, outputs=("partial",), timeout=1)
        assert result.status is Status.TIMEOUT
        assert result.files["partial"].data == b"so far"

    def test_a_link_is_never_followed_out_of_the_work_directory(
        self, jar: Jar, open_dir: Path
    ) -> None:
        canary = open_dir / "canary"
        canary.write_text("canary-content")
        canary.chmod(0o644)
        result = jar.run(
            f"""
            import os
            leads = dict(link={str(canary)!r}, dir={str(open_dir)!r}, inner="plain.out")
            for name, target in leads.items():
                try:
                    os.symlink(target, name + ".out")
                except PermissionError:
                    pass  # wasm refuses links that lead out as they are made
            open("plain.out", "w").write("mine")
            if hasattr(os, "mkfifo"):
                os.mkfifo("fifo.out")
            """,
            outputs=("*.out", "dir.out/*"),
        )
        assert result.success, result
        assert result.files["plain.out"].data == b"mine"  # the control arm: a file is collected
        assert b"canary-content" not in b"".join(f.data or b"" for f in result.files.values())
        assert "dir.out/canary" not in result.files

    def test_odd_names_and_modes_are_collected_and_deleted(self, jar: Jar) -> None:
        result = jar.run(
            """
            import os
            open("new\\nline", "w").write("1")
            try:
                open(b"bad-\\xff", "w").write("2")
            except OSError:
                pass  # wasm has only names that are text
            open("shut", "w").write("3")
            os.chmod("shut", 0)
            os.mkdir("closed")
            open("closed/inside", "w").write("4")
            os.chmod("closed", 0)
            """,
            outputs=("*",),
        )
        assert result.success, result
        assert result.files["new\nline"].data == b"1"
        assert len(result.files) >= 3
        assert all("\0" not in path for path in result.to_dict()["files"])

    def test_the_work_directory_is_private_to_the_run(self, jar: Jar) -> None:
        first = jar.run("import os; open('left', 'w').write('x'); os.getcwd()")
        second = jar.run("import os; os.path.exists('left')")
        assert first.success
        assert second.value is False

    def test_a_temporary_file_can_be_made(self, jar: Jar) -> None:
        result = jar.run("""
            import tempfile
            with tempfile.NamedTemporaryFile() as file:
                file.write(b"scratch")
            """)
        assert result.success, result.error

    @pytest.mark.parametrize("mode", ["ro", "rw"])
    def test_the_collector_leaves_a_mount_alone(self, jar: Jar, open_dir: Path, mode: str) -> None:
        closed = open_dir / "closed"
        closed.mkdir()
        (open_dir / "given").write_text("the host's")
        (open_dir / "given").chmod(0o644)
        mounts = (Mount(str(open_dir), "in/m", mode),)  # type: ignore[arg-type]
        jar.needs(mounts=mounts)
        closed.chmod(0)
        result = jar.run("open('mine', 'w').write('x')", mounts=mounts, outputs=("*",))
        assert result.success, result
        assert result.files["mine"].data == b"x"  # the control arm: a file is collected
        assert [name for name in result.files if name.startswith("in/")] == []
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in open_dir.iterdir()}
        assert modes == {"closed": 0, "given": 0o644}

    @pytest.mark.parametrize("place", ["/sandbox", "/sandbox/run", "/sandbox/run/work", "here"])
    def test_a_mount_in_place_of_the_work_directory_keeps_its_mode(
        self, jar: Jar, open_dir: Path, place: str
    ) -> None:
        open_dir.chmod(0o755)
        where = jar.run("import os; os.getcwd()").value if place == "here" else place
        try:
            jar.run("1", mounts=(Mount(str(open_dir), where, "rw"),))
        except (PolicyError, PolicyUnenforceable, BackendFailed):
            pass  # refused, as most do
        assert stat.S_IMODE(open_dir.stat().st_mode) == 0o755

    def test_nothing_of_the_run_is_left_on_disk(
        self, open_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(open_dir))
        monkeypatch.setattr("tempfile.tempdir", None)
        backend = self.make_backend()
        if not backend.probe().available:
            pytest.skip(f"{backend.name} is not available")
        jar = self.make_jar(backend)
        during: list[bool] = []
        code = """
            import os
            os.makedirs("deep/" * 20)
            open("deep/file", "w").write("x")
            os.chmod("deep", 0)
            print(os.getcwd(), flush=True)
            """
        try:
            watch = Watch(b"\n", lambda: during.append(any(open_dir.iterdir())))
            where = jar.run(code, emit=watch).stdout.strip()
            jar.run("1 / 0")
            if jar.held("timeout").state != "absent":
                jar.run("open('x', 'w').write('x')\nwhile True: pass", timeout=1)
        finally:
            jar.engine.close()
        assert where
        assert not os.path.exists(where) or os.path.samefile(where, ".")
        assert list(open_dir.iterdir()) == []
        if during != [True]:
            pytest.skip("the work directory is not below TMPDIR: only its absence could be checked")

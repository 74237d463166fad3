"""Conformance: which files of the host a program reaches, and what it may do to them."""

from __future__ import annotations

import contextlib
import select
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ...backends.base import Cancel
from ...errors import BelljarError, PolicyError, PolicyUnenforceable
from ...policy import Isolation
from ...types import Mount, Status
from .harness import Backed, Jar, directory_with_a_mount, writable_directory


class Reach(Backed):
    @pytest.fixture(params=["/tmp", "/var/tmp"])
    def host_dir(self, request: pytest.FixtureRequest) -> Iterator[Path]:
        """Two places, because a backend may treat the directory of temporary files specially."""
        if not Path(request.param).is_dir():
            pytest.skip(f"this host has no {request.param}")
        with writable_directory(request.param) as path:
            yield path

    def test_a_host_file_is_out_of_reach_unless_it_is_mounted(
        self, jar: Jar, host_dir: Path
    ) -> None:
        if jar.held("filesystem").state != "enforced":
            pytest.skip(f"filesystem is {jar.held('filesystem').state}")
        canary = host_dir / "canary"
        canary.write_text("canary-content")
        canary.chmod(0o666)
        result = jar.run(f"open({str(canary)!r}).read()")
        assert result.status is Status.ERROR
        assert "canary-content" not in repr(result)
        jar.run(f"open({str(canary)!r}, 'w').write('overwritten')")
        assert canary.read_text() == "canary-content"
        jar.run(f"import os; os.unlink({str(canary)!r})")
        assert canary.exists()
        mounts = (Mount(str(host_dir), "shown", "ro"),)
        jar.needs(mounts=mounts)
        assert jar.run("open('shown/canary').read()", mounts=mounts).value == "canary-content"

    @pytest.mark.parametrize("mode", ["ro", "rw"])
    def test_a_mount_is_writable_only_if_it_was_asked_so(
        self, jar: Jar, host_dir: Path, mode: str
    ) -> None:
        (host_dir / "given").write_text("given")
        (host_dir / "given").chmod(0o666)
        mounts = (Mount(str(host_dir), "shown", mode),)  # type: ignore[arg-type]
        jar.needs(mounts=mounts)
        read = jar.run("open('shown/given').read()", mounts=mounts)
        assert read.value == "given", read
        written = jar.run("open('shown/new', 'w').write('by the guest')", mounts=mounts)
        assert written.success == (mode == "rw"), written
        assert (host_dir / "new").exists() == (mode == "rw")
        assert (host_dir / "given").read_text() == "given"

    def test_a_file_system_below_a_read_only_mount_is_read_only(self, jar: Jar) -> None:
        code = """
            try:
                open("shown/inner/new", "w").close()
            except OSError:
                pass
            """
        with directory_with_a_mount() as path:
            new = path / "inner" / "new"
            mounts = (Mount(str(path), "shown", "ro"),)
            jar.needs(mounts=mounts)
            assert jar.run(code, mounts=mounts).success
            assert not new.exists()
            if jar.backend.isolation not in (Isolation.PROCESS, Isolation.LANDLOCK, Isolation.JAIL):
                return  # an engine may leave it out of a writable mount, too
            mounts = (Mount(str(path), "shown", "rw"),)
            jar.needs(mounts=mounts)
            assert jar.run(code, mounts=mounts).success
            assert new.exists()  # the control arm

    @pytest.mark.parametrize("protect", [True, False])
    @pytest.mark.parametrize("way", ["mounted", "listed"])
    def test_what_tools_execute_is_writable_only_if_it_was_asked_so(
        self, jar: Jar, open_dir: Path, way: str, protect: bool
    ) -> None:
        hooks = open_dir / ".git" / "hooks"
        hooks.mkdir(parents=True)
        for path in (open_dir, open_dir / ".git", hooks):
            path.chmod(0o777)
        asked: dict[str, Any] = {"mounts": (Mount(str(open_dir), "p", "rw", protect),)}
        field, place = "mounts", "p"
        if way == "listed":
            asked = {"filesystem": {"read_write": [str(open_dir)], "protect": protect}}
            field, place = "filesystem", str(open_dir)
        jar.needs(**asked)
        code = f"""
            written = []
            for name in (".git/hooks/pre-commit", ".mcp.json", "result.txt"):
                try:
                    with open({place!r} + "/" + name, "w") as file:
                        file.write("by the guest")
                    written.append(name)
                except OSError:
                    pass
            written
            """
        result = jar.run(code, **asked)
        everything = [".git/hooks/pre-commit", ".mcp.json", "result.txt"]
        if protect and jar.protects:
            assert result.value == ["result.txt"], result
            assert list(hooks.iterdir()) == []
        else:
            assert result.value == everything, result
            assert (open_dir / ".mcp.json").read_text() == "by the guest"
        if not protect and jar.protects:
            assert "not protected, as asked" in result.enforcement[field].by

    def test_no_program_leaves_a_set_id_file_in_a_writable_mount(
        self, jar: Jar, open_dir: Path
    ) -> None:
        """It would run as its owner, root perhaps, for any user of the host."""
        jar.needs_own_process()
        mounts = (Mount(str(open_dir), "p", "rw"),)
        jar.needs(mounts=mounts)
        if "seccomp" not in getattr(jar.backend, "layers", ("seccomp",)):
            pytest.skip("a system without seccomp: the program is the user that owns the files")
        result = jar.run(
            """
            import os
            def tried(act):
                try:
                    act()
                except (OSError, AttributeError):
                    pass
            for name in ("chmod", "fchmod"):
                open("p/" + name, "w").close()
            tried(lambda: os.chmod("p/chmod", 0o6755))
            tried(lambda: os.fchmod(os.open("p/fchmod", os.O_RDONLY), 0o4755))
            tried(lambda: os.open("p/open", os.O_CREAT | os.O_WRONLY, 0o4755))
            tried(lambda: os.mknod("p/mknod", 0o104755))
            """,
            mounts=mounts,
        )
        assert result.success, result
        left = {path.name: path.stat().st_mode for path in open_dir.iterdir() if path.is_file()}
        assert {"chmod", "fchmod"} <= set(left)
        assert {name for name, mode in left.items() if mode & 0o6000} == set(), left
        control = open_dir / "control"
        control.touch()
        control.chmod(0o4755)
        assert control.stat().st_mode & 0o4000  # there can be such files here

    def test_a_read_only_mount_inside_a_writable_one_is_held_or_refused(
        self, jar: Jar, host_dir: Path
    ) -> None:
        inner = host_dir / "inner"
        inner.mkdir()
        inner.chmod(0o777)
        mounts = (Mount(str(host_dir), "outer", "rw"), Mount(str(inner), "inner", "ro"))
        for path in ("inner/new", "outer/inner/new", f"{inner}/new"):
            try:
                jar.run(f"open({path!r}, 'w').write('by the guest')", mounts=mounts)
            except PolicyUnenforceable as refusal:
                assert "mounts" in refusal.fields
                break
            assert list(inner.iterdir()) == [], path

    @pytest.mark.parametrize("key", ["read_only", "read_write"])
    def test_a_listed_path_is_writable_only_if_it_was_listed_so(
        self, jar: Jar, host_dir: Path, key: str
    ) -> None:
        wanted: dict[str, Any] = {"filesystem": {key: [str(host_dir)]}}
        self.needs_reports(jar, wanted)
        (host_dir / "given").write_text("given")
        (host_dir / "given").chmod(0o666)
        assert jar.run(f"open({str(host_dir / 'given')!r}).read()", **wanted).value == "given"
        written = jar.run(f"open({str(host_dir / 'new')!r}, 'w').write('x')", **wanted)
        assert written.success == (key == "read_write"), written
        assert (host_dir / "new").exists() == (key == "read_write")

    def test_a_read_only_path_inside_a_writable_one_is_held_or_refused(
        self, jar: Jar, host_dir: Path
    ) -> None:
        if jar.held("filesystem").state != "enforced":
            pytest.skip(f"filesystem is {jar.held('filesystem').state}")
        inner = host_dir / "inner"
        inner.mkdir()
        inner.chmod(0o777)
        listed = {"read_write": [str(host_dir)], "read_only": [str(inner)]}
        try:
            result = jar.run(f"open({str(inner / 'new')!r}, 'w').write('x')", filesystem=listed)
        except PolicyUnenforceable as refusal:
            assert "filesystem" in refusal.fields
            return
        assert not result.success
        assert list(inner.iterdir()) == []

    def test_a_hidden_path_wins_over_a_listed_one(self, jar: Jar, host_dir: Path) -> None:
        secret = host_dir / "secret"
        secret.mkdir()
        secret.chmod(0o777)
        (secret / "canary").write_text("canary-content")
        (secret / "canary").chmod(0o666)
        code = f"open({str(secret / 'canary')!r}).read()"
        shown: dict[str, Any] = {"read_only": [str(host_dir)]}
        self.needs_reports(jar, {"filesystem": {**shown, "hidden": [str(secret)]}})
        assert jar.run(code, filesystem=shown).value == "canary-content"  # the control arm
        hidden = jar.run(code, filesystem={**shown, "hidden": [str(secret)]})
        assert hidden.status is Status.ERROR
        assert "canary-content" not in repr(hidden)

    @pytest.mark.parametrize("key", ["read_only", "read_write", "mounts"])
    @pytest.mark.parametrize("above", [False, True], ids=["itself", "above"])
    def test_a_path_that_is_hidden_is_not_shown_by_another_setting(
        self, jar: Jar, host_dir: Path, key: str, above: bool
    ) -> None:
        secret = host_dir / "secret"
        (secret / "deep").mkdir(parents=True)
        (secret / "deep/canary").write_text("canary-content")
        opened = (secret, secret / "deep", secret / "deep/canary")
        for path in opened:
            path.chmod(0o777)
        shown = str(secret / "deep")
        place = "m" if key == "mounts" else shown
        code = f"open({place + '/canary'!r}).read()"
        asked: dict[str, Any] = {"filesystem": {key: [shown]}}
        if key == "mounts":
            asked = {"mounts": (Mount(shown, "m", "ro"),), "filesystem": {}}
        jar.needs(**asked)
        assert jar.run(code, **asked).value == "canary-content"  # the control arm
        asked["filesystem"]["hidden"] = [str(secret) if above else shown]
        try:
            result = jar.run(code, **asked)
        except (PolicyError, PolicyUnenforceable) as refusal:
            assert "canary-content" not in str(refusal)
            return
        assert "canary-content" not in repr(result)

    @pytest.mark.parametrize("way", ["mount", "listed", "part"])
    @pytest.mark.parametrize("led", [False, True], ids=["as it was", "led astray"])
    def test_a_link_that_is_made_after_the_check_shows_nothing_else(
        self, jar: Jar, open_dir: Path, way: str, led: bool
    ) -> None:
        """Another run may write to a directory above a mount, and put a link in its path."""
        if jar.held("filesystem").state != "enforced":
            pytest.skip(f"filesystem is {jar.held('filesystem').state}")
        given, secret = open_dir / "above" / "given", open_dir / "secret"
        for path in (given, given / ".vscode", secret, secret / ".vscode"):
            path.mkdir(parents=True)
        (given / ".vscode" / "canary").write_text("of the mount")
        (secret / ".vscode" / "canary").write_text("canary-content")
        asked: dict[str, Any] = {"mounts": (Mount(str(given), "m", "rw"),)}
        place = "m"
        if way == "listed":
            asked, place = {"filesystem": {"read_only": [str(given)]}}, str(given)
        jar.needs(**asked)
        for path in (open_dir, *open_dir.rglob("*")):
            path.chmod(0o777)  # nothing but the sandbox keeps the program from it
        plan = jar.plan(f"open({place + '/.vscode/canary'!r}).read()", **asked)
        if led:
            if way == "part":
                (given / ".vscode").rename(open_dir / "aside")
                (given / ".vscode").symlink_to("../../secret/.vscode")
            else:
                (open_dir / "above").rename(open_dir / "aside")
                (secret / "given").symlink_to(".")
                (open_dir / "above").symlink_to("secret")
        try:
            with Cancel() as cancel:
                result = jar.backend.run(plan, lambda event: None, cancel)
        except BelljarError as refusal:
            assert led, refusal
            assert "canary-content" not in str(refusal)
            return
        if not led:
            assert result.value == "of the mount", result
        assert "canary-content" not in repr(result)

    @pytest.mark.parametrize("host_root", ["/old", "/oldroot", ""])
    def test_a_link_in_a_mount_leads_the_place_of_another_mount_nowhere(
        self, jar: Jar, open_dir: Path, host_root: str
    ) -> None:
        """Places to mount on are made with the host's rights, while its own tree is still in sight:
        where that is differs, and a program can guess it."""
        shown, outside, inner = (open_dir / name for name in ("shown", "outside", "inner"))
        (inner / "deep").mkdir(parents=True)
        (inner / "file").write_text("inner")
        outside.mkdir()
        (shown / "a" / "made").mkdir(parents=True)
        for path in (open_dir, *open_dir.rglob("*")):
            path.chmod(0o777)
        mounts = (
            Mount(str(shown), "/data", "rw"),
            Mount(str(inner), "/data/a/made", "ro"),
        )
        jar.needs(mounts=mounts)
        code = "open('/data/a/made/file').read()"
        assert jar.run(code, mounts=mounts).value == "inner"  # the control arm
        (shown / "a").rename(shown / "aside")
        (shown / "a").symlink_to(f"{host_root}{outside}")
        for source in ("deep", "file"):
            mounts = (mounts[0], Mount(str(inner / source), f"/data/a/{source}", "ro"))
            with contextlib.suppress(BelljarError):
                jar.run(code, mounts=mounts)
            assert list(outside.iterdir()) == []

    @pytest.mark.parametrize("mode", ["ro", "rw"])
    def test_a_hosts_socket_in_a_mount_is_out_of_reach_with_the_network_off(
        self, jar: Jar, host_dir: Path, mode: str
    ) -> None:
        for field in ("network", "filesystem"):
            if jar.held(field).state != "enforced":
                pytest.skip(f"{field} is {jar.held(field).state}")
        mounts = (Mount(str(host_dir), "m", mode),)  # type: ignore[arg-type]
        jar.needs(mounts=mounts)
        with socket.socket(socket.AF_UNIX) as daemon, socket.socket(socket.AF_UNIX) as caller:
            daemon.bind(str(host_dir / "daemon"))
            (host_dir / "daemon").chmod(0o666)
            daemon.listen()
            daemon.setblocking(False)
            caller.connect(str(host_dir / "daemon"))
            daemon.accept()[0].close()  # the control arm: it answers
            result = jar.run(
                """
                import socket
                reached = False
                try:
                    with socket.socket(socket.AF_UNIX) as caller:
                        caller.connect("m/daemon")
                        reached = True
                except (OSError, AttributeError):
                    pass
                reached
                """,
                mounts=mounts,
            )
            assert result.value is False, result
            with pytest.raises(BlockingIOError):
                daemon.accept()

    def test_no_end_of_a_socket_pair_reaches_a_hosts_socket_in_a_mount(
        self, jar: Jar, host_dir: Path
    ) -> None:
        """An end of a datagram pair takes any name as an address."""
        for field in ("network", "filesystem"):
            if jar.held(field).state != "enforced":
                pytest.skip(f"{field} is {jar.held(field).state}")
        mounts = (Mount(str(host_dir), "m", "ro"),)
        jar.needs(mounts=mounts)
        attempts = """
            import socket
            def attempt(act):
                try:
                    act()
                except (OSError, AttributeError):
                    pass
            for kind in ("SOCK_DGRAM", "SOCK_STREAM", "SOCK_SEQPACKET"):
                try:
                    one, other = socket.socketpair(socket.AF_UNIX, getattr(socket, kind))
                except (OSError, AttributeError):
                    continue
                with one, other:
                    for name in ("m/log", "m/daemon"):
                        attempt(lambda: one.sendto(b"by the guest", name))
                        attempt(lambda: one.sendmsg([b"by the guest"], [], 0, name))
                        attempt(lambda: (other.connect(name), other.send(b"by the guest")))
            """
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
            socket.socket(socket.AF_UNIX) as daemon,
        ):
            for made, name in ((log, "log"), (daemon, "daemon")):
                made.bind(str(host_dir / name))
                (host_dir / name).chmod(0o666)
                made.setblocking(False)
            daemon.listen()
            with contextlib.chdir(host_dir.parent):
                exec(textwrap.dedent(attempts).replace("m/", f"{host_dir.name}/"), {})
            assert log.recv(100) == b"by the guest"  # the control arm
            while select.select([log], [], [], 0)[0]:
                log.recv(100)
            result = jar.run(attempts, mounts=mounts)
            assert result.success, result
            assert not select.select([log, daemon], [], [], 0)[0]

    def needs_reports(self, jar: Jar, wanted: dict[str, Any]) -> None:
        """Skip where the backend does not claim to enforce this filesystem."""
        try:
            held = jar.plan("1", **wanted).enforcement["filesystem"]
        except PolicyUnenforceable as refusal:
            pytest.skip(str(refusal))
        if held.state != "enforced":
            pytest.skip(f"filesystem is {held.state}: {held.by}")

"""chmod on the landlock backend: real for what a program may write, refused elsewhere."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

from belljar.backends.landlock import LandlockBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.linux import probe
from belljar.types import Mount, Request, Result

_FOUND = LandlockBackend().probe()
pytestmark = [
    pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason),
    pytest.mark.skipif(probe.facts().landlock_abi < 6, reason="runs here have no children"),
]
ATTEMPT = """
import ctypes, errno, os, subprocess, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def mode(path):
    return os.stat(path).st_mode & 0o7777
def script(path):
    with open(path, "w") as file:
        file.write("#!/bin/sh\\necho ran")
def runs(path):
    return subprocess.run([path], capture_output=True, text=True).stdout
"""


class Jar:
    def __init__(self, **options: Any) -> None:
        self.engine = Engine(Settings(), backends={"landlock": LandlockBackend(**options)})

    def run(self, code: str, mounts: tuple[Mount, ...] = (), **wishes: Any) -> Result:
        asked = Request(code=ATTEMPT + code, mounts=mounts)
        return self.engine.run(asked, wishes={"modules": "any", **wishes})

    def value(self, code: str, *mounts: Mount, **wishes: Any) -> Any:
        result = self.run(code, mounts, **wishes)
        assert result.success, (result.error, result.stderr)
        return result.value


@pytest.fixture(scope="module")
def jar() -> Iterator[Jar]:
    made = Jar()
    yield made
    made.engine.close()


@pytest.fixture
def open_jar() -> Iterator[Jar]:
    """The control arm: no filter, so that chmod is the kernel's own."""
    made = Jar(disable=frozenset({"seccomp"}))
    yield made
    made.engine.close()


@pytest.fixture
def given(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host's with a file that only its owner reads."""
    directory = tmp_path / "given"
    directory.mkdir()
    (directory / "canary").write_text("canary")
    (directory / "canary").chmod(0o600)
    yield directory


@pytest.mark.parametrize(
    "change",
    [
        "os.chmod('tool', 0o755)",
        "os.chmod(os.path.abspath('tool'), 0o755)",
        "os.chmod('tool', 0o755, dir_fd=os.open('.', os.O_RDONLY))",
        "fd = os.open('tool', os.O_RDONLY)\nos.fchmod(fd, 0o755)\nos.close(fd)",
        "os.symlink('tool', 'link')\nos.chmod('link', 0o755)",
        "os.mkdir('d')\nos.chdir('d')\nos.chmod('../tool', 0o755)\nos.chdir('..')",
        "subprocess.run(['chmod', '755', 'tool'], check=True)",
        "fd = os.open('tool', os.O_RDONLY)\nos.chmod(f'/proc/self/fd/{fd}', 0o755)\nos.close(fd)",
        "t = threading.Thread(target=os.chmod, args=('tool', 0o755))\nt.start()\nt.join()",
    ],
)
def test_a_script_made_executable_runs(jar: Jar, change: str) -> None:
    before = "script('tool')\nbefore = attempt(lambda: runs('./tool'))\n"
    assert jar.value(f"{before}{change}\n(before, mode('tool'), runs('./tool'))") == (
        "EACCES",
        0o755,
        "ran\n",
    )


def test_in_the_temporary_directory_and_in_a_writable_mount_too(jar: Jar, given: Path) -> None:
    code = f"""
found = []
for path in (os.environ["TMPDIR"] + "/tool", {str(given)!r} + "/tool"):
    script(path)
    os.chmod(path, 0o700)
    found.append(runs(path))
os.unlink({str(given)!r} + "/tool")
found
"""
    assert jar.value(code, Mount(str(given), str(given), "rw")) == ["ran\n", "ran\n"]


ROADS = {
    "path": "os.chmod(canary, 0o644)",
    "relative": "os.chmod(os.path.relpath(canary), 0o644)",
    "link": "os.symlink(canary, 'link'); os.chmod('link', 0o644)",
    "descriptor": "os.fchmod(os.open(canary, os.O_RDONLY), 0o644)",
    "descriptor_path": "os.chmod(f'/proc/self/fd/{os.open(canary, os.O_RDONLY)}', 0o644)",
    "directory": "os.chmod('canary', 0o644, dir_fd=os.open(given, os.O_RDONLY))",
    "child": "subprocess.run(['chmod', '644', canary])",
    "cwd": "os.chdir(given); os.chmod('canary', 0o644)",
    "hard_link": "os.link(canary, 'mine'); os.chmod('mine', 0o644)",
    "renamed": "os.rename(canary, 'mine'); os.chmod('mine', 0o644)",
}


@pytest.mark.parametrize("road", ROADS)
def test_the_mode_of_a_readable_file_of_the_host_s_stays(jar: Jar, given: Path, road: str) -> None:
    code = f"given = {str(given)!r}\ncanary = given + '/canary'\ndef go():\n    {ROADS[road]}\n"
    told = jar.value(f"{code}attempt(go)", Mount(str(given), str(given), "ro"))
    assert stat.S_IMODE((given / "canary").stat().st_mode) == 0o600
    assert told in ("EPERM", "EXDEV", "EACCES", "ENOENT") or road == "child", told


def test_without_the_filter_the_same_changes_it(open_jar: Jar, given: Path) -> None:
    code = f"os.chmod({str(given / 'canary')!r}, 0o644)"
    assert open_jar.run(code, (Mount(str(given), str(given), "ro"),)).success
    assert stat.S_IMODE((given / "canary").stat().st_mode) == 0o644


# One thread exchanges what the other one's calls mean, in memory and in the file system.
RACE = """
canary = {canary!r}
text = ctypes.create_string_buffer(4096)
open("mine", "w").close()
os.mkdir("a"); os.mkdir("b")
open("a/canary", "w").close()
os.symlink(os.path.dirname(canary), "b/link")
os.symlink(os.path.abspath("a"), "b/other")
end = time.monotonic() + {seconds}
def exchange():
    while time.monotonic() < end:
        text.value = canary.encode()
        os.rename("b/link", "b/way")
        text.value = b"mine"
        os.rename("b/way", "b/link")
        os.rename("b/other", "b/way")
        os.rename("b/way", "b/other")
thread = threading.Thread(target=exchange)
thread.start()
calls = 0
while time.monotonic() < end:
    libc.chmod(text, 0o644)
    libc.chmod(b"b/way/canary", 0o644)
    calls += 2
thread.join()
calls > 100
"""


def test_what_a_call_means_cannot_be_exchanged_after_the_check(jar: Jar, given: Path) -> None:
    code = RACE.format(canary=str(given / "canary"), seconds=2)
    assert jar.value(code, Mount(str(given), str(given), "ro"), cpus=2) is True
    assert stat.S_IMODE((given / "canary").stat().st_mode) == 0o600


def test_a_call_fails_as_the_kernel_s_own_would(jar: Jar, open_jar: Jar) -> None:
    code = """
def told(*arguments):
    ctypes.set_errno(0)
    libc.chmod(*arguments)
    return errno.errorcode.get(ctypes.get_errno())
open("mine", "w").close()
os.symlink("loop", "loop")
[
    attempt(lambda: os.chmod("missing", 0o700)),
    attempt(lambda: os.chmod("", 0o700)),
    attempt(lambda: os.chmod("mine/below", 0o700)),
    attempt(lambda: os.chmod("loop", 0o700)),
    attempt(lambda: os.chmod("x" * 300, 0o700)),
    attempt(lambda: os.chmod("y/" * 2500, 0o700)),
    attempt(lambda: os.fchmod(200, 0o700)),
    told(ctypes.c_void_p(1), 0o700),
    told(ctypes.c_void_p(2**64 - 1), 0o700),
]
"""
    assert jar.value(code) == open_jar.value(code)


def test_no_file_is_set_id(jar: Jar) -> None:
    code = "script('a')\n[attempt(lambda: os.chmod('a', m)) for m in (0o4755, 0o2755)], mode('a')"
    assert jar.value(code) == (["EPERM", "EPERM"], 0o600)


def test_directories_stay_open_to_what_counts_them(jar: Jar) -> None:
    code = "os.mkdir('d')\nos.chmod('d', 0)\nos.chmod('.', 0)\nmode('d'), mode('.') & 0o700"
    assert jar.value(code) == (0o700, 0o700)


def test_other_processes_cannot_be_asked_about(jar: Jar) -> None:
    """The supervisor could follow what Landlock closes to the guest."""
    others = f"/proc/{os.getpid()}/cwd"
    code = f"""
os.symlink({others!r}, "link")
[attempt(lambda: os.chmod(path, 0o700)) for path in (
    {others!r}, {others!r} + "/{os.listdir()[0]}", {others!r} + "/missing", "link/missing",
)]
"""
    told = jar.value(code)
    assert len(set(told)) == 1 and told[0] != "done", told


def test_a_program_has_no_descriptor_that_answers_its_calls(jar: Jar) -> None:
    look = """
import os
found = []
for fd in range(256):
    try:
        found.append((fd, os.readlink(f"/proc/self/fd/{fd}")))
    except OSError:
        pass
print([fd for fd, what in found if fd > 3 or "seccomp" in what])
"""
    code = f"""
import sys
look = {look!r}
exec(look)
print(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout)
"""
    assert jar.run(code).stdout.split() == ["[]", "[]"]


@pytest.mark.slow
def test_a_flood_of_calls_keeps_no_run_from_its_end(jar: Jar) -> None:
    code = """
open("mine", "w").close()
for _ in range(8):
    if os.fork() == 0:
        while True:
            libc.chmod(b"mine", 0o700)
time.sleep(60)
"""
    began = time.monotonic()
    result = jar.run(code, timeout=1)
    assert result.status == "timeout"
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_where_another_filter_has_the_only_listener_calls_do_nothing(given: Path) -> None:
    code = (
        "import os; open('a', 'w').close(); os.chmod('a', 0o711);"
        f" os.chmod({str(given / 'canary')!r}, 0o644); os.stat('a').st_mode & 0o777"
    )
    program = f"""
from belljar.linux import seccomp, syscalls
syscalls.no_new_privileges()
everything = seccomp._op(seccomp._RETURN, seccomp._ALLOW)
listener = seccomp.install_listener(everything)
import belljar
mounts = [belljar.Mount({str(given)!r}, {str(given)!r}, "ro")]
print(belljar.run({code!r}, backend="landlock", mounts=mounts, fallback=False).value)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == str(0o600), done.stderr
    assert stat.S_IMODE((given / "canary").stat().st_mode) == 0o600

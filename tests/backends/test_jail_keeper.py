"""The keeper of a jail's memory: it lets a run end sooner, and nobody hides behind it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.api import Runner
from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.linux import probe, slot
from belljar.testing.hostile.snapshot import descendants

pytestmark = [
    pytest.mark.skipif(not JailBackend().probe().available, reason=JailBackend().probe().reason),
    pytest.mark.skipif(probe.facts().cgroup is None, reason="no control groups: no keeper"),
]

LIST = "import os; sorted(int(name) for name in os.listdir('/proc') if name.isdigit())"
# The keeper waits in the C library's `pause`. Whoever stops and continues it has that call begin
# again, in memory that is the program's to change: here into a loop.
TAKE_OVER = """
import ctypes, mmap, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
nothing, stay = {"x86_64": (b"\\x90", b"\\xeb\\xfe"),
                 "aarch64": (b"\\x1f\\x20\\x03\\xd5", b"\\0\\0\\0\\x14")}[os.uname().machine]
wait = ctypes.cast(libc.pause, ctypes.c_void_p).value
loop = nothing * (96 // len(nothing)) + stay
page = wait & ~(mmap.PAGESIZE - 1)
if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), 7):
    raise OSError(ctypes.get_errno(), "mprotect")
ctypes.memmove(wait, loop, len(loop))
os.kill(3, signal.SIGSTOP)
os.kill(3, signal.SIGCONT)
def ran():
    with open("/proc/3/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[11])
until = time.monotonic() + 20
while ran() < 3 and time.monotonic() < until: time.sleep(0.01)
print("it runs" if ran() >= 3 else "it sleeps")
"""

# A signal for the keeper whenever somebody reads in the work directory, as the host does; and what
# it would do, if it ran, is to count in an output file.
TRAP = """
import ctypes, fcntl, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
with open("canary", "wb") as file: file.write(bytes(8))
place = mmap.mmap(os.open("canary", os.O_RDWR), 8)
at = ctypes.addressof(ctypes.c_char.from_buffer(place)).to_bytes(8, "little")
count = b"\\x90" * 96 + b"\\x49\\xbc" + at + b"\\x49\\xff\\x04\\x24\\xeb\\xfa"
wait = ctypes.cast(libc.pause, ctypes.c_void_p).value
page = wait & ~(mmap.PAGESIZE - 1)
if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), 7):
    raise OSError(ctypes.get_errno(), "mprotect")
ctypes.memmove(wait, count, len(count))
for number in SIGNALS:
    here = os.open(".", os.O_RDONLY)
    fcntl.fcntl(here, fcntl.F_SETOWN, 3)
    fcntl.fcntl(here, fcntl.F_SETSIG, number)
    fcntl.fcntl(here, fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT)
"""
SPRING = """
import os, time
os.pread(os.open("canary", os.O_RDONLY), 8, 0)
until = time.monotonic() + 20
while place[:] == bytes(8) and time.monotonic() < until: time.sleep(0.01)
"""


def _runner(**options: object) -> Runner:
    backend = JailBackend(**options)  # type: ignore[arg-type]
    return Runner(engine=Engine(Settings(), backends={"jail": backend}), backend="jail")


@pytest.fixture
def runner() -> Iterator[Runner]:
    with _runner() as made:
        yield made


def test_a_program_that_waits_for_all_its_children_is_not_told_of_it(runner: Runner) -> None:
    assert runner.execute(LIST).value == [2, 3]
    for call in ("os.wait()", "os.waitpid(-1, os.WNOHANG)", "os.waitid(os.P_ALL, 0, os.WEXITED)"):
        result = runner.execute(f"import os\n{call}")
        assert result.error is not None and result.error.type == "ChildProcessError"
    code = "import os\nif os.fork() == 0: os._exit(7)\nos.waitstatus_to_exitcode(os.wait()[1])"
    assert runner.execute(code).value == 7


def test_where_the_watchdog_counts_there_is_none() -> None:
    """It would count the guest's memory twice, or miss what a program leaves in the keeper's."""
    with _runner(facts=replace(probe.facts(), cgroup=None)) as runner:
        assert runner.execute(LIST).value == [2]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_a_program_may_do_to_it_what_it_likes(runner: Runner, number: str) -> None:
    code = f"import os, signal\nos.kill(3, signal.{number})\n'done'"
    for _ in range(2):
        result = runner.execute(code)
        assert (result.status, result.value) == ("success", "done")
        assert result.kill is not None and result.kill.survivors == 0
    assert runner.execute("1").value == 1


def test_one_that_was_made_to_run_cannot_run_when_there_is_a_result() -> None:
    with _runner(parked=0) as runner:
        for _ in range(8):
            result = runner.execute(TAKE_OVER)
            running = [pid for pid in descendants() if _is_keeper(pid) and not _is_exiting(pid)]
            assert (result.stdout, result.stderr) == ("it runs\n", "")
            assert running == []


def _is_keeper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(line for line in file if line.startswith("NSpid:")).split()[3:] == ["3"]
    except (OSError, StopIteration):
        return False


def _is_exiting(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return bool(int(file.read().rsplit(")", 1)[1].split()[6]) & 0x4)
    except OSError:
        return True


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the trap is machine code")
def test_one_that_our_own_reading_would_wake_does_not_wake() -> None:
    trap = f"SIGNALS = {int(signal.SIGCONT)}, {int(signal.SIGSTOP)}\n{TRAP}"
    with _runner(parked=0) as runner:
        sprung = runner.execute(trap + SPRING, outputs=["canary"])  # the control arm
        assert sprung.stderr == "" and sprung.files["canary"].data != bytes(8)
        for _ in range(8):
            result = runner.execute(trap, outputs=["canary"])
            assert result.stderr == "" and result.files["canary"].data == bytes(8)


def test_a_program_that_becomes_another_leaves_nothing_with_it(runner: Runner) -> None:
    """Neither the end of a pipe that somebody waits for, nor memory that counts."""
    code = """
import os, sys
reader, writer = os.pipe()
if os.fork() == 0:
    os.close(writer)
    os._exit(len(os.read(reader, 1)))
taken = bytearray(b"x") * (150 << 20)
after = "import os; x = bytearray(b'x') * (150 << 20); print(os.wait()[1], flush=True); os._exit(1)"
os.execv(sys.executable, [sys.executable, "-c", after])
"""
    result = runner.execute(code, memory="256M", timeout=60)
    assert (result.status, result.stdout, result.exit_code) == ("error", "0\n", 1)
    assert runner.execute("import os; os.execve in os.supports_fd").value is True


def test_a_process_that_has_the_keeper_s_old_number_is_not_taken_for_it(tmp_path: Path) -> None:
    """The slot's question, with lists of our own: the anchor is 1, its only child the keeper."""
    for name, text in (("ours", b"1 "), ("below", b"")):
        (tmp_path / name).write_bytes(text)
    alone = {}
    for ended in (False, True):
        with subprocess.Popen(["sleep", "60"]) as keeper, ExitStack() as opened:
            run = slot._Run()
            run.anchor, run.guest = 1, os.getpid()
            run.keeper = b"%d " % keeper.pid
            run.keeper_fds = (
                os.pidfd_open(keeper.pid),
                *(
                    os.open(f"/proc/{keeper.pid}/{name}", os.O_RDONLY)
                    for name in ("stat", f"task/{keeper.pid}/children", "schedstat")
                ),
            )
            run.children = tuple(
                os.open(tmp_path / name, os.O_RDONLY) for name in ("ours", "below")
            )
            for fd in (*run.keeper_fds, *run.children):
                opened.callback(os.close, fd)
            if ended:
                keeper.kill()
                keeper.wait()
            (tmp_path / "below").write_bytes(run.keeper)
            alone[ended] = slot._is_alone(run, looks=10**6)
            (tmp_path / "below").write_bytes(b"")
            assert slot._is_alone(run)
    assert alone == {False: True, True: False}


def test_the_next_run_is_not_charged_with_what_the_last_one_had(runner: Runner) -> None:
    for _ in range(5):
        assert (runner.execute("x = bytearray(b'x') * (150 << 20)").usage.peak_memory or 0) > 150e6
        assert (runner.execute("1").usage.peak_memory or 0) < 60e6

"""The keeper of a jail's memory: it lets a run end sooner, and nobody hides behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

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


def test_one_that_was_made_to_run_is_gone_before_the_result() -> None:
    with _runner(parked=0) as runner:
        assert runner.execute("import ctypes, mmap, os, signal, time").success
        time.sleep(1)  # what is left then is kept for the next
        idle = set(descendants())
        for _ in range(5):
            result = runner.execute(TAKE_OVER)
            left = set(descendants()) - idle
            assert (result.stdout, result.stderr) == ("it runs\n", "")
            assert left == set()


def test_sleep_without_a_break_is_told_from_sleep() -> None:
    """What decides whether the keeper may be there at the end."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sleeper:
        status = os.open(f"/proc/{sleeper.pid}/status", os.O_RDONLY)
        try:
            deadline = time.monotonic() + 20
            while (before := slot.asleep(status)) is None or before != _a_moment_later(status):
                assert time.monotonic() < deadline
            assert slot.asleep(status) == before
            sleeper.send_signal(signal.SIGSTOP)
            while slot.asleep(status) is not None:
                assert time.monotonic() < deadline
            sleeper.send_signal(signal.SIGCONT)
            while (after := slot.asleep(status)) is None:
                assert time.monotonic() < deadline
            assert after != before
        finally:
            os.close(status)
            sleeper.kill()


def _a_moment_later(status: int) -> tuple[bytes, ...] | None:
    time.sleep(0.2)
    return slot.asleep(status)


def test_the_next_run_is_not_charged_with_what_the_last_one_had(runner: Runner) -> None:
    for _ in range(5):
        assert (runner.execute("x = bytearray(b'x') * (150 << 20)").usage.peak_memory or 0) > 150e6
        assert (runner.execute("1").usage.peak_memory or 0) < 60e6

"""The keeper of a jail's memory: it lets a run end sooner, and nobody hides behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.api import Runner, build_request
from belljar.backends import shelves
from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.files import collect
from belljar.linux import probe, slot
from belljar.linux.keeper import Keeper
from belljar.testing.hostile.snapshot import descendants
from belljar.types import Result

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

# The kernel's own last act for a thread is to mark the locks that it held: here words in files, in
# pages that are not there yet, and the canary's is the last of many.
ROBUST = """
import ctypes, os, signal, struct, sys, time
if not os.path.exists("/proc/3"):
    print("no keeper")
    sys.exit()
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = *[ctypes.c_size_t] * 2, *[ctypes.c_int] * 3, ctypes.c_long
COUNT, PAGE, FIXED = 2040, 4096, 0x10
def place(at, size, name=None):
    if name:
        found = libc.mmap(at, size, 3, 1 | FIXED, os.open(name, os.O_RDWR), 0)
    else:
        found = libc.mmap(at, size, 3, 0x22, -1, 0)
    if found == 2**64 - 1: raise OSError(ctypes.get_errno(), "mmap")
    return found
with open("canary", "wb") as file: file.write(struct.pack("<I", 3).ljust(PAGE, b"\\0"))
with open("holes", "wb") as file: file.truncate(COUNT * PAGE)
locks = place(0, (2 * COUNT + 8) * PAGE)
head, flag = locks + (COUNT + 1) * PAGE, locks + (COUNT + 2) * PAGE
words = locks + (COUNT + 4) * PAGE
place(words, COUNT * PAGE, "holes")
place(words + (COUNT - 1) * PAGE, PAGE, "canary")
for number in range(COUNT):
    following = locks + (number + 1) * PAGE if number < COUNT - 1 else head
    ctypes.memmove(locks + number * PAGE, struct.pack("<Q", following), 8)
ctypes.memmove(head, struct.pack("<QqQ", locks, words - locks, 0), 24)
code = b"".join((
    b"\\x90" * 96,
    b"\\x48\\xbf", struct.pack("<Q", head), b"\\xbe\\x18\\0\\0\\0",  # rdi = head, esi = 24
    b"\\xb8\\x11\\x01\\0\\0\\x0f\\x05",  # set_robust_list
    b"\\x48\\xbb", struct.pack("<Q", flag), b"\\xc6\\x03\\x01",  # *flag = 1
    b"\\xb8\\x22\\0\\0\\0\\x0f\\x05\\xeb\\xf7",  # pause, for ever
))
wait = ctypes.cast(libc.pause, ctypes.c_void_p).value
if libc.mprotect(ctypes.c_void_p(wait & -PAGE), ctypes.c_size_t(2 * PAGE), 7):
    raise OSError(ctypes.get_errno(), "mprotect")
ctypes.memmove(wait, code, len(code))
os.kill(3, signal.SIGSTOP)
os.kill(3, signal.SIGCONT)
until = time.monotonic() + 20
while ctypes.string_at(flag, 1) == b"\\0" and time.monotonic() < until: time.sleep(0.001)
"""
OWNER_DIED = (0x4000_0000).to_bytes(4, "little")

# The keeper has the file open as well, and takes its time to end with so much memory.
LEASE = """
import fcntl, os
with open("out", "wb") as file: file.write(b"hello")
file = os.open("out", os.O_RDWR)
memory = bytearray(b"x") * (60 << 20)
try:
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print("leased")
except PermissionError:
    print("refused")
"""


def _runner(**options: object) -> Runner:
    backend = JailBackend(**options)  # type: ignore[arg-type]
    return Runner(engine=Engine(Settings(), backends={"jail": backend}), backend="jail")


def _kept(runner: Runner, code: str, **options: Any) -> Result:
    """The result of a run that had a keeper: one whose jail was parked, which the first is not."""
    backend = runner.engine.backend("jail")
    assert isinstance(backend, JailBackend)
    spec = runner.engine.plan(build_request(code=code), backend="jail").spec
    nothing = f"raise SystemExit\n{code}"  # of the same kind, as it imports the same
    runner.execute(nothing)
    runner.execute(nothing)
    assert backend._fleet is not None
    shelf = backend._fleet._zygotes[spec.outer]._shelves[spec.shape]
    deadline = time.monotonic() + 30
    # Those that were made in a hurry, at the beginning, may still be among the parked.
    for program in (nothing, nothing, nothing, code):
        while shelf.at_hand is None:
            assert time.monotonic() < deadline
            runner.execute(nothing)
            time.sleep(0.02)  # in which the next is made, and after the next run it is at hand
        result = runner.execute(program, **options)
    return result


@pytest.fixture
def runner() -> Iterator[Runner]:
    with _runner() as made:
        yield made


def test_a_program_that_waits_for_all_its_children_is_not_told_of_it(runner: Runner) -> None:
    assert runner.execute(LIST).value == [2]  # the control arm: it was made for a caller
    assert _kept(runner, LIST).value == [2, 3]
    for call in ("os.wait()", "os.waitpid(-1, os.WNOHANG)", "os.waitid(os.P_ALL, 0, os.WEXITED)"):
        result = _kept(runner, f"import os\n{call}")
        assert result.error is not None and result.error.type == "ChildProcessError"
    code = "import os\nif os.fork() == 0: os._exit(7)\nos.waitstatus_to_exitcode(os.wait()[1])"
    assert _kept(runner, code).value == 7


def test_where_the_watchdog_counts_there_is_none() -> None:
    """It would count the guest's memory twice, or miss what a program leaves in the keeper's."""
    with _runner(facts=replace(probe.facts(), cgroup=None)) as runner:
        assert runner.execute(LIST).value == [2]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_a_program_may_do_to_it_what_it_likes(runner: Runner, number: str) -> None:
    code = f"import os, signal\nos.kill(3, signal.{number})\n'done'"
    for _ in range(2):
        result = _kept(runner, code)
        assert (result.status, result.value) == ("success", "done")
        assert result.kill is not None and result.kill.survivors == 0
    assert runner.execute("1").value == 1


def test_one_that_was_made_to_run_cannot_run_when_there_is_a_result(runner: Runner) -> None:
    for _ in range(8):
        result = _kept(runner, TAKE_OVER)
        running = [pid for pid in descendants() if _is_keeper(pid) and _runs(pid)]
        assert (result.stdout, result.stderr) == ("it runs\n", "")
        assert running == []


def _is_keeper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(line for line in file if line.startswith("NSpid:")).split()[3:] == ["3"]
    except (OSError, StopIteration):
        return False


def _runs(pid: int) -> bool:
    """Whether it has, which those of parked jails have not, and is not exiting."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return int(fields[11]) > 0 and not int(fields[6]) & 0x4


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the trap is machine code")
def test_one_that_our_own_reading_would_wake_does_not_wake() -> None:
    trap = f"SIGNALS = {int(signal.SIGCONT)}, {int(signal.SIGSTOP)}\n{TRAP}"
    # Its trigger, F_NOTIFY, is refused by the filter: without one our reading must not wake it.
    with _runner(disable=frozenset({"seccomp"})) as runner:
        sprung = _kept(runner, trap + SPRING, outputs=["canary"])  # the control arm
        assert sprung.stderr == "" and sprung.files["canary"].data != bytes(8)
        for _ in range(8):
            result = _kept(runner, trap, outputs=["canary"])
            assert result.stderr == "" and result.files["canary"].data == bytes(8)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="it is made to do so by machine code")
def test_what_the_kernel_writes_at_its_end_is_written_before_there_is_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directories: list[int] = []

    def keep(work: int, *arguments: Any) -> Any:
        directories.append(os.dup(work))
        return changed_files(work, *arguments)

    changed_files = collect.changed_files
    monkeypatch.setattr(collect, "changed_files", keep)
    with _runner() as runner, ExitStack() as kept:
        for _ in range(4):
            result = _kept(runner, ROBUST, outputs=["canary"])
            assert (result.stderr, result.settled) == ("", True)
            kept.callback(os.close, directories[-1])
            canary = os.open("canary", os.O_RDONLY, dir_fd=directories[-1])
            kept.callback(os.close, canary)
            now = os.pread(canary, 4, 0)
            time.sleep(0.2)  # in which the kernel would have come to it
            assert os.pread(canary, 4, 0) == OWNER_DIED  # it was done
            assert [now, (result.files["canary"].data or b"")[:4]] == [OWNER_DIED] * 2


def test_a_lease_does_not_keep_us_from_reading_a_file() -> None:
    for disable, told in ((frozenset({"seccomp"}), "leased\n"), (frozenset[str](), "refused\n")):
        with _runner(disable=disable) as runner:
            for _ in range(4):
                result = _kept(runner, LEASE, outputs=["out"])
                assert (result.stdout, result.stderr) == (told, "")
                if not disable:  # the other is the control arm, where it may be read or not
                    assert result.files["out"].data == b"hello" and not result.warnings


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
            fds: list[int] = []
            run.keeper = Keeper(keeper.pid, fds)
            run.children = tuple(
                os.open(tmp_path / name, os.O_RDONLY) for name in ("ours", "below")
            )
            for fd in (*fds, *run.children):
                opened.callback(os.close, fd)
            if ended:
                keeper.kill()
                keeper.wait()
            assert run.keeper.end(looks=10**6)
            (tmp_path / "below").write_bytes(run.keeper.name)
            alone[ended] = slot._is_alone(run, run.keeper)
            (tmp_path / "below").write_bytes(b"")
            assert slot._is_alone(run, run.keeper)
    assert alone == {False: True, True: False}


def test_the_next_run_is_not_charged_with_what_the_last_one_had(runner: Runner) -> None:
    for _ in range(5):
        assert (runner.execute("x = bytearray(b'x') * (150 << 20)").usage.peak_memory or 0) > 150e6
        assert (runner.execute("1").usage.peak_memory or 0) < 60e6


def test_the_next_run_is_not_charged_with_the_last_one_s_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one place, taken again the moment it is free.

    Whether the host or the slot lets go of the files last is luck; here it is never the host, who
    would do it in time.
    """

    def let_go(jail: shelves.Jail, seconds: float) -> bool:
        os.dup2(nowhere, jail.work)
        return is_empty(jail, seconds)

    is_empty = shelves.Jail.is_empty
    monkeypatch.setattr(shelves.Jail, "is_empty", let_go)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    code = "file = open('big', 'wb')\nfor _ in range(150): file.write(bytes(1 << 20))"
    with _runner(parked=0) as runner, ExitStack() as opened:
        opened.callback(os.close, nowhere)
        for _ in range(5):
            used = runner.execute(code, memory="512M", disk="200M").usage.peak_memory
            _wait_for_its_place(runner)
            after = runner.execute("1", memory="512M", disk="200M").usage.peak_memory
            _wait_for_its_place(runner)
            assert (used or 0) > 150e6
            assert (after or 0) < 60e6


def _wait_for_its_place(runner: Runner) -> None:
    backend = runner.engine.backend("jail")
    assert isinstance(backend, JailBackend) and backend._fleet is not None
    deadline = time.monotonic() + 20
    while any(zygote.busy for zygote in backend._fleet._zygotes.values()):
        assert time.monotonic() < deadline
        time.sleep(0)  # not more: the others are to have their turn, and then we at once

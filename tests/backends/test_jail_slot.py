"""The slot of a jail: nobody gets past it, whatever he is a child of, and it survives its runs."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from belljar.api import Runner
from belljar.backends.jail import JailBackend
from belljar.backends.shelves import Slot
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed
from belljar.linux import probe
from belljar.testing.hostile.snapshot import descendants

pytestmark = pytest.mark.skipif(
    not JailBackend().probe().available, reason=JailBackend().probe().reason
)

# With CLONE_PARENT a process makes a brother of itself: a child of the slot, who is ours.
BROTHER = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
def brother():
    pid = libc.syscall(number, 0x8000 | 17, 0, 0, 0, 0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid
"""


def _runner(**options: object) -> Runner:
    backend = JailBackend(**options)  # type: ignore[arg-type]
    return Runner(engine=Engine(Settings(), backends={"jail": backend}), backend="jail")


@pytest.fixture
def runner() -> Iterator[Runner]:
    with _runner() as made:
        yield made


def _until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_first_word_that_another_thread_has_taken_is_no_death() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slot = Slot(1, None, ours)
    with theirs:
        pidfd = os.pidfd_open(os.getpid())
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
        theirs.sendmsg([b"here"], passed)
        os.close(pidfd)
        woken = {ours.fileno(): int(select.POLLIN)}
        assert not slot.is_dead(woken)  # this thread takes it
        assert not slot.is_dead(woken)  # and this one was woken for the same
        assert slot.is_dead({ours.fileno(): int(select.POLLHUP)})
    slot.close()


def test_a_guest_cannot_make_a_brother(runner: Runner) -> None:
    result = runner.execute(BROTHER + "brother()")
    assert result.error is not None and result.error.type == "PermissionError"


def test_a_brother_is_ended_where_it_can_be_made() -> None:
    """The control arm, and the second wall: without the filter he is made, but does not stay."""
    code = BROTHER + "if brother() == 0:\n  os.closerange(0, 4); time.sleep(600)\nprint('made')"
    with _runner(disable=frozenset({"seccomp"})) as runner:
        for _ in range(3):
            result = runner.execute(code)
            assert (result.status, result.stdout) == ("success", "made\n")
            assert result.settled and result.kill is not None and result.kill.survivors == 0
        assert runner.execute(code + "\ntime.sleep(600)", timeout=1).status == "timeout"
        assert runner.execute("1").value == 1  # the slot is not stuck


def test_a_brother_is_counted_by_the_watchdog() -> None:
    code = BROTHER + (
        "if brother() == 0:\n  x = bytearray(b'x') * (250 << 20); time.sleep(5)\ntime.sleep(20)"
    )
    facts = replace(probe.facts(), cgroup=None)
    with _runner(disable=frozenset({"seccomp"}), facts=facts) as runner:
        assert runner.execute(code, memory="64M", timeout=30).status == "oom"


def test_signals_do_not_keep_the_watchdog_from_looking() -> None:
    """Every stop and continue of the guest wakes the slot, who is its parent."""
    code = (
        "import os, signal, time\n"
        "for k in range(12):\n"
        "  if os.fork() == 0:\n"
        "    while True:\n"
        "      os.kill(2, signal.SIGSTOP); time.sleep(0.003)\n"
        "      os.kill(2, signal.SIGCONT); time.sleep(0.003)\n"
        "if os.fork() == 0:\n"
        "  x = bytearray(b'x') * (150 << 20)\n"
        "  time.sleep(20)\n"
        "while True: time.sleep(5)"
    )
    with _runner(facts=replace(probe.facts(), cgroup=None)) as runner:
        assert runner.execute(code, memory="64M", timeout=30).status == "oom"


HOARD = """
import mmap, os
size = 256 << 20
pages = mmap.mmap({file}, size)
for at in range(0, size, 1 << 20):
    pages[at:at + (1 << 20)] = b"x" * (1 << 20)
    pages.madvise(mmap.MADV_DONTNEED, at, 1 << 20)
"""


@pytest.mark.parametrize("file", ["-1", "os.open('/dev/zero', os.O_RDWR)"])
def test_memory_that_no_process_is_seen_to_have_is_not_to_be_had_uncounted(file: str) -> None:
    code = HOARD.format(file=file)
    facts = replace(probe.facts(), cgroup=None)
    with _runner(facts=facts) as runner:
        result = runner.execute(code, memory="64M")
        assert result.error is not None and result.error.type == "PermissionError"
    open_to_it = frozenset({"seccomp", "landlock"})
    with _runner(facts=facts, disable=open_to_it) as runner:
        assert runner.execute(code, memory="64M").success  # the watchdog does not see it


def test_a_callback_that_raises_ends_the_run(runner: Runner) -> None:
    def refuse(text: str) -> None:
        raise ValueError(text)

    code = "import time\nprint('up', flush=True)\ntime.sleep(600)"
    with pytest.raises(ValueError, match="up"):
        runner.execute(code, on_stdout=refuse, timeout=300)
    backend = runner.engine.backend("jail")
    assert isinstance(backend, JailBackend) and backend._fleet is not None
    (zygote,) = backend._fleet._zygotes.values()
    assert zygote.busy == 0
    # Of the slots that made a jail none is waiting for a guest that nobody waits for.
    _until(lambda: all(not shelf.busy for shelf in zygote._shelves.values()))
    assert runner.execute("1").value == 1


def test_an_interrupt_ends_the_run() -> None:
    with _runner(parked=0) as runner:
        runner.execute("import time")  # the zygote that serves it is there
        before = set(descendants())
        timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            runner.execute("import time\ntime.sleep(600)", timeout=300)
        timer.join()
        _until(lambda: not set(descendants()) - before)


@pytest.mark.parametrize("settle", ["now", "later"])
def test_a_run_whose_slot_was_killed_does_not_live_on(settle: str) -> None:
    """The guest says its last word and stays; its slot is killed, as an administrator might."""
    stay = "os._exit = lambda code, sleep=time.sleep: sleep(600)"
    code = f"import os, time\n{stay}\nprint(1, flush=True)"
    started = threading.Event()
    failed: list[BackendFailed] = []
    with _runner(parked=0) as runner:

        def work() -> None:
            try:
                runner.execute(
                    code, settle=settle, timeout=300, on_stdout=lambda text: started.set()
                )
            except BackendFailed as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert started.wait(60)
        _until(lambda: len(_at_depth(3)) == 2)  # anchor and guest
        if settle == "later":
            thread.join()
        (slot,) = {_parent(pid) for pid in _at_depth(3)}.difference(_at_depth(3))
        os.kill(slot, signal.SIGKILL)
        thread.join()
        assert bool(failed) == (settle == "now")
        _until(lambda: not _at_depth(3))
        assert runner.execute("1").value == 1


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rsplit(b")", 1)[1].split()[1])


def _at_depth(depth: int) -> list[int]:
    """Those that are so many pid namespaces deep: the host's, the zygote's, a run's."""
    found = []
    for pid in sorted(descendants()):
        try:
            with open(f"/proc/{pid}/status") as file:
                names = next(line for line in file if line.startswith("NSpid:")).split()
        except (OSError, StopIteration):  # it ended while we looked
            continue
        if len(names) - 1 == depth:
            found.append(pid)
    return found


def test_a_file_that_cannot_be_written_is_told_without_our_own_traceback(runner: Runner) -> None:
    result = runner.execute("1", files={"a" * 300: b"x"})
    assert (result.status, result.exit_code) == ("error", 120)
    assert "File name too long" in result.stderr
    assert "Traceback" not in result.stderr
    assert runner.execute("1").value == 1

"""The jail in hosts that are not simple: many threads, forks, no more threads, ignored signals."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from belljar.api import Runner
from belljar.backends import jail, settle
from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BelljarError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not JailBackend().probe().available, reason="no jail here"
)


def _runner(backend: JailBackend) -> Runner:
    engine = Engine(Settings(backend="jail"), backends={"jail": backend})
    return Runner(engine=engine, modules="any")


def _children() -> set[int]:
    me = os.getpid()
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{me}/task"):
        with open(f"/proc/{me}/task/{thread}/children") as file:
            found |= set(map(int, file.read().split()))
    return found


def _soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _busy(backend: JailBackend) -> int:
    fleet = backend._fleet
    assert fleet is not None
    return sum(zygote.busy for zygote in fleet._zygotes.values())


def test_a_host_that_can_have_no_more_threads_gets_its_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _children()
    backend = JailBackend()
    runner = _runner(backend)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(settle.threading.Thread, "start", refuse)
    for how in ("now", "later", "now"):
        assert runner.execute("6 * 7", settle=how).value == 42
    assert _busy(backend) == 0  # their places were given back
    runner.close()
    assert _children() <= before


def test_places_are_given_back_by_a_thread_where_there_is_one() -> None:
    """The control arm: otherwise it is somebody else who does it."""
    backend = JailBackend()
    with _runner(backend) as runner:
        assert runner.execute("6 * 7").value == 42
        assert any(thread.name == "belljar-settle" for thread in threading.enumerate())
        assert _soon(lambda: _busy(backend) == 0)


def test_callers_who_come_first_together_share_one_fleet() -> None:
    before = _children()
    values: list[object] = []
    for _ in range(5):
        backend = JailBackend()
        runner = _runner(backend)
        start = threading.Barrier(3)

        def call(runner: Runner = runner, start: threading.Barrier = start) -> None:
            start.wait()
            values.append(runner.execute("6 * 7").value)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert values[-3:] == [42] * 3
        runner.close()
        assert _children() <= before  # nobody has a zygote that close does not know


def test_closing_while_callers_run_ends_everything() -> None:
    before = _children()
    for _ in range(8):
        backend = JailBackend()
        runner = _runner(backend)
        wrong: list[BaseException] = []
        begun = threading.Event()

        def call(
            runner: Runner = runner,
            wrong: list[BaseException] = wrong,
            begun: threading.Event = begun,
        ) -> None:
            try:
                while True:
                    runner.execute("1")
                    begun.set()
            except BelljarError:
                begun.set()  # closed, or the run was killed: one of ours
            except BaseException as error:  # noqa: BLE001 - any other is what is looked for
                wrong.append(error)
                begun.set()

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        runner.close()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        assert _children() <= before


FORKED = """
import os, sys, time
from belljar.api import Runner
from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
backend = JailBackend()
runner = Runner(engine=Engine(Settings(backend="jail"), backends={"jail": backend}))
assert runner.execute("6 * 7").value == 42
pid = os.fork()
if pid == 0:
    for _ in range(3):
        assert runner.execute("6 * 7").value == 42
    zygotes = list(backend._fleet._zygotes.values())
    deadline = time.monotonic() + 30
    while any(zygote.busy for zygote in zygotes) and time.monotonic() < deadline:
        time.sleep(0.01)
    busy = [zygote.busy for zygote in zygotes]
    runner.close()
    os._exit(sum(busy))
status = os.waitpid(pid, 0)[1]
assert runner.execute("6 * 7").value == 42  # the parent's are the parent's still
runner.close()
print("left", os.waitstatus_to_exitcode(status))
"""

IGNORED = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
import belljar
print(belljar.run("6 * 7", backend="jail").value)
"""

CROWDED = """
import os, resource, time
from belljar.api import Runner
from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed
backend = JailBackend()
engine = Engine(Settings(backend="jail"), backends={"jail": backend})
def rested():
    # Nothing of a run is left to be done by another thread, and the next jail is at hand.
    deadline = time.monotonic() + 60
    while zygote.busy or shelf.at_hand is None or shelf.available < 2:
        assert time.monotonic() < deadline, (zygote.busy, shelf.at_hand, shelf.available)
        zygote.fetch(shelf)
        time.sleep(0.01)
def held():
    # Open descriptors, but for those by which slots are known, which come when they come.
    slots = [slot for slot in shelf.slots.values() if slot._process >= 0]
    return len(os.listdir("/proc/self/fd")) - len(slots)
with Runner(engine=engine) as runner:
    for _ in range(4):
        assert runner.execute("6 * 7").value == 42
    (zygote,) = backend._fleet._zygotes.values()
    (shelf,) = zygote._shelves.values()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for missing in (1, 3, 7):
        rested()
        shelf.take_from_hand().drop()  # so that the next one's are to come
        shelf.available -= 1
        before = held()
        # The limit is of the number of a descriptor: leave as many free ones below it.
        listed = os.listdir("/proc/self/fd")
        open_now = {int(fd) for fd in listed if os.path.exists("/proc/self/fd/" + fd)}
        limit = [fd for fd in range(1000) if fd not in open_now][7 - missing]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most[1]))
        try:
            zygote.take(shelf.shape)
        except BackendFailed as error:
            assert "ulimit -n" in str(error), error
        else:
            raise AssertionError("taken")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        assert held() <= before, (held(), before)
        for _ in range(3):
            assert runner.execute("6 * 7").value == 42
    deadline = time.monotonic() + 30
    while zygote.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    print(zygote.busy, "busy")
"""


def test_a_backend_dropped_in_the_midst_of_giving_a_place_back_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the collector does it, which comes whenever it likes: also while locks are held."""
    before = _children()
    backend = JailBackend()
    runner = _runner(backend)
    assert runner.execute("6 * 7").value == 42
    fleet, settler = backend._fleet, backend._settler
    assert fleet is not None
    assert _soon(lambda: _busy(backend) == 0)
    (zygote,) = fleet._zygotes.values()
    closed = threading.Event()

    def replenish(shelf: object, most: int) -> None:
        with zygote._lock:
            jail._close(settler, fleet)
        closed.set()

    monkeypatch.setattr(zygote, "replenish", replenish)
    assert runner.execute("6 * 7").value == 42
    assert closed.wait(30)
    assert _soon(lambda: _children() <= before)
    runner.close()


@pytest.mark.parametrize(
    ("program", "said"),
    [(FORKED, "left 0"), (IGNORED, "42"), (CROWDED, "0 busy")],
    ids=["forked", "ignored", "crowded"],
)
def test_odd_hosts(program: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.strip(), done.returncode) == (said, 0), done.stderr


def test_a_fork_of_the_host_does_not_hold_the_next_jail_s_streams() -> None:
    """Its input would not end before the fork does."""
    backend = JailBackend()
    code = "import sys\nsys.stdin.read()"
    with _runner(backend) as runner:

        def is_at_hand() -> bool:
            assert runner.execute(code).value == ""
            time.sleep(0.02)  # it is fetched after the result, if it is there by then
            fleet = backend._fleet
            shelves = [
                shelf
                for zygote in (fleet._zygotes.values() if fleet is not None else ())
                for shelf in zygote._shelves.values()
            ]
            return any(shelf.at_hand is not None for shelf in shelves)

        assert _soon(is_at_hand)
        assert _soon(lambda: _busy(backend) == 0)
        stay, go = os.pipe()
        fork = os.fork()
        if fork == 0:
            os.close(go)
            os.read(stay, 1)
            os._exit(0)
        try:
            os.close(stay)
            result = runner.execute(code, timeout=10)
        finally:
            os.close(go)
            os.waitpid(fork, 0)
        assert (result.status, result.value) == ("success", "")

"""`settle="later"`: an answer on the program's own word, and the kernel's word behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from belljar.api import Runner, create_runner
from belljar.backends.jail import JailBackend
from belljar.errors import RequestError
from belljar.types import Result

pytestmark = pytest.mark.skipif(
    not JailBackend().probe().available, reason=JailBackend().probe().reason
)


@pytest.fixture
def runner() -> Iterator[Runner]:
    with create_runner(backend="jail") as made:
        yield made


def _fleet_is_idle(runner: Runner) -> bool:
    backend = runner.engine.backend("jail")
    assert isinstance(backend, JailBackend)
    fleet = backend._fleet
    assert fleet is not None
    return all(zygote.busy == 0 for zygote in fleet._zygotes.values())


def _wait_for(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _unsettled(runner: Runner, code: str) -> Result:
    """The kernel may be faster than we are: then the answer is settled after all."""
    for _ in range(200):
        result = runner.execute(code, settle="later")
        if not result.settled:
            return result
    raise AssertionError("every answer was settled")


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("print('out'); 6 * 7", "success", 0),
        ("raise SystemExit(3)", "error", 3),
        ("raise SystemExit('why')", "error", 1),
        ("1 / 0", "error", 1),
    ],
)
def test_the_answer_is_the_same_and_is_marked(
    runner: Runner, code: str, status: str, exit_code: int
) -> None:
    now, later = runner.execute(code), _unsettled(runner, code)
    assert (now.settled, now.status, now.exit_code) == (True, status, exit_code)
    assert (later.settled, later.status, later.exit_code) == (False, status, exit_code)
    assert (later.stdout, later.stderr, later.value) == (now.stdout, now.stderr, now.value)
    assert later.error == now.error
    # What only the kernel could tell is not made up.
    assert now.kill is not None and now.usage.cpu is not None
    assert later.kill is None and later.usage.cpu is None
    assert later.to_dict()["settled"] is False


def test_files_come_back(runner: Runner) -> None:
    code = "open('a.txt', 'w').write('x')"
    result = runner.execute(code, settle="later", outputs=["*.txt"])
    assert result.files["a.txt"].data == b"x"


def test_a_program_that_goes_on_after_its_last_word_keeps_its_place_and_is_ended(
    runner: Runner,
) -> None:
    """It closes all that we listen to and says that it has ended; then it does not end."""
    code = (
        "import os, struct, time\n"
        "os.write(3, bytes([0x87]) + struct.pack('>I', 1) + b'0')\n"
        "os.closerange(0, 4)\n"
        "time.sleep(600)"
    )
    result = runner.execute(code, settle="later", timeout=3)
    assert (result.settled, result.success) == (False, True)  # a lie about itself, and marked
    assert not _fleet_is_idle(runner)
    _wait_for(lambda: _fleet_is_idle(runner))
    assert runner.execute("1").value == 1


def test_without_a_last_word_the_kernel_is_waited_for(runner: Runner) -> None:
    result = runner.execute("import os; os._exit(5)", settle="later")
    assert (result.settled, result.exit_code) == (True, 5)
    result = runner.execute("import time; time.sleep(60)", settle="later", timeout=1)
    assert (result.settled, result.status) == (True, "timeout")


def test_orphans_are_gone_when_the_place_is_free(runner: Runner) -> None:
    code = "import os, time\nif os.fork() == 0:\n  os.closerange(0, 4); time.sleep(600)"
    result = runner.execute(code, settle="later")
    assert result.success
    _wait_for(lambda: _fleet_is_idle(runner))


def test_many_at_a_time_leave_nothing(runner: Runner) -> None:
    def work() -> None:
        for number in range(10):
            assert runner.execute(f"{number}", settle="later").value == number

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _wait_for(lambda: _fleet_is_idle(runner))


def test_closing_the_runner_waits_for_what_is_not_settled() -> None:
    with create_runner(backend="jail") as runner:
        for _ in range(3):
            runner.execute("1", settle="later")
    assert "belljar-settle" not in {thread.name for thread in threading.enumerate()}


def test_nothing_else_can_be_asked_for(runner: Runner) -> None:
    with pytest.raises(RequestError, match="settle"):
        runner.execute("1", settle="never")
    assert runner.execute("1", settle="now").settled

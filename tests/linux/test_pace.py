"""A tree that is ahead of its rate is stopped, and goes on when the rate has caught up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from belljar.linux.pace import Pace

SPIN = "while True: pass"


@pytest.fixture
def spinner() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", SPIN]) as child:
        yield child.pid
        child.kill()


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def until(condition: Callable[[], bool], step: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        step()
        time.sleep(0.005)


def test_a_process_ahead_of_its_rate_is_stopped_and_continued(spinner: int) -> None:
    pace = Pace(0.2, [spinner])
    for _ in range(3):
        until(lambda: state(spinner) == "T", lambda: pace.hold(lambda: [spinner]))
        until(lambda: state(spinner) != "T", lambda: pace.hold(lambda: [spinner]))


def test_the_rate_is_held(spinner: int) -> None:
    began, pace = time.monotonic(), Pace(0.1, [spinner])
    while time.monotonic() < began + 1:
        assert pace.hold(lambda: [spinner])
        time.sleep(0.02)
    assert pace.total <= 0.1 * (time.monotonic() - began) + 0.1
    free, began = Pace(100, [spinner]), time.monotonic()  # the control arm: it would use more
    os.kill(spinner, signal.SIGCONT)
    until(lambda: free.total > 0.3, lambda: free.hold(lambda: [spinner]))


def test_what_does_not_stay_stopped_is_reported(spinner: int) -> None:
    pace, done, held = Pace(0.01, [spinner]), threading.Event(), [True]

    def accomplice() -> None:
        while not done.wait(0.0005):
            os.kill(spinner, signal.SIGCONT)

    thread = threading.Thread(target=accomplice)
    thread.start()
    try:
        until(lambda: not held[-1], lambda: held.append(pace.hold(lambda: [spinner])))
    finally:
        done.set()
        thread.join()


def test_a_process_that_the_program_stopped_stays_stopped(spinner: int) -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN]) as other:
        os.kill(other.pid, signal.SIGSTOP)
        until(lambda: state(other.pid) == "T", lambda: None)
        pace = Pace(0.2, [spinner, other.pid])
        both = [spinner, other.pid]
        until(lambda: state(spinner) == "T", lambda: pace.hold(lambda: both))
        until(lambda: state(spinner) != "T", lambda: pace.hold(lambda: both))
        assert state(other.pid) == "T"
        other.kill()

"""Interpreters that are started ahead: used once, or ended without a trace."""

from __future__ import annotations

import os
import sys

import pytest

from belljar.backends import blank
from belljar.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's")


def test_what_was_started_ahead_is_taken_once_and_only_for_a_worker() -> None:
    blank.start_ahead()
    other = blank.take(worker=False)
    first, second = blank.take(worker=True), blank.take(worker=True)
    try:
        assert len({other.process.pid, first.process.pid, second.process.pid}) == 3
        assert not blank._ahead
    finally:
        for each in (other, first, second):
            each.end()
    assert first.process.returncode == 0


def test_what_nobody_needed_ends() -> None:
    blank.start_ahead()
    (ahead,) = blank._ahead
    blank.end_unused()
    assert ahead.process.returncode == 0
    assert not blank._ahead


def test_a_fork_of_the_host_does_not_take_what_is_its_parents() -> None:
    blank.start_ahead()
    (ahead,) = blank._ahead
    child = os.fork()
    if child == 0:
        taken = blank.take(worker=True)
        taken.end()
        os._exit(taken.process.pid == ahead.process.pid)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        blank.end_unused()


@pytest.mark.parametrize("words", [["run", "--nonsense"], ["run", "no-such-file.py"]])
def test_a_command_that_runs_nothing_leaves_no_interpreter(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[blank.Blank] = []
    monkeypatch.setattr(blank, "_ahead", started)
    start, seen = blank.start_ahead, []

    def noting_start() -> None:
        start()
        seen.extend(started)

    monkeypatch.setattr(blank, "start_ahead", noting_start)
    assert main(words) == 125
    assert [each.process.returncode for each in seen] == [0]

"""The outside assertions can fail: a scripted backend does each wrong, and is caught."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.policy import Isolation
from belljar.testing import FakeBackend, hostile
from belljar.testing.hostile import Outcome, Suite, Verdict, snapshot
from belljar.testing.hostile.checks.values import strict_json_problem
from belljar.types import File, GuestError, Request, Result, Status

SUITE = hostile.load()
FINE = Result(status=Status.SUCCESS, exit_code=0, stdout="R:HELD\n")


def examine(
    assertion: str,
    misdeed: Callable[[Request], Result],
    *,
    case_id: str = "rf-001-symlink-to-canary",
) -> Outcome:
    """One case that asserts one thing, on a backend that does `misdeed`."""

    def respond(request: Request) -> Result:
        if request.code == "print(2+2)":
            return Result(status=Status.SUCCESS, exit_code=0, stdout="4\n")
        return misdeed(request)

    case = SUITE[case_id]
    case = replace(case, expect=replace(case.expect, asserts=(assertion,), status_in=()))
    suite = Suite(
        cases=(case,), limits=SUITE.limits, placeholders=SUITE.placeholders, meta=SUITE.meta
    )
    backend = FakeBackend(respond, isolation=Isolation.PROCESS)
    with hostile.World(suite) as world, hostile.EngineSubject(backend) as subject:
        (outcome,) = hostile.Runner(suite, subject, world, attempts=1, patience=0.2).run(
            suite.cases
        )
    return outcome


def target_of(request: Request, kind: str) -> Path:
    """The canary or the marker that the program was given."""
    assert request.code is not None
    words = [word for word in request.code.split("'") if kind in word and word.startswith("/")]
    return Path(words[0])


def returning(**changes: Any) -> Callable[[Request], Result]:
    return lambda request: replace(FINE, **changes)


@pytest.mark.parametrize(
    "assertion",
    [
        "no_breach", "canary_intact", "canary_content_absent", "secret_absent", "marker_absent",
        "no_leftovers", "next_run_ok", "symlinks_not_followed", "result_typed", "json_strict_ok",
        "output_le", "status_truthful", "no_listener_hit", "sentinel_got_no_signal",
        "collector_survives", "cleanup_complete", "no_core_files", "collected_size_le",
    ],
)  # fmt: skip
def test_a_good_run_passes(assertion: str) -> None:
    outcome = examine(assertion, lambda request: FINE)
    assert (outcome.verdict, outcome.reasons) == (Verdict.HELD, ())


def write_canary(request: Request) -> Result:
    target_of(request, "canary").write_text("overwritten")
    return FINE


def link_canary(request: Request) -> Result:
    canary = target_of(request, "canary")
    os.link(canary, tempfile.gettempdir() + "/second-name")
    return FINE


def chmod_canary(request: Request) -> Result:
    target_of(request, "canary").chmod(0o600)
    return FINE


def steal_canary(request: Request) -> Result:
    text = target_of(request, "canary").read_text()
    return replace(FINE, files={"out/x": File(path="out/x", size=40, data=text.encode())})


def steal_secret(request: Request) -> Result:
    return replace(FINE, stderr=os.environ["HOST_SECRET"])


def leave_directory(request: Request) -> Result:
    tempfile.mkdtemp(prefix="belljar-")
    return FINE


def leave_descriptor(request: Request) -> Result:
    kept.append(os.open("/dev/null", os.O_RDONLY))
    return FINE


def leave_process(request: Request) -> Result:
    """A grandchild whose parent is gone: nobody's child but the subreaper's."""
    code = "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return FINE


def leave_comet(request: Request) -> Result:
    """It forks and ends all the time, and is never there when one looks."""
    code = (
        "import os, time\nend = time.time() + 1.5\n"
        "while time.time() < end:\n if os.fork(): os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    return FINE


def leave_socket(request: Request) -> Result:
    import socket

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(tempfile.gettempdir() + "/belljar.sock")
    kept.append(listener.detach())
    return FINE


kept: list[int] = []


@pytest.fixture(autouse=True)
def close_what_was_kept() -> Any:
    yield
    while kept:
        os.close(kept.pop())


FLOOD = "x" * (2 << 20)


@pytest.mark.parametrize(
    ("assertion", "misdeed", "said"),
    [
        ("canary_intact", write_canary, "content"),
        ("canary_intact", link_canary, "links"),
        ("canary_intact", chmod_canary, "mode"),
        ("canary_content_absent", steal_canary, "canary"),
        ("secret_absent", steal_secret, "secret"),
        ("no_leftovers", leave_directory, "temporary file"),
        ("cleanup_complete", leave_directory, "temporary file"),
        ("no_leftovers", leave_descriptor, "descriptor"),
        ("no_leftovers", leave_process, "process"),
        ("no_leftovers", leave_comet, "process"),
        ("no_leftovers", leave_socket, "unix socket"),
        ("no_breach", returning(stderr="R:BREACH told on stderr"), "R:BREACH"),
        ("output_le", returning(stdout="R:HELD\n" + FLOOD), "stdout"),
        ("output_le", returning(stderr=FLOOD), "stderr"),
        ("output_le", returning(value=FLOOD), "value"),
        ("output_le", returning(error=GuestError(type="E", message=FLOOD)), "error"),
        ("truncated_flag", returning(truncated=False), "truncated"),
        ("status_truthful", returning(exit_code=7), "exit code 7"),
        ("status_truthful", returning(signal=9), "signal 9"),
        ("status_truthful", returning(status=Status.ERROR, exit_code=0), "exit code 0"),
        ("exit_code_is:7", returning(exit_code=0), "not 7"),
        ("count_le:4096", returning(stdout="R:HELD 4097\n"), "4097"),
        ("count_le:4096", returning(stdout="R:HELD many\n"), "did not say"),
        ("no_core_files", returning(files={"core": File(path="core", size=1)}), "core"),
        (
            "symlinks_not_followed",
            returning(files={"out/p": File(path="out/p", size=1, data=b"root:x:0")}),
            "out/p",
        ),
        (
            "collected_size_le",
            returning(files={"out/p": File(path="out/p", size=1, data=bytes(65 << 20))}),
            "collected",
        ),
        ("forged_only_in_stdout", returning(value="FORGED"), "forged"),
        ("no_host_paths_in_output", returning(stderr=f"File {Path.home()}/x.py"), "path"),
        ("env_allowlist_only", returning(stdout="R:HELD\n['AWS_KEY', 'PATH']\n"), "AWS_KEY"),
    ],
)
def test_a_misdeed_is_caught(
    assertion: str, misdeed: Callable[[Request], Result], said: str
) -> None:
    outcome = examine(assertion, misdeed)
    assert outcome.verdict is Verdict.BREACHED, outcome
    assert said in outcome.reasons[0]


def test_a_signal_to_the_sentinel_is_caught() -> None:
    import signal

    case_id = "pr-002-kill-minus-one"

    def signal_it(request: Request) -> Result:
        for pid in snapshot.descendants():
            os.kill(pid, signal.SIGWINCH)
        # The sentinel writes down what it gets; wait until it has.
        for log in Path(tempfile.gettempdir()).parent.glob("selftest-sentinel-*"):
            while not log.read_text():
                os.sched_yield()
        return FINE

    outcome = examine("sentinel_got_no_signal", signal_it, case_id=case_id)
    assert outcome.verdict is Verdict.BREACHED
    assert "signal 28" in outcome.reasons[0]


@pytest.mark.parametrize(
    ("before", "meanwhile", "caught"),
    [("1", "1", False), ("1", "-1", True), ("-1", "-1", False)],
    ids=["has its watch", "lost it", "never had one: there are none"],
)
def test_a_neighbour_that_loses_its_file_watch_is_noticed(
    before: str, meanwhile: str, caught: bool
) -> None:
    def respond(request: Request) -> Result:
        assert request.code is not None
        if "inotify_add_watch" not in request.code:
            return FINE
        got = meanwhile if request.code.startswith("import time") else before
        return replace(FINE, stdout=f"N:WATCH {got}\n")

    outcome = examine("neighbour_can_inotify", respond)
    assert outcome.verdict is (Verdict.BREACHED if caught else Verdict.HELD), outcome.reasons


def test_a_connection_to_a_listener_is_caught() -> None:
    import socket

    def connect(request: Request) -> Result:
        assert request.code is not None
        port = int(request.code.rsplit("con(h,", 1)[1].split(")")[0])
        with socket.create_connection(("127.0.0.1", port)) as reached:
            reached.recv(1)  # returns when the listener has counted us and hung up
        return FINE

    outcome = examine("no_listener_hit", connect, case_id="ne-002-host-loopback")
    assert outcome.saw is Verdict.BREACHED
    assert "tcp listener" in outcome.reasons[0]


@pytest.mark.parametrize(
    "wire", [b'{"a": NaN}', b'{"a": Infinity}', b'"\\ud800"', b'"\xff"', b'{"a": 1', b'"\x01"']
)
def test_json_that_a_strict_reader_would_refuse_is_refused(wire: bytes) -> None:
    assert strict_json_problem(wire)


def test_plain_json_is_accepted() -> None:
    assert (
        strict_json_problem('{"a": [1, 2.5, null, true, "\u00e9\\ud83d\\ude00"]}'.encode()) is None
    )

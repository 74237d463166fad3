"""The table from what the kernel saw to the one word for it."""

from __future__ import annotations

import errno
import itertools
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.backends.verdict import Ending, Verdict, judge
from belljar.report import Hint, Report
from belljar.types import Status


def exited(code: int) -> int:
    return code << 8


def report(*, errno: int | None = None, memory: bool = False) -> Report:
    made = Report()
    made.hint = Hint(errno=errno, memory=memory)
    return made


def verdict(wait_status: int, hint: Report | None = None, **ending: object) -> Verdict:
    return judge(Ending(wait_status=wait_status, **ending), hint or report())  # type: ignore[arg-type]


KILLED = int(signal.SIGKILL)

# what the kernel saw, what the guest says, what we did about it -> status, code, signal, limit
TABLE = {
    "a clean end": (exited(0), {}, {}, "success", 0, None, None),
    "an exit code": (exited(3), {}, {}, "error", 3, None, None),
    "the last exit code": (exited(255), {}, {}, "error", 255, None, None),
    "a segmentation fault": (signal.SIGSEGV, {}, {}, "error", None, signal.SIGSEGV, None),
    "with a core": (signal.SIGABRT | 0x80, {}, {}, "error", None, signal.SIGABRT, None),
    "a kill that was not ours": (KILLED, {}, {}, "killed", None, KILLED, None),
    "too much processor time": (signal.SIGXCPU, {}, {}, "timeout", None, signal.SIGXCPU, None),
    "too large a file": (
        signal.SIGXFSZ, {}, {"disk_full": True}, "limit", None, signal.SIGXFSZ, "disk",
    ),
    # The kernel's counters explain a failure.
    "an oom kill": (KILLED, {}, {"oom_kills": 1}, "oom", None, KILLED, None),
    "an oom kill of a child, then failure": (exited(1), {}, {"oom_kills": 2}, "oom", 1, None, None),
    "refused forks": (exited(1), {}, {"forks_refused": 9}, "limit", 1, None, "pids"),
    "no refused forks": (exited(1), {}, {"forks_refused": 0}, "error", 1, None, None),
    "memory before forks": (
        exited(1), {}, {"oom_kills": 1, "forks_refused": 1}, "oom", 1, None, None,
    ),
    # What the guest reports names a limit only if the host confirms it.
    "a MemoryError": (exited(1), {"memory": True}, {}, "oom", 1, None, None),
    "no more descriptors": (exited(1), {"errno": errno.EMFILE}, {}, "error", 1, None, None),
    "the system's descriptors": (exited(1), {"errno": errno.ENFILE}, {}, "error", 1, None, None),
    "no space": (exited(1), {"errno": errno.ENOSPC}, {"disk_full": True}, "limit", 1, None, "disk"),
    "a large file": (
        exited(1), {"errno": errno.EFBIG}, {"disk_full": True}, "limit", 1, None, "disk",
    ),
    "a quota": (exited(1), {"errno": errno.EDQUOT}, {"disk_full": True}, "limit", 1, None, "disk"),
    "no space, and there was": (exited(1), {"errno": errno.ENOSPC}, {}, "error", 1, None, None),
    "too large a file on an empty disk": (
        signal.SIGXFSZ, {}, {}, "error", None, signal.SIGXFSZ, None,
    ),
    "a full disk and another error": (
        exited(1), {"errno": errno.EACCES}, {"disk_full": True}, "error", 1, None, None,
    ),
    "EAGAIN where the kernel does not count": (
        exited(1), {"errno": errno.EAGAIN}, {}, "error", 1, None, None,
    ),
    "EAGAIN with as many processes as there may be": (
        exited(1), {"errno": errno.EAGAIN}, {"processes_full": True}, "limit", 1, None, "pids",
    ),
    "EAGAIN where the kernel counted none": (
        exited(1), {"errno": errno.EAGAIN}, {"forks_refused": 0, "processes_full": True},
        "error", 1, None, None,
    ),
    "any other error": (exited(1), {"errno": errno.EACCES}, {}, "error", 1, None, None),
    # What we killed it for comes first, whatever else is true.
    "our timeout": (KILLED, {}, {"reason": "timeout"}, "timeout", None, KILLED, None),
    "our processor limit": (KILLED, {}, {"reason": "cpu"}, "timeout", None, KILLED, None),
    "our cancel": (KILLED, {}, {"reason": "cancelled"}, "killed", None, KILLED, None),
    "our memory watch": (KILLED, {}, {"reason": "oom"}, "oom", None, KILLED, None),
    "our count of processes": (KILLED, {}, {"reason": "pids"}, "limit", None, KILLED, "pids"),
    "our look at the disk": (KILLED, {}, {"reason": "disk"}, "limit", None, KILLED, "disk"),
    "a timeout at the very moment of its end": (
        exited(0), {}, {"reason": "timeout"}, "timeout", None, KILLED, None,
    ),
    "a timeout while it begged for memory": (
        KILLED, {"memory": True}, {"reason": "timeout", "oom_kills": 1},
        "timeout", None, KILLED, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_each_end_has_its_word(name: str) -> None:
    seen, said, did, status, code, number, limit = TABLE[name]
    found = verdict(int(seen), report(**said), **did)  # type: ignore[arg-type]
    assert (found.status.value, found.exit_code, found.signal, found.limit_hit) == (
        status, code, number, limit,
    )  # fmt: skip
    assert bool(found.warnings) == (name in UNCONFIRMED)


# Of these a warning says that nothing but the program tells of the limit.
UNCONFIRMED = {
    "a MemoryError", "no more descriptors", "the system's descriptors", "no space, and there was",
    "too large a file on an empty disk", "EAGAIN where the kernel does not count",
}  # fmt: skip


@pytest.mark.parametrize(
    ("number", "field"),
    [(errno.EMFILE, "open_files"), (errno.ENOSPC, "disk"), (errno.EAGAIN, "processes")],
)
def test_the_warning_names_the_error_and_the_field(number: int, field: str) -> None:
    (warning,) = verdict(exited(1), report(errno=number)).warnings
    assert errno.errorcode[number] in warning
    assert f"`{field}`" in warning


def test_a_program_whose_child_was_killed_for_memory_is_oom_however_it_ends() -> None:
    found = verdict(exited(0), oom_kills=1)
    assert (found.status, found.exit_code) == (Status.OOM, 0)
    assert "want of memory" in found.warnings[0]


SAID = st.builds(
    report,
    errno=st.none() | st.sampled_from(sorted(errno.errorcode)),
    memory=st.booleans(),
)
ENDS = st.integers(0, 255).map(exited) | st.integers(1, 64)


@given(ENDS, SAID)
def test_nothing_that_a_guest_says_makes_a_failure_a_success_or_the_reverse(
    wait_status: int, said: Report
) -> None:
    found = verdict(wait_status, said)
    assert (found.status is Status.SUCCESS) == (wait_status == 0)
    assert found.exit_code == (None if found.signal else os.waitstatus_to_exitcode(wait_status))


@given(ENDS, SAID, st.integers(0, 3), st.none() | st.integers(0, 3))
def test_only_what_we_did_is_a_timeout(
    wait_status: int, said: Report, kills: int, refused: int | None
) -> None:
    found = verdict(wait_status, said, oom_kills=kills, forks_refused=refused)
    assert found.status is not Status.TIMEOUT or found.signal == signal.SIGXCPU


def test_a_limit_is_named_exactly_when_the_status_is_limit() -> None:
    reasons = ("", "timeout", "cpu", "cancelled", "oom", "pids", "disk")
    codes = (None, errno.EMFILE, errno.EAGAIN, errno.ENOSPC, errno.ENOENT)
    for status, reason, number in itertools.product((0, 9, 25, exited(1)), reasons, codes):
        found = verdict(status, report(errno=number), reason=reason)
        assert (found.status is Status.LIMIT) == (found.limit_hit is not None)
        assert (found.exit_code is None) != (found.signal is None)

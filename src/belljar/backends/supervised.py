"""The plumbing of a run that a supervisor process watches: pipes, its start, its end, the sweep."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..errors import BackendFailed
from ..events import Emit
from ..policy import Limits
from ..records import record
from ..report import Report
from ..types import new_id
from . import outcome
from .base import Cancel, Plan
from .supervise import Ended, Watch

if TYPE_CHECKING:
    from ..linux.cgroup import Group, Home

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Appended: what is installed beside us must not stand in front of the standard library.
_LAUNCH = (
    "import sys; sys.path.append({parent!r}); from belljar.linux.{module} import main; main({fd})"
)
_SEND_SECONDS = 30.0  # a supervisor that has not read its message by then is broken
_END_SECONDS = 10.0  # and so is one that has not ended the tree after we hung up


@record
class Streams:
    """Our ends of a guest's standard streams, and its own."""

    stdin: int | None
    stdout: int
    stderr: int
    their_stdin: int
    their_stdout: int
    their_stderr: int


def streams(ours: ExitStack, theirs: ExitStack, data: bytes) -> Streams:
    stdin = None
    if data:
        their_stdin, stdin = _pipe(theirs, ours)
    else:  # no input is an empty file, not a pipe to wait on
        their_stdin = os.open(os.devnull, os.O_RDONLY)
        theirs.callback(os.close, their_stdin)
    stdout, their_stdout = _pipe(ours, theirs)
    stderr, their_stderr = _pipe(ours, theirs)
    return Streams(
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        their_stdin=their_stdin,
        their_stdout=their_stdout,
        their_stderr=their_stderr,
    )


def socket_pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()
    ours.callback(here.close)
    theirs.callback(there.close)
    return here, there


def frame_sockets(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    """A pair whose second end is the guest's: bytes come from there, and nothing else."""
    from ..linux import syscalls

    here, there = socket_pair(ours, theirs)
    syscalls.refuse_descriptors(here)
    return here, there


def _pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    readers.callback(os.close, reader)
    writers.callback(os.close, writer)
    return reader, writer


def start(
    module: str, control: socket.socket, *, passed: tuple[int, ...], stdio: tuple[int, int, int]
) -> subprocess.Popen[bytes]:
    """Start `belljar.linux.MODULE` with its end of the control socket."""
    stdin, stdout, stderr = stdio
    code = _LAUNCH.format(parent=_PACKAGE_PARENT, module=module, fd=control.fileno())
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=(control.fileno(), *passed),
        env={},
        cwd="/",
        start_new_session=True,
    )


def instruct(
    ours: ExitStack, supervisor: subprocess.Popen[bytes], control: socket.socket, message: bytes
) -> None:
    """Hand it its message. If what follows in `ours` fails, it is told to end, and waited for."""
    ours.callback(_wait_for_end, supervisor)
    ours.callback(control.close)  # comes first: it is what the supervisor waits for
    send(control, message)


def send(control: socket.socket, message: bytes) -> None:
    control.settimeout(_SEND_SECONDS)
    control.sendall(len(message).to_bytes(4, "big") + message)
    control.settimeout(None)


def watched(
    plan: Plan,
    control: socket.socket,
    streams: Streams,
    report: Report,
    emit: Emit,
    cancel: Cancel,
    group: Group | None,
) -> dict[str, Any]:
    """What every Watch is made of; from then on it owns our ends."""
    request, limits = plan.request, plan.policy.limits
    return {
        "run": request.id,
        "control": control,
        "stdout": streams.stdout,
        "stderr": streams.stderr,
        "stdin": streams.stdin,
        "data": request.stdin,
        "timeout": limits.timeout,
        "captured": outcome.captures(plan, capped="output_cap" in plan.spec.layers),
        "report": report,
        "emit": emit,
        "cancel": cancel,
        "on_kill": group.release if group is not None else lambda: None,
    }


def until_gone(watch: Watch, supervisor: subprocess.Popen[bytes], group: Group | None) -> Ended:
    """Watch until nobody of the run is left, whatever happens."""
    try:
        return watch.until_gone()
    except BaseException:
        _wait_for_end(supervisor)
        if group is not None:
            group.kill()
        raise
    finally:
        supervisor.wait()


def _wait_for_end(supervisor: subprocess.Popen[bytes]) -> None:
    """After we closed its control socket: it kills the tree, waits for it, and ends.

    Killing it at once would leave that to the kernel, which does it only for a pid namespace.
    """
    try:
        supervisor.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def group(limits: Limits, home: Home | None, *, overhead: int) -> Group | None:
    """A control group for one run; `overhead` is how many of its processes are not the guest's."""
    if home is None:
        return None
    from ..linux.cgroup import Group

    return Group(
        home,
        new_id(),  # not the request's: one request may be run many times at once
        memory=limits.memory,
        processes=limits.processes + overhead,
        cpus=limits.cpus,
    )


def sweep(home: Home | None) -> None:
    """Remove the control groups that processes of ours that crashed left behind."""
    if home is None:
        return
    from ..linux import cgroup

    try:
        cgroup.sweep(home)
    except (OSError, BackendFailed) as error:  # what is left of others stops nobody
        import logging

        logging.getLogger("belljar").warning("a crashed run's control group: %s", error)

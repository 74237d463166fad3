"""The seam between the engine and an isolation technology.

Contract of a backend:
- `probe` says whether this host can run it, and the command that makes it so. It never raises.
- `compile` is pure. It returns a Plan whose `enforcement` names, for every policy field, what holds
  it; or it raises PolicyUnenforceable with the fields that nothing would hold. It starts nothing.
- `run` blocks until the whole process tree of the run is gone and its files are deleted. A guest's
  failure is a Result; the backend's own failure is a BelljarError. It is called from many threads.
- `run` emits Output and Displayed events only, and keeps reading `cancel` until the end.
- Exit status, signal, times and limits in the Result come from the kernel or the engine, never from
  bytes that the guest wrote.
- Files that `outcome.wanted` asks for go into `plan.destination` if there is one. The engine writes
  what a backend left in memory instead.
- One that runs programs in container images has `takes_images = True`; others are never given a
  request that names one.
- One that needs more than `minima.LEAST` of a limit to start has `least`, of the same form.
- `close` ends everything the backend keeps warm. A closed backend refuses to run.

Third parties publish a backend through the entry-point group `belljar.backends` and test it with
`belljar.testing.conformance`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Container, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import PolicyError, PolicyUnenforceable
from ..events import Emit
from ..policy import Isolation, Policy
from ..records import record
from ..types import Enforcement, Request, Result

if TYPE_CHECKING:
    from ..files.destination import Destination

# Every field a backend must account for in its enforcement report.
FIELDS = (
    "timeout", "memory", "cpus", "processes", "disk", "output", "value", "displays", "open_files",
    "network", "filesystem", "mounts",
)  # fmt: skip


@record
class Availability:
    """Whether a backend can run here; if not, why, and the command that changes it."""

    available: bool
    reason: str = ""
    fix: str | None = None
    notes: tuple[str, ...] = ()


@record
class Plan:
    """A policy compiled for one backend: everything `run` needs, and what will hold each field.

    `spec` is the backend's own, made of plain values so that a test can compare it with a snapshot.
    """

    backend: str
    isolation: Isolation
    request: Request
    policy: Policy
    enforcement: Mapping[str, Enforcement]
    spec: Any = None
    warnings: tuple[str, ...] = ()
    image: str = ""  # the one that it runs in, where there are any
    destination: Destination | None = None  # where collected files go, instead of into memory


class Cancel:
    """A switch that any thread may flip to end a run; poll loops watch its descriptor."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._lock = threading.Lock()
        self._open = True
        self._event = threading.Event()

    def fileno(self) -> int:
        return self._reader

    def waker(self) -> int:
        """A descriptor for `signal.set_wakeup_fd`: a signal whose handler calls `set` then ends the
        wait of a poll loop, even if it comes just before the loop begins to wait."""
        os.set_blocking(self._writer, False)  # as a signal's handler needs it
        return self._writer

    def set(self) -> None:
        with self._lock:
            if self._open and not self._event.is_set():
                self._event.set()
                with contextlib.suppress(BlockingIOError):  # full of signals: that wakes as well
                    os.write(self._writer, b"x")

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._event.wait(timeout)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._reader)
                os.close(self._writer)

    def __enter__(self) -> Cancel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@cache
def never() -> Cancel:
    """The switch that nobody flips, for runs that nobody can cancel."""
    return Cancel()


class Backend(Protocol):
    """See the module's docstring for the contract."""

    name: str
    isolation: Isolation

    def probe(self) -> Availability: ...

    def compile(self, policy: Policy, request: Request) -> Plan: ...

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result: ...

    def close(self) -> None: ...


def enforced(by: str) -> Enforcement:
    return Enforcement(state="enforced", by=by)


def best_effort(by: str) -> Enforcement:
    return Enforcement(state="best_effort", by=by)


def absent(why: str) -> Enforcement:
    return Enforcement(state="absent", by=why)


def kept_by_host(active: Container[str]) -> dict[str, Enforcement]:
    """What holds the fields that the host counts itself, whatever the backend."""
    if "output_cap" not in active:
        return dict.fromkeys(("output", "value", "displays"), absent("the cap is off"))
    return {
        "output": enforced("the host keeps head and tail and drops the rest"),
        "value": enforced("the host counts what it decodes, and drops a value past its budget"),
        "displays": enforced("the host counts what it keeps, and drops a display past the budget"),
    }


def refuse_unless_held(
    name: str, isolation: Isolation, policy: Policy, report: Mapping[str, Enforcement]
) -> None:
    """Raise PolicyUnenforceable if `report` is not enough for `policy` on this rung.

    A floor up to `process` accepts `best_effort`; nothing accepts `absent`. The import lint is not
    asked: it never was a boundary.
    """
    floor = policy.min_isolation
    lacking: dict[str, str] = {}
    if not isolation.at_least(floor):
        lacking["min_isolation"] = f"needs {floor.value}, {name} is {isolation.value}"
    strict = not Isolation.PROCESS.at_least(floor)
    for field_name, held in report.items():
        if field_name == "modules":
            continue
        if held.state == "absent" or (strict and held.state == "best_effort"):
            lacking[field_name] = f"{held.state}: {held.by}"
    if lacking:
        why = "; ".join(f"{field_name} ({reason})" for field_name, reason in lacking.items())
        raise PolicyUnenforceable(
            f"backend {name!r} cannot enforce this policy: {why}",
            fields=tuple(lacking),
            lacking=lacking,
            fix="choose a stronger backend (`belljar backends`), or relax the fields named",
        )


def refuse_hidden(policy: Policy, request: Request) -> None:
    """Raise PolicyError if a path is to be shown that the policy hides, or that is inside one.

    Hiding wins on every backend: some mount what is shown after they have covered what is hidden.
    """
    files = policy.filesystem
    if not files.hidden:
        return
    shown = [("filesystem.read_only", path) for path in files.read_only]
    shown += [("filesystem.read_write", path) for path in files.read_write]
    shown += [("mounts.src", mount.src) for mount in request.mounts]
    for field_name, path in shown:
        if (cover := covered_by(path, files.hidden)) is not None:
            raise PolicyError(
                field_name,
                f"{path!r} is inside {cover!r}, which filesystem.hidden hides",
                fix="leave one of the two out",
            )


def covered_by(path: str, hidden: tuple[str, ...]) -> str | None:
    """The hidden path that `path` is, or is inside of, by its name or by where its links lead."""
    names = {os.path.normpath(path), os.path.realpath(path)}
    for cover in hidden:
        for top in {os.path.normpath(cover), os.path.realpath(cover)}:
            if any(name == top or name.startswith(top.rstrip("/") + "/") for name in names):
                return cover
    return None

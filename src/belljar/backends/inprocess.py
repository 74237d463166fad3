"""Backend `inprocess`: the program runs in our own interpreter, on a thread. It is no boundary.

For development, with code you trust: it needs nothing and starts at once. It is the rung `none`;
every level but `permissive` refuses it.

Theory of operation
- `run` waits for its turn: streams, working directory, environment and `sys` exist once in a
  process, so one program has them at a time (`inprocess_world.py`), whoever runs it.
- The program runs on one new thread and on those that this one starts (`inprocess_run.py`). The
  thread that called `run` is the watchdog: every hundredth of a second it passes output on, and
  reads the clock, the cancel switch, memory, descriptors and files (`inprocess_watch.py`).
- To end a program, an exception is thrown into its threads, again and again until they are gone
  (`inprocess_guard.py`). It arrives between two steps of Python. A thread that stays in native code
  or swallows the exception for longer than the grace period is abandoned: it goes on, guarded,
  until it comes back to Python, and the result says so.
- One audit hook for the process refuses to the program's threads: processes, the network, writing
  outside the work directory. It is installed at the first run and does nothing to other threads.
- The guest worker's `Interpreter` runs the program, so values, errors and displays are those of
  every backend.
- Stop, wait, put the process back, collect, delete: in this order, whatever happened.

What it does not protect against: anything that does not want to be held. The program can read all
memory of this process and all files of its user, change any module, hold the interpreter's lock in
native code for ever (`7 ** 10 ** 8`), or crash the process. What it leaves in imported modules, and
its `atexit` handlers, stay.

Facts relied on: `pytest tests/backends/test_inprocess.py` checks each of them.
"""

from __future__ import annotations

import sys
import threading
import time

from .. import languages
from ..errors import BackendUnavailable, LanguageMissing, LanguageUnknown, RequestError
from ..events import Emit
from ..policy import Isolation, Policy
from ..records import record
from ..types import Enforcement, KillProof, Request, Result, Status
from . import outcome
from .base import (
    Availability,
    Cancel,
    Plan,
    absent,
    best_effort,
    enforced,
    kept_by_host,
    refuse_unless_held,
)
from .inprocess_watch import open_descriptors, resident_memory

NO_BOUNDARY = (
    "backend inprocess is no boundary: the program runs in Belljar's own process and can do"
    " whatever that can; it is for development only"
)
LAYERS = ("audit", "watchdog", "output_cap")
_TICK = 0.05

# Streams, directory, environment: there is one of each for all backends of this kind together.
_turn = threading.Lock()


@record
class Spec:
    """What a run needs beyond the policy, as plain values."""

    layers: tuple[str, ...]
    network: bool
    writable: tuple[str, ...]
    hidden: tuple[str, ...]


class InProcessBackend:
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers."""

    name = "inprocess"
    isolation = Isolation.NONE
    layers = LAYERS

    def __init__(self, *, disable: frozenset[str] = frozenset()) -> None:
        unknown = disable - set(self.layers)
        if unknown:
            raise ValueError(f"unknown layers {sorted(unknown)}; known: {', '.join(self.layers)}")
        self.disabled = disable
        self._closed = False

    def probe(self) -> Availability:
        return Availability(available=True, notes=self._notices())

    def _notices(self) -> tuple[str, ...]:
        return NO_BOUNDARY, *outcome.notices(self.disabled)

    def compile(self, policy: Policy, request: Request) -> Plan:
        _check_program(request)
        layers = tuple(layer for layer in self.layers if layer not in self.disabled)
        report = _enforcement(policy, request, layers)
        # With a layer switched off on purpose the report says what is missing, and the run goes on.
        refuse_unless_held(self.name, self.isolation, policy, {} if self.disabled else report)
        return Plan(
            backend=self.name,
            isolation=self.isolation,
            request=request,
            policy=policy,
            enforcement=report,
            spec=Spec(
                layers=layers,
                network=policy.network.mode == "any",
                writable=policy.filesystem.read_write,
                hidden=policy.filesystem.hidden,
            ),
            warnings=self._notices(),
        )

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendUnavailable("this backend is closed")
        from .inprocess_run import Run

        began = time.monotonic()
        run = Run(plan, emit, cancel)
        while not _turn.acquire(timeout=_TICK):
            if cancel.is_set():
                return _never_started(plan)
        try:
            return _never_started(plan) if cancel.is_set() else run.result(began)
        finally:
            _turn.release()

    def close(self) -> None:
        self._closed = True


def _never_started(plan: Plan) -> Result:
    return Result(
        id=plan.request.id,
        status=Status.KILLED,
        enforcement=plan.enforcement,
        kill=KillProof(reason="cancelled", survivors=0, seconds=0.0),
        backend=plan.backend,
        isolation=plan.isolation.value,
        warnings=plan.warnings,
    )


def _check_program(request: Request) -> None:
    """Only a Python program, and only for the interpreter we are."""
    language = None if request.command else languages.of(request)
    if language is None or language.family != "python":
        told = "a command" if language is None else language.name
        raise LanguageUnknown(
            "language",
            f"backend inprocess runs python programs only, not {told}",
            fix="choose another backend, such as subprocess",
        )
    ours = sys.version_info[: len(language.version)] == language.version
    if not ours or language.command_on("inprocess"):
        raise LanguageMissing(
            f"backend inprocess has no interpreter but its own, and that is not {language.name}",
            fix="choose another backend, such as subprocess",
        )
    if request.python is not None:
        raise RequestError("python", "backend inprocess has no interpreter but its own")


def _enforcement(
    policy: Policy, request: Request, layers: tuple[str, ...]
) -> dict[str, Enforcement]:
    """What holds each field. Nothing but the output cap is more than best effort."""
    audit, watchdog = "audit" in layers, "watchdog" in layers
    unwatched, unheard = absent("the watchdog is off"), absent("the audit hook is off")
    report = {
        "timeout": best_effort(
            "a watchdog throws an exception into the program's threads; native code outlasts it"
        ),
        "memory": best_effort("a watchdog over the growth of this process; on Linux RLIMIT_AS")
        if resident_memory() is not None
        else absent("this platform does not say how much memory a process has"),
        "cpus": best_effort("an end at cpus x timeout seconds of the threads' CPU time"),
        "disk": best_effort("a watchdog over the work directory"),
        "open_files": best_effort("a watchdog over the growth in this process's descriptors")
        if open_descriptors() is not None
        else absent("this platform does not say which descriptors are open"),
    }
    if not watchdog:
        report = dict.fromkeys(report, unwatched)
    held = best_effort("an audit hook refuses every new process")
    report["processes"] = held if audit else unheard
    report |= kept_by_host(layers)
    match policy.network.mode:
        case "any":
            report["network"] = enforced("open, as the policy asks")
        case "hosts":
            report["network"] = absent("an audit hook cannot hold a program to a list of hosts")
        case _:
            held = best_effort("an audit hook refuses Python's sockets")
            report["network"] = held if audit else unheard
    held = best_effort("an audit hook refuses writing elsewhere; reading is open, but for `hidden`")
    report["filesystem"] = held if audit else unheard
    report["mounts"] = (
        absent("a program in our own process sees the host's paths as they are")
        if request.mounts
        else enforced("none asked for")
    )
    if policy.limits.fuel is not None:
        report["fuel"] = absent("our own interpreter has no fuel; the wasm backend counts it")
    if policy.modules.active:
        report["modules"] = best_effort("import lint before the run and an import hook during it")
    return report

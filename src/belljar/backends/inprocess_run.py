"""One run in our own process, from an empty directory to the Result."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from .. import languages
from ..errors import BackendFailed
from ..events import Displayed, Emit, Output
from ..files import collect
from ..guest import protocol
from ..guest.worker import Channel, Interpreter
from ..lint_rules import Rules
from ..records import replace
from ..report import Report, run_fields
from ..types import Display, KillProof, Request, Result, Status, Usage
from . import outcome
from .base import Cancel, Plan
from .inprocess_guard import Guard
from .inprocess_watch import Watchdog, bounded_address_space, open_descriptors
from .inprocess_world import Streams, lent
from .verdict import Ending, Verdict, judge

_TICK = 0.01
_GRACE = 1.0  # seconds that a program's threads have to end once they are told to
_NOISE = 1 << 20  # growth of memory below this is the allocator's, not the program's
_BIG = 16 << 20  # growth that is worth a search for garbage


class _Direct(Channel):
    """The worker's channel without a descriptor: frames wait here for the thread that watches."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()

    @property
    def usable(self) -> bool:
        return True

    def send_encoded(self, *pieces: Any) -> bool:
        self._waiting.extend(map(bytes, pieces))  # the program goes on and may change its data
        return True

    def deliver(self, report: Report) -> None:
        while self._waiting:
            report.feed(self._waiting.popleft())


@dataclass(slots=True)
class _Ended:
    """What became of the program's threads."""

    reason: str = ""
    exit_code: int = 0
    survivors: int = 0
    cpu: float = 0.0
    wall: float = 0.0
    kill_seconds: float = 0.0
    peak_memory: int | None = None
    refused_descriptors: bool = False


class Run:
    """A request on its way through our process. RequestError if it cannot be handed to a worker."""

    def __init__(self, plan: Plan, emit: Emit, cancel: Cancel) -> None:
        self._plan = plan
        self._emit = emit
        self._cancel = cancel
        file, budgets = languages.of(plan.request).file, outcome.budgets_of(plan)
        buffers: list[Any] = []
        fields = run_fields(plan.request, file, budgets, buffers)
        # Through JSON and copied, because the program must not change the caller's own objects.
        self._program: Any = protocol.loads(protocol.dumps(fields), max_nodes=sys.maxsize)
        self._program["buffers"] = [io.BytesIO(bytes(bytearray(each))) for each in buffers]
        layers = plan.spec.layers
        self._watched = "watchdog" in layers
        self._streams = Streams(outcome.captures(plan, capped="output_cap" in layers))
        self._channel = _Direct()
        self._shown: list[Display] = []
        self._report = Report(budgets=budgets, on_display=self._show)
        self._ended = _Ended()
        self._warnings: list[str] = []

    def result(self, began: float) -> Result:
        """Run it. Afterwards the process is as it was, whatever the program or `emit` did."""
        request = self._plan.request
        # Resolved, because the audit hook compares real paths.
        root = os.path.realpath(tempfile.mkdtemp(prefix=f"belljar-{os.getpid()}-"))
        work = os.path.join(root, "work")
        try:
            for name in ("work", "tmp"):
                os.mkdir(os.path.join(root, name), 0o700)
            collect.write_inputs(work, request.files)
            before = collect.snapshot(work)
            started = time.monotonic()
            self._run_program(root, request)
            settling = time.monotonic()
            found = collect.changed_files(work, before, outcome.wanted(self._plan))
        finally:
            self._delete(root)
        timings = {
            "start": started - began,
            "run": self._ended.wall,
            "settle": time.monotonic() - settling,
        }
        return self._judged(found, timings)

    def _delete(self, root: str) -> None:
        try:
            collect.remove_tree(root)
        except OSError as error:
            if not self._ended.survivors:
                raise BackendFailed(f"the work directory could not be deleted: {error}") from error
            self._warnings.append(f"the work directory could not be deleted: {error}")

    # -- the run itself --------------------------------------------------------------------------

    def _run_program(self, root: str, request: Request) -> None:
        limits, spec = self._plan.policy.limits, self._plan.spec
        audited, now = "audit" in spec.layers, open_descriptors()
        guard = Guard(
            writable=(root, *map(os.path.realpath, spec.writable)) if audited else (os.sep,),
            hidden=tuple(map(os.path.realpath, spec.hidden)) if audited else (),
            network=spec.network or not audited,
            processes=not audited,
            descriptors=now + limits.open_files if self._watched and now is not None else None,
        )
        with ExitStack() as lending:
            lending.enter_context(lent(root, request, self._streams))
            if self._watched:
                lending.enter_context(bounded_address_space(limits.memory))
            watchdog = Watchdog(limits, guard, root)
            try:
                guard.start(self._interpret)
                self._watch(guard, watchdog)
            finally:
                self._end(guard, watchdog)
        self._hand_out()
        for name, captured in self._streams.captured.items():
            if rest := captured.rest():
                self._emit(Output(id=request.id, stream=name, data=rest))  # type: ignore[arg-type]
        if watchdog.peak_memory > _BIG:
            gc.collect()

    def _interpret(self) -> None:
        """On the program's own thread."""
        program, self._program = self._program, None
        interpreter = Interpreter(self._channel)
        modules = self._plan.policy.modules
        if modules.active:
            own = [name for name in self._plan.request.files if name.endswith(".py")]
            importer = _checked_import(Rules(modules, own))
            names = {**vars(builtins), "__import__": importer}
            interpreter.module.__dict__["__builtins__"] = names
        self._ended.exit_code = _exit_code(interpreter.run(program).error)

    def _watch(self, guard: Guard, watchdog: Watchdog) -> None:
        while guard.running():
            guard.join(_TICK)
            self._hand_out()
            if self._cancel.is_set():
                self._ended.reason = "cancelled"
            elif self._watched and guard.running():
                self._ended.reason = watchdog.look()
            if self._ended.reason:
                return

    def _end(self, guard: Guard, watchdog: Watchdog) -> None:
        """End what is left of the program, and write down what it was."""
        ended, now = self._ended, time.monotonic()
        ended.wall = now - watchdog.started
        while guard.alive() and time.monotonic() - now < _GRACE:
            guard.stop()
            guard.join(_TICK)
        ended.kill_seconds = time.monotonic() - now
        ended.survivors = len(guard.alive())
        ended.refused_descriptors = guard.refused_descriptors
        ended.cpu = guard.cpu()
        ended.peak_memory = watchdog.peak_memory if watchdog.peak_memory >= _NOISE else None
        if self._watched and not ended.reason and watchdog.disk_full():
            ended.reason = "disk"
        self._streams.close()
        guard.release()
        if ended.survivors:
            self._warnings.append(
                f"{ended.survivors} threads of the program could not be ended:"
                " they go on in this process until they come back to Python"
            )

    def _hand_out(self) -> None:
        self._channel.deliver(self._report)
        for name, data in self._streams.take():
            self._emit(Output(id=self._plan.request.id, stream=name, data=data))

    def _show(self, display: Display) -> None:
        self._shown.append(display)
        self._emit(Displayed(id=self._plan.request.id, display=display))

    # -- and what to say of it -------------------------------------------------------------------

    def _judged(self, found: collect.Collected, timings: dict[str, float]) -> Result:
        plan, ended, report = self._plan, self._ended, self._report
        verdict = self._verdict()
        stdout, stderr = self._streams.captured["stdout"], self._streams.captured["stderr"]
        return Result(
            id=plan.request.id,
            status=verdict.status,
            exit_code=verdict.exit_code,
            limit_hit=verdict.limit_hit,
            stdout=stdout.text(),
            stderr=stderr.text(),
            truncated=(stdout.truncated or stderr.truncated or report.truncated or found.truncated),
            value=None if ended.reason else report.value,
            error=report.error if verdict.exit_code != 0 else None,
            displays=tuple(self._shown),
            files=found.files,
            changes=tuple(found.changes),
            usage=Usage(
                wall=ended.wall,
                cpu=ended.cpu,
                peak_memory=ended.peak_memory,
                stdout_bytes=stdout.total,
                stderr_bytes=stderr.total,
            ),
            timings=timings,
            enforcement=plan.enforcement,
            kill=KillProof(
                reason=ended.reason or "ended",
                survivors=ended.survivors,
                seconds=ended.kill_seconds,
            ),
            backend=plan.backend,
            isolation=plan.isolation.value,
            warnings=(
                *plan.warnings, *verdict.warnings, *report.warnings, *self._warnings,
                *found.warnings,
            ),
        )  # fmt: skip

    def _verdict(self) -> Verdict:
        """As for any other backend, but that no signal was ever sent."""
        if self._ended.reason == "fds":
            return Verdict(status=Status.LIMIT, limit_hit="fds")
        ending = Ending(wait_status=self._ended.exit_code << 8, reason=self._ended.reason)
        verdict = judge(ending, self._report)
        ran_out = self._report.hint.errno == errno.EMFILE and self._ended.refused_descriptors
        if ran_out and verdict.status is Status.ERROR:
            # The audit hook refused one: a program that only reports it has asked for none.
            return replace(verdict, status=Status.LIMIT, limit_hit="fds", warnings=())
        return verdict


def _exit_code(error: BaseException | None) -> int:
    """What CPython would have exited with after such an end."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # as CPython does with anything that is no number
    return 1


def _checked_import(rules: Rules) -> Callable[..., Any]:
    """`__import__` for the program's own code; what its libraries import is their business."""

    def checked(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        below = [f"{name}.{part}" for part in fromlist or () if part != "*"] or [name]
        if not level and any(map(rules.refuses, below)):
            raise ImportError(
                f"module {name!r} is not allowed; allow it with modules=[...]", name=name
            )
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    return checked

"""Backend `wasm`: CPython compiled to WebAssembly, a fresh instance a run, in jailed workers.

Theory of operation
- The guest is a component that was started when the package was built and then frozen
  (`wasm/build.py`, `wasm/inside`): its memory, with the interpreter ready and the standard library
  imported, is part of the file. An instance maps it copy-on-write and is thrown away after one run.
- It is compiled to native code once per host (`wasm/cache.py`) and run by `wasmtime` in worker
  processes (`wasm/worker.py`), one run at a time each. `wasm_pool.py` keeps the workers warm.
- Every worker lives in a jail as the `jail` backend makes them, with an empty network and a memory
  file system of the run's size: what a hole in the engine would open is that jail. A worker serves
  many runs, so such a hole would also let one run see the next one on that worker.
- Each protection is a layer that can be switched off in the constructor, for tests that ask what
  it is good for. A backend with a layer off says so in every result.

Who kills whom: the engine interrupts a guest at its deadline. One that sits in a blocking call of
the host's does not notice; its worker is killed a tenth of a second later, by the kernel, with the
pid namespace it lives in. Cancelling kills the worker at once.

Facts relied on: linear memory only grows, and only up to the store's limit; a store that is closed
has closed every descriptor of its guest; an exit code, a trap and the fuel used are the engine's
words. The hash seed is part of the snapshot and the same in every run.

What it does not protect against: a hole in the engine together with one in the kernel, and side
channels between runs on one machine.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import languages
from ..errors import BackendFailed, BackendUnavailable, RequestError
from ..events import Emit
from ..files import collect
from ..files.names import checked_name
from ..guest import protocol
from ..linux import root
from ..policy import Filesystem, Isolation, Policy
from ..records import replace
from ..report import Report, run_fields
from ..types import Enforcement, GuestError, Request, Result
from ..wasm import build, cache, engine
from . import jail_plan, outcome, protect, wasm_plan, wasm_report, working_directory
from .base import Availability, Cancel, Plan
from .fleet import Fleet
from .layered import HostLayered
from .verdict import Ending
from .wasm_plan import Spec
from .wasm_pool import Pool, say, start
from .wasm_workers import Ended, Worker

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

_TRAP_CODE = 134  # as a shell would say of a process that was aborted
_ABOUT_DISK = frozenset({errno.EIO, errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
_FULL = 1 << 16  # bytes left: the engine writes in pieces of that size
_SPARE = 1 << 20  # bytes of a disk for what the file system itself takes
_MOST_KNOWN = 64
_NOT_ASKED = object()
_NO_FILES = Filesystem()


class WasmBackend(HostLayered):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers.

    `kept` is how many idle workers may wait for the next run; `tidy` keeps none between runs, and
    only one process that makes jails for them, for tests that count leftovers.
    """

    name = "wasm"
    isolation = Isolation.WASM

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        facts: HostFacts | None = None,
        kept: int = 8,
        tidy: bool = False,
    ) -> None:
        super().__init__(disable, wasm_plan.LAYERS, facts)
        self.kept = kept
        self.tidy = tidy
        self._pool: Pool | None = None
        self._compiled: dict[Any, tuple[Mapping[str, Enforcement], Spec]] = {}
        self._library: Any = _NOT_ASKED
        self._availability: Availability | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The protections that this host has, which `disable` can switch off."""
        active = wasm_plan.active_layers(self.facts, self.disabled)
        return tuple(name for name in wasm_plan.LAYERS if name in active)

    @property
    def library(self) -> cache.Library | None:
        """The installed engine, looked for once."""
        if self._library is _NOT_ASKED:
            self._library = cache.library()
        found: cache.Library | None = self._library
        return found

    def probe(self) -> Availability:
        if self._availability is None:
            self._availability = self._find_out()
        return self._availability

    def _find_out(self) -> Availability:
        library = self.library
        floor = ".".join(map(str, engine.FLOOR))
        if library is None:
            return _lacking("wasmtime is not installed", "pip install 'belljar[wasm]'")
        if engine.parse_version(library.version) < engine.FLOOR:
            return _lacking(
                f"wasmtime {library.version} has known holes; {floor} is the oldest that is used",
                "pip install --upgrade 'belljar[wasm]'",
            )
        if not build.description(build.PYTHON):
            return _lacking("the Python guest has not been built", "belljar wasm build")
        from .jail import JailBackend

        jail = JailBackend(facts=self._given_facts).probe()
        if not jail.available:
            return _lacking(f"no jail for its workers: {jail.reason}", jail.fix)
        notes = [*jail.notes]
        if not self._is_compiled(library):
            notes.append(
                "the first run compiles the guest for about ten seconds: belljar wasm prepare"
            )
        notes += outcome.notices(self.disabled)
        return Availability(available=True, notes=tuple(notes))

    def _is_compiled(self, library: cache.Library) -> bool:
        try:
            return cache.find(build.PYTHON, fuel=False, installed=library) is not None
        except BackendUnavailable:
            return False

    def compile(self, policy: Policy, request: Request) -> Plan:
        library = self.library
        if library is None:
            raise BackendUnavailable("wasmtime is not installed", fix="pip install 'belljar[wasm]'")
        language = wasm_plan.language_of(request)
        if request.mounts or policy.filesystem != _NO_FILES:
            report, spec = self._compile(policy, request, language, library)
        else:
            # Without mounts it depends on nothing that changes while we run.
            key = policy, language, languages.of(request).name
            known = self._compiled.get(key)
            if known is None:
                if len(self._compiled) > _MOST_KNOWN:
                    self._compiled.clear()
                known = self._compiled[key] = self._compile(policy, request, language, library)
            report, spec = known
        self.hold(policy, report)
        return self.planned(jail_plan.with_disk(policy), request, report, spec)

    def _compile(
        self, policy: Policy, request: Request, language: str, library: cache.Library
    ) -> tuple[Mapping[str, Enforcement], Spec]:
        active = wasm_plan.active_layers(self.facts, self.disabled)
        report = wasm_report.enforcement(policy, request, self.facts, active)
        fuel = policy.limits.fuel is not None
        guest = build.GUESTS[language]
        compiled = os.path.join(cache.directory(), cache.name(guest, fuel=fuel, installed=library))
        spec = wasm_plan.spec(policy, request, self.facts, active, compiled, library)
        return MappingProxyType(report), spec

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        request, spec, limits = plan.request, plan.spec, plan.policy.limits
        assert isinstance(spec, Spec)
        report, shown = outcome.heard(plan, emit)
        order, before = _order(plan, spec)
        captured = outcome.captures(plan, capped="output_cap" in spec.layers)
        left: list[str] = []
        with ExitStack() as cleanup:
            if spec.guarded:
                left = cleanup.enter_context(protect.placeholders(spec.guarded))
            worker = self._take(spec, cleanup)
            taken = time.monotonic()
            ended = worker.run(
                order,
                timeout=limits.timeout,
                captured=captured,
                report=report,
                run=request.id,
                emit=emit,
                cancel=cancel,
            )
            over = time.monotonic()
            found = collect.Collected()
            full = False
            if spec.files:
                full = _explain_full_disk(report, worker.jail.work)
                found = collect.changed_files(worker.jail.work, before, outcome.wanted(plan))
            result = outcome.of(
                plan,
                replace(_ending(ended, worker), disk_full=full),
                report,
                captured,
                wall=ended.ended - ended.started,
                cpu=ended.cpu,
                peak_memory=ended.peak_memory,
                survivors=0,
                kill_seconds=ended.kill_seconds,
                found=found,
                shown=shown,
            )
            collected = time.monotonic()
            if worker.healthy and spec.house.reusable and spec.files:
                worker.settle()
        timings = {
            "start": taken - began,
            "run": ended.ended - ended.started,
            "settle": over - ended.ended,
            "collect": collected - over,
            "clean": time.monotonic() - collected,
        }
        result = replace(result, timings=timings, **_engine_words(result, ended))
        return replace(result, warnings=(*result.warnings, *left)) if left else result

    def close(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.close()

    def _take(self, spec: Spec, cleanup: ExitStack) -> Worker:
        """A worker, which `cleanup` gives back or ends."""
        library = self.library
        assert library is not None
        house = spec.house

        def prepare() -> cache.Compiled:
            return cache.prepare(house.guest, fuel=house.fuel, installed=library, say=say)

        # What makes jails is kept even by the tidy, but only one of it.
        if house.reusable and not (self.tidy and (house.fuel or house.language != "python")):
            pool = self._warm()
            worker = pool.take(house, prepare)
            cleanup.callback(lambda: pool.give_back(worker, keep=not self.tidy))
            return worker
        fleet = Fleet(self.facts)
        cleanup.callback(fleet.close)
        worker = start(fleet, house, prepare())
        cleanup.callback(worker.end)
        return worker

    def _warm(self) -> Pool:
        pool = self._pool
        if pool is None or pool.process != os.getpid():
            pool = self._pool = Pool(self.facts, self.kept)
            # At exit too, when nobody has closed the backend.
            weakref.finalize(self, pool.close)
        return pool


def _lacking(reason: str, fix: str | None) -> Availability:
    return Availability(available=False, reason=reason, fix=fix)


def _order(plan: Plan, spec: Spec) -> tuple[dict[str, Any], dict[str, collect.Stamp]]:
    """What the worker is told of the run, and the state of the work directory that it makes."""
    request, limits = plan.request, plan.policy.limits
    files = {checked_name("files", name): data for name, data in request.files.items()}
    files[spec.file] = (request.code or "").encode("utf-8", "surrogatepass")
    if sum(map(len, files.values())) > spec.disk:
        raise RequestError(
            "files", f"do not fit into a disk of {spec.disk} bytes", fix="raise `disk`"
        )
    env = {
        "HOME": root.WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "USER": "user",
        **working_directory.environment(request, root.WORK),
    }
    called = working_directory.program_file(request, spec.file, root.WORK)
    budgets = outcome.budgets_of(plan)
    # The guest's one function takes text. Bytes go through a file on its disk, if they fit there;
    # only Python reads it.
    buffers: list[Any] | None = [] if spec.files else None
    fields = run_fields(request, called, budgets, buffers)
    sizes = [len(each) for each in buffers or ()]
    if sizes and sum(sizes) + sum(map(len, files.values())) > spec.disk - _SPARE:
        buffers, sizes = None, []
        fields = run_fields(request, called, budgets)
    run = protocol.dumps(fields).decode("utf-8")
    start_in = working_directory.start_in(request, root.WORK)
    about = protocol.dumps({"env": env, "directory": start_in, "sizes": sizes}).decode("utf-8")
    if not spec.files:
        files.clear()  # nobody could read them
    stamp = time.time_ns()
    order = {
        "request": f"{about[:-1]},{run[1:]}",
        "stdin": request.stdin,
        "files": [(name, data, stamp) for name, data in files.items()],
        "buffers": b"".join(buffers or ()),
        "seconds": limits.timeout,
        "epoch": "epoch" in spec.layers,
        "fuel": limits.fuel,
    }
    return order, {name: (stamp, len(data), 0) for name, data in files.items()}


def _ending(ended: Ended, worker: Worker) -> Ending:
    """As if it had been a process: the engine's words in the kernel's form."""
    if ended.report is None:
        group = worker.jail.group
        return Ending(
            wait_status=ended.wait_status,
            reason=ended.reason,
            oom_kills=group.oom_kills() if group is not None else 0,
        )
    trap = ended.report["trap"]
    reason = "timeout" if trap.endswith("wasm trap: interrupt") else ""
    if "all fuel consumed" in trap:
        reason = "fuel"
    return Ending(wait_status=(ended.report["code"] & 0xFF) << 8, reason=reason)


def _explain_full_disk(report: Report, work: int) -> bool:
    """Whether the disk is full, asked only if the program says so or ended for want of something
    that WASI calls "input/output error"."""
    if report.hint.errno not in _ABOUT_DISK:
        return False
    room = os.fstatvfs(work)
    full = not room.f_favail or room.f_bavail * room.f_frsize < _FULL
    if full and report.hint.errno == errno.EIO:
        report.hint = replace(report.hint, errno=errno.ENOSPC)
    return full


def _engine_words(result: Result, ended: Ended) -> dict[str, Any]:
    """What changes by fuel, and by what the engine said of a guest that it had to stop."""
    if ended.report is None:
        if ended.reason:
            return {}
        note = "the worker process itself ended: the guest may have met a fault of the engine"
        return {"warnings": (*result.warnings, note)}
    fuel, trap = ended.report["fuel"], ended.report["trap"]
    changed: dict[str, Any] = {}
    if fuel is not None:
        changed["usage"] = replace(result.usage, fuel=fuel)
    if trap and result.error is None and result.exit_code == _TRAP_CODE:
        changed["error"] = GuestError(type="WasmTrap", message=trap)
    elif "fuel" in trap:
        changed["signal"] = None
    return changed

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

import os
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import languages
from ..errors import BackendFailed, BackendUnavailable
from ..events import Emit
from ..files import collect
from ..linux import root
from ..policy import Filesystem, Isolation, Policy
from ..records import replace
from ..types import Enforcement, Request, Result
from ..wasm import build, cache
from . import jail_plan, outcome, protect, wasm_orders, wasm_plan, wasm_report
from .base import Availability, Cancel, Plan
from .fleet import Fleet
from .layered import HostLayered
from .verdict import Ending
from .wasm_plan import Spec
from .wasm_pool import Pool, start
from .wasm_workers import Ended, Worker

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

_FULL = 1 << 16  # bytes left: the engine writes in pieces of that size
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
        try:
            library = wasm_orders.checked(self.library)
        except BackendUnavailable as error:
            return _lacking(error.message, error.fix)
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
        language = wasm_orders.language_of(request)
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
                work = worker.jail.work
                full = wasm_orders.explain_full_disk(report, lambda: _full(work))
                found = collect.changed_files(work, before, outcome.wanted(plan))
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
        words = wasm_orders.engine_words(result, ended.report, ended.reason)
        result = replace(result, timings=timings, **words)
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
            return cache.prepare(house.guest, fuel=house.fuel, installed=library, say=cache.tell)

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
    files = wasm_orders.files_of(plan, spec.file, spec.disk)
    epoch = "epoch" in spec.layers
    room = wasm_orders.room_for_buffers(spec.disk, files) if spec.files else 0
    order = wasm_orders.order(plan, spec.file, root.WORK, epoch=epoch, room=room)
    if not spec.files:
        files.clear()  # nobody could read them
    stamp = time.time_ns()
    order["files"] = [(name, data, stamp) for name, data in files.items()]
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
    return wasm_orders.ending_of(ended.report)


def _full(work: int) -> bool:
    room = os.fstatvfs(work)
    return not room.f_favail or room.f_bavail * room.f_frsize < _FULL

"""Backend `wasm` where there is no Linux: WebAssembly guests in plain processes, without a jail.

Theory of operation
- The guest and the engine are those of `wasm.py`: a frozen CPython or QuickJS, a fresh instance a
  run, no address and no file but those of the run. What holds the program is the engine alone; the
  enforcement report says so.
- Each run has a worker process of its own (`wasm/plain_worker.py`), which talks to us over its
  stdin and stdout (`portable_wasm_process.py`), a private directory (work/, tmp/), and its end.
- The engine holds time (an epoch), memory and fuel. The process's own limits hold open files and
  the size of each file where there are such limits, a watchdog the sum of files.

What it does not protect against: a hole in the engine. Such a program is then this user.

Tested on Linux by `tests/backends/test_portable_wasm.py`; not run on macOS or Windows yet.
"""

from __future__ import annotations

import os
import posixpath
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ..errors import BackendFailed, BackendUnavailable
from ..events import Emit
from ..files import collect
from ..files.names import checked_name
from ..policy import Isolation, Policy
from ..records import replace
from ..types import Request, Result
from ..wasm import build, cache
from . import outcome, portable_wasm_plan, wasm_orders
from .base import Availability, Cancel, Plan, refuse_hidden
from .layered import Layered
from .portable_wasm_plan import TMP, WORK, Spec
from .portable_wasm_process import Ended, Process
from .portable_watch import disk_use
from .verdict import Ending

_WASM_DIRECTORY = os.path.dirname(os.path.abspath(build.__file__))


class PortableWasmBackend(Layered):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers;
    `platform` replaces this machine's, for tests of the report."""

    name = "wasm"
    isolation = Isolation.WASM
    layers = portable_wasm_plan.LAYERS

    def __init__(
        self, *, disable: frozenset[str] = frozenset(), platform: str = sys.platform
    ) -> None:
        super().__init__(disable, self.layers)
        self.platform = platform
        self._library: cache.Library | None = None

    def probe(self) -> Availability:
        try:
            library = self._installed()
        except BackendUnavailable as error:
            return Availability(available=False, reason=error.message, fix=error.fix)
        notes = ["the engine alone isolates: no jail is around its workers"]
        if self.platform != "linux":
            notes.append("this backend has not been run on macOS or Windows yet")
        try:
            ready = cache.find(build.PYTHON, fuel=False, installed=library) is not None
        except BackendUnavailable as error:
            return Availability(available=False, reason=error.message, fix=error.fix)
        if not ready:
            notes.append(
                "the first run compiles the guest for about ten seconds: belljar wasm prepare"
            )
        return Availability(available=True, notes=(*notes, *outcome.notices(self.disabled)))

    def compile(self, policy: Policy, request: Request) -> Plan:
        self._installed()
        refuse_hidden(policy, request)
        active = frozenset(self.layers) - self.disabled
        spec = portable_wasm_plan.spec(policy, request, active)
        report, warnings = portable_wasm_plan.enforcement(policy, request, self.platform, active)
        self.hold(policy, report)
        return self.planned(policy, request, report, spec, warnings)

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        request, spec, limits = plan.request, plan.spec, plan.policy.limits
        assert isinstance(spec, Spec)
        guest = build.GUESTS[spec.language]
        library = self._installed()
        compiled = cache.prepare(guest, fuel=spec.fuel, installed=library, say=cache.tell)
        report, shown = outcome.heard(plan, emit)
        captured = outcome.captures(plan, capped="output_cap" in spec.layers)
        given = wasm_orders.files_of(plan, spec.file, spec.disk)
        room = wasm_orders.room_for_buffers(spec.disk, given) if spec.files else 0
        epoch = "epoch" in spec.layers
        order = wasm_orders.order(plan, spec.file, WORK, epoch=epoch, room=room)
        files = self._files()
        with self._directory(files) as place:
            work, tmp = os.path.join(place, "work"), os.path.join(place, "tmp")
            directories = (work, tmp)
            for path in directories:
                os.mkdir(path, 0o700)
            if spec.files:
                collect.write_inputs(work, given)
                for _, name in spec.shown:
                    if name.startswith(f"{WORK}/"):  # where the guest lists it
                        os.makedirs(os.path.join(work, *_below(name)), exist_ok=True)
            before = files.snapshot(work)
            process = Process(_argv(library), _environment(place), place)
            try:
                process.begin(
                    {
                        "language": spec.language,
                        "guest": compiled.path,
                        "parts": compiled.parts,
                        "fuel": spec.fuel,
                        # The interpreter's own memory is not the program's.
                        "memory": spec.memory + compiled.memory if spec.memory else 0,
                        "preopens": [
                            (work, WORK, True),
                            (tmp, TMP, True),
                            *((source, name, False) for source, name in spec.shown),
                        ],
                        "directory": WORK,
                        "rlimits": list(spec.rlimits),
                        "stdin": os.path.join(place, "stdin"),
                    }
                )
                taken = time.monotonic()
                ended = process.run(
                    order,
                    timeout=limits.timeout,
                    captured=captured,
                    report=report,
                    run=request.id,
                    emit=emit,
                    cancel=cancel,
                    over=lambda: _over(spec, directories),
                )
            finally:
                process.end()
            found = files.changed_files(work, before, outcome.wanted(plan))
            full = wasm_orders.explain_full_disk(
                report, lambda: outcome.nearly_all(disk_use(directories, spec.disk), spec.disk)
            )
            result = outcome.of(
                plan,
                replace(_ending(ended), disk_full=full),
                report,
                captured,
                wall=ended.ended - ended.started,
                cpu=ended.report["cpu"] if ended.report else None,
                peak_memory=(ended.report["memory"] or None) if ended.report else None,
                survivors=0,
                kill_seconds=ended.kill_seconds,
                found=found,
                shown=shown,
            )
            settled = time.monotonic()
        timings = {
            "start": taken - began,
            "run": ended.ended - ended.started,
            "settle": settled - ended.ended,
            "clean": time.monotonic() - settled,
        }
        words = wasm_orders.engine_words(result, ended.report, ended.reason)
        return replace(result, timings=timings, **words)

    def close(self) -> None:
        self._closed = True

    def _installed(self) -> cache.Library:
        """The engine, looked for once. BackendUnavailable if it or its guest is missing."""
        if self._library is None:
            self._library = wasm_orders.checked(cache.library())
        return self._library

    def _files(self) -> ModuleType:
        """What copies files out: directory descriptors do not exist on Windows."""
        if self.platform == "win32":
            from . import portable_files

            return portable_files
        return collect

    @contextmanager
    def _directory(self, files: ModuleType) -> Iterator[str]:
        # The other portable backend finds what a crash has left, by this kind of name.
        place = os.path.realpath(tempfile.mkdtemp(prefix=f"belljar-{os.getpid()}-"))
        try:
            yield place
        finally:
            try:
                files.remove_tree(place)
            except OSError as error:
                raise BackendFailed(
                    f"the run's directory could not be removed: {error}", fix=f"remove {place}"
                ) from error


def _argv(library: cache.Library) -> tuple[str, ...]:
    code = cache.boot("plain_worker", "main()")
    packages = os.path.dirname(library.package)
    return (sys.executable, "-I", "-S", "-B", "-c", code, _WASM_DIRECTORY, packages)


def _environment(place: str) -> dict[str, str]:
    """Nothing of the host's but what Windows needs to start a process."""
    own = {"LANG": "C.UTF-8", "RUST_BACKTRACE": "0", "HOME": place, "TMPDIR": place}
    if sys.platform == "win32":
        from .portable_windows import environment

        return {**environment(place, place), **own}
    return own


def _below(name: str) -> list[str]:
    return checked_name("mounts.dst", posixpath.relpath(name, WORK)).split("/")


def _over(spec: Spec, directories: tuple[str, ...]) -> str:
    if "watchdog" in spec.layers and disk_use(directories, spec.disk) > spec.disk:
        return "disk"
    return ""


def _ending(ended: Ended) -> Ending:
    if ended.report is not None:
        return wasm_orders.ending_of(ended.report)
    # POSIX's negative number is a signal; Windows' codes are larger than a status has room for.
    code = ended.exit_code
    status = -code if code < 0 else (code & 0xFF) << 8
    return Ending(wait_status=status or 1 << 8, reason=ended.reason)

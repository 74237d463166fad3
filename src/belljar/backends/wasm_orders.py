"""What a worker of WebAssembly guests is told of a run, and what its answer means for the result.

The same for workers in a jail (`wasm.py`) and for plain processes (`portable_wasm.py`); imports on
every platform.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Mapping
from typing import Any

from .. import languages
from ..errors import BackendUnavailable, RequestError
from ..files.names import checked_name
from ..guest import protocol
from ..records import replace
from ..report import Report, run_fields
from ..types import GuestError, Request, Result
from ..wasm import build, cache, engine
from . import outcome, working_directory
from .base import Plan
from .verdict import Ending

_ABOUT_DISK = frozenset({errno.EIO, errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", -1)})
_RESERVED = 16 << 30  # of address space: four gigabytes a memory, and as much around it
_SPARE = 1 << 20  # bytes of a disk for what the file system itself takes
TRAP_CODE = 134  # as a shell would say of a process that was aborted
_VERSIONS = {"python": (3, 14)}  # what a versioned name such as python3.14 may ask for


def checked(library: cache.Library | None) -> cache.Library:
    """The installed engine, if it is new enough and there is a guest for it."""
    if library is None:
        raise BackendUnavailable("wasmtime is not installed", fix="pip install 'belljar[wasm]'")
    if engine.parse_version(library.version) < engine.FLOOR:
        floor = ".".join(map(str, engine.FLOOR))
        raise BackendUnavailable(
            f"wasmtime {library.version} has known holes; {floor} is the oldest that is used",
            fix="pip install --upgrade 'belljar[wasm]'",
        )
    if not build.description(build.PYTHON):
        raise BackendUnavailable("the Python guest has not been built", fix="belljar wasm build")
    if 0 <= (limit := _address_space()) < _RESERVED:
        raise BackendUnavailable(
            f"this process may have {limit >> 20} MiB of address space, and the engine reserves"
            f" {_RESERVED >> 30} GiB for its workers",
            fix="ulimit -v unlimited",
        )
    return library


def _address_space() -> int:
    """This process's limit, which workers inherit; -1 if there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return -1
    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit if limit != resource.RLIM_INFINITY else -1


def language_of(request: Request) -> str:
    """The guest that runs it; BackendUnavailable for what no guest here does."""
    if request.command:
        what = "commands"
    elif request.python is not None:
        what = "interpreters of your own choice"
    else:
        language = languages.of(request)
        guest = build.GUESTS.get(language.family)
        version = _VERSIONS.get(language.family, ())
        asked = language.version
        if guest and asked == version[: len(asked)] and _is_built(guest):
            return language.family
        what = f"{language.name} programs"
    raise BackendUnavailable(
        f"the wasm backend runs no {what}", fix="choose another backend, such as jail"
    )


@functools.cache
def _is_built(guest: str) -> bool:
    return bool(build.description(guest))


def files_of(plan: Plan, file: str, disk: int) -> dict[str, bytes]:
    """The run's files with its program; RequestError if they do not fit into `disk` bytes."""
    request = plan.request
    files = {checked_name("files", name): data for name, data in request.files.items()}
    files[file] = (request.code or "").encode("utf-8", "surrogatepass")
    if sum(map(len, files.values())) > disk:
        raise RequestError("files", f"do not fit into a disk of {disk} bytes", fix="raise `disk`")
    return files


def room_for_buffers(disk: int, files: Mapping[str, bytes]) -> int:
    """What a disk of `disk` bytes leaves for binary data beside `files`."""
    return disk - sum(map(len, files.values())) - _SPARE


def order(plan: Plan, file: str, work: str, *, epoch: bool, room: int) -> dict[str, Any]:
    """The message that starts the run, but for its files; `work` is what the guest calls the work
    directory. `room` is what binary data may take on its disk; only Python reads it there."""
    request, limits = plan.request, plan.policy.limits
    env = {
        "HOME": work,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "USER": "user",
        **working_directory.environment(request, work),
    }
    called = working_directory.program_file(request, file, work)
    budgets = outcome.budgets_of(plan)
    # The guest's one function takes text. Bytes go through a file on its disk, if they fit there.
    buffers: list[Any] | None = [] if room > 0 else None
    fields = run_fields(request, called, budgets, buffers)
    sizes = [len(each) for each in buffers or ()]
    if sum(sizes) > room:
        buffers, sizes = None, []
        fields = run_fields(request, called, budgets)
    run = protocol.dumps(fields).decode("utf-8")
    start_in = working_directory.start_in(request, work)
    about = protocol.dumps({"env": env, "directory": start_in, "sizes": sizes}).decode("utf-8")
    return {
        "request": f"{about[:-1]},{run[1:]}",
        "stdin": request.stdin,
        "files": [],
        "buffers": b"".join(buffers or ()),
        "seconds": limits.timeout,
        "epoch": epoch,
        "fuel": limits.fuel,
    }


def ending_of(report: dict[str, Any]) -> Ending:
    """As if it had been a process: the engine's words in the kernel's form."""
    trap = report["trap"]
    reason = "timeout" if trap.endswith("wasm trap: interrupt") else ""
    if "all fuel consumed" in trap:
        reason = "fuel"
    return Ending(wait_status=(report["code"] & 0xFF) << 8, reason=reason)


def explain_full_disk(report: Report, full: Callable[[], bool]) -> bool:
    """Whether the disk is `full`, asked only if the program says so or ended for want of something
    that WASI calls "input/output error"."""
    if report.hint.errno not in _ABOUT_DISK or not full():
        return False
    if report.hint.errno == errno.EIO:
        report.hint = replace(report.hint, errno=errno.ENOSPC)
    return True


def engine_words(result: Result, report: dict[str, Any] | None, reason: str) -> dict[str, Any]:
    """What changes by fuel, and by what the engine said of a guest that it had to stop.

    `reason` is why the worker was killed, if it was.
    """
    if report is None:
        if reason:
            return {}
        note = "the worker process itself ended: the guest may have met a fault of the engine"
        return {"warnings": (*result.warnings, note)}
    fuel, trap = report["fuel"], report["trap"]
    changed: dict[str, Any] = {}
    if fuel is not None:
        changed["usage"] = replace(result.usage, fuel=fuel)
    if trap and result.error is None and result.exit_code == TRAP_CODE:
        changed["error"] = GuestError(type="WasmTrap", message=trap)
    elif "fuel" in trap:
        changed["signal"] = None
    return changed

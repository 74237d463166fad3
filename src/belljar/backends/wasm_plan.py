"""What a WebAssembly run is made of: the pure half of the `wasm` backend.

From a policy, a request and the host's facts: which worker can serve the run, and what that worker
is jailed in. Runs with equal answers use each other's warm workers.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

from .. import languages
from ..linux import root
from ..policy import Filesystem, Policy
from ..records import positional_record, record, replace
from ..types import Mount, Request
from ..wasm import build
from ..wasm.cache import Library, boot
from . import jail_plan, protect, wasm_orders

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

# The engine's own, and those of the jail around the worker.
ENGINE_LAYERS = ("store_limits", "epoch")
LAYERS = (*ENGINE_LAYERS, *jail_plan.LAYERS)
# What a worker needs for itself, on top of what its guest may use.
_WORKER_MEMORY = 256 << 20
_WORKER_FILES = 40
_WORKER_THREADS = 64
_WORKER_START = 0.5  # seconds of processor time
PRIVATE = root.SHM  # a guest's /tmp, which no worker uses itself
# Where the worker finds its own things in the jail.
_CODE, _LIBRARY, _GUEST = "/.wasm/code", "/.wasm/lib", "/.wasm/guest"
_WASM_DIRECTORY = os.path.dirname(os.path.abspath(build.__file__))


@positional_record
class House:
    """A worker: its jail, what it is told to set up, and whether it may serve more than one run."""

    outer: jail_plan.Outer
    shape: jail_plan.Shape
    argv: tuple[str, ...]
    language: str
    guest: str
    compiled: str
    fuel: bool
    memory: int
    preopens: tuple[tuple[str, str, bool], ...]
    reusable: bool


@record
class Spec:
    """Everything `run` needs. In the sources of `guarded` the project's metadata is protected.

    Where a guest has no `files` at all, none are written, collected or deleted.
    """

    house: House
    file: str
    files: bool
    disk: int
    layers: tuple[str, ...]
    guarded: tuple[str, ...]


def active_layers(facts: HostFacts, disabled: frozenset[str]) -> frozenset[str]:
    jail = jail_plan.active_layers(facts, disabled)
    return jail | (frozenset(ENGINE_LAYERS) - disabled)


def jailed_policy(policy: Policy) -> Policy:
    """The policy of the worker's jail: room for the guest, and for the worker itself."""
    limits, disk = policy.limits, jail_plan.disk_size(policy)
    return replace(
        policy,
        limits=replace(
            limits,
            memory=limits.memory + disk + _WORKER_MEMORY,
            processes=_WORKER_THREADS,
            open_files=limits.open_files + _WORKER_FILES,
            disk=disk,
        ),
        explicit=policy.explicit | {"disk"},
    )


def jailed_request(request: Request, compiled: str, library: Library) -> Request:
    """The worker, as the jail sees it: a command with some mounts."""
    return Request(
        command=(sys.executable, "-I", "-S", "-B", "-c", boot("worker", "main()"), _CODE, _LIBRARY),
        mounts=(
            Mount(_WASM_DIRECTORY, _CODE, "ro"),
            Mount(library.package, f"{_LIBRARY}/wasmtime", "ro"),
            Mount(compiled, _GUEST, "ro"),
            *request.mounts,
        ),
    )


def spec(
    policy: Policy,
    request: Request,
    facts: HostFacts,
    active: frozenset[str],
    compiled: str,
    library: Library,
) -> Spec:
    """The values for the run. Starts nothing."""
    language = wasm_orders.language_of(request)
    limits = policy.limits
    # Then the worker's end depends on the run's time.
    counted = limits.cpus != int(limits.cpus) and "cgroup" not in active
    if request.mounts or policy.filesystem != Filesystem() or counted:
        house, guarded = _house(policy, request.mounts, language, facts, active, compiled, library)
    else:
        bare = _bare(policy)
        house, guarded = _found_again(bare, (), language, facts, active, compiled, library)
    return Spec(
        house=house,
        file=languages.of(request).file,
        files=language != "javascript",
        disk=jail_plan.disk_size(policy),
        layers=tuple(name for name in LAYERS if name in active),
        guarded=guarded,
    )


def _bare(policy: Policy) -> Policy:
    """Only what a house depends on, so that equal houses are found again."""
    return Policy(
        level=policy.level,
        min_isolation=policy.min_isolation,
        limits=replace(policy.limits, timeout=0, output=0, fuel=0 if policy.limits.fuel else None),
        explicit=policy.explicit & {"disk"},
    )


def _house(
    policy: Policy,
    mounts: tuple[Mount, ...],
    language: str,
    facts: HostFacts,
    active: frozenset[str],
    compiled: str,
    library: Library,
) -> tuple[House, tuple[str, ...]]:
    """(the worker, the sources of its writable mounts in which metadata is protected)."""
    limits = policy.limits
    request = jailed_request(Request(code="", mounts=mounts), compiled, library)
    around = jail_plan.spec(jailed_policy(policy), request, facts, active)
    shape = replace(around.shape, memfd=True)  # the engine's; a guest has no such call
    counted = shape.watch is not None and shape.watch[2] > 0
    if shape.watch is not None and counted:
        every, memory, cpu = shape.watch
        shape = replace(shape, watch=(every, memory, cpu + _WORKER_START))
    ours = jail_plan.all_mounts(policy, Request(code="", mounts=mounts))
    # In the worker's own /tmp may be its interpreter, if that is installed below /tmp: a guest gets
    # another one, unless a file is mounted there for it.
    private = root.TMP if ours else PRIVATE
    preopens = [(root.WORK, root.WORK, True), (private, "/tmp", True)]
    for source, place, mode in ours:
        if os.path.isdir(source):
            preopens.append((place, place, mode == "rw"))
    house = House(
        outer=around.outer,
        shape=shape,
        argv=around.argv,
        language=language,
        guest=build.GUESTS[language],
        compiled=_GUEST,
        fuel=limits.fuel is not None,
        memory=limits.memory if "store_limits" in active else 0,
        preopens=tuple(preopens),
        reusable=not ours and not counted,
    )
    bare = protect.unprotected(policy, request)
    return house, tuple(source for source, _, mode in ours if mode == "rw" and source not in bare)


# For a run without mounts it depends on nothing that changes while we run.
_found_again = lru_cache(maxsize=64)(_house)

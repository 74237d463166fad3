"""What holds each policy field in the `wasm` backend, in words: the engine, and the jail around."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..linux import root
from ..policy import Policy
from ..types import Enforcement, Request
from . import jail_plan, jail_report
from .base import absent, best_effort, enforced, kept_by_host
from .wasm_plan import jailed_policy

if TYPE_CHECKING:
    from ..linux.probe import HostFacts


def enforcement(
    policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]
) -> dict[str, Enforcement]:
    """Every policy field, and what will hold it with these layers."""
    jail = jail_report.enforcement(jailed_policy(policy), request, facts, active)

    def also(field: str, first: str) -> Enforcement:
        """Held by the engine itself; and what the jail around the worker adds."""
        return enforced(f"{first}; around the worker: {jail[field].by}")

    report = {
        "timeout": _timeout(active),
        "memory": _memory(policy, jail["memory"], active),
        "cpus": jail["cpus"],
        "processes": also("processes", "WebAssembly has no processes and no threads"),
        "disk": jail["disk"],
        **kept_by_host(active),
        "open_files": jail["open_files"],
        "network": _network(policy, jail["network"]),
        "filesystem": _filesystem(policy, jail["filesystem"]),
        "mounts": _mounts(request, jail["mounts"]),
    }
    if policy.limits.fuel is not None:
        report["fuel"] = enforced("the engine counts instructions, equally every time")
    if policy.modules.active:
        report["modules"] = best_effort("import lint before the run; a lint, not a boundary")
    return report


def _timeout(active: frozenset[str]) -> Enforcement:
    kill = "the host's clock, then the kernel ends the worker's pid namespace"
    return enforced(
        f"an epoch deadline in the engine, behind it {kill}" if "epoch" in active else kill
    )


def _memory(policy: Policy, jail: Enforcement, active: frozenset[str]) -> Enforcement:
    if "store_limits" in active:
        own = f"the engine gives {policy.limits.memory} bytes beyond the interpreter's own, no more"
        return enforced(f"{own}; around the worker: {jail.by}")
    return Enforcement(state=jail.state, by=f"the jail around the worker: {jail.by}")


def _network(policy: Policy, jail: Enforcement) -> Enforcement:
    if policy.network.mode != "off":
        return absent("WebAssembly guests have no network; the jail has one")
    return enforced(f"WASI grants no address; around the worker: {jail.by}")


def _filesystem(policy: Policy, jail: Enforcement) -> Enforcement:
    files = policy.filesystem
    if lone := _lone_files((path, path) for path in (*files.read_only, *files.read_write)):
        return absent(f"{lone!r} is a file: WASI shows directories")
    return enforced(f"WASI opens nothing but the run's directories; around the worker: {jail.by}")


def _mounts(request: Request, jail: Enforcement) -> Enforcement:
    if not request.mounts or jail.state == "absent":
        return jail
    if lone := _lone_files((mount.src, mount.dst) for mount in request.mounts):
        return absent(
            f"{lone!r} is a file: WASI shows directories, and files below the work directory"
        )
    return enforced(f"WASI, one permission a mount; around the worker: {jail.by}")


def _lone_files(mounts: object) -> str:
    """The first file that would not be below a directory of the run's own."""
    for source, place in mounts:  # type: ignore[attr-defined]
        place = os.path.normpath(os.path.join(root.WORK, place))
        if not os.path.isdir(source) and not jail_plan.inside_any(place, (root.WORK, "/tmp")):
            return str(source)
    return ""

"""What holds each policy field on the rung `landlock`, in words: the enforcement report."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..policy import Isolation, Policy
from ..types import Enforcement, Request
from . import landlock_plan, process_plan
from .base import absent, best_effort, enforced, kept_by_host
from .jail_plan import inside_any
from .landlock_plan import SCOPED_SIGNALS_ABI, Children, children, counts_writes, shown_paths
from .layered import besides_limits, grouped_memory

if TYPE_CHECKING:
    from ..linux.probe import HostFacts


def enforcement(
    policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]
) -> dict[str, Enforcement]:
    """Every policy field, and what will hold it with these layers."""
    mode = children(policy, facts, active)
    report = {
        "timeout": _timeout(mode, facts, active),
        "memory": _memory(mode, policy, facts, active),
        "cpus": _cpus(mode, policy, facts, active),
        "processes": _processes(mode, policy, facts, active),
        "disk": _disk(mode, policy, active),
    }
    report |= kept_by_host(active)
    report["open_files"] = (
        enforced("RLIMIT_NOFILE") if "rlimits" in active else absent("rlimits are off")
    )
    report["network"] = process_plan._network(policy, active)
    report["filesystem"] = _filesystem(policy, request, facts, active)
    report["mounts"] = process_plan._mounts(policy, request, active)
    report |= besides_limits(
        policy, request, active, "no sockets, no memory files, no changed affinity"
    )
    return report


def _group_name(facts: HostFacts) -> str:
    return f"cgroup v{facts.cgroup.version}" if facts.cgroup is not None else "no cgroup"


def _timeout(mode: Children, facts: HostFacts, active: frozenset[str]) -> Enforcement:
    clock = "the host's clock, then"
    if mode == "one" and "seccomp" in active:
        return enforced(f"{clock} a kill of the one process")
    if "subreaper" not in active:
        return best_effort(f"{clock} the first process is killed; others may survive")
    if "landlock" not in active:
        return best_effort(f"{clock} a kill; without Landlock the program can signal us, too")
    if mode == "group":
        return enforced(f"{clock} {_group_name(facts)} stops forks and the subreaper kills all")
    return best_effort(f"{clock} the subreaper kills the tree until nothing is left")


def _memory(
    mode: Children, policy: Policy, facts: HostFacts, active: frozenset[str]
) -> Enforcement:
    if mode == "group" and facts.cgroup is not None:
        return grouped_memory(facts.cgroup, "the whole tree")
    also = ", and RLIMIT_DATA" if "rlimits" in active else ""
    if "watchdog" in active:
        counted = f"the supervisor counts it, sockets and pipes 50 times a second{also}"
        if policy.network.mode == "any":
            return best_effort(f"{counted}, but not how much sockets of an open network hold")
        if mode == "one" and "seccomp" in active:
            return enforced(counted)
        return best_effort(counted)
    if "rlimits" in active:
        return best_effort("RLIMIT_DATA, each process for itself")
    return absent("no cgroup, no rlimits, no watchdog")


def _cpus(mode: Children, policy: Policy, facts: HostFacts, active: frozenset[str]) -> Enforcement:
    cpus, cores = policy.limits.cpus, len(facts.cpus)
    if mode == "group":
        return enforced(f"{_group_name(facts)} cpu controller")
    if cpus >= cores:
        return enforced("this machine has no more cores than allowed")
    if "seccomp" not in active:
        return best_effort("affinity, which a program can change without seccomp")
    if cpus == int(cpus):
        return enforced(f"affinity to {int(cpus)} of {cores} cores")
    if "watchdog" not in active:
        return absent("no cgroup and no watchdog")
    ended = (
        f"affinity to {math.ceil(cpus)} of {cores} cores; the supervisor stops and continues the "
        f"run to hold the rate, and ends it at {cpus * policy.limits.timeout:g} seconds of "
        "processor time, or if it does not stay stopped"
    )
    return enforced(ended) if mode == "one" else best_effort(ended)


def _processes(
    mode: Children, policy: Policy, facts: HostFacts, active: frozenset[str]
) -> Enforcement:
    if mode == "group":
        return enforced(f"{_group_name(facts)} pids controller")
    if mode == "one" and "seccomp" in active:
        only = "one process: seccomp refuses to fork"
        if "watchdog" in active:
            most = policy.limits.processes
            return enforced(f"{only}; the supervisor ends it if it has more than {most} threads")
        return best_effort(f"{only}; nobody counts its threads")
    if mode == "watched" and "watchdog" in active:
        return best_effort("a watchdog counts the tree, 50 times a second")
    return absent("no cgroup, no seccomp that refuses to fork, no watchdog")


def _disk(mode: Children, policy: Policy, active: frozenset[str]) -> Enforcement:
    parts = [
        *(["RLIMIT_FSIZE for each file"] if "rlimits" in active else []),
        *(["a watchdog over the work directory"] if "watchdog" in active else []),
    ]
    if not parts:
        return absent("nothing counts it")
    if counts_writes(mode, policy) and {"watchdog", "seccomp"} <= active:
        return enforced(
            "the supervisor counts, 50 times a second, what the kernel says was written in all"
        )
    held = f"{' and '.join(parts)}; no quota"
    base = landlock_plan.work_base()
    demanding = not Isolation.PROCESS.at_least(policy.min_isolation)
    if demanding and mode == "one" and not landlock_plan.writes_are_counted(base):
        held = (
            f"{base} is in memory: set TMPDIR to a directory on a disk, where the kernel counts "
            f"what is written; {held}"
        )
    return best_effort(held)


def _filesystem(
    policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]
) -> Enforcement:
    files = policy.filesystem
    if "landlock" not in active:
        return process_plan._filesystem(policy, facts, active, None)
    if nested := process_plan._nested(files.read_only, files.read_write):
        return absent(f"{nested[0]!r} is read-only inside a writable path: needs namespaces")
    shown = shown_paths(policy, request)
    asked = (*files.read_only, *files.read_write, *(mount.src for mount in request.mounts))
    for path in asked:
        if inside_any("/proc", (os.path.realpath(path).rstrip("/"), path.rstrip("/"))):
            return absent(f"{path!r} holds /proc, where every process of the host is to be seen")
    for path in files.hidden:
        real = os.path.realpath(path)
        if any(real != top and inside_any(real, (os.path.realpath(top),)) for top in shown):
            return absent(f"{path!r} is inside of what is shown: hiding it needs namespaces")
    also = "" if "capabilities" in active or not facts.root else ", with all capabilities"
    landlock = f"Landlock ABI {facts.landlock_abi}"
    if "seccomp" in active:
        return enforced(f"{landlock}, and seccomp for modes, owners, times and attributes{also}")
    return best_effort(f"{landlock}, which does not hold modes, owners and times{also}")


def shortcomings(facts: HostFacts, user: tuple[int, int] | None) -> Iterator[str]:
    """What this host lacks, each with its consequence."""
    if facts.landlock_abi < SCOPED_SIGNALS_ABI:
        yield f"Landlock ABI {facts.landlock_abi}: a run is one process and its threads"
    elif facts.cgroup is None:
        yield "no writable cgroup: memory, processor time and processes are counted by a watchdog"
    if facts.root and user is None:
        yield "running as root: guests keep uid 0, without capabilities; set `user` to change that"

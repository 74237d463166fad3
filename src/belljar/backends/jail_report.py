"""What holds each policy field in a jail, in words: the enforcement report and the host's lacks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..linux import root
from ..policy import Policy
from ..types import Enforcement, Request
from . import protect
from .base import absent, best_effort, enforced, kept_by_host
from .jail_plan import disk_size, inode_count, inside_any
from .layered import besides_limits, grouped_memory

if TYPE_CHECKING:
    from ..linux.probe import HostFacts


def enforcement(
    policy: Policy, request: Request, facts: HostFacts, active: frozenset[str]
) -> dict[str, Enforcement]:
    """Every policy field, and what will hold it with these layers."""
    report = dict(_limits(policy, facts, active))
    report["network"] = _network(policy, facts, active)
    report["filesystem"] = _filesystem(policy, facts, active)
    report["mounts"] = _mounts(policy, request)
    report |= besides_limits(
        policy, request, active, "no sockets, no memory files, no changed affinity"
    )
    return report


def _limits(
    policy: Policy, facts: HostFacts, active: frozenset[str]
) -> Iterator[tuple[str, Enforcement]]:
    group = f"cgroup v{facts.cgroup.version}" if facts.cgroup and "cgroup" in active else ""
    limits = policy.limits
    cpus = limits.cpus
    yield "timeout", enforced("the host's clock; the kernel ends the whole pid namespace")

    if group and facts.cgroup is not None:
        yield "memory", grouped_memory(facts.cgroup, "the whole tree and its files")
    elif "watchdog" in active and "seccomp" in active:
        extra = ", RLIMIT_DATA for each process" if "rlimits" in active else ""
        counted = "the slot counts the tree, its files, sockets and pipes 50 times a second"
        if policy.network.mode == "any":
            yield "memory", best_effort(f"{counted}, but not how much an open network's hold")
        elif "namespaces" not in active:
            yield "memory", best_effort(f"{counted}, but not descriptors that are sent away")
        else:
            yield "memory", enforced(f"{counted}{extra}")
    elif "watchdog" in active:
        yield "memory", best_effort("the slot counts the tree, but not memfd, open without seccomp")
    elif "rlimits" in active:
        yield "memory", best_effort("RLIMIT_DATA, each process for itself")
    else:
        yield "memory", absent("no cgroup, no rlimits, no watchdog")

    if group:
        yield "cpus", enforced(f"{group} cpu controller")
    elif cpus >= len(facts.cpus):
        yield "cpus", enforced("this machine has no more cores than allowed")
    elif "seccomp" not in active:
        yield "cpus", best_effort("affinity, which a program can change without seccomp")
    elif cpus == int(cpus):
        yield "cpus", enforced(f"affinity to {int(cpus)} of {len(facts.cpus)} cores")
    elif "watchdog" in active:
        yield (
            "cpus",
            enforced(
                f"affinity to {math.ceil(cpus)} of {len(facts.cpus)} cores; the slot stops and "
                f"continues the run to hold the rate, and ends it at {cpus * limits.timeout:g} "
                "seconds of processor time, or if it does not stay stopped"
            ),
        )
    else:
        yield "cpus", absent("no cgroup and no watchdog")

    if group:
        also = ", RLIMIT_NPROC behind it" if "rlimits" in active else ""
        yield "processes", enforced(f"{group} pids controller{also}")
    elif "rlimits" in active and "namespaces" in active:
        yield "processes", enforced("RLIMIT_NPROC in a user namespace of the run's own")
    else:
        yield "processes", absent("no cgroup and no RLIMIT_NPROC in a user namespace")

    yield "disk", _disk(policy, active)
    yield from kept_by_host(active).items()
    yield (
        "open_files",
        enforced("RLIMIT_NOFILE") if "rlimits" in active else absent("rlimits are off"),
    )


def _disk(policy: Policy, active: frozenset[str]) -> Enforcement:
    size = disk_size(policy)
    if size > policy.limits.memory:
        return absent(
            f"the work directory is in memory, and {policy.limits.memory} bytes of memory cannot "
            f"hold {size} bytes of disk"
        )
    mounts = "; a writable mount is the host's, RLIMIT_FSIZE holds each file in it"
    return enforced(
        f"a memory file system of {size} bytes and {inode_count(size)} inodes for all it writes"
        f"{mounts if 'rlimits' in active else ''}"
    )


def _network(policy: Policy, facts: HostFacts, active: frozenset[str]) -> Enforcement:
    match policy.network.mode:
        case "any":
            return enforced("open, as the policy asks")
        case "hosts":
            return absent("a list of hosts needs the proxy, which is not built yet")
    families = ", seccomp for the other socket families" if "seccomp" in active else ""
    if "namespaces" in active:
        return enforced(f"an empty network namespace, for one run at a time{families}")
    if "seccomp" in active:
        return enforced("seccomp refuses every socket but AF_UNIX pairs")
    return absent("no network namespace and no seccomp")


def _filesystem(policy: Policy, facts: HostFacts, active: frozenset[str]) -> Enforcement:
    parts = [
        *(["a root of its own"] if "pivot_root" in active else []),
        *([f"Landlock ABI {facts.landlock_abi}"] if "landlock" in active else []),
        *(["no capabilities"] if "capabilities" in active else []),
        *protect.given_up(policy),
    ]
    for path in policy.filesystem.read_write if policy.filesystem.protect else ():
        if found := protect.links(os.path.realpath(path)):
            return absent(f"{found[0]!r} in {path!r} is a link, which cannot be protected")
    if "pivot_root" in active:
        return enforced(", ".join(parts))
    return best_effort(", ".join((*parts, "the host's tree is in sight")))


def _mounts(policy: Policy, request: Request) -> Enforcement:
    if not request.mounts:
        return enforced("none asked for")
    for mount in request.mounts:
        if mount.dst.split("/")[1:2] in (["proc"], ["dev"], ["sys"]):
            return absent(f"{mount.dst!r} is not a place to mount on")
        place = os.path.normpath(os.path.join(root.WORK, mount.dst))
        if inside_any(root.RUN, (place,)) or place in (root.WORK, root.TMP, root.SHM):
            return absent(f"{mount.dst!r} is the run's own directory, and not a place to mount on")
    for mount in request.mounts:
        if mount.mode == "rw" and mount.protect and (found := protect.links(mount.src)):
            return absent(f"{found[0]!r} in {mount.src!r} is a link, which cannot be protected")
    return enforced(f"bind mounts in the jail's own root; {protect.promise(policy, request)}")


def shortcomings(facts: HostFacts) -> Iterator[str]:
    """What this host lacks, each with its consequence."""
    if not facts.landlock_abi:
        yield "no Landlock: one layer less"
    if facts.cgroup is None:
        yield "no writable cgroup: memory and processor time are counted by init"

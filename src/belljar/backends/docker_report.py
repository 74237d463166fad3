"""What holds each policy field in a container, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ..linux.cgroup import SOCKETS_PART
from ..policy import Policy
from ..types import Enforcement, Request
from ..units import human_size
from . import protect
from .base import absent, best_effort, enforced, kept_by_host
from .docker_facts import EngineFacts
from .docker_plan import all_mounts, not_writable, objection, scratch
from .jail_plan import disk_size
from .layered import besides_limits


def enforcement(
    policy: Policy,
    request: Request,
    facts: EngineFacts,
    active: frozenset[str],
    *,
    gvisor: bool,
    user: str | None = None,
) -> dict[str, Enforcement]:
    """Every policy field, and what will hold it with these layers."""
    report = dict(_limits(policy, facts, active, gvisor))
    mounts = bool(all_mounts(policy, request))
    problem = objection(policy, request, facts) if mounts else ""
    if mounts and not problem and "user" in active:
        problem = not_writable(policy, request, facts, user, gvisor=gvisor)
    report["network"] = _network(policy, facts, active, gvisor, mounts)
    report["filesystem"] = _filesystem(policy, facts, active, gvisor, problem)
    report["mounts"] = _mounts(request, policy, problem)
    report |= besides_limits(
        policy, request, active, "no sockets, no memory files, no changed affinity"
    )
    return report


def _limits(
    policy: Policy, facts: EngineFacts, active: frozenset[str], gvisor: bool
) -> Iterator[tuple[str, Enforcement]]:
    group = f"cgroup v{facts.cgroup_version}" if "cgroup" in active else ""
    none = absent(
        "rootless without delegated control groups: the engine would only warn"
        if facts.rootless
        else "the engine has no control groups to limit it with"
        if not (facts.memory and facts.pids and facts.cpu)
        else "control groups are off"
    )
    whole = ", the whole sandbox with its kernel" if gvisor else ", all processes and their files"
    swap = ", no swap" if facts.swap else ""
    yield "timeout", enforced("the host's clock; then pid 1 kills all, or the engine the container")
    by = f"{group} memory controller of the container{whole}{swap}"
    yield "memory", _memory(policy, facts, active, by, gvisor) if group else none
    if group or policy.limits.cpus >= facts.cores:
        by = f"{group} cpu controller" if group else "this machine has no more cores than allowed"
        yield "cpus", enforced(by)
    else:
        yield "cpus", none
    yield "processes", _processes(policy, group, none, gvisor)
    yield "disk", _disk(policy, active, gvisor)
    yield from kept_by_host(active).items()
    yield (
        "open_files",
        enforced("RLIMIT_NOFILE") if "rlimits" in active else absent("rlimits are off"),
    )


def _memory(
    policy: Policy, facts: EngineFacts, active: frozenset[str], by: str, gvisor: bool
) -> Enforcement:
    if gvisor:
        return enforced(by)
    if "seccomp" not in active:
        return best_effort(f"{by}; but without seccomp nothing counts huge pages of the host's")
    if facts.cgroup_version == 2:
        return enforced(by)
    if facts.sockets_counted:
        return enforced(f"{by}; buffers of TCP and UDP sockets: 1/{SOCKETS_PART} of it besides")
    if policy.network.mode == "any":
        return best_effort(f"{by}; but nothing counts the buffers of TCP and UDP sockets")
    return enforced(f"{by}; no TCP or UDP sockets, whose buffers nothing would count")


def _processes(policy: Policy, group: str, none: Enforcement, gvisor: bool) -> Enforcement:
    if not group:
        return none
    if not gvisor:
        return enforced(f"{group} pids controller")
    if "processes" in policy.explicit:
        return absent("gVisor does not count a guest's processes, and a limit crashes its kernel")
    return best_effort("by memory only: gVisor does not count a guest's processes")


def _disk(policy: Policy, active: frozenset[str], gvisor: bool) -> Enforcement:
    size = disk_size(policy)
    if size > policy.limits.memory:
        return absent(
            f"the work directory is in memory, and {policy.limits.memory} bytes of memory cannot "
            f"hold {size} bytes of disk"
        )
    places = ", ".join(f"{place} {human_size(each)}" for place, each in scratch(size))
    by = f"memory file systems of limited size: {places}"
    if "read_only_root" not in active:
        return absent(f"{by}; but the root is writable")
    if "rlimits" in active:
        by += "; a writable mount is the host's, RLIMIT_FSIZE holds each file in it"
    return enforced(by)


def _network(
    policy: Policy, facts: EngineFacts, active: frozenset[str], gvisor: bool, mounts: bool
) -> Enforcement:
    if "network" not in active:
        return absent("the host's network is open")
    match policy.network.mode:
        case "any" if gvisor:
            return absent("the sandbox's runtime may have no network; not offered with gVisor")
        case "any":
            if not facts.bridge:
                return absent("the engine has no bridge network")
            return enforced("open, as the policy asks, over the engine's bridge")
        case "hosts":
            return absent("a list of hosts needs the proxy, which is not built yet")
    by = "a network namespace with nothing but a loopback"
    if gvisor:
        return enforced(by)
    if "seccomp" not in active:
        reached = "; but without seccomp sockets in mounts can be connected to"
        return best_effort(f"{by}{reached}") if mounts else enforced(by)
    named = " and for sockets with a name in a mount" if mounts else ""
    return enforced(f"{by}, seccomp for other socket families{named}")


def _filesystem(
    policy: Policy, facts: EngineFacts, active: frozenset[str], gvisor: bool, problem: str
) -> Enforcement:
    if problem and (policy.filesystem.read_only or policy.filesystem.read_write):
        return absent(problem)
    parts = [
        "gVisor, a kernel of its own" if gvisor else "the image as a root of its own",
        *(["read-only"] if "read_only_root" in active else []),
        *(["no capabilities", "no new privileges"] if "capabilities" in active else []),
        *(["a user of the run's own"] if "user" in active else ["as root"]),
        *(["our seccomp profile"] if "seccomp" in active else []),
        *_of_the_engine(facts, gvisor),
        *protect.given_up(policy),
    ]
    return enforced(", ".join(parts))


def _of_the_engine(facts: EngineFacts, gvisor: bool) -> Iterator[str]:
    """What the engine adds by itself, where it is set up so."""
    if facts.remapped or facts.rootless:
        yield "user ids that the host does not know (a user namespace of the engine's)"
    if facts.apparmor and not gvisor:
        yield "the engine's AppArmor profile"
    if facts.selinux and not gvisor:
        yield "SELinux labels"


def _mounts(request: Request, policy: Policy, problem: str) -> Enforcement:
    if not request.mounts:
        return enforced("none asked for")
    if problem:
        return absent(problem)
    return enforced(f"bind mounts of the engine's; {protect.promise(policy, request)}")


def shortcomings(facts: EngineFacts, gvisor: bool) -> Iterator[str]:
    """What this engine lacks, each with its consequence."""
    if not facts.seccomp and not gvisor:
        yield "no seccomp: one layer less"
    if not facts.swap and facts.memory:
        yield "no swap accounting: a guest may use the host's swap beyond its memory"
    if not facts.bridge:
        yield "no bridge network: network=any is refused"
    if gvisor:
        yield "processes are bounded by memory only; a request that sets them is refused"

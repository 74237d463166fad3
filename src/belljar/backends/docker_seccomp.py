"""The jail's system call policy in the words of an OCI engine: made from the same data.

An engine's profile is a list of rules; a call that matches none is answered ENOSYS, as if the
kernel were older. A rule's conditions can say "equal under a mask" but not "none of these", so what
must not be is written as everything else: a handful of masks that together cover the rest.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from ..linux import seccomp, seccomp_jail, syscall_table

_MACHINES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_LOW = 0xFFFF_FFFF  # the kernel reads these arguments as 32 bits, whatever is above them
_NODES = (0, 0o010000, 0o100000, 0o140000)  # plain, fifo, regular, socket: no devices


_CONDITIONED = frozenset({*seccomp_jail.CONDITIONED, *seccomp.ONLY_ITSELF, "fcntl", "mmap",
                          "memfd_create"})  # fmt: skip
_FAMILIES = {
    "unix": (seccomp_jail.AF_UNIX,), "inet": (seccomp_jail.AF_INET, seccomp_jail.AF_INET6),
}  # fmt: skip


@cache
def profile(
    machine: str, strict: bool = False, families: tuple[str, ...] = ("unix", "inet")
) -> str:
    """The JSON that `seccomp=` takes, for an engine on `machine`.

    `families` are the sockets that a program may open, "unix" and "inet"; pairs it always may, but
    without "unix" only those that stay connected. The strict one has no sockets, no memory that is
    a file's, and no change of affinity.
    """
    jail = seccomp_jail
    closed = [*jail.CLOSED, *(name for name in jail.SETUP if name != "clone3")]
    closed += ["memfd_create", "sched_setaffinity"] if strict else []
    conditioned = _CONDITIONED - set(closed)
    special = {*conditioned, *closed, "clone3", "openat2"}
    plain = [name for name in jail.ALLOWED if name not in special]
    known = set(syscall_table.numbers(machine))
    unknown = sorted(known - set(plain) - set(closed) - conditioned)
    opened = () if strict else tuple(each for name in families for each in _FAMILIES[name])
    rules = [
        _rule(plain, "SCMP_ACT_ALLOW"),
        _rule(closed, "SCMP_ACT_ERRNO", error=errno.EPERM),
        # Named one by one: engines before 23 do not know `defaultErrnoRet`.
        _rule(unknown, "SCMP_ACT_ERRNO", error=errno.ENOSYS),
        *_unless_bits("clone", 0, jail.NAMESPACES | jail.CLONE_PARENT),
        *_families("socket", opened),
        *_pairs(any_kind=jail.AF_UNIX in opened),
        *_unless("ioctl", 1, jail.TERMINAL_INPUT, errno.EPERM),
        *_unless("fcntl", 1, seccomp.REFUSED_FCNTLS, errno.EPERM),
        *_maps(shared=not strict),
    ]
    if not strict:
        rules += _unless_bits("memfd_create", 1, seccomp.MFD_HUGETLB, errno.EINVAL)
    for name, arguments in seccomp.ONLY_ITSELF.items():
        if name in conditioned:
            rules += _zero(name, arguments)
    for name, argument in seccomp.MODES.items():
        rules += _unless_bits(name, argument, seccomp.SET_ID)
    for name, argument in seccomp.NODES.items():
        rules += [_rule([name], "SCMP_ACT_ALLOW", _masked(argument, 0o176000, n)) for n in _NODES]
    document: dict[str, Any] = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": [_MACHINES[machine]],
        "syscalls": rules,
    }
    return json.dumps(document, separators=(",", ":"))


def _rule(
    names: Iterable[str], action: str, *conditions: dict[str, Any], error: int | None = None
) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": list(names), "action": action}
    if error is not None:
        rule["errnoRet"] = error
    return rule | {"args": list(conditions)}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _unless_bits(
    name: str, index: int, bits: int, error: int = errno.EPERM
) -> list[dict[str, Any]]:
    """Allowed if none of `bits` is set in the argument, `error` if one is."""
    rules = [_rule([name], "SCMP_ACT_ALLOW", _masked(index, bits, 0))]
    for bit in (1 << place for place in range(32) if bits >> place & 1):
        condition = _masked(index, bit, bit)
        rules.append(_rule([name], "SCMP_ACT_ERRNO", condition, error=error))
    return rules


def _unless(name: str, index: int, values: tuple[int, ...], error: int) -> list[dict[str, Any]]:
    """Allowed but for `values`, which are answered `error`."""
    rules = [
        _rule([name], "SCMP_ACT_ALLOW", _masked(index, mask, value))
        for mask, value in everything_but(values)
    ]
    for value in values:
        condition = _masked(index, _LOW, value)
        rules.append(_rule([name], "SCMP_ACT_ERRNO", condition, error=error))
    return rules


def _families(name: str, families: tuple[int, ...]) -> list[dict[str, Any]]:
    rules = [_rule([name], "SCMP_ACT_ALLOW", _masked(0, _LOW, family)) for family in families]
    for mask, value in everything_but(families):
        condition = _masked(0, mask, value)
        rules.append(_rule([name], "SCMP_ACT_ERRNO", condition, error=errno.EAFNOSUPPORT))
    return rules


def _pairs(*, any_kind: bool) -> list[dict[str, Any]]:
    """socketpair for AF_UNIX; unless `any_kind`, as `seccomp.connected_pairs`."""
    rules = _families("socketpair", (seccomp_jail.AF_UNIX,))
    if any_kind:
        return rules
    family, mask = _masked(0, _LOW, seccomp_jail.AF_UNIX), seccomp.SOCK_TYPE_MASK
    for kind in range(mask + 1):
        conditions = (family, _masked(1, mask, kind))
        if kind in seccomp.CONNECTED_PAIRS:
            rules.append(_rule(["socketpair"], "SCMP_ACT_ALLOW", *conditions))
        else:
            error = errno.EPROTONOSUPPORT
            rules.append(_rule(["socketpair"], "SCMP_ACT_ERRNO", *conditions, error=error))
    return rules[1:]  # without the one that allows the family whatever the kind


def _zero(name: str, arguments: tuple[int, ...]) -> list[dict[str, Any]]:
    """Allowed if all of these arguments are 0, EPERM if one is not."""
    allowed = _rule([name], "SCMP_ACT_ALLOW", *(_masked(each, _LOW, 0) for each in arguments))
    refused = [
        _rule([name], "SCMP_ACT_ERRNO", _masked(each, mask, value), error=errno.EPERM)
        for each in arguments
        for mask, value in everything_but((0,))
    ]
    return [allowed, *refused]


def _maps(*, shared: bool) -> list[dict[str, Any]]:
    """mmap without huge pages, and unless `shared` without anonymous memory that is shared, which
    no process would be seen to have."""
    huge, anonymous, kinds, sharing = seccomp.MAP_HUGETLB, 0x20, 0xF, (1, 3)
    rules = [_rule(["mmap"], "SCMP_ACT_ERRNO", _masked(3, huge, huge), error=errno.ENOMEM)]
    if shared:
        return [*rules, _rule(["mmap"], "SCMP_ACT_ALLOW", _masked(3, huge, 0))]
    rules.append(_rule(["mmap"], "SCMP_ACT_ALLOW", _masked(3, huge | anonymous, 0)))
    for kind in range(kinds + 1):
        condition = _masked(3, huge | anonymous | kinds, anonymous | kind)
        if kind in sharing:
            rules.append(_rule(["mmap"], "SCMP_ACT_ERRNO", condition, error=errno.EPERM))
        else:
            rules.append(_rule(["mmap"], "SCMP_ACT_ALLOW", condition))
    return rules


def everything_but(values: tuple[int, ...]) -> list[tuple[int, int]]:
    """(mask, value) pairs that match every 32-bit number except `values`, each number once."""
    found: list[tuple[int, int]] = []

    def below(prefix: int, bits: int) -> None:
        """All numbers that start with the top `bits` bits of `prefix`."""
        mask = _LOW ^ (_LOW >> bits)
        inside = [value for value in values if value & mask == prefix]
        if not inside:
            found.append((mask, prefix))
        elif bits < 32:
            below(prefix, bits + 1)
            below(prefix | 1 << (31 - bits), bits + 1)

    below(0, 0)
    return found

"""The system call policy of the `landlock` backend: the jail's, and what no namespace holds here.

The zygote carries the jail's BASE filter (`seccomp_jail.py`: an allow list, unknown calls ENOSYS),
and every run inherits it. `delta` is put on each guest on top of it. It closes what Landlock does
not hold and what the jail leaves to its namespaces and mounts:

    modes                   asked of the supervisor, which changes those of what the guest may write
                            (`modes.py`); without it they do nothing and report success
    owners, times           do nothing and report success: Landlock would let an owner change them
    extended attributes     EOPNOTSUPP, reading too: Landlock does not ask for a path here
    inotify                 ENOSYS in BASE: it would tell the names in directories that cannot be
                            listed, and a user has few instances
    pipes                   of the size they are made with: a user has few pages for them
    sockets                 AF_UNIX never (a path reaches any daemon), others if the policy opens
                            the network; pairs of connected ones always
    other processes         their limits, priority, cores, leases and signals by descriptor: EPERM
    shared memory           without a cgroup nobody counts memfd (EPERM), and shared anonymous maps:
                            closed (EPERM) where memory is to be enforced by counting
    sockets' memory         without a cgroup buffers stay as they are, and no descriptors are sent
                            (EPERM), which would hide what they hold
    huge pages              never: no cgroup's memory limit counts them
    preallocation           EOPNOTSUPP: it fills a disk faster than anybody looks
    fork                    EAGAIN where a run is one process; threads stay
    ioctl                   a list of harmless ones, ENOTTY for the rest
"""

from __future__ import annotations

import errno

from . import seccomp_jail as jail
from . import syscalls
from .seccomp import DESCRIPTOR_SENDERS, METADATA, REFUSED_FCNTLS, _op, connected_pairs
from .seccomp_jail import _ALLOW, _EPERM, _RETURN, _argument, _one_of, _words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .seccomp_jail import Action

XATTRS = _words("""
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr getxattr lgetxattr fgetxattr
    listxattr llistxattr flistxattr
""")
MODES = ("chmod", "fchmod", "fchmodat", "fchmodat2")
OWNERS_TIMES = tuple(name for name in METADATA if "xattr" not in name and name not in MODES)
CONNECTIONS = ("bind", "connect", "listen", "accept", "accept4")
# F_SETOWN and F_SETOWN_EX send signals to others.
_FCNTLS = (8, 15, *REFUSED_FCNTLS)
# TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2, FICLONE and
# FICLONERANGE.
_IOCTLS = (
    0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C_542A, 0x4004_9409, 0x4020_940D,
)  # fmt: skip
# Names, addresses and numbers of interfaces, to read.
_NETWORK_IOCTLS = (0x8910, 0x8912, 0x8913, 0x8915, 0x891B, 0x8921, 0x8927, 0x8933, 0x8942)
_CLONE_THREAD = 0x0001_0000
_EAGAIN = 0x0005_0000 | errno.EAGAIN
_EOPNOTSUPP = 0x0005_0000 | errno.EOPNOTSUPP
_ENOTTY = 0x0005_0000 | errno.ENOTTY
_STOP = 0x7FC0_0000  # SECCOMP_RET_USER_NOTIF: weaker than any error of another filter's


def delta(
    families: Iterable[int],
    *,
    children: bool,
    counted: bool,
    affinity: bool,
    truncate: bool,
    machine: str = syscalls.MACHINE,
) -> bytes:
    """What a guest loses on top of `seccomp_jail.base`.

    `families` are all it may open sockets of; without `children` it stays one process; `counted`
    says that a cgroup counts its memory; without `affinity` it stays on the cores it was given;
    without `truncate` that call is closed, which Landlock holds only from its third version on.
    Modes are the business of `modes`.
    """
    families = tuple(families)
    actions: dict[str, Action] = dict.fromkeys(jail.SETUP, _EPERM)
    actions["clone3"] = jail._ENOSYS  # its flags are out of sight; the C library tries clone next
    actions["openat2"] = jail._ENOSYS  # base leaves it to the supervisor
    actions["clone"] = _clone(children)
    if not children:
        actions |= {"fork": _EAGAIN, "vfork": _EAGAIN}
    actions |= dict.fromkeys(OWNERS_TIMES, jail._SUCCESS)
    actions |= dict.fromkeys(XATTRS, _EOPNOTSUPP)
    actions["fallocate"] = _EOPNOTSUPP
    actions["fcntl"] = _one_of(1, _FCNTLS, then=_EPERM, otherwise=_ALLOW)
    ioctls = (*_IOCTLS, *(_NETWORK_IOCTLS if families else ()))
    actions["ioctl"] = _one_of(1, ioctls, then=_ALLOW, otherwise=_ENOTTY)
    actions["socket"] = _one_of(0, families, then=_ALLOW, otherwise=jail._EAFNOSUPPORT)
    actions["socketpair"] = tuple(connected_pairs())
    actions["setsockopt"] = jail.socket_options(counted=counted)
    if not families:
        actions |= dict.fromkeys(CONNECTIONS, _EPERM)
    actions |= jail.only_itself()
    if not affinity:
        actions["sched_setaffinity"] = _EPERM
    actions["mmap"] = jail.maps(shared=counted or children)
    actions["memfd_create"] = jail.memory_files() if counted else _EPERM
    if not (counted or families):
        actions |= dict.fromkeys(DESCRIPTOR_SENDERS, _EPERM)
    if not truncate:
        actions["truncate"] = _EPERM
    return jail._search(actions, _ALLOW, machine)


def modes(*, stopped: bool, machine: str = syscalls.MACHINE) -> bytes:
    """For the calls that change a mode: wait for an answer if `stopped`, do nothing otherwise."""
    action = _STOP if stopped else jail._SUCCESS
    return jail._search(dict.fromkeys(MODES, action), _ALLOW, machine)


def signals_to_itself(pid: int, *, machine: str = syscalls.MACHINE) -> bytes:
    """For one process without children, where Landlock does not scope signals: before ABI 6."""
    own = _one_of(0, (pid,), then=_ALLOW, otherwise=_EPERM)
    names = ("tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open")
    actions: dict[str, Action] = dict.fromkeys(names, own)
    # 0 is its process group, in which it is alone: it is the leader of a session of its own.
    actions["kill"] = _one_of(0, (pid, 0), then=_ALLOW, otherwise=_EPERM)
    actions["tkill"] = _EPERM
    return jail._search(actions, _ALLOW, machine)


def _clone(children: bool) -> tuple[bytes, ...]:
    head = (_argument(0), _op(jail._ANY_BIT, jail.NAMESPACES, 0, 1), _op(_RETURN, _EPERM))
    if children:
        return (*head, _op(_RETURN, _ALLOW))
    return (
        *head,
        _op(jail._ANY_BIT, _CLONE_THREAD, 0, 1),
        _op(_RETURN, _ALLOW),
        _op(_RETURN, _EAGAIN),
    )

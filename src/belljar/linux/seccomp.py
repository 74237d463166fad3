"""A small assembler for seccomp filters, and the filter that `subprocess` puts on its guests.

The table below is the policy: it can be read without reading the assembler. Calls that are not
named stay allowed: this is the `process` rung, whose boundary is not the system call surface.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from . import syscalls

TYPE_CHECKING = False  # as `typing` has it, without its import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# name: (x86_64, aarch64). None where the architecture has no such call.
_TABLE: Mapping[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "chmod": (90, None),
    "chown": (92, None), "chroot": (161, 51),
    "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435), "creat": (85, None),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "fcntl": (72, 25),
    "file_setattr": (469, 469), "finit_module": (313, 273), "fremovexattr": (199, 16),
    "fsconfig": (431, 431), "fsetxattr": (190, 7), "fsmount": (432, 432), "fsopen": (430, 430),
    "fspick": (433, 433), "futimesat": (261, None),
    "init_module": (175, 105), "inotify_add_watch": (254, 27), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "inotify_rm_watch": (255, 28), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioctl": (16, 29),
    "ioperm": (173, None), "iopl": (172, None),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "lchown": (94, None), "lremovexattr": (198, 15), "lsetxattr": (189, 6),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mknod": (133, None), "mknodat": (259, 33),
    "mmap": (9, 222), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "move_pages": (279, 239), "mq_open": (240, 180),
    "msgctl": (71, 187), "msgget": (68, 186), "msgrcv": (70, 188), "msgsnd": (69, 189),
    "name_to_handle_at": (303, 264), "open": (2, None), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "open_tree_attr": (467, 467), "openat": (257, 56),
    "openat2": (437, 437), "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142),
    "removexattr": (197, 14), "removexattrat": (466, 466), "request_key": (249, 218),
    "sched_setaffinity": (203, 122), "semctl": (66, 191), "semget": (64, 190), "semop": (65, 193),
    "semtimedop": (220, 192), "sendmmsg": (307, 269), "sendmsg": (46, 211), "setns": (308, 268),
    "setpriority": (141, 140), "setsockopt": (54, 208),
    "settimeofday": (164, 170), "setxattr": (188, 5), "setxattrat": (463, 463),
    "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194),
    "socket": (41, 198), "socketpair": (53, 199), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "truncate": (76, 45), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, None), "utimensat": (280, 88),
    "utimes": (235, None),
}  # fmt: skip

# Nothing that a program of ours needs; each has been a way out of, or around, a sandbox.
DENIED = (
    "acct", "add_key", "bpf", "chroot", "clock_settime", "delete_module", "fanotify_init",
    "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "memfd_secret", "migrate_pages", "mount",
    "mount_setattr", "move_mount", "move_pages", "name_to_handle_at", "open_by_handle_at",
    "open_tree", "open_tree_attr", "perf_event_open", "pidfd_getfd", "pivot_root",
    "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace", "quotactl", "quotactl_fd",
    "reboot", "request_key", "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount2",
    "unshare", "userfaultfd",
)  # fmt: skip
# Answered as if the kernel were older: callers have a fallback for that.
ABSENT = (
    "clone3", "inotify_add_watch", "inotify_init", "inotify_init1", "inotify_rm_watch",
    "io_uring_enter", "io_uring_register", "io_uring_setup", "openat2",
)  # fmt: skip

# Which arguments must be 0, "the caller" and "a process", because a filter knows no pids: otherwise
# a guest limits, slows down or moves a process of ours that shares its user and ends its run.
ONLY_ITSELF = {"prlimit64": (0,), "sched_setaffinity": (0,), "setpriority": (0, 1)}

# Calls that give a file its mode, and which argument that is: no file of a guest's is ever set-id,
# because in a writable mount it would run as its owner for whoever executes it on the host.
MODES = {
    "chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "open": 2, "openat": 3, "creat": 1,
}  # fmt: skip
NODES = {"mknod": 1, "mknodat": 2}
SET_ID = 0o6000

# Closed or ignored only where nothing else holds what they do.
# Memory that no process maps: only a memory cgroup counts it.
UNCOUNTED_MEMORY = ("memfd_create", "shmget")
# System V and POSIX queues, semaphores and segments: held by an ipc namespace of one's own.
SHARED_IPC = (
    "mq_open", "msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop",
    "shmat", "shmctl", "shmget",
)  # fmt: skip
# Landlock does not hold these; read-only mounts do. Programs copy modes and times all the time.
METADATA = (
    "chmod", "chown", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "file_setattr",
    "fremovexattr", "fsetxattr", "futimesat", "lchown", "lremovexattr", "lsetxattr", "removexattr",
    "removexattrat", "setxattr", "setxattrat", "utime", "utimensat", "utimes",
)  # fmt: skip

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
_NAMESPACE_FLAGS = 0x7E02_0080
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# FS_IOC_SETFLAGS, its 32-bit form, FS_IOC_SETVERSION, FS_IOC_FSSETXATTR.
_METADATA_IOCTLS = (0x4008_6602, 0x4004_6602, 0x4008_7602, 0x401C_5820)
# fcntl's F_SETLEASE: a lease outlives its owner by as long as that takes to end, and keeps us from
# reading the file. F_NOTIFY: inotify's ancestor. F_SETPIPE_SZ: the pages of all pipes of a user
# together are limited, and with it 64 pipes use them up.
REFUSED_FCNTLS = (1024, 1026, 1031)
# Pages of the host's pool of huge ones are counted by no limit of memory.
MAP_HUGETLB, MFD_HUGETLB, _SHM_HUGETLB = 0x4_0000, 4, 0o4000
# Descriptors on their way are out of a watchdog's sight.
DESCRIPTOR_SENDERS = ("sendmsg", "sendmmsg")
_SOL_SOCKET, _SO_LINGER, _SO_SNDBUF, _SO_RCVBUF = 1, 13, 7, 8
# The kinds of socket pairs whose ends cannot be turned to another address. `SOCK_TYPE_MASK` leaves
# the kind of an argument that may have flags.
CONNECTED_PAIRS, SOCK_TYPE_MASK = (1, 5), 0xF  # SOCK_STREAM, SOCK_SEQPACKET

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000
_PR_SET_SECCOMP = 22
_LISTENER, _KILLABLE_ONLY = 1 << 3, 1 << 5


def supported() -> bool:
    """Whether there is a table for this machine. Without one no filter is built, ever."""
    return syscalls.MACHINE in _ARCH


def guest_filter(
    socket_families: Iterable[int],
    *,
    closed: Iterable[str] = (),
    ignored: Iterable[str] = (),
    machine: str = "",
) -> bytes:
    """The filter program for one guest: `socket_families` are all it may open sockets of.

    `closed` names more calls to refuse; those of `ignored` do nothing and report success.
    """
    machine = machine or syscalls.MACHINE
    refuse, ignored = _ERRNO | errno.EPERM, tuple(ignored)
    socket_families = tuple(socket_families)
    rules: dict[str, list[bytes]] = {
        name: [*_must_be_zero(arguments), _op(_RETURN, _ALLOW)]
        for name, arguments in ONLY_ITSELF.items()
    }
    rules |= {
        name: [
            _argument(at),
            _op(_ANY_BIT, SET_ID, 0, 1),
            _op(_RETURN, refuse),
            _op(_RETURN, _ALLOW),
        ]
        for name, at in (MODES | NODES).items()
    }
    rules |= {name: [_op(_RETURN, refuse)] for name in (*DENIED, *closed)}
    rules |= {name: [_op(_RETURN, _ERRNO | errno.ENOSYS)] for name in ABSENT}
    rules |= {name: [_op(_RETURN, _ERRNO)] for name in ignored}
    rules["clone"] = [
        _argument(0),
        _op(_ANY_BIT, _NAMESPACE_FLAGS & ~0x80, 0, 1),  # 0x80 in clone is part of the exit signal
        _op(_RETURN, refuse),
        _op(_RETURN, _ALLOW),
    ]
    ioctls = (_TIOCSTI, _TIOCLINUX, *(_METADATA_IOCTLS if "fchmod" in ignored else ()))
    rules["ioctl"] = _one_of(1, ioctls, then=refuse, otherwise=_ALLOW)
    # Where nothing counts such memory, nothing counts socket buffers and what they carry either.
    counted = "memfd_create" not in rules
    rules["fcntl"] = _one_of(1, REFUSED_FCNTLS, then=refuse, otherwise=_ALLOW)
    # Huge pages of the pool are counted by no memory controller: answered as without a pool.
    for name, argument, flag, error in (
        ("mmap", 3, MAP_HUGETLB, errno.ENOMEM),
        ("memfd_create", 1, MFD_HUGETLB, errno.EINVAL),
        ("shmget", 2, _SHM_HUGETLB, errno.ENOMEM),
    ):
        without = [_op(_ANY_BIT, flag, 0, 1), _op(_RETURN, _ERRNO | error), _op(_RETURN, _ALLOW)]
        rules.setdefault(name, [_argument(argument), *without])
    if not (counted or socket_families):
        rules |= {name: [_op(_RETURN, refuse)] for name in DESCRIPTOR_SENDERS}
    rules["socket"] = _one_of(
        0, socket_families, then=_ALLOW, otherwise=_ERRNO | errno.EAFNOSUPPORT
    )
    # Whoever closes such a connection last waits, and that could be us (syscalls.py says how).
    # Larger buffers: asking succeeds without effect, as at the kernel's own maximum.
    sizes = () if counted else (_SO_SNDBUF, _SO_RCVBUF)
    rules["setsockopt"] = [
        _argument(1),
        _op(_EQUAL, _SOL_SOCKET, 1, 0),
        _op(_RETURN, _ALLOW),
        _argument(2),
        *[_op(_EQUAL, _SO_LINGER, 0, 1), _op(_RETURN, refuse)],
        *(step for size in sizes for step in (_op(_EQUAL, size, 0, 1), _op(_RETURN, _ERRNO))),
        _op(_RETURN, _ALLOW),
    ]
    rules["socketpair"] = connected_pairs()
    return _assemble(rules, machine)


def _assemble(rules: Mapping[str, list[bytes]], machine: str) -> bytes:
    column = ("x86_64", "aarch64").index(machine)
    program = [
        _op(_LOAD, 4),  # struct seccomp_data: nr 0, arch 4, arguments from 16
        _op(_EQUAL, _ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, 0),
    ]
    if machine == "x86_64":
        program += [_op(_AT_LEAST, _X32_BIT, 0, 1), _op(_RETURN, _KILL)]
    for name, body in sorted(rules.items()):
        number = _TABLE[name][column]
        if number is not None:
            program += [_op(_EQUAL, number, 0, len(body)), *body]
    program.append(_op(_RETURN, _ALLOW))
    return b"".join(program)


def connected_pairs() -> list[bytes]:
    """socketpair for AF_UNIX pairs that stay connected to each other.

    An end of a datagram pair can still send, and connect, to any name: of a daemon in a mount, or
    an abstract one. An end of the others answers EISCONN, or ignores the address.
    """
    body = [_argument(0), _op(_EQUAL, AF_UNIX, 1, 0), _op(_RETURN, _ERRNO | errno.EAFNOSUPPORT)]
    body += [_argument(1), _op(_AND, SOCK_TYPE_MASK)]
    for kind in CONNECTED_PAIRS:
        body += [_op(_EQUAL, kind, 0, 1), _op(_RETURN, _ALLOW)]
    return [*body, _op(_RETURN, _ERRNO | errno.EPROTONOSUPPORT)]


def _op(code: int, operand: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, operand)


def _argument(index: int) -> bytes:
    return _op(_LOAD, 16 + 8 * index)


def _one_of(index: int, values: Iterable[int], *, then: int, otherwise: int) -> list[bytes]:
    body = [_argument(index)]
    for value in values:
        body += [_op(_EQUAL, value, 0, 1), _op(_RETURN, then)]
    return [*body, _op(_RETURN, otherwise)]


def _must_be_zero(arguments: Iterable[int]) -> list[bytes]:
    """EPERM unless all these arguments are 0; then the next instruction decides."""
    body = []
    for index in arguments:
        body += [_argument(index), _op(_EQUAL, 0, 1, 0), _op(_RETURN, _ERRNO | errno.EPERM)]
    return body


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def add(program: bytes) -> None:
    """The same, from where our own filter is on: that one closes the call `seccomp`."""
    wrapped = _Program(len(program) // 8, program)
    syscalls.prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(wrapped))


def install(program: bytes) -> None:
    """Put `program` on this thread and all its children. Needs no_new_privs."""
    wrapped = _Program(len(program) // 8, program)
    syscalls.call("seccomp", 1, 0, ctypes.byref(wrapped))


def install_listener(program: bytes) -> int:
    """The same with a program that stops calls: a descriptor that takes and answers them.

    A signal with a handler does not interrupt a call that was taken, where the kernel can (5.19).
    """
    wrapped = _Program(len(program) // 8, program)
    try:
        return syscalls.call("seccomp", 1, _LISTENER | _KILLABLE_ONLY, ctypes.byref(wrapped))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return syscalls.call("seccomp", 1, _LISTENER, ctypes.byref(wrapped))

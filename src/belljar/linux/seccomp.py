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
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "chroot": (161, 51),
    "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None), "iopl": (172, None),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "move_pages": (279, 239), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218), "setns": (308, 268),
    "settimeofday": (164, 170), "socket": (41, 198), "socketpair": (53, 199), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282),
}  # fmt: skip

# Nothing that a program of ours needs; each has been a way out of, or around, a sandbox.
DENIED = (
    "acct", "add_key", "bpf", "chroot", "clock_settime", "delete_module", "fanotify_init",
    "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "memfd_secret", "migrate_pages", "mount",
    "mount_setattr", "move_mount", "move_pages", "name_to_handle_at", "open_by_handle_at",
    "open_tree", "perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise",
    "process_vm_readv", "process_vm_writev", "ptrace", "quotactl", "reboot", "request_key",
    "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount2", "unshare", "userfaultfd",
)  # fmt: skip
# Answered as if the kernel were older: callers have a fallback for that.
ABSENT = ("clone3", "io_uring_enter", "io_uring_register", "io_uring_setup")

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
_NAMESPACE_FLAGS = 0x7E02_0080
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000


def supported() -> bool:
    """Whether there is a table for this machine. Without one no filter is built, ever."""
    return syscalls.MACHINE in _ARCH


def guest_filter(socket_families: Iterable[int], *, memfd: bool, machine: str = "") -> bytes:
    """The filter program for one guest: `socket_families` are all it may open sockets of.

    `memfd=False` also closes memfd_create, whose pages only a memory cgroup would count.
    """
    machine = machine or syscalls.MACHINE
    refuse = _ERRNO | errno.EPERM
    rules: dict[str, list[bytes]] = {name: [_op(_RETURN, refuse)] for name in DENIED}
    rules |= {name: [_op(_RETURN, _ERRNO | errno.ENOSYS)] for name in ABSENT}
    if not memfd:
        rules["memfd_create"] = [_op(_RETURN, refuse)]
    rules["clone"] = [
        _argument(0),
        _op(_ANY_BIT, _NAMESPACE_FLAGS & ~0x80, 0, 1),  # 0x80 in clone is part of the exit signal
        _op(_RETURN, refuse),
        _op(_RETURN, _ALLOW),
    ]
    rules["ioctl"] = _one_of(1, (_TIOCSTI, _TIOCLINUX), then=refuse, otherwise=_ALLOW)
    rules["socket"] = _one_of(
        0, socket_families, then=_ALLOW, otherwise=_ERRNO | errno.EAFNOSUPPORT
    )
    rules["socketpair"] = _one_of(0, (AF_UNIX,), then=_ALLOW, otherwise=_ERRNO | errno.EAFNOSUPPORT)
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


def _op(code: int, operand: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, operand)


def _argument(index: int) -> bytes:
    return _op(_LOAD, 16 + 8 * index)


def _one_of(index: int, values: Iterable[int], *, then: int, otherwise: int) -> list[bytes]:
    body = [_argument(index)]
    for value in values:
        body += [_op(_EQUAL, value, 0, 1), _op(_RETURN, then)]
    return [*body, _op(_RETURN, otherwise)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(program: bytes) -> None:
    """Put `program` on this thread and all its children. Needs no_new_privs."""
    buffer = ctypes.create_string_buffer(program, len(program))
    wrapped = _Program(len(program) // 8, ctypes.addressof(buffer))
    syscalls.call("seccomp", 1, 0, ctypes.byref(wrapped))

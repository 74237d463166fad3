"""The few system calls that Python has no name for, by ctypes. Errors are OSError."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import struct

from .bare import socket

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
# Said once: a jail's set-up is a hundred such calls, and its guest pays for every page it touches.
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)

# The kernel's; the tables are not for a 32-bit interpreter on it, whose numbers are others.
MACHINE = os.uname().machine + ("" if struct.calcsize("P") == 8 else " (32-bit interpreter)")
NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317, "rt_sigaction": 13},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277, "rt_sigaction": 134},
}.get(MACHINE, {})
# These came late enough to have one number everywhere.
NUMBERS |= {
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "close_range": 436,
    "mount_setattr": 442,
    "move_mount": 429,
    "open_tree": 428,
    "openat2": 437,
}

CLONE_VM = 0x0000_0100
CLONE_FILES = 0x0000_0400
CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MOUNT_ATTR_IDMAP = 0x0010_0000

_SO_PASSRIGHTS = 83

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def call(name: str, *args: object) -> int:
    """A raw system call by name; an architecture without a table is an error, never a guess."""
    if name not in NUMBERS:
        raise OSError(38, f"{name}: no system call table for {MACHINE}")
    return _check(_libc.syscall(NUMBERS[name], *args), name)


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def prctl(option: int, argument: int = 0, second: int = 0) -> None:
    if _libc.prctl(option, argument, second, 0, 0) < 0:
        _check(-1, f"prctl({option})")


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    _check(
        _libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data)),
        f"mount {kind or source} on {target}",
    )


def umount(target: str) -> None:
    """Take a mount and all below it out of this mount namespace."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


class Stack:
    """A little memory for `clone_waiting` to stand on; keep it as long as that process lives."""

    _SIZE = 64 << 10

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(self._SIZE)

    @property
    def top(self) -> int:
        return (ctypes.addressof(self._memory) + self._SIZE) & ~0xFF


def clone_waiting(stack: Stack, flags: int) -> int:
    """A child that shares our memory and calls the C library's `pause`, for ever; its pid.

    `flags` are what else it shares, and the signal of its end. Block every signal first: it has our
    handlers, and they would run in our memory.
    """
    wait = ctypes.cast(_libc.pause, ctypes.c_void_p)
    top = ctypes.c_void_p(stack.top)
    return _check(_libc.clone(wait, top, ctypes.c_int(CLONE_VM | flags), None), "clone")


def refuse_descriptors(end: socket.socket) -> None:
    """Let nobody send descriptors to this end of a pair, where the kernel can (6.16).

    Whoever reads a message drops those that came with it, which can take as long as their sender
    likes: a connection that lingers. Filters refuse that option too, for kernels that cannot.
    """
    try:
        end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise


def reset_library_signals() -> None:
    """Give the two signals that the C library keeps for itself their default action.

    Its posix_spawn leaves them ignored in the new process, and its sigaction refuses both.
    """
    if "rt_sigaction" in NUMBERS:
        for number in (32, 33):
            default = ctypes.c_char_p(bytes(32))
            call("rt_sigaction", ctypes.c_int(number), default, None, ctypes.c_size_t(8))


def high(fd: int) -> int:
    """A copy of `fd` that is out of the way of the first few."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(64, most // 2))


def current_cpu() -> int:
    """The processor that we run on, at this moment."""
    return _check(_libc.sched_getcpu(), "sched_getcpu")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def pivot_root(new: str, old: str) -> None:
    call("pivot_root", ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def mount_setattr(
    target: str,
    attributes: int,
    *,
    clear: int = 0,
    recursive: bool = True,
    userns: int = 0,
    fd: int = -100,
) -> None:
    """Add `attributes` to a mount (and to those below it) and take `clear` away from it.

    `userns` is for MOUNT_ATTR_IDMAP.
    """
    wanted = _MountAttr(attributes, clear, 0, userns)
    flags = (0x8000 if recursive else 0) | (0 if target else 0x1000)
    call(
        "mount_setattr",
        ctypes.c_int(fd),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(flags),
        ctypes.byref(wanted),
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )


def detached_tree(path: str, fd: int = -100) -> int:
    """A copy of the mounts at `path`, or at `fd`, that is attached nowhere yet; a descriptor."""
    # AT_RECURSIVE, OPEN_TREE_CLONE, and AT_EMPTY_PATH
    flags = ctypes.c_uint(0x8000 | 1 | os.O_CLOEXEC | (0 if path else 0x1000))
    return call("open_tree", ctypes.c_int(fd), ctypes.c_char_p(os.fsencode(path)), flags)


def attach_tree(tree: int, path: str, fd: int = -100) -> None:
    """Mount it at `path`, or at `fd`."""
    empty, target = ctypes.c_char_p(b""), ctypes.c_char_p(os.fsencode(path))
    flags = ctypes.c_uint(4 | (0 if path else 0x40))  # both descriptors may be without a path
    call("move_mount", ctypes.c_int(tree), empty, ctypes.c_int(fd), target, flags)


def gather_pages(start: int, size: int) -> bool:
    """Put memory of ours into huge pages now; False where the kernel cannot, or will not."""
    collapse = 25  # MADV_COLLAPSE, since Linux 6.1
    place, length = ctypes.c_void_p(start), ctypes.c_size_t(size)
    return bool(_libc.madvise(place, length, ctypes.c_int(collapse)) == 0)


def map_in_place_of(memory: memoryview, fd: int) -> None:
    """Map the file `fd`, privately, where `memory`, whole pages of a mapping of ours, is."""
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    failed = ctypes.c_void_p(-1).value
    rights, flags = ctypes.c_int(1 | 2), ctypes.c_int(2 | 0x10)  # MAP_PRIVATE | MAP_FIXED
    size, at = ctypes.c_size_t(len(memory)), ctypes.c_long(0)
    if _libc.mmap(ctypes.c_void_p(place), size, rights, flags, ctypes.c_int(fd), at) == failed:
        _check(-1, "mmap")


def trim_heap() -> None:
    """Give freed memory back to the kernel, where the C library can (musl cannot)."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(ctypes.c_size_t(0))


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    call("close_range", ctypes.c_uint(first), ctypes.c_uint(0xFFFF_FFFF), ctypes.c_uint(0))


def sethostname(name: str) -> None:
    raw = name.encode()
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


_NO_CAPABILITIES = struct.pack("=Ii", 0x2008_0522, 0), bytes(24)  # the header, and three sets twice


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def drop_capabilities(last: int | None = None) -> None:
    """Empty every capability set of this thread, for good: an exec does not bring any back.

    `last` is what `last_capability` said, for where it cannot be asked any more.
    """
    last = last_capability() if last is None else last
    try:
        for capability in range(last + 1):
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except PermissionError:
                # It takes CAP_SETPCAP, also where the set is empty already (--cap-drop ALL).
                if _libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) != 0:
                    raise
    except PermissionError:
        # Without CAP_SETPCAP there is nothing to lower: an ordinary user's sets are empty already,
        # and no_new_privs keeps an exec from filling them out of the bounding set.
        if os.geteuid() == 0:
            raise
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    call("capset", *_NO_CAPABILITIES)


def no_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)

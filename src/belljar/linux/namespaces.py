"""Namespaces of one's own, and the few mounts that make a process see only itself."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from . import no_links, syscalls
from .bare import socket
from .footprint import LARGEST_TCP_BUFFER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# What a guest sees as its own user and group, whoever runs Belljar.
GUEST_ID = 1000
_LIMITS = syscalls.MS_NOSUID | syscalls.MS_NODEV
_SIOCSIFFLAGS, _IFF_UP, _AF_INET, _SOCK_DGRAM = 0x8914, 1, 2, 2


def enter(*, network: bool) -> None:
    """Put this process into new user, ipc and uts namespaces and its children into a new pid one.

    `network` adds an empty network namespace with a working loopback.
    """
    flags = syscalls.CLONE_NEWPID | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    own_user(flags | (syscalls.CLONE_NEWNET if network else 0))
    syscalls.sethostname("belljar")
    if network:
        loopback_up()
        try:
            bound_buffers()
        except OSError as error:
            # Containers have /proc/sys read-only, or none: then a connection may have more beside
            # the limit, some 70 KB instead of 20.
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT):
                raise


def own_user(also: int = 0) -> None:
    """Put this process into a new user namespace, where it is GUEST_ID and nobody else exists.

    `also` are the flags of other namespaces to enter with it.
    """
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER | also)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{GUEST_ID} {uid} 1"),
        ("gid_map", f"{GUEST_ID} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def loopback_up() -> None:
    """Switch 127.0.0.1 on in this network namespace."""

    sock = socket.socket(_AF_INET, _SOCK_DGRAM)
    try:
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    finally:
        sock.close()


# Smallest, first and largest buffer of a TCP socket. A group's limit of socket buffers is passed by
# what the kernel grants a connection in any case: one segment, of at most the first window.
_TCP_BUFFERS = b"4096 16384 %d" % LARGEST_TCP_BUFFER


def bound_buffers() -> None:
    """Keep TCP sockets of this network namespace, which must be the run's own, to small buffers.

    Needs a /proc with /proc/sys. A namespace inherits the host's, which are of many megabytes.
    """
    for name in ("tcp_rmem", "tcp_wmem"):
        fd = os.open(f"/proc/sys/net/ipv4/{name}", os.O_WRONLY)
        try:
            os.write(fd, _TCP_BUFFERS)
        finally:
            os.close(fd)


def own_mounts() -> None:
    """A private mount namespace: nothing mounted from here on is seen outside, or the other way."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def mount_proc() -> None:
    """A /proc that lists only this pid namespace. Must be called by a member of it."""
    syscalls.mount("proc", "/proc", "proc", _LIMITS | syscalls.MS_NOEXEC)


def hide(path: str) -> None:
    """Cover a directory with an empty one, or a file with nothing, read-only."""
    if os.path.isdir(path):
        flags = _LIMITS | syscalls.MS_RDONLY
        syscalls.mount("tmpfs", path, "tmpfs", flags, "size=4k,mode=555")
    elif os.path.exists(path):
        syscalls.mount("/dev/null", path, None, syscalls.MS_BIND)


def freeze(path: str) -> None:
    """Make a path read-only wherever it is: Landlock alone would give it its parent's rights."""
    if not os.path.exists(path):
        return
    syscalls.mount(path, path, None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.mount_setattr(path, syscalls.MOUNT_ATTR_RDONLY)


def read_only_except(writable: list[str], freeze: list[str]) -> None:
    """Make every mount read-only but `writable`; the paths of `freeze` inside those stay closed.

    Landlock does not hold modes, owners, times and extended attributes, nor, before ABI 3,
    truncation: with them a program could spoil, or open, every file of its user. A read-only mount
    holds all of them.
    """
    rules = {os.path.realpath(path): True for path in writable if os.path.exists(path)}
    rules |= {os.path.realpath(path): False for path in freeze if os.path.exists(path)}
    for path in sorted(rules):
        syscalls.mount(path, path, None, syscalls.MS_BIND | syscalls.MS_REC)
    read_only = syscalls.MOUNT_ATTR_RDONLY
    syscalls.mount_setattr("/", read_only)
    for path in sorted(rules):  # parents first: the nearest rule has the last word
        if not rules[path]:
            syscalls.mount_setattr(path, read_only)
            continue
        for recursive in (True, False):
            try:
                syscalls.mount_setattr(path, 0, clear=read_only, recursive=recursive)
            except PermissionError:  # something there was read-only before, and stays so
                continue
            break


def memory_directory(path: str, size: int) -> None:
    """A private directory in memory, at most `size` bytes."""
    syscalls.mount("tmpfs", path, "tmpfs", _LIMITS, f"size={size},nr_inodes=4096,mode=1777")


def private_tmp(target: str, private: str, keep: list[str], resolved: Iterable[str] = ()) -> None:
    """Show `private` at `target` (say /tmp); the paths of `keep` below it stay where they are.

    Those that are in `resolved`, too, must lead through no link (`no_links.py`).
    """
    bind = syscalls.MS_BIND | syscalls.MS_REC
    inside = sorted(path for path in keep if path.startswith(target + "/") and os.path.exists(path))
    handles = [
        (path, no_links.open_path(path) if path in resolved else os.open(path, os.O_PATH))
        for path in inside
    ]
    for path in inside:
        place = os.path.join(private, os.path.relpath(path, target))
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
    syscalls.mount(private, target, None, bind)
    for path, handle in handles:
        syscalls.mount(f"/proc/self/fd/{handle}", path, None, bind)
        os.close(handle)

"""How single cases run without a sandbox, where the plain way could not show anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How a case runs unsandboxed. `why` says what the plain arm could not show.

    `privileged` is root, in mount, host name, IPC, network and pid namespaces of its own.
    """

    why: str = ""
    privileged: bool = False
    inprocess: bool = False
    prelude: str = ""
    planted: str = ""
    file_size: int = 1 << 30


# A pool that hands out a slot again without wiping it.
_RECYCLED_PAGES = """
import mmap as _mmap
_fresh = _mmap.mmap
class _Recycled(_fresh):
    def __new__(cls, *a):
        pages = _fresh.__new__(cls, *a)
        pages[:16] = b'another tenant..'
        return pages
_mmap.mmap = _Recycled
"""

ARMS: dict[str, Arm] = {
    "me-010-pipe-buffers": Arm(
        why="the kernel itself bounds the pipes of an unprivileged user; it makes only pipes",
        privileged=True,
    ),
    "pr-011-raise-rlimits": Arm(
        why="only a privileged process can raise a hard limit; it raises only its own",
        privileged=True,
    ),
    **dict.fromkeys(
        (
            "fs-017-open-by-handle-shocker",
            "fs-018-chroot-classic",
            "ke-006-chroot",
            "ke-017-perf-event-open",
            "ke-022-kexec",
            "ke-025-sethostname-same",
            "ke-035-capset-setuid",
            "ne-007-icmp-raw",
        ),
        Arm(
            why="the kernel asks for a capability first; it acts on namespaces of its own or, as "
            "kexec, has arguments that cannot succeed",
            privileged=True,
        ),
    ),
    "rf-005-sparse-1TiB": Arm(why="the hole must be allowed its size", file_size=2 << 40),
    "rv-005-repr-raises-baseexception": Arm(
        why="it harms a host that formats the guest's objects itself", inprocess=True
    ),
    "se-005-metadata-files": Arm(
        why="this host has no such file: one is planted in a private mount namespace",
        planted="/run/secrets",
    ),
    "se-011-uninitialised-memory": Arm(
        why="Linux wipes pages: a pool that does not is played by the mmap module",
        prelude=_RECYCLED_PAGES,
    ),
}

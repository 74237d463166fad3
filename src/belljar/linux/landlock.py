"""Landlock: which paths a process may read and write, from now on and for all its children."""

from __future__ import annotations

import ctypes
import os
import stat

from . import no_links, syscalls

TYPE_CHECKING = False  # as `typing` has it, without its import
if TYPE_CHECKING:
    from collections.abc import Iterable

# Access bits, linux/landlock.h. Each ABI version added to the set that can be restricted.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_READ = EXECUTE | READ_FILE | READ_DIR
_FILE_ONLY = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("access", ctypes.c_uint64), ("fd", ctypes.c_int32))


def abi() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    try:
        return syscalls.call("landlock_create_ruleset", None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def restrict(
    read_only: Iterable[str],
    read_write: Iterable[str],
    devices: Iterable[str],
    *,
    resolved: Iterable[str] = (),
) -> None:
    """Confine this thread to these paths. Signals and abstract sockets too, where the kernel can.

    A path that does not exist is left out: there is nothing there to grant. One of `resolved` in
    which a name is a symbolic link is an error (`no_links.py`). Needs no_new_privs.
    """
    version = abi()
    everything = _ALL_BY_ABI.get(version, (1 << 16) - 1)
    scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attributes = _RulesetAttr(everything, 0, scope)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = syscalls.call(
        "landlock_create_ruleset", ctypes.byref(attributes), ctypes.c_size_t(size), 0
    )
    fixed = frozenset(resolved)
    try:
        for paths, access in (
            (read_only, _READ),
            (read_write, everything & ~(MAKE_CHAR | MAKE_BLOCK)),
            (devices, READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV),
        ):
            for path in paths:
                try:
                    _allow(ruleset, path, access & everything, path in fixed)
                except FileNotFoundError:
                    continue
        syscalls.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def build(
    read_only: Iterable[str],
    read_write: Iterable[str],
    devices: Iterable[str],
    *,
    close_network: bool,
    resolved: Iterable[str] = (),
) -> int:
    """A ruleset as `restrict` would enforce, for later: `enforce` takes the descriptor.

    `close_network` also refuses TCP, where the kernel can.
    """
    version = abi()
    everything = _ALL_BY_ABI.get(version, (1 << 16) - 1)
    scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attributes = _RulesetAttr(everything, 3 if close_network and version >= 4 else 0, scope)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = syscalls.call(
        "landlock_create_ruleset", ctypes.byref(attributes), ctypes.c_size_t(size), 0
    )
    fixed = frozenset(resolved)
    for paths, access in (
        (read_only, _READ),
        (read_write, everything & ~(MAKE_CHAR | MAKE_BLOCK)),
        (devices, READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV),
    ):
        for path in paths:
            _allow(ruleset, path, access & everything, path in fixed)
    return ruleset


def enforce(ruleset: int) -> None:
    """Confine this thread to a ruleset that `build` made. Needs no_new_privs."""
    syscalls.call("landlock_restrict_self", ruleset, 0)


def _allow(ruleset: int, path: str, access: int, resolved: bool) -> None:
    fd = no_links.open_path(path) if resolved else os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _FILE_ONLY
        rule = _PathAttr(access, fd)
        syscalls.call("landlock_add_rule", ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(fd)

"""How single cases run without a sandbox, where the plain way could not show anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How a case runs unsandboxed. `why` says what the plain arm could not show.

    `privileged` is root, in mount, host name, IPC, network and pid namespaces of its own.
    `planted` is a directory, and `shadowed` a file of the kernel's that anybody may write, also
    where this kernel has none; both are in a mount namespace of its own.
    """

    why: str = ""
    privileged: bool = False
    inprocess: bool = False
    prelude: str = ""
    planted: str = ""
    shadowed: str = ""
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

# Somebody answers at the address that nobody has.
_TEST_NETWORK = """
import fcntl as _fcntl, socket as _socket, struct as _struct
with _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM) as _control:
    _address = _struct.pack('16sHH4s8x', b'lo:1', _socket.AF_INET, 0, bytes((192, 0, 2, 1)))
    _fcntl.ioctl(_control, 0x8916, _address)
    _fcntl.ioctl(_control, 0x8914, _struct.pack('16sH14x', b'lo', 1))
_server = _socket.create_server(('192.0.2.1', 80))
"""
# A system log, and an interpreter, that belong to the guest's user.
_LOG = """
import socket as _socket
_log = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
_log.bind('/dev/log')
"""
_OWN_INTERPRETER = """
import os as _os, shutil as _shutil, sys as _sys
_sys.executable = _shutil.copy(_sys.executable, _os.path.abspath('interpreter'))
"""
# A bridge to a JavaScript that has a process object, as an embedder's would.
_BRIDGE = """
import subprocess as _subprocess, sys as _sys, types as _types
def _function(body):
    words = ['node', '-p', '(function(){%s})()' % body]
    return lambda: _subprocess.run(words, capture_output=True, text=True).stdout.strip()
_sys.modules['js'] = _types.SimpleNamespace(Object=_types.SimpleNamespace(constructor=_function))
"""
# A user namespace that has no map yet.
_UNMAPPED = """
import ctypes as _ctypes
assert _ctypes.CDLL(None).unshare(0x10000000) == 0
"""
# A compiler that goes as deep as it is told, and takes the process down.
_NO_DEPTH = """
import ast as _ast, sys as _sys
def eval(text):
    _sys.setrecursionlimit(10**9)
    at = dict(lineno=1, col_offset=0, end_lineno=1, end_col_offset=1)
    node = _ast.Constant(int(text[-1]), **at)
    for _ in text[:-1]: node = _ast.UnaryOp(_ast.USub(), node, **at)
    compile(_ast.Expression(node), 'bomb', 'eval')
"""

ARMS: dict[str, Arm] = {
    "cp-010-compile-bomb": Arm(
        why="this parser counts its depth: one that does not is played by the compiler behind it",
        prelude=_NO_DEPTH,
    ),
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
    **dict.fromkeys(
        ("ne-001-testnet-tcp", "ne-022-empty-allowlist"),
        Arm(
            why="nobody has that address: somebody does in a network namespace of its own",
            privileged=True,
            prelude=_TEST_NETWORK,
        ),
    ),
    **{
        case: Arm(why="only root may write it: a copy for everybody stands there", shadowed=path)
        for case, path in (
            ("ps-001-core-pattern", "/proc/sys/kernel/core_pattern"),
            ("ps-002-modprobe-path", "/proc/sys/kernel/modprobe"),
            ("ps-005-overcommit", "/proc/sys/vm/overcommit_memory"),
            ("ps-006-ip-forward", "/proc/sys/net/ipv4/ip_forward"),
            ("ps-011-cgroup-raise-own", "/sys/fs/cgroup/memory.max"),
        )
    },
    "di-010-log-flood": Arm(
        why="this host may have no system log: one is planted in a private mount namespace",
        planted="/dev/shm",
        prelude=_LOG,
    ),
    "ps-015-uid-map": Arm(
        why="a map can be written once: a user namespace that has none yet",
        privileged=True,
        prelude=_UNMAPPED,
    ),
    "pj-032-pyodide-js-bridge": Arm(
        why="this interpreter has no such bridge: one to Node", prelude=_BRIDGE
    ),
    "fs-022-proc-self-exe-overwrite": Arm(
        why="the interpreter is root's: a copy of it is the guest's own", prelude=_OWN_INTERPRETER
    ),
}

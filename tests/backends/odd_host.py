"""A host with one peculiarity, for real: runs a program on each backend there and tells JSON.

Started by test_odd_hosts. `python odd_host.py PECULIARITY BACKEND...`; each backend's answer is
what `probe` says, and the program's value or what went wrong.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import struct
import sys
from typing import Any

from belljar.backends import registry
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BelljarError
from belljar.linux import namespaces, probe, seccomp, syscalls
from belljar.types import Request

_SYS_ADMIN = 21
PROGRAM = """
ignored = 0
try:
    with open('/proc/self/status') as file:
        ignored = next(int(line.split()[1], 16) for line in file if line.startswith('SigIgn'))
except OSError:
    pass  # it is not shown
f'ignored: {ignored:x}' if ignored >> 31 & 3 else 42
"""


def umask() -> None:
    os.umask(0o077)


def umask_027() -> None:
    os.umask(0o027)


def masked_proc() -> None:
    """As in a pod: something lies over parts of /proc, so that no new one may be mounted."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    with open("/proc/self/mounts") as file:
        mounts = [line.split()[1:3] for line in file]
    for path, kind in mounts:
        if kind == "proc" and path != "/proc":
            syscalls.umount(path)
    syscalls.mount("/dev/null", "/proc/timer_list", None, syscalls.MS_BIND)
    syscalls.prctl(syscalls.PR_CAPBSET_DROP, _SYS_ADMIN)
    left = capabilities("CapPrm") & ~(1 << _SYS_ADMIN)
    low, high = left & 0xFFFF_FFFF, left >> 32
    sets = struct.pack("=6I", low, low, 0, high, high, 0)
    syscalls.call("capset", struct.pack("=Ii", 0x2008_0522, 0), sets)
    if os.fork() == 0:  # the control arm
        try:
            namespaces.enter(network=False)
            namespaces.own_mounts()
            if os.fork() == 0:
                try:
                    namespaces.mount_proc()
                except PermissionError:
                    os._exit(0)
                os._exit(1)
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        finally:
            os._exit(2)
    assert os.wait()[1] == 0, "a /proc can be mounted here: this host is not what is tested"


def closed_after_probing() -> None:
    """Namespaces are refused, and what was found out says that they are not."""
    probe.facts()
    syscalls.no_new_privileges()
    refused = [seccomp._op(seccomp._RETURN, seccomp._ERRNO | errno.EPERM)]
    rules = dict.fromkeys(seccomp.DENIED, refused)
    seccomp.install(seccomp._assemble(rules, syscalls.MACHINE))


def library_signals() -> None:
    """As posix_spawn of the C library leaves those two that it keeps for itself."""
    for number in (32, 33):
        ignore = ctypes.c_char_p(struct.pack("QQQQ", 1, 0, 0, 0))
        syscalls.call("rt_sigaction", ctypes.c_int(number), ignore, None, ctypes.c_size_t(8))


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def little_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def no_proc() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.umount("/proc")


def no_capabilities() -> None:
    syscalls.drop_capabilities()
    assert not any(map(capabilities, ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")))


def capabilities(which: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith(which))


def ask(name: str) -> list[Any]:
    with Engine(Settings(), backends={name: registry.load(name)}) as engine:
        try:
            found = engine.backend(name).probe()
            result = engine.run(Request(code=PROGRAM), backend=name)
        except BelljarError as error:
            return [error.code != "backend_unavailable", error.code, error.message]
        return [found.available, result.value]


def main() -> None:
    globals()[sys.argv[1]]()
    answers = {name: ask(name) for name in sys.argv[2:]}
    with Engine(Settings()) as engine:
        try:
            result = engine.run(Request(code=PROGRAM))
            answers["auto"] = [result.backend, result.value, list(result.warnings)]
        except BelljarError as error:
            answers["auto"] = [None, error.code, [str(error)]]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

"""The filter as a program: run here, instruction by instruction, and by the kernel."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import fresh
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.linux import seccomp, syscalls

MACHINES = ("x86_64", "aarch64")
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
_DEFINED = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
STREAM, DGRAM, RAW, SEQPACKET = 1, 2, 3, 5
CLOEXEC, NONBLOCK = 0o2000000, 0o4000
SOL_SOCKET, SO_LINGER = 1, 13


def decide(program: bytes, nr: int, *args: int, arch: int) -> int:
    """What the kernel would answer: classic BPF over struct seccomp_data, little endian."""
    data = struct.pack("<IIQ6Q", nr & 0xFFFFFFFF, arch, 0, *(args + (0,) * 6)[:6])
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        operation, on_true, on_false, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                at += on_true if accumulator == operand else on_false
            case 0x35:
                at += on_true if accumulator >= operand else on_false
            case 0x45:
                at += on_true if accumulator & operand else on_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")


def number(name: str, machine: str) -> int | None:
    return seccomp._TABLE[name][MACHINES.index(machine)]


def answer(
    name: str, *args: int, machine: str = "x86_64", families: tuple[int, ...] = (), **more: object
) -> int:
    program = seccomp.guest_filter(families, machine=machine, **more)  # type: ignore[arg-type]
    nr = number(name, machine)
    assert nr is not None
    return decide(program, nr, *args, arch=ARCH[machine])


def named(machine: str, names: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if number(name, machine) is not None)


# -- the table


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    known = {name: int(nr) for name, nr in re.findall(_DEFINED, text)}
    # Headers of this age end here; what came later has one number everywhere.
    newest = max(nr for name, nr in known.items() if name != "syscalls") - 1
    for name in seccomp._TABLE:
        nr = number(name, machine)
        if nr is not None and nr > newest:
            assert seccomp._TABLE[name][0] == seccomp._TABLE[name][1]
            continue
        assert known.get(name) == nr, name


@pytest.mark.parametrize("name", ["pivot_root", "capset", "seccomp"])
def test_our_own_calls_have_the_right_numbers(name: str) -> None:
    header = HEADERS.get(syscalls.MACHINE, Path("/nonexistent"))
    if not header.exists():
        pytest.skip("no headers for this machine")
    found = re.search(rf"#define __NR_{name}\s+(\d+)", header.read_text())
    assert found and int(found[1]) == syscalls.NUMBERS[name]


def test_no_two_names_share_a_number() -> None:
    for column in (0, 1):
        numbers = [pair[column] for pair in seccomp._TABLE.values() if pair[column] is not None]
        assert len(numbers) == len(set(numbers))


def test_every_name_of_the_table_is_used_and_every_name_used_is_in_it() -> None:
    used = {
        *seccomp.DENIED, *seccomp.ABSENT, *seccomp.UNCOUNTED_MEMORY, *seccomp.SHARED_IPC,
        *seccomp.METADATA, *seccomp.MODES, *seccomp.NODES, *seccomp.ONLY_ITSELF,
        *seccomp.DESCRIPTOR_SENDERS, "clone", "fcntl", "ioctl", "mmap", "setsockopt", "socket",
        "socketpair", "truncate",
    }  # fmt: skip
    assert used == set(seccomp._TABLE)


# -- the program


@pytest.mark.parametrize("machine", MACHINES)
def test_no_quota_of_the_user_can_be_used_up_and_no_uncounted_page_be_had(machine: str) -> None:
    for name in named(machine, ("inotify_init", "inotify_init1", "inotify_add_watch")):
        assert answer(name, machine=machine) == ERRNO | errno.ENOSYS
    for command in (1024, 1026, 1031):  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
        assert answer("fcntl", 3, command, machine=machine) == ERRNO | errno.EPERM
    assert answer("fcntl", 3, 1032, machine=machine) == ALLOW
    for name, place, huge, error in (
        ("mmap", 3, 0x40000, errno.ENOMEM),
        ("memfd_create", 1, 4, errno.EINVAL),
        ("shmget", 2, 0o4000, errno.ENOMEM),
    ):
        before = [0] * place
        assert answer(name, *before, huge | 2, machine=machine) == ERRNO | error
        assert answer(name, *before, 2, machine=machine) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_no_set_id_file_can_be_made(machine: str) -> None:
    calls = {**seccomp.MODES, **seccomp.NODES}
    for name in named(machine, tuple(calls)):
        before = [0] * calls[name]
        for mode in (0o4755, 0o2755, 0o6000):
            assert answer(name, *before, mode, machine=machine) == ERRNO | errno.EPERM, name
        assert answer(name, *before, 0o1777, machine=machine) == ALLOW, name


def test_without_a_cgroup_socket_buffers_keep_their_size_and_carry_no_descriptors() -> None:
    closed = {"closed": seccomp.UNCOUNTED_MEMORY}
    for option in (7, 8):  # SO_SNDBUF, SO_RCVBUF
        assert answer("setsockopt", 3, 1, option, **closed) == ERRNO  # success without effect
        assert answer("setsockopt", 3, 1, option) == answer("setsockopt", 3, 6, option) == ALLOW
    for name in ("sendmsg", "sendmmsg"):
        assert answer(name, **closed) == ERRNO | errno.EPERM
        assert answer(name) == answer(name, families=(2,), **closed) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_every_way_through_the_program_ends_in_an_answer(machine: str) -> None:
    program = seccomp.guest_filter(
        (2, 10, 16), closed=seccomp.SHARED_IPC, ignored=seccomp.METADATA, machine=machine
    )
    code = list(struct.iter_unpack("<HBBI", program))
    assert len(code) < 4096  # BPF_MAXINSNS
    for at, (operation, on_true, on_false, _) in enumerate(code):
        if operation in (0x15, 0x35, 0x45):
            assert at + 1 + max(on_true, on_false) < len(code)
    assert code[-1][0] == 0x06


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_denied_is_denied_and_what_is_not_named_is_allowed(machine: str) -> None:
    for name in named(machine, seccomp.DENIED):
        assert answer(name, machine=machine) == ERRNO | errno.EPERM, name
    for name in named(machine, seccomp.ABSENT):
        assert answer(name, machine=machine) == ERRNO | errno.ENOSYS, name
    for name in named(machine, (*seccomp.METADATA, *seccomp.SHARED_IPC, "truncate")):
        assert answer(name, machine=machine) == ALLOW, name


@pytest.mark.parametrize("machine", MACHINES)
def test_more_can_be_closed_or_ignored(machine: str) -> None:
    for name in named(machine, seccomp.SHARED_IPC):
        assert answer(name, machine=machine, closed=seccomp.SHARED_IPC) == ERRNO | errno.EPERM
    for name in named(machine, seccomp.METADATA):
        assert answer(name, machine=machine, ignored=seccomp.METADATA) == ERRNO  # "success"


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_another_architectures_calls_kill(nr: int, args: list[int]) -> None:
    program = seccomp.guest_filter((2,), machine="x86_64")
    for arch in (0x40000003, ARCH["aarch64"], 0):  # i386 is the one that x86_64 can really reach
        assert decide(program, nr, *args, arch=arch) == KILL
    if nr >= 0x40000000:  # x32, and -1
        assert decide(program, nr, *args, arch=ARCH["x86_64"]) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_a_clone_may_make_threads_and_processes_but_no_namespaces(machine: str) -> None:
    flags = {
        "newns": 0x20000, "newcgroup": 0x2000000, "newuts": 0x4000000, "newipc": 0x8000000,
        "newuser": 0x10000000, "newpid": 0x20000000, "newnet": 0x40000000,
    }  # fmt: skip
    thread = 0x3D0F00  # what pthread_create asks for
    vfork = 0x4111
    for allowed in (17, thread, vfork, 0x1200011):
        assert answer("clone", allowed, machine=machine) == ALLOW
    for flag in flags.values():
        for base in (0, 17, thread):
            assert answer("clone", base | flag, machine=machine) == ERRNO | errno.EPERM


@given(st.integers(0, 2**64 - 1))
def test_the_upper_half_of_an_argument_changes_nothing(upper: int) -> None:
    high = upper & ~0xFFFFFFFF
    # The kernel looks at the lower 32 bits of these arguments only, and so must the filter.
    assert answer("ioctl", 0, 0x5412 | high) == ERRNO | errno.EPERM
    assert answer("ioctl", 0, 0x5401 | high) == ALLOW
    assert answer("socket", 1 | high, families=(2,)) == ERRNO | errno.EAFNOSUPPORT
    assert answer("socket", 2 | high, families=(2,)) == ALLOW
    assert answer("socketpair", 1 | high, DGRAM | high) == ERRNO | errno.EPROTONOSUPPORT
    assert answer("setsockopt", 0, SOL_SOCKET | high, SO_LINGER | high) == ERRNO | errno.EPERM


@given(st.integers(0, 60), st.frozensets(st.integers(0, 60)))
def test_sockets_are_of_the_given_families_only(family: int, families: frozenset[int]) -> None:
    got = answer("socket", family, families=tuple(sorted(families)))
    assert got == (ALLOW if family in families else ERRNO | errno.EAFNOSUPPORT)


@pytest.mark.parametrize("flags", [0, CLOEXEC, NONBLOCK, CLOEXEC | NONBLOCK])
def test_a_pair_of_sockets_cannot_be_turned_to_anybody_else(flags: int) -> None:
    for kind in (STREAM, SEQPACKET):
        assert answer("socketpair", 1, kind | flags) == ALLOW
    for kind in (DGRAM, RAW, 4, 6, 10):
        assert answer("socketpair", 1, kind | flags) == ERRNO | errno.EPROTONOSUPPORT
    for family in (0, 2, 16, 40):
        assert answer("socketpair", family, STREAM | flags) == ERRNO | errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", MACHINES)
def test_no_connection_can_be_made_to_linger(machine: str) -> None:
    refused = ERRNO | errno.EPERM
    for level in (0, SOL_SOCKET, 6, 41, 255):  # IP, sockets, TCP, IPv6, raw
        for option in range(128):  # 13 of TCP is its congestion control
            expected = refused if (level, option) == (SOL_SOCKET, SO_LINGER) else ALLOW
            assert answer("setsockopt", 3, level, option, machine=machine) == expected


def test_terminal_injection_is_closed_and_file_flags_where_metadata_is() -> None:
    refused = ERRNO | errno.EPERM
    for request in (0x5412, 0x541C):  # TIOCSTI, TIOCLINUX
        assert answer("ioctl", 0, request) == refused
    for request in (0x40086602, 0x401C5820):  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
        assert answer("ioctl", 0, request) == ALLOW
        assert answer("ioctl", 0, request, ignored=seccomp.METADATA) == refused
    assert answer("ioctl", 0, 0x5401, ignored=seccomp.METADATA) == ALLOW  # TCGETS


def test_a_machine_without_a_table_gets_no_filter() -> None:
    with pytest.raises(ValueError):
        seccomp.guest_filter((), machine="riscv64")


# -- the kernel


@pytest.mark.skipif(not seccomp.supported(), reason="no table for this machine")
def test_the_kernel_takes_the_filter_and_agrees_with_it(tmp_path: Path) -> None:
    code = """
import ctypes, os, socket
from belljar.linux import seccomp, syscalls

def attempt(act):
    try:
        act()
    except OSError as error:
        return error.errno
    return 0

def answer(on, where):
    os.chdir(where)
    if on:
        syscalls.no_new_privileges()
        seccomp.install(seccomp.guest_filter((2,), closed=("memfd_create",), ignored=("fchmod",)))
    here = os.open(".", os.O_RDONLY)
    def dgram():
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        a.close(); b.close()
    def set_option(option):
        with socket.socket(socket.AF_INET) as made:
            made.setsockopt(socket.SOL_SOCKET, option, bytes([1, 0, 0, 0, 5, 0, 0, 0]))
    return {
        "unix": attempt(lambda: socket.socket(socket.AF_UNIX).close()),
        "inet": attempt(lambda: socket.socket(socket.AF_INET).close()),
        "stream": attempt(lambda: [end.close() for end in socket.socketpair()]),
        "dgram": attempt(dgram),
        "linger": attempt(lambda: set_option(socket.SO_LINGER)),
        "keepalive": attempt(lambda: set_option(socket.SO_KEEPALIVE)),
        "memfd": attempt(lambda: os.memfd_create("x")),
        "fchmod": attempt(lambda: os.fchmod(here, 0o700 if on else 0o711)),
        "fork": attempt(lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)),
        "mode": oct(os.stat(".").st_mode & 0o777),
    }
"""
    free, held = fresh.ask(code, False, str(tmp_path)), fresh.ask(code, True, str(tmp_path))
    assert free.pop("mode") == "0o711"
    assert set(free.values()) == {0}
    assert held == {
        "unix": errno.EAFNOSUPPORT, "inet": 0, "stream": 0, "dgram": errno.EPROTONOSUPPORT,
        "linger": errno.EPERM, "keepalive": 0, "memfd": errno.EPERM, "fchmod": 0, "fork": 0,
        "mode": "0o711",
    }  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 and i386 are of x86_64")
def test_a_call_of_the_x32_table_kills() -> None:
    code = """
import ctypes, os
from belljar.linux import seccomp, syscalls

def answer(on):
    pid = os.fork()
    if pid == 0:
        if on:
            syscalls.no_new_privileges()
            seccomp.install(seccomp.guest_filter(()))
        ctypes.CDLL(None).syscall(0x40000000 | 39)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert fresh.ask(code, False) == 0
    assert fresh.ask(code, True) == -31  # SIGSYS

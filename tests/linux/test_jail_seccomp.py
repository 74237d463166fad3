"""The filters of the jail and of `landlock`, run call by call through an interpreter of BPF."""

from __future__ import annotations

import errno
import struct

import pytest

from belljar.linux import seccomp_jail, seccomp_landlock, syscall_table

MACHINES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
ALLOW, KILL, ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000


def decide(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """What the kernel would do with this call."""
    given = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=iIQ6Q", number, MACHINES[machine], 0, *given)
    accumulator, at = 0, 0
    while True:
        code, when_true, when_false, operand = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x05:
                at += operand
            case 0x15:
                at += when_true if accumulator == operand else when_false
            case 0x35:
                at += when_true if accumulator >= operand else when_false
            case 0x45:
                at += when_true if accumulator & operand else when_false
            case 0x54:
                accumulator &= operand
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"instruction {code:#x}")


@pytest.fixture(params=sorted(MACHINES))
def machine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_the_lists_name_known_calls_and_each_once() -> None:
    known = syscall_table.numbers("x86_64")
    names = [*seccomp_jail.ALLOWED, *seccomp_jail.SETUP, *seccomp_jail.CLOSED]
    assert sorted(names) == sorted(set(names))
    assert set(names) <= set(known)


def test_every_call_is_answered_as_its_list_says(machine: str) -> None:
    program = seccomp_jail.base(machine)
    numbers = syscall_table.numbers(machine)
    for name, number in numbers.items():
        found = decide(program, machine, number)
        if name == "openat2":
            assert found == ERRNO | errno.ENOSYS
        elif name in (*seccomp_jail.ALLOWED, *seccomp_jail.SETUP):
            assert found == ALLOW, name
        elif name in seccomp_jail.CLOSED:
            assert found == ERRNO | errno.EPERM, name
        else:
            assert found == ERRNO | errno.ENOSYS, name
    for number in (max(numbers.values()) + 1, 9999, 0x3FFF_FFFF):
        assert decide(program, machine, number) == ERRNO | errno.ENOSYS


def test_a_guest_loses_what_only_the_set_up_needs(machine: str) -> None:
    program = seccomp_jail.delta((1,), memfd=False, affinity=False, machine=machine)
    numbers = syscall_table.numbers(machine)
    for name in seccomp_jail.SETUP:
        expected = errno.ENOSYS if name == "clone3" else errno.EPERM
        assert decide(program, machine, numbers[name]) == ERRNO | expected, name
    for name in ("memfd_create", "sched_setaffinity"):
        assert decide(program, machine, numbers[name]) == ERRNO | errno.EPERM
        lax = seccomp_jail.delta((1,), memfd=True, affinity=True, machine=machine)
        assert decide(lax, machine, numbers[name]) == ALLOW
    assert decide(program, machine, numbers["read"]) == ALLOW


@pytest.mark.parametrize("flag", [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)])
def test_no_namespace_comes_from_clone(machine: str, flag: int) -> None:
    program = seccomp_jail.delta((1,), memfd=True, affinity=True, machine=machine)
    clone = syscall_table.numbers(machine)["clone"]
    assert decide(program, machine, clone, flag | 17) == ERRNO | errno.EPERM
    assert decide(program, machine, clone, 0x0050_0F00 | 17) == ALLOW  # a thread


def test_sockets_are_of_the_families_given(machine: str) -> None:
    program = seccomp_jail.delta((1, 2), memfd=True, affinity=True, machine=machine)
    numbers = syscall_table.numbers(machine)
    for family in range(64):
        expected = ALLOW if family in (1, 2) else ERRNO | errno.EAFNOSUPPORT
        assert decide(program, machine, numbers["socket"], family) == expected
    assert decide(program, machine, numbers["socketpair"], 2) == ERRNO | errno.EAFNOSUPPORT


def test_only_pairs_that_stay_connected_are_made_without_unix_sockets(machine: str) -> None:
    number = syscall_table.numbers(machine)["socketpair"]
    with_names = seccomp_jail.delta((1,), memfd=True, affinity=True, machine=machine)
    without = seccomp_jail.delta((2,), memfd=True, affinity=True, machine=machine)
    for kind in range(16):
        for flags in (0, 0o2004000):  # SOCK_CLOEXEC, SOCK_NONBLOCK
            expected = ALLOW if kind in (1, 5) else ERRNO | errno.EPROTONOSUPPORT
            assert decide(without, machine, number, 1, kind | flags) == expected
            assert decide(with_names, machine, number, 1, kind | flags) == ALLOW
    for program in (with_names, without):
        assert decide(program, machine, number, 2, 1) == ERRNO | errno.EAFNOSUPPORT


def test_no_device_and_no_set_id_file_can_be_made(machine: str) -> None:
    program = seccomp_jail.base(machine)
    numbers = syscall_table.numbers(machine)
    for kind, expected in ((0o010644, ALLOW), (0o020644, ERRNO | 1), (0o060644, ERRNO | 1)):
        assert decide(program, machine, numbers["mknodat"], 0, 0, kind) == expected
    for name, position in (("fchmod", 1), ("fchmodat", 2), ("openat", 3)):
        for mode, expected in ((0o755, ALLOW), (0o4755, ERRNO | 1), (0o2755, ERRNO | 1)):
            arguments = [0] * position + [mode]
            assert decide(program, machine, numbers[name], *arguments) == expected, name


def test_terminal_injection_is_refused(machine: str) -> None:
    program = seccomp_jail.delta((1,), memfd=True, affinity=True, machine=machine)
    ioctl = syscall_table.numbers(machine)["ioctl"]
    for command in (0x5412, 0x541C):
        assert decide(program, machine, ioctl, 0, command) == ERRNO | errno.EPERM
    assert decide(program, machine, ioctl, 0, 0x5401) == ALLOW


def deltas(machine: str) -> dict[str, bytes]:
    """The laxest filter of a guest of each backend."""
    return {
        "jail": seccomp_jail.delta((1, 2), memfd=True, affinity=True, machine=machine),
        "landlock": seccomp_landlock.delta(
            (2,), children=True, counted=True, affinity=True, truncate=True, machine=machine
        ),
    }


def tight(machine: str) -> dict[str, bytes]:
    """The filter of a guest that no cgroup counts, without a network."""
    return {
        "jail": seccomp_jail.delta((), memfd=False, affinity=False, machine=machine),
        "landlock": seccomp_landlock.delta(
            (), children=False, counted=False, affinity=False, truncate=True, machine=machine
        ),
    }


def test_no_connection_can_be_made_to_linger(machine: str) -> None:
    """Its last owner waits when closing it, and that can be made the host."""
    setsockopt = syscall_table.numbers(machine)["setsockopt"]
    for name, program in deltas(machine).items():
        for level in (0, 1, 6, 41, 255):  # IP, sockets, TCP, IPv6, raw
            for option in range(128):  # 13 of TCP is its congestion control
                expected = ERRNO | errno.EPERM if (level, option) == (1, 13) else ALLOW
                assert decide(program, machine, setsockopt, 3, level, option) == expected, name
        # The kernel looks at the lower halves only.
        high = 1 << 32
        assert decide(program, machine, setsockopt, 3, high | 1, high | 13) == ERRNO | errno.EPERM


def test_no_file_can_be_leased(machine: str) -> None:
    """Whoever opens it next waits for the owner, or is refused: that is the host, collecting."""
    fcntl = syscall_table.numbers(machine)["fcntl"]
    for name, program in deltas(machine).items():
        for command in (1024, 1 << 32 | 1024):
            assert decide(program, machine, fcntl, 3, command) == ERRNO | errno.EPERM, name
    jail = deltas(machine)["jail"]
    for command in {*range(1050)} - {1024, 1026, 1031}:
        assert decide(jail, machine, fcntl, 3, command) == ALLOW, command


def test_what_a_user_has_few_of_is_closed(machine: str) -> None:
    """Without root every run is the same user to the kernel, and the same as its host."""
    numbers = syscall_table.numbers(machine)
    for name in ("inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch"):
        if name in numbers:
            found = decide(seccomp_jail.base(machine), machine, numbers[name])
            assert found == ERRNO | errno.ENOSYS, name
    for name, program in deltas(machine).items():
        for command in (1026, 1031):  # F_NOTIFY, F_SETPIPE_SZ
            assert decide(program, machine, numbers["fcntl"], 3, command) == ERRNO | 1, name


def test_no_page_comes_from_the_pool_of_huge_ones(machine: str) -> None:
    numbers = syscall_table.numbers(machine)
    lax, hard = deltas(machine), tight(machine)
    for name in lax:
        for program in (lax[name], hard[name]):
            for size in (0, 21 << 26, 30 << 26):
                huge = 0x22 | 0x40000 | size
                assert decide(program, machine, numbers["mmap"], 0, 0, 0, huge) == (
                    ERRNO | errno.ENOMEM
                ), name
            assert decide(program, machine, numbers["mmap"], 0, 0, 0, 0x22) == ALLOW
        memfd = numbers["memfd_create"]
        assert decide(lax[name], machine, memfd, 0, 4 | 1) == ERRNO | errno.EINVAL
        assert decide(lax[name], machine, memfd, 0, 3) == ALLOW
        assert decide(hard[name], machine, memfd, 0, 1) == ERRNO | errno.EPERM


def test_what_is_not_counted_cannot_grow_and_not_be_hidden(machine: str) -> None:
    numbers = syscall_table.numbers(machine)
    for name, program in tight(machine).items():
        for option in (7, 8):  # SO_SNDBUF, SO_RCVBUF: success without effect
            assert decide(program, machine, numbers["setsockopt"], 3, 1, option) == ERRNO, name
            assert decide(program, machine, numbers["setsockopt"], 3, 6, option) == ALLOW, name
        for call in ("sendmsg", "sendmmsg"):
            assert decide(program, machine, numbers[call]) == ERRNO | errno.EPERM, name
            assert decide(deltas(machine)[name], machine, numbers[call]) == ALLOW, name
        shared = decide(program, machine, numbers["mmap"], 0, 0, 0, 0x21)
        assert shared == ERRNO | errno.EPERM, name


def test_other_machines_calls_kill_and_x32_is_not_there() -> None:
    for program in (seccomp_jail.base("x86_64"), seccomp_jail.base("aarch64")):
        data_of_i386 = 0x4000_0003
        MACHINES["i386"] = data_of_i386
        try:
            assert decide(program, "i386", 1) == KILL
        finally:
            del MACHINES["i386"]
    x32 = decide(seccomp_jail.base("x86_64"), "x86_64", 0x4000_0000 | 39)
    assert x32 == ERRNO | errno.ENOSYS


def test_a_machine_without_a_table_has_no_filter() -> None:
    with pytest.raises(KeyError):
        seccomp_jail.base("riscv64")

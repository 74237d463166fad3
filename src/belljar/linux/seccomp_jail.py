"""The jail's system call policy: an allow list in two stacked filters, readable here as data.

BASE is put on a zygote once, when its own root stands; every run inherits it. DELTA is put on each
guest last of all and takes away what only the set-up of a run needs. The kernel obeys the stricter
of the two. A call that is in no list is answered ENOSYS, as if the kernel were older, so that a
program which has a fallback uses it; a call that is closed on purpose is answered EPERM.
32-bit calls kill the process: their numbers mean other things. x32 is answered ENOSYS.

Not listed, because a user has few of them and every run of an ordinary user is that user: inotify,
which also shows what others open below /usr.
"""

from __future__ import annotations

import errno

from . import syscall_table, syscalls
from .seccomp import (
    DESCRIPTOR_SENDERS,
    MAP_HUGETLB,
    MFD_HUGETLB,
    MODES,
    NODES,
    ONLY_ITSELF,
    REFUSED_FCNTLS,
    SET_ID,
    _must_be_zero,
    _op,  # the assembler's one instruction
    connected_pairs,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Action = int | tuple[bytes, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What programs are made of. Sorted by what it is for, not by name.
ALLOWED = _words("""
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range
    open openat openat2 creat dup dup2 dup3 fcntl flock ioctl pipe pipe2 sendfile splice tee
    copy_file_range fadvise64 readahead fallocate truncate ftruncate fsync fdatasync sync syncfs
    sync_file_range
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat
    getdents getdents64 getcwd chdir fchdir umask mkdir mkdirat rmdir unlink unlinkat rename
    renameat renameat2 link linkat symlink symlinkat mknod mknodat chmod fchmod fchmodat fchmodat2
    chown fchown lchown fchownat utime utimes futimesat utimensat cachestat
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr lsetxattr fsetxattr
    removexattr lremovexattr fremovexattr mmap munmap mremap mprotect msync mincore madvise brk
    mlock mlock2 munlock munlockall membarrier memfd_create pkey_alloc pkey_free pkey_mprotect
    get_mempolicy mseal
    clone fork vfork execve execveat exit exit_group wait4 waitid set_tid_address rseq
    set_robust_list get_robust_list futex futex_waitv futex_wake futex_wait futex_requeue
    arch_prctl get_thread_area set_thread_area prctl restart_syscall
    kill tkill tgkill rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait
    rt_sigsuspend rt_sigqueueinfo rt_tgsigqueueinfo sigaltstack signalfd signalfd4 pidfd_open
    pidfd_send_signal alarm pause getitimer setitimer
    getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid
    getpgrp getsid setsid setpgid setuid setgid setreuid setregid setresuid setresgid setfsuid
    setfsgid setgroups capget
    getrlimit setrlimit prlimit64 getrusage times sysinfo uname getpriority setpriority ioprio_get
    sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler sched_getattr
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval getcpu
    nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time timer_create
    timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime
    timerfd_gettime select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait
    epoll_pwait epoll_pwait2 eventfd eventfd2 getrandom
    socket socketpair bind connect listen accept accept4 getsockname getpeername getsockopt
    setsockopt sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown
""")

# What the set-up of a run needs between BASE and DELTA.
SETUP = _words("""
    mount umount2 unshare setns capset seccomp landlock_create_ruleset landlock_add_rule
    landlock_restrict_self clone3 sched_setscheduler
""")

# Each of these has been a way out of, or around, a sandbox; none is needed by a program of ours.
CLOSED = _words("""
    acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init
    fanotify_mark finit_module fsconfig fsmount fsopen fspick init_module ioperm iopl ioprio_set
    kcmp kexec_file_load kexec_load keyctl listmount lookup_dcookie lsm_set_self_attr
    map_shadow_stack mbind memfd_secret migrate_pages mlockall modify_ldt mount_setattr move_mount
    move_pages name_to_handle_at open_by_handle_at open_tree perf_event_open personality pidfd_getfd
    pivot_root process_madvise process_mrelease process_vm_readv process_vm_writev ptrace quotactl
    quotactl_fd reboot remap_file_pages request_key sched_setattr sched_setparam set_mempolicy
    set_mempolicy_home_node setdomainname sethostname settimeofday statmount swapoff
    swapon syslog userfaultfd vhangup vmsplice
""")

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NAMESPACES = 0x7E02_0000  # every CLONE_NEW* that clone knows
CLONE_PARENT = 0x8000  # a child that would not be below the guest, but beside it
_MAP_SHARED, _MAP_SHARED_VALIDATE, _MAP_TYPE, _MAP_ANONYMOUS = 1, 3, 0xF, 0x20
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# Whoever closes such a connection last waits: that could be the host (syscalls.refuse_descriptors).
SOL_SOCKET, SO_LINGER = 1, 13
SO_SNDBUF, SO_RCVBUF = 7, 8
# Calls that are allowed only with some of their arguments, in containers too.
CONDITIONED = (*MODES, *NODES, "clone", "ioctl", "socket", "socketpair")
_FIFO, _REGULAR, _SOCKET = 0o010000, 0o100000, 0o140000

_LOAD, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF_0000, 0x8000_0000
_SUCCESS = 0x0005_0000  # without doing anything
_EPERM = 0x0005_0000 | errno.EPERM
_EINVAL = 0x0005_0000 | errno.EINVAL
_ENOMEM = 0x0005_0000 | errno.ENOMEM
_ENOSYS = 0x0005_0000 | errno.ENOSYS
_EAFNOSUPPORT = 0x0005_0000 | errno.EAFNOSUPPORT
_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}


def base(machine: str = syscalls.MACHINE, *, openat2: bool = False) -> bytes:
    """The filter of a zygote and of everything below it.

    `openat2` leaves that call to supervisors: what a guest loses on top must close it.
    """
    actions: dict[str, Action] = dict.fromkeys((*ALLOWED, *SETUP), _ALLOW)
    actions |= dict.fromkeys(CLOSED, _EPERM)
    for name, argument in NODES.items():
        actions[name] = _node(argument)
    for name, argument in MODES.items():
        actions[name] = _no_set_id(argument)
    # Its mode is in memory, out of a filter's sight.
    actions["openat2"] = _ALLOW if openat2 else _ENOSYS
    return _search(actions, _ENOSYS, machine)


def delta(
    families: Iterable[int],
    *,
    memfd: bool,
    affinity: bool,
    alone: bool = False,
    machine: str = syscalls.MACHINE,
) -> bytes:
    """What a guest loses on top: `families` are all it may open sockets of.

    It may have pairs of AF_UNIX sockets in any case, without that family only those that stay
    connected to each other.

    `memfd=False` says that no memory cgroup counts it, and closes what only that could count: a
    file's memory, larger socket buffers and, without `families`, descriptors sent over sockets,
    where they are out of a watchdog's sight. `affinity=False` keeps a guest on the cores it was
    given; `alone=True` is for a sandbox in which a process of Belljar's has the guest's user and no
    more capabilities than the guest.
    """
    families = tuple(families)
    actions: dict[str, Action] = dict.fromkeys(SETUP, _EPERM)
    # Its flags are in memory, out of a filter's sight; the C library tries clone next.
    actions["clone3"] = _ENOSYS
    actions["clone"] = (
        _argument(0),
        _op(_ANY_BIT, NAMESPACES | CLONE_PARENT, 0, 1),
        _op(_RETURN, _EPERM),
        _op(_RETURN, _ALLOW),
    )
    actions["ioctl"] = _one_of(1, TERMINAL_INPUT, then=_EPERM, otherwise=_ALLOW)
    actions["fcntl"] = _one_of(1, REFUSED_FCNTLS, then=_EPERM, otherwise=_ALLOW)
    actions["setsockopt"] = socket_options(counted=memfd)
    actions["socket"] = _one_of(0, families, then=_ALLOW, otherwise=_EAFNOSUPPORT)
    if AF_UNIX in families:
        actions["socketpair"] = _one_of(0, (AF_UNIX,), then=_ALLOW, otherwise=_EAFNOSUPPORT)
    else:
        actions["socketpair"] = tuple(connected_pairs())
    actions["mmap"] = maps(shared=memfd)
    actions["memfd_create"] = memory_files() if memfd else _EPERM
    if not (memfd or families):
        actions |= dict.fromkeys(DESCRIPTOR_SENDERS, _EPERM)
    # A jail's init has capabilities that its guest lacks, which holds priorities and cores.
    actions |= only_itself() if alone else only_itself(("prlimit64",))
    if not affinity:
        actions["sched_setaffinity"] = _EPERM
    return _search(actions, _ALLOW, machine)


def only_itself(names: Iterable[str] = ONLY_ITSELF) -> dict[str, Action]:
    """These calls for the calling process alone, EPERM for any other."""
    return {name: (*_must_be_zero(ONLY_ITSELF[name]), _op(_RETURN, _ALLOW)) for name in names}


def socket_options(*, counted: bool) -> tuple[bytes, ...]:
    """setsockopt without SO_LINGER.

    Unless a memory cgroup counts them, buffers stay at the size that a watchdog counts a socket at.
    Asking for more succeeds without effect, as it does at the kernel's own maximum.
    """
    sizes = () if counted else (SO_SNDBUF, SO_RCVBUF)
    body = [_argument(1), _op(_EQUAL, SOL_SOCKET, 1, 0), _op(_RETURN, _ALLOW), _argument(2)]
    for option, answer in ((SO_LINGER, _EPERM), *((size, _SUCCESS) for size in sizes)):
        body += [_op(_EQUAL, option, 0, 1), _op(_RETURN, answer)]
    return (*body, _op(_RETURN, _ALLOW))


def maps(*, shared: bool) -> tuple[bytes, ...]:
    """mmap without huge pages of the pool, which is answered as if that were empty.

    Unless `shared`, without shared anonymous memory either: its pages outlive their place in a
    process, so that no process is seen to have them.
    """
    body = (_argument(3), _op(_ANY_BIT, MAP_HUGETLB, 0, 1), _op(_RETURN, _ENOMEM))
    if shared:
        return (*body, _op(_RETURN, _ALLOW))
    return (
        *body,
        _op(_ANY_BIT, _MAP_ANONYMOUS, 1, 0),
        _op(_RETURN, _ALLOW),
        _op(_AND, _MAP_TYPE),
        _op(_EQUAL, _MAP_SHARED, 1, 0),
        _op(_EQUAL, _MAP_SHARED_VALIDATE, 0, 1),
        _op(_RETURN, _EPERM),
        _op(_RETURN, _ALLOW),
    )


def memory_files() -> tuple[bytes, ...]:
    """memfd_create without MFD_HUGETLB, as kernels before it have it."""
    return (
        _argument(1),
        _op(_ANY_BIT, MFD_HUGETLB, 0, 1),
        _op(_RETURN, _EINVAL),
        _op(_RETURN, _ALLOW),
    )


def _no_set_id(argument: int) -> tuple[bytes, ...]:
    return (
        _argument(argument),
        _op(_ANY_BIT, SET_ID, 0, 1),
        _op(_RETURN, _EPERM),
        _op(_RETURN, _ALLOW),
    )


def _node(argument: int) -> tuple[bytes, ...]:
    """mknod makes pipes, sockets and files, never devices."""
    body = [_argument(argument), _op(_ANY_BIT, SET_ID, 0, 1), _op(_RETURN, _EPERM)]
    body.append(_op(_AND, 0o170000))
    for kind in (0, _FIFO, _REGULAR, _SOCKET):
        body += [_op(_EQUAL, kind, 0, 1), _op(_RETURN, _ALLOW)]
    return (*body, _op(_RETURN, _EPERM))


def _argument(index: int) -> bytes:
    return _op(_LOAD, 16 + 8 * index)


def _one_of(index: int, values: Iterable[int], *, then: int, otherwise: int) -> tuple[bytes, ...]:
    body = [_argument(index)]
    for value in values:
        body += [_op(_EQUAL, value, 0, 1), _op(_RETURN, then)]
    return (*body, _op(_RETURN, otherwise))


def _search(actions: dict[str, Action], default: Action, machine: str) -> bytes:
    """A program that finds the action for a number by halving: a dozen steps for any call."""
    known = syscall_table.numbers(machine)
    by_number = {known[name]: action for name, action in actions.items() if name in known}
    steps: list[tuple[int, Action]] = []

    def from_here_on(number: int, action: Action) -> None:
        if not steps or steps[-1][1] != action:
            steps.append((number, action))

    following = 0
    for number in sorted(by_number):
        if number > following:
            from_here_on(following, default)
        from_here_on(number, by_number[number])
        following = number + 1
    from_here_on(following, default)

    def halve(low: int, high: int) -> list[bytes]:
        if high - low == 1:
            action = steps[low][1]
            return [_op(_RETURN, action)] if isinstance(action, int) else list(action)
        middle = (low + high) // 2
        left, right = halve(low, middle), halve(middle, high)
        if len(left) < 256:
            return [_op(_AT_LEAST, steps[middle][0], len(left), 0), *left, *right]
        return [_op(_AT_LEAST, steps[middle][0], 0, 1), _op(_JUMP, len(left)), *left, *right]

    program = [
        _op(_LOAD, 4),  # struct seccomp_data: nr 0, arch 4, arguments from 16
        _op(_EQUAL, _ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, 0),
    ]
    if machine == "x86_64":
        program += [_op(_AT_LEAST, 0x4000_0000, 0, 1), _op(_RETURN, _ENOSYS)]  # x32
    return b"".join((*program, *halve(0, len(steps))))

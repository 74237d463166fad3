"""The guest of a run of the `landlock` backend: it gives up what it can, checks that, and begins.

A fork of the zygote's, two generations down (`landlock_zygote.py` has the theory of operation).
Nothing here may import once it runs: after `restrict` the files of this package are out of reach.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import struct

from . import landlock, leave, modes, own_frames, sealed, seccomp, seccomp_landlock, syscalls
from .bare import signal, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

FRAMES = 3
# What programs read about themselves, and do not survive when it exists and is closed. Of its own
# process only: its children's, which have other numbers, no rule can name beforehand.
_OWN_FILES = tuple(f"/proc/self/{name}" for name in ("cgroup", "stat", "statm", "status"))
_ERRORS, _TO_SUPERVISOR = 4, 5


class Settled:
    """What a zygote has ready for all its runs."""

    def __init__(self) -> None:
        self.worker: Callable[..., None] | None = None
        self.reseed: Callable[[], None] | None = None
        self.loaded: leave.Loaded | None = None
        self.layers: frozenset[str] = frozenset()


def arrange_descriptors(frames: int, errors: int, to_supervisor: int) -> int:
    """The guest's own are 0 to 3. 4, returned, is the pipe that says how the set-up went.

    5 is a socket to the supervisor, for the set-up only.
    """
    kept = [syscalls.high(fd) for fd in (frames, errors, to_supervisor) if fd >= 0]
    os.dup2(kept[0], FRAMES, inheritable=False)  # without frames it is that pipe, too
    os.dup2(kept[-2], _ERRORS, inheritable=False)
    os.dup2(kept[-1], _TO_SUPERVISOR, inheritable=False)
    syscalls.close_from(_TO_SUPERVISOR + 1)
    return _ERRORS


def be_guest(spec: dict[str, Any], settled: Settled) -> NoReturn:
    """Raises what went wrong in the set-up. The pipe for that is closed when the program begins."""
    os.setsid()
    os.chdir(spec["cwd"])
    os.umask(0o077)
    _be_the_first_to_go()
    if spec["affinity"]:
        os.sched_setaffinity(0, spec["affinity"])
    status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    if "seccomp" in settled.layers:
        modes.stop_calls(_TO_SUPERVISOR)
    else:
        os.close(_TO_SUPERVISOR)  # now: the supervisor looks when the set-up has ended
    _limit(spec["rlimits"])
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if "landlock" in settled.layers:
        ruleset = landlock.build(
            (*spec["read_only"], *_OWN_FILES),
            spec["read_write"],
            spec["devices"],
            close_network=spec["close_network"],
            resolved=spec["resolved"],
        )
        landlock.enforce(ruleset)
        os.close(ruleset)
    if "seccomp" in settled.layers:
        if spec["own_signals"]:
            seccomp.install(seccomp_landlock.signals_to_itself(os.getpid()))
        seccomp.install(spec["seccomp"])
    _check(settled, status)
    if spec["filter"]:
        seccomp.add(spec["filter"])
    if spec["argv"]:
        os.set_inheritable(FRAMES, spec["frame_fd"] >= 0)
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python has them
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(spec["env"])
    gc.enable()
    if settled.reseed is not None:
        settled.reseed()
    syscalls.close_from(_ERRORS)
    worker, loaded = settled.worker, settled.loaded
    assert worker is not None and loaded is not None
    passed = _receive_descriptor()
    leave.run_and_leave(
        lambda: worker(FRAMES, given=lambda sizes: sealed.read(passed, sizes)),
        loaded,
        _more_are_open,
    )


def _receive_descriptor() -> int:
    """The descriptor that comes with the first byte from the host, or -1. The byte stays there."""
    frames = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, FRAMES)
    try:
        flags = socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC
        ancillary = frames.recvmsg(1, socket.CMSG_SPACE(4), flags)[1]
    finally:
        frames.detach()
    fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
    return fds[0] if fds else -1


def _more_are_open() -> bool:
    """Asked in one call, and without /proc."""
    poll = select.poll()
    asked = range(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for fd in asked:
        poll.register(fd, 0)
    try:
        closed = sum(bool(events & select.POLLNVAL) for _, events in poll.poll(0))
    except OSError:  # more than the kernel answers at once
        return True
    return closed < len(asked)


def _be_the_first_to_go() -> None:
    """When the machine's memory is used up the kernel takes a guest, not its supervisor."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, b"1000")
    os.close(fd)


def _limit(rlimits: list[tuple[int, int]]) -> None:
    for number, value in rlimits:
        if number == resource.RLIMIT_DATA:
            value += _data_size()  # what the zygote has loaded is not the program's
        # An operator's own limit may be lower than ours: then it stays.
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))


def _data_size() -> int:
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    size = int(os.read(fd, 200).split()[5]) * resource.getpagesize()
    os.close(fd)
    return size


def _check(settled: Settled, status: int) -> None:
    """Every layer that should be on, is on: asked of the kernel, not of our own code."""
    text = os.read(status, 1 << 14).decode()
    os.close(status)
    facts = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    on, wrong = settled.layers, []
    if facts["NoNewPrivs"] != "1":
        wrong.append("no_new_privs")
    if "capabilities" in on and any(
        int(facts[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")
    ):
        wrong.append("capabilities")
    if "landlock" in on and not _refused(lambda: os.close(os.open("/proc/self/environ", 0))):
        wrong.append("Landlock")
    if "seccomp" in on and (
        facts["Seccomp"] != "2" or not _refused(lambda: syscalls.unshare(syscalls.CLONE_NEWUSER))
    ):
        wrong.append("seccomp")
    if wrong:
        raise OSError(0, f"these protections are not on: {', '.join(wrong)}")


def _refused(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False


own_frames.without_path(be_guest)

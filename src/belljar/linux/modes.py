"""chmod on the `landlock` backend: a program may change the modes of what it may write, only.

Landlock does not restrict chmod, and a seccomp filter sees no path: without more, a program could
change the mode of every file that its user owns. So a filter stops these calls in the kernel, and
the supervisor of the run makes the change (seccomp user notification).

Theory of operation

    guest        before its program begins, `stop_calls` installs the filter, sends the descriptor
                 that answers it to the supervisor and closes its own copy: with one, a program
                 could let its own calls through
    supervisor   one call at a time: copies the path out of the guest's memory, opens the file
                 (O_PATH: nothing is read), asks the kernel where that file is, and changes its mode
                 through the descriptor if it is below a writable place

Facts relied on
- The mode that changes is that of the opened file, and the place that was compared is that file's:
  a path rewritten in memory, a swapped link or a renamed directory in between changes neither. The
  kernel never continues a stopped call by itself.
- Only then is the call known to be still waiting (SECCOMP_IOCTL_NOTIF_ID_VALID) when all files
  below /proc/TID are open, so that they are the caller's and not those of a later thread with its
  number.
- Landlock lets no file be linked or renamed into a writable place from a place that is not.
- Links like /proc/PID/cwd are not followed: the supervisor could follow those of processes that
  Landlock closes to the guest, and the answer would tell what is behind them.
- When the supervisor is gone, stopped calls fail with ENOSYS.
- The supervisor has the guest's user and no capabilities. It answers for at most half of its time,
  because that time is in no limit of the guest's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import time

from . import in_flight, seccomp, seccomp_landlock, syscall_table, syscalls
from .bare import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# SECCOMP_IOCTL_NOTIF_RECV, _SEND and _ID_VALID.
_RECEIVE, _SEND, _STILL_WAITS = 0xC050_2100, 0xC018_2101, 0x4008_2102
# struct seccomp_notif: id, thread, flags, and then seccomp_data: number, architecture, instruction,
# arguments. The kernel's may be longer, and is copied whole.
_CALL, _CALL_ROOM = "=QIIiIQ6Q", 1024
_ANSWER = "=QqiI"
_AT_FDCWD, _NO_FOLLOW, _EMPTY_PATH = -100, 0x100, 0x1000
_LONGEST_PATH = 4096
_LONGEST_REST = 0.01
_RESOLVE_NO_MAGICLINKS = 2
_OWN_DESCRIPTOR = re.compile(rb"/(?:proc/(?:thread-)?self|dev)/fd/(\d{1,9})")
_MODE = 0o1777
_HERE = os.O_PATH | os.O_CLOEXEC


class _Unseen(Exception):
    """The kernel does not let us see what the caller means."""


def stop_calls(to_supervisor: int) -> None:
    """In the guest: stop these calls for good, and send on the descriptor that answers them.

    Where the kernel has no such filter, or one above us has its only listener, they do nothing.
    """
    with_sender = socket.socket(fileno=to_supervisor)
    try:
        try:
            listener = seccomp.install_listener(seccomp_landlock.modes(stopped=True))
        except OSError:
            seccomp.install(seccomp_landlock.modes(stopped=False))
            return
        try:
            in_flight.send(with_sender, b"listener", [listener])
        finally:
            os.close(listener)
    finally:
        with_sender.close()


def listener_from(guest: int) -> int:
    """In the supervisor, when `stop_calls` has returned: the descriptor; -1 if there is none."""
    receiver = socket.socket(fileno=guest)
    message, passed, _, _ = receiver.recvmsg(
        16, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    receiver.close()
    if message != b"listener":
        return -1
    ((_, _, data),) = passed
    return int(struct.unpack("i", data)[0])


class Modes:
    """Answers the stopped calls of one run. `places` are all that it may write."""

    def __init__(self, listener: int, places: Iterable[str]) -> None:
        self.listener = listener
        self._places = [os.open(place, _HERE) for place in places]
        self._names = {
            number: name
            for name, number in syscall_table.numbers(syscalls.MACHINE).items()
            if name in seccomp_landlock.MODES
        }

    def answer(self) -> None:
        """Take one call that waits, do what it asks for if that is allowed, and let it return."""
        began = time.monotonic()
        call = bytearray(_CALL_ROOM)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, call)
        except OSError:  # its caller was killed meanwhile
            return
        identity, thread, _, number, _, _, *arguments = struct.unpack_from(_CALL, call)
        try:
            self._do(identity, thread, self._names[number], arguments)
            error = 0
        except _Unseen:
            error = 0
        except OSError as problem:
            error = problem.errno or errno.EPERM
        try:
            fcntl.ioctl(self.listener, _SEND, struct.pack(_ANSWER, identity, 0, -error, 0))
        except OSError:  # its caller was killed meanwhile
            return
        time.sleep(min(time.monotonic() - began, _LONGEST_REST))

    def _do(self, identity: int, thread: int, name: str, arguments: list[int]) -> None:
        opened: list[int] = []
        try:
            if name == "fchmod":
                mode = arguments[1]
                file = _descriptor(thread, _signed(arguments[0]), opened)
            else:
                where, flags = _AT_FDCWD, 0
                if name != "chmod":
                    where, *arguments = arguments
                    flags = arguments[2] & 0xFFFF_FFFF if name == "fchmodat2" else 0
                mode = arguments[1]
                file = _named(thread, _signed(where), arguments[0], flags, opened)
            if not self._waits(identity):
                return
            self._change(file, mode & _MODE)
        finally:
            for fd in opened:
                os.close(fd)

    def _waits(self, identity: int) -> bool:
        try:
            fcntl.ioctl(self.listener, _STILL_WAITS, struct.pack("=Q", identity))
        except OSError:
            return False
        return True

    def _change(self, file: int, mode: int) -> None:
        kind = os.fstat(file).st_mode
        if stat.S_ISLNK(kind):
            raise OSError(errno.EOPNOTSUPP, "links have no mode")
        if stat.S_ISDIR(kind):
            mode |= 0o700  # what a program writes is counted in directories that can be listed
        at = _place(file)
        if not at.startswith("/") or at.startswith("/memfd:"):
            return  # a pipe, a socket
        for place in map(_place, self._places):
            if at == place:
                return  # the host's own, in which it has to find the results
            if at.startswith(f"{place}/"):
                os.chmod(f"/proc/self/fd/{file}", mode)
                return
        raise OSError(errno.EPERM, "not in a writable place")


def _named(thread: int, where: int, address: int, flags: int, opened: list[int]) -> int:
    if flags & ~(_NO_FOLLOW | _EMPTY_PATH):
        raise OSError(errno.EINVAL, "unknown flags")
    path = _text(thread, address)
    own = _OWN_DESCRIPTOR.fullmatch(path)
    if own is not None:
        return _descriptor(thread, int(own[1]), opened)
    if path.startswith(b"/"):
        start = os.open("/", _HERE)
        opened.append(start)
    elif where == _AT_FDCWD:
        start = _of_caller(thread, "cwd", opened)
    else:
        start = _descriptor(thread, where, opened)
    if not path and flags & _EMPTY_PATH:
        return start
    how = struct.pack(
        "=QQQ", _HERE | (os.O_NOFOLLOW if flags & _NO_FOLLOW else 0), 0, _RESOLVE_NO_MAGICLINKS
    )
    try:
        opened.append(syscalls.call("openat2", start, path, how, len(how)))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            raise _Unseen from None  # a filter above us
        raise
    return opened[-1]


def _descriptor(thread: int, number: int, opened: list[int]) -> int:
    try:
        return _of_caller(thread, f"fd/{number}", opened)
    except FileNotFoundError:
        raise OSError(errno.EBADF, "no such descriptor") from None


def _of_caller(thread: int, name: str, opened: list[int]) -> int:
    try:
        opened.append(os.open(f"/proc/{thread}/{name}", _HERE))
    except PermissionError:
        raise _Unseen from None
    return opened[-1]


def _text(thread: int, address: int) -> bytes:
    """The path there, read once."""
    try:
        memory = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        raise _Unseen from None
    try:
        text, end, _ = os.pread(memory, _LONGEST_PATH, address).partition(b"\0")
    except (OSError, OverflowError):
        raise OSError(errno.EFAULT, "no path there") from None
    finally:
        os.close(memory)
    if not end:
        raise OSError(errno.ENAMETOOLONG, "a path without an end")
    return text


def _place(file: int) -> str:
    return os.readlink(f"/proc/self/fd/{file}")


def _signed(number: int) -> int:
    """An int that arrived in a register: its upper half means nothing."""
    return int((number & 0xFFFF_FFFF) ^ 0x8000_0000) - 0x8000_0000

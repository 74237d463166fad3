"""Holds the threads of a program that shares our process: what they may do, and how they are ended.

One audit hook for the whole process looks at what Python is about to do, and only ever acts on the
threads of a guard. It sees Python's own functions; it does not see native code, nor Python code
that looks for a way around it. It is a fence for programs that mean well, not a boundary.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .inprocess_watch import open_descriptors

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_PROCESSES = frozenset({
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.startfile",
    "os.startfile/2", "pty.spawn", "subprocess.Popen", "os.kill", "os.killpg",
    "signal.pthread_kill",
})  # fmt: skip
_NETWORK = frozenset({
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
    "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo",
})  # fmt: skip
_DESCRIPTORS = frozenset({"open", "socket.__new__"})
_READS = frozenset({"open", "os.listdir", "os.scandir", "os.chdir"})

# Where the paths that an event changes stand in its arguments: (path, its dir_fd or None, follows a
# link in the last place).
_CHANGES: dict[str, tuple[tuple[int, int | None, bool], ...]] = {
    "os.remove": ((0, 1, False),),
    "os.rmdir": ((0, 1, False),),
    "os.mkdir": ((0, 2, False),),
    "os.rename": ((0, 2, False), (1, 3, False)),
    "os.link": ((0, 2, True), (1, 3, False)),
    "os.symlink": ((1, 2, False),),
    "os.truncate": ((0, None, True),),
    "os.chmod": ((0, 2, True),),
    "os.chown": ((0, 3, True),),
    "os.utime": ((0, 3, True),),
}
_WATCHED = _PROCESSES | _NETWORK | _DESCRIPTORS | _READS | _CHANGES.keys()

_guards: list[Guard] = []
_hook_lock = threading.Lock()
_hooked = False


class Guard:
    """The threads of one run, and the rules for them.

    `writable` and `hidden` are real paths; `descriptors` is the number that may be open, or None.
    """

    def __init__(
        self,
        *,
        writable: tuple[str, ...],
        hidden: tuple[str, ...] = (),
        network: bool = False,
        processes: bool = False,
        descriptors: int | None = None,
    ) -> None:
        self._writable = writable
        self._hidden = hidden
        self._network = network
        self._processes = processes
        self._descriptors = descriptors
        self.refused_descriptors = False
        self._members: list[threading.Thread] = []
        self._awaited: list[threading.Thread] = []
        self._clocks: dict[int, int] = {}
        self._spent: list[float] = []
        self._cpu_before = time.process_time()

    def start(self, program: Callable[[], None]) -> None:
        """Run `program` in a new thread under this guard."""
        _install_hook()
        _guards.append(self)
        # A daemon, so that a program which cannot be ended does not keep our process alive.
        thread = threading.Thread(target=self._main, args=(program,), daemon=True)
        self._members.append(thread)
        self._awaited.append(thread)
        thread.start()

    def release(self) -> None:
        """Forget this guard and those of earlier runs, but none that has a thread left."""
        for guard in list(_guards):
            if not guard.alive():
                _guards.remove(guard)

    def _main(self, program: Callable[[], None]) -> None:
        # Its own threads are no daemons by default, and are waited for, as in any main program.
        vars(threading.current_thread())["_daemonic"] = False
        self._guarded(program)

    def _guarded(self, program: Callable[[], None]) -> None:
        me = threading.get_ident()
        if hasattr(time, "pthread_getcpuclockid"):
            # Asked for from inside: from outside the thread might be gone already.
            self._clocks[me] = time.pthread_getcpuclockid(me)
        try:
            program()
        finally:
            self._spent.append(time.thread_time())
            self._clocks.pop(me, None)

    def adopt(self, thread: threading.Thread) -> None:
        """Take in a thread that one of ours is about to start."""
        if thread.ident is not None:
            return  # it was started before: Python will say so
        vars(thread)["run"] = partial(self._guarded, thread.run)
        self._members.append(thread)
        if not thread.daemon:
            self._awaited.append(thread)
            thread.daemon = True  # for our process; the program is held until it ends

    def running(self) -> bool:
        """Whether the program goes on: its main thread, or one that it waits for at its end."""
        return any(thread.is_alive() for thread in list(self._awaited))

    def join(self, seconds: float) -> None:
        """Wait until a thread of the program ends, or that long."""
        for thread in self.alive():
            thread.join(seconds)
            return

    def alive(self) -> list[threading.Thread]:
        """The guest's threads that have not ended."""
        return [thread for thread in list(self._members) if thread.is_alive()]

    def owns_this_thread(self) -> bool:
        # Numbers of threads are used again, so the number alone proves nothing.
        me = threading.get_ident()
        return any(thread.ident == me and thread.is_alive() for thread in list(self._members))

    def cpu(self) -> float:
        """Seconds of processor time that the guest's threads used, as the kernel counts."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time() - self._cpu_before  # ours included: all there is to be had
        used = sum(self._spent)
        for clock in list(self._clocks.values()):
            try:
                used += time.clock_gettime(clock)
            except OSError:
                continue  # it ended just now, and is in the sum next time
        return used

    def stop(self) -> None:
        """Throw an exception into every thread, at its next step in Python; repeat until all end.

        It is SystemExit, which ends a thread without a word, and nothing that is derived from it.
        """
        _throw([ctypes.c_ulong(thread.ident or 0) for thread in self.alive()])

    # -- what the audit hook asks ----------------------------------------------------------------

    def judge(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise OSError if a thread of this guard may not do what it is about to."""
        if event in _PROCESSES and not self._processes:
            raise PermissionError(errno.EPERM, f"{event}: backend inprocess starts no processes")
        elif event in _NETWORK and not self._network:
            raise PermissionError(errno.EPERM, f"{event}: the network is off")
        if event in _DESCRIPTORS and self._descriptors is not None:
            count = open_descriptors()
            if count is not None and count >= self._descriptors:
                self.refused_descriptors = True
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if event in _READS and self._hidden:
            self._check_hidden(args[0])
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITES:
                self._check_change(path, None, follow=True)
        for place, dir_fd, follow in _CHANGES.get(event, ()):
            parent = None if dir_fd is None or dir_fd >= len(args) else args[dir_fd]
            if event != "os.mkdir" or not os.path.isdir(args[place]):  # that fails by itself
                self._check_change(args[place], parent, follow=follow)

    def _check_change(self, path: Any, dir_fd: object, *, follow: bool) -> None:
        real = _real(path, dir_fd, follow=follow)
        if real is None or real == os.devnull or any(_inside(real, top) for top in self._writable):
            return
        raise PermissionError(errno.EPERM, "outside the work directory nothing is written", path)

    def _check_hidden(self, path: Any) -> None:
        real = _real(path, None, follow=True)
        if real is not None and any(_inside(real, top) for top in self._hidden):
            raise PermissionError(errno.EACCES, "hidden by the policy", path)


class _Nudge(BaseException):
    """From a thread to itself."""


def _throw(threads: list[ctypes.c_ulong]) -> None:
    """Make SystemExit the exception that is pending in each of `threads`.

    In CPython 3.11, calling a function that is traced (by a debugger, for coverage) spins for as
    long as an exception is pending in another thread; in native code that may be long. Taking an
    exception of our own removes the mark that does it; the other thread finds its exception without
    the mark, when it next gives up the interpreter's lock. In between nothing may be called.
    """
    throw, me = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident())
    leave, nudge = ctypes.py_object(SystemExit), ctypes.py_object(_Nudge)
    traced = sys.version_info < (3, 12) and sys.gettrace() is not None
    try:
        for thread in threads:
            throw(thread, leave)
        # On one line, so that it arrives here and not in a tracer that is told of the next line.
        while traced: throw(me, nudge)  # noqa: E701  # fmt: skip
    except _Nudge:
        return


def _real(path: Any, dir_fd: object, *, follow: bool) -> str | None:
    """The path without links; None for a descriptor, which was judged when it was opened."""
    if path is None or isinstance(path, int):
        return None
    try:
        name = os.fsdecode(path)
        if isinstance(dir_fd, int) and dir_fd >= 0:
            name = os.path.join(os.path.realpath(f"/proc/self/fd/{dir_fd}"), name)
        if follow:
            return os.path.realpath(name)
        head, tail = os.path.split(name.rstrip(os.sep))
        return os.path.join(os.path.realpath(head or os.curdir), tail)
    except (TypeError, ValueError):
        return None  # no path at all: the call itself will say so


def _inside(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip(os.sep) + os.sep)


def _install_hook() -> None:
    global _hooked
    with _hook_lock:
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _guards or event not in _WATCHED:
        return
    guard = guard_of_this_thread()
    if guard is not None:
        guard.judge(event, args)


# Without this neither a debugger nor coverage sees what happens in a hook.
_audit.__cantrace__ = True  # type: ignore[attr-defined]


def guard_of_this_thread() -> Guard | None:
    """The guard of the program that the calling thread belongs to; None for threads of ours."""
    return next((guard for guard in list(_guards) if guard.owns_this_thread()), None)

"""Interpreters that become zygotes: started when one is needed, or a little before.

Starting one takes as long as importing us does. `start_ahead` has it done at the same time, by the
other processor; whoever called it calls `end_unused` before the process ends. What this file
imports is waited for before that: `subprocess` and `socket` would take longer than all the rest.
"""

from __future__ import annotations

import _thread
import os
import select
import sys

from ..linux.bare import signal, socket

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_CONTROL = 3
# Our own files are compiled once, if ours may be (`-B` is for the guests).
_BOOT = (
    "import sys;sys.dont_write_bytecode={no_bytecode!r};p=type(sys)('belljar_jail');"
    "p.__path__=[{package!r}+'/linux'];sys.modules['belljar_jail']=p;"
    "from belljar_jail.zygote import main;main({control},{package!r}+'/guest',{worker!r})"
)
# Libraries that would start threads, and a locale in which Python speaks UTF-8.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "MPLCONFIGDIR": "/tmp",
    "MPLBACKEND": "agg",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "LD_BIND_NOW": "1",  # symbols are looked up once, not in every guest
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_END_SECONDS = 60.0

_lock = _thread.allocate_lock()
_ahead: list[Blank] = []


class Process:
    """A child in a session of its own, with `control` as descriptor 3 and nothing on 0, 1 and 2.

    Other descriptors that the host was given without close-on-exec are its to close.
    """

    def __init__(self, argv: list[str], control: int) -> None:
        # Copying a descriptor to its own number would leave it to be closed.
        apart = os.dup(control) if control == _CONTROL else control
        try:
            self.pid = os.posix_spawn(
                argv[0],
                argv,
                _ENVIRONMENT,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, apart, _CONTROL),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                    (os.POSIX_SPAWN_DUP2, 0, 1),
                    (os.POSIX_SPAWN_DUP2, 0, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
            )
        finally:
            if apart != control:
                os.close(apart)
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended, and is waited for, within `seconds`."""
        if self.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * 1000):
            return False
        try:
            end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:  # this host ignores SIGCHLD, and the kernel waited for us
            end = None
        # By descriptor: whoever else waits in this process, a number would be somebody else's then.
        exited = end is None or end.si_code == os.CLD_EXITED
        status = end.si_status if end is not None else 0
        self.returncode = status if exited else -status
        os.close(self._pidfd)
        return True

    def kill(self) -> None:
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended, and nobody needs to wait for it
                return


class Blank:
    """A process that waits for `control` to say which zygote it is to be; it ends with that."""

    def __init__(self, *, worker: bool) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = ["-I", "-B"] if worker else ["-I", "-S", "-B"]
        boot = _BOOT.format(
            no_bytecode=sys.dont_write_bytecode, package=_PACKAGE, control=_CONTROL, worker=worker
        )
        try:
            self.process = Process([sys.executable, *flags, "-c", boot], theirs.fileno())
        finally:
            theirs.close()

    def end(self) -> None:
        """Returns when it has ended, and all that it has become with it."""
        self.control.close()
        if not self.process.wait(_END_SECONDS):
            self.process.kill()
            self.process.wait()


def start_ahead() -> None:
    """One for Python programs, before it is known whether it will be needed."""
    with _lock:
        _ahead.append(Blank(worker=True))


def take(*, worker: bool) -> Blank:
    """One that is there already, or a new one."""
    with _lock:
        if worker and _ahead and _ahead[-1].owner == os.getpid():
            return _ahead.pop()
    return Blank(worker=worker)


def end_unused() -> None:
    with _lock:
        unused = [each for each in _ahead if each.owner == os.getpid()]
        _ahead.clear()
    for each in unused:
        each.end()

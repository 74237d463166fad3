"""Interpreters that become zygotes: started when one is needed, or a little before.

Starting one takes as long as importing us does. `start_ahead` has it done at the same time, by the
other processor; whoever called it calls `end_unused` before the process ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

_LINUX_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "linux")
_BOOT = (
    "import sys;p=type(sys)('belljar_jail');p.__path__=[{directory!r}];"
    "sys.modules['belljar_jail']=p;from belljar_jail.zygote import main;main({fd})"
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

_lock = threading.Lock()
_ahead: list[Blank] = []


class Blank:
    """A process that waits for `control` to say which zygote it is to be; it ends with that."""

    def __init__(self, *, worker: bool) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = ["-I", "-B"] if worker else ["-I", "-S", "-B"]
        boot = _BOOT.format(directory=_LINUX_DIR, fd=theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )

    def end(self) -> None:
        """Returns when it has ended, and all that it has become with it."""
        self.control.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
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

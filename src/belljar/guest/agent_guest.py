"""From the agent to the program: what is given up in the child before the program's first line."""

from __future__ import annotations

import fcntl
import os
import resource
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .agent_identity import Identity


class Refused(Exception):
    """The run cannot be started; `kind` says which part of the request is to blame."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


def find(argv: list[str], env: dict[str, str]) -> str:
    import shutil

    path = shutil.which(argv[0], path={**os.environ, **env}.get("PATH"))
    if path is None:
        raise Refused("command", f"{argv[0]!r} is not installed in this image")
    return path


def be_guest(
    start: dict[str, Any], own: tuple[int, ...], executable: str, identity: Identity
) -> None:
    """In the child: what the program may not have is given up; then it is the program's turn."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in own]):
        os.dup2(fd, number, inheritable=number < 3)
    os.closerange(5, 256)
    identity.assume()
    os.chdir(start["cwd"])
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the first to go when memory is used up, never pid 1
    except OSError:
        if "gvisor" not in start["layers"]:
            raise
    for name, value in start["rlimits"]:
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))
    handle_all(signal.SIG_DFL)
    env = {**os.environ, **start["env"]}
    env.pop("HOSTNAME", None)
    if executable:
        _add_filter(start["filter"])
        _execute(executable, start["argv"], env)
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python has it
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _add_filter(start["filter"])


def _add_filter(program: bytes) -> None:
    """Put a filter on this process beside the container's own; OSError if the kernel objects."""
    if not program:
        return
    import ctypes

    class Wrapped(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    wrapped = Wrapped(len(program) // 8, program)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(wrapped))
    if libc.prctl(22, ctypes.c_ulong(2), address, 0, 0) != 0:  # PR_SET_SECCOMP, a filter
        raise OSError(ctypes.get_errno(), "the language's seccomp profile was not taken")


def handle_all(how: signal.Handlers) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, how)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _execute(executable: str, argv: list[str], env: dict[str, str]) -> NoReturn:
    os.closerange(3, 5)
    try:
        os.execve(executable, argv, env)
    except OSError as error:
        os.write(2, f"belljar: {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)

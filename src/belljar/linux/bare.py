"""`signal` and `socket` as the C modules that the standard library wraps.

To import the wrappers takes milliseconds, which is most of a short run. But the C modules are
private to CPython: where one is missing or lacks what we use, the public module takes its place.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from types import ModuleType

__all__ = ["signal", "socket"]

SIGNAL = (
    "NSIG", "SIGCHLD", "SIGCONT", "SIGINT", "SIGKILL", "SIGPIPE", "SIGSTOP", "SIGXFSZ", "SIG_BLOCK",
    "SIG_DFL", "SIG_IGN", "SIG_SETMASK", "default_int_handler", "pidfd_send_signal",
    "pthread_sigmask", "signal", "sigtimedwait", "valid_signals",
)  # fmt: skip
SOCKET = (
    "AF_INET", "AF_UNIX", "CMSG_SPACE", "MSG_CMSG_CLOEXEC", "MSG_DONTWAIT", "MSG_NOSIGNAL",
    "MSG_PEEK", "SCM_RIGHTS", "SOCK_DGRAM", "SOCK_SEQPACKET", "SOCK_STREAM", "SOL_SOCKET",
    "SO_RCVBUF", "SO_SNDBUF", "socket", "socketpair",
)  # fmt: skip


def _bare(private: str, public: str, needed: tuple[str, ...]) -> ModuleType:
    try:
        module = __import__(private)
    except ImportError:
        return __import__(public)
    if all(hasattr(module, name) for name in needed):
        return module
    return __import__(public)


if not TYPE_CHECKING:
    signal = _bare("_signal", "signal", SIGNAL)
    socket = _bare("_socket", "socket", SOCKET)

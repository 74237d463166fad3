"""What a program finds changed because it runs in WebAssembly: time, event loops, what is absent.

Where something is missing the error says so in one sentence and names a backend that has it.
"""

from __future__ import annotations

import errno
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_ELSEWHERE = "the wasm backend has no {what}; the backend 'jail' has"
# Modules of the standard library that need what WebAssembly has not.
_ABSENT = {
    **dict.fromkeys(("ssl", "_ssl"), "TLS"),
    **dict.fromkeys(("ctypes", "_ctypes"), "native libraries"),
    **dict.fromkeys(("mmap",), "memory maps"),
    **dict.fromkeys(("_multiprocessing", "_posixsubprocess"), "processes"),
    **dict.fromkeys(("bz2", "_bz2", "lzma", "_lzma", "_zstd"), "compressors but zlib"),
    **dict.fromkeys(("curses", "_curses", "readline", "termios", "tty", "pty"), "terminals"),
    **dict.fromkeys(("tkinter", "_tkinter", "turtle", "idlelib"), "screens"),
    **dict.fromkeys(("ensurepip", "venv", "pip"), "installed packages"),
    **dict.fromkeys(("grp", "resource", "syslog"), "users and system services"),
}  # fmt: skip
_PROCESS_CALLS = frozenset((
    "execv", "execve", "execvp", "fork", "forkpty", "kill", "killpg", "pipe", "popen",
    "posix_spawn", "posix_spawnp", "spawnv", "spawnve", "system", "wait", "waitpid",
))  # fmt: skip
# Blocking calls of the host do not see an interruption: short ones are soon over.
_SLICE = 0.02


def sentence(what: str) -> str:
    return _ELSEWHERE.format(what=what)


class Absent:
    """The last finder: what nobody has found is explained."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        what = _ABSENT.get(name.partition(".")[0])
        if what is None and path is None:
            what = "packages beyond the standard library" if _looks_installed(name) else None
        if what is not None:
            raise ModuleNotFoundError(f"No module named {name!r}: {sentence(what)}", name=name)


# What programs for other backends import most; for any other name plain words are truer.
_PACKAGES = frozenset((
    "PIL", "aiohttp", "bs4", "cv2", "fastapi", "flask", "httpx", "lxml", "matplotlib", "numpy",
    "pandas", "polars", "psutil", "pyarrow", "pydantic", "requests", "scipy", "seaborn", "sklearn",
    "sympy", "torch", "yaml",
))  # fmt: skip


def _looks_installed(name: str) -> bool:
    return name in _PACKAGES


def change(leave: Callable[[int], None]) -> None:
    """Change the modules concerned; `leave` ends the instance with an exit code."""
    sys.meta_path.append(Absent)
    _sleep_in_slices()
    _loop_without_sockets()
    _no_threads()
    _no_processes()

    def leave_at_once(status: int) -> NoReturn:
        leave(int(status) & 0xFF)
        raise AssertionError("unreachable")

    os._exit = leave_at_once


def _sleep_in_slices() -> None:
    nap, now = time.sleep, time.monotonic

    def sleep(seconds: float, /) -> None:
        """Delay execution for a given number of seconds."""
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        end = now() + seconds
        while (left := end - now()) > 0:
            nap(min(left, _SLICE))

    time.sleep = sleep  # type: ignore[assignment]


def _loop_without_sockets() -> None:
    """An event loop that needs no pair of sockets to wake itself: nobody else could wake it."""
    import asyncio
    import selectors

    class NapSelector(selectors._BaseSelectorImpl):
        def select(self, timeout: float | None = None) -> list[Any]:
            if timeout is None:
                raise RuntimeError("asyncio waits for something that can never happen in wasm")
            if timeout > 0:
                time.sleep(timeout)
            return []

    class Loop(asyncio.SelectorEventLoop):
        def __init__(self, selector: Any = None) -> None:
            super().__init__(selector or NapSelector())

        def _make_self_pipe(self) -> None:
            self._ssock = self._csock = None
            self._internal_fds = 0

        def _close_self_pipe(self) -> None:
            return None

        def _write_to_self(self) -> None:
            return None

    library: Any = asyncio
    library.unix_events._UnixDefaultEventLoopPolicy._loop_factory = Loop
    library.EventLoop = library.SelectorEventLoop = Loop


def _no_threads() -> None:
    import _thread
    import threading

    def start(*args: object, **named: object) -> NoReturn:
        raise RuntimeError(sentence("threads"))

    for module in (_thread, threading):
        for name in ("start_new_thread", "start_joinable_thread", "_start_joinable_thread",
                     "_start_new_thread", "start_new"):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, start)


def _no_processes() -> None:
    import subprocess

    def start() -> NoReturn:
        raise OSError(errno.ENOTSUP, sentence("processes"))

    def begin(self: Any, *args: Any, **named: Any) -> None:
        self._child_created = False  # for its finalizer
        start()

    popen: Any = subprocess.Popen
    popen.__init__ = begin

    def missing(name: str) -> NoReturn:
        why = f": {sentence('processes')}" if name in _PROCESS_CALLS else ""
        raise AttributeError(f"module 'os' has no attribute {name!r}{why}", name=name, obj=os)

    for name in _PROCESS_CALLS & set(vars(os)):  # stubs that could only fail
        delattr(os, name)
    os.__getattr__ = missing  # type: ignore[method-assign]

"""Lends our own process to a program: streams, directory, environment and modules, and back again.

All of this exists once in a process. While a program has it, every other thread of ours sees its
working directory, its environment and its `sys.stdout`. That is why runs take turns, and one reason
why this is for development only.
"""

from __future__ import annotations

import _thread
import builtins
import errno
import io
import os
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NoReturn

from ..capture import HeadTail
from ..lint import WARNING_FILTERS
from ..types import Request
from . import working_directory
from .inprocess_guard import guard_of_this_thread

_SLICE = 0.02  # seconds between two chances to stop a program that sleeps
_MOST_WAITING = 16 << 20  # bytes that a program may be ahead of the thread that hands them out
_Stream = Literal["stdout", "stderr"]


class Streams:
    """What the program writes: captured within the cap, and queued for whoever streams it."""

    def __init__(self, captured: dict[str, HeadTail]) -> None:
        self.captured = captured
        self._live: deque[tuple[_Stream, bytes]] = deque()
        self._waiting = 0  # bytes in it
        self._lock = threading.Lock()
        self._closed = False

    def write(self, stream: _Stream, data: bytes) -> None:
        with self._lock:
            live = b"" if self._closed else self.captured[stream].feed(data)
        if live:
            self._live.append((stream, live))
            self._waiting += len(live)
            while self._waiting > _MOST_WAITING and not self._closed:
                time.sleep(_SLICE)

    def take(self) -> Iterator[tuple[_Stream, bytes]]:
        """What came since the last time, in order, in as few pieces as the order allows."""
        while self._live:
            self._waiting = 0
            stream, piece = self._live.popleft()
            pieces = [piece]
            while self._live and self._live[0][0] == stream:
                pieces.append(self._live.popleft()[1])
            yield stream, b"".join(pieces)

    def close(self) -> None:
        """Let nothing more in: a thread that could not be ended may still be writing."""
        with self._lock:
            self._closed = True


class _Writer(io.RawIOBase):
    """The bytes below `sys.stdout`: the program's are captured, those of our threads go on to ours.

    It has no descriptor: `fileno` raises UnsupportedOperation, as for any stream that is no file.
    """

    def __init__(self, streams: Streams, stream: _Stream, ours: Any) -> None:
        self._streams = streams
        self._stream: _Stream = stream
        self._ours = ours

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        if guard_of_this_thread() is not None:
            self._streams.write(self._stream, piece)
        elif self._ours is not None:
            self._ours.write(piece.decode("utf-8", "replace"))
        return len(piece)


@contextmanager
def lent(root: str, request: Request, streams: Streams) -> Iterator[None]:
    """Our process as the program's, with `root`/work as its directory, until the block ends."""
    work, tmp = os.path.join(root, "work"), os.path.join(root, "tmp")
    with ExitStack() as back:
        _swap_warnings(back)
        for name, value in {
            "stdin": io.TextIOWrapper(io.BytesIO(request.stdin), "utf-8", "surrogateescape"),
            "stdout": _text(streams, "stdout", "surrogateescape"),
            "stderr": _text(streams, "stderr", "backslashreplace"),
        }.items():
            _swap(back, sys, name, value)
            _swap(back, sys, f"__{name}__", value)
        _swap(back, sys, "argv", [])
        _swap(back, sys, "path", ["", *sys.path])
        for name in ("displayhook", "excepthook"):
            _swap(back, sys, name, getattr(sys, f"__{name}__"))
        _swap(back, tempfile, "tempdir", tmp)
        _swap(back, time, "sleep", _for_guests(_patient_sleep, time.sleep))
        _swap(back, os, "_exit", _for_guests(_exit, os._exit))
        _swap(back, os, "abort", _for_guests(_abort, os.abort))
        _swap(back, threading.Thread, "start", _adopting(threading.Thread.start))
        _swap(back, _thread, "start_new_thread", _for_guests(_refuse, _thread.start_new_thread))
        _swap(back, threading, "excepthook",
              _for_guests(threading.__excepthook__, threading.excepthook))  # fmt: skip
        back.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        back.callback(os.umask, os.umask(0o022))
        _swap_environment(back, dict(working_directory.environment(request, work)))
        back.callback(os.chdir, _current_directory())
        os.chdir(working_directory.start_in(request, work))
        back.callback(_forget_modules, root)
        back.callback(vars(builtins).pop, "display", None)  # which the guest's Interpreter adds
        back.callback(_close_figures, _figures())
        if "__main__" in sys.modules:
            back.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        yield


def _swap(back: ExitStack, holder: Any, name: str, value: Any) -> None:
    back.callback(setattr, holder, name, getattr(holder, name))
    setattr(holder, name, value)


def _swap_environment(back: ExitStack, env: dict[str, str]) -> None:
    before = dict(os.environ)

    def put(values: dict[str, str]) -> None:
        os.environ.clear()
        os.environ.update(values)

    back.callback(put, before)
    put(env)


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # ours was deleted under us; there is nothing to come back to
        return tempfile.gettempdir()


def _text(streams: Streams, stream: _Stream, errors: str) -> io.TextIOWrapper:
    # RawIOBase is what TextIOWrapper needs, whatever its annotation says: it never writes in part.
    raw: Any = _Writer(streams, stream, getattr(sys, stream))
    return io.TextIOWrapper(raw, "utf-8", errors, newline="\n", write_through=True)


def _swap_warnings(back: ExitStack) -> None:
    """The filters of a fresh interpreter, and afterwards ours again."""
    kept = warnings.catch_warnings()
    with WARNING_FILTERS:
        kept.__enter__()
        warnings.resetwarnings()
        warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
        for category in (
            DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning,
        ):  # fmt: skip
            warnings.simplefilter("ignore", category, append=True)

    def put_back() -> None:
        with WARNING_FILTERS:
            kept.__exit__(None, None, None)

    back.callback(put_back)


def _forget_modules(root: str) -> None:
    """So that the next program, with modules of the same names, does not get this one's."""
    for name, module in list(sys.modules.items()):
        # Not `module.__file__`: asked for it, a lazy module would load itself.
        if str(getattr(module, "__dict__", {}).get("__file__")).startswith(root):
            del sys.modules[name]
    for path in [path for path in sys.path_importer_cache if path.startswith(root)]:
        del sys.path_importer_cache[path]


def _for_guests(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """One function that is `theirs` in the program's threads and `ours` everywhere else."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (ours if guard_of_this_thread() is None else theirs)(*args, **kwargs)

    return choose


def _adopting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """`Thread.start`, by which a program's threads come under its guard."""

    def adopt_and_start(thread: threading.Thread) -> None:
        guard = guard_of_this_thread()
        if guard is not None:
            guard.adopt(thread)
        start(thread)

    return adopt_and_start


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise PermissionError(errno.EPERM, "backend inprocess starts threads by threading.Thread only")


def _figures() -> set[int]:
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    return set() if pyplot is None else set(pyplot.get_fignums())


def _close_figures(ours: set[int]) -> None:
    """Pyplot keeps figures until they are closed: the next program would show them as its own."""
    for number in _figures() - ours:
        sys.modules["matplotlib.pyplot"].close(number)


_sleep = time.sleep


def _patient_sleep(seconds: float, /) -> None:
    """`time.sleep` in slices: between them Python can throw the exception that ends a thread."""
    if not seconds > _SLICE:
        return _sleep(seconds)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        _sleep(min(left, _SLICE))


def _exit(status: int) -> NoReturn:
    """`os._exit` would be the end of our own process."""
    raise SystemExit(status)


def _abort() -> NoReturn:
    raise SystemExit(134)

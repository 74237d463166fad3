"""The end of a program that ran in a fork of a warm interpreter: CPython's, but for teardown.

Threads are joined, exit handlers run, what the program left open is flushed. Modules are not torn
down: that would copy every page that the fork shares. Nothing here needs /proc.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import atexit
import gc
import io
import os
import resource
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn


def run_and_leave(program: Callable[[], None], known: frozenset[str]) -> NoReturn:
    """Call `program` and end this process as it says; `known` modules were there before it."""
    code = 0
    try:
        program()
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt:
        code = -_signal.SIGINT
    except BaseException:  # noqa: BLE001 - the program may raise anything
        sys.excepthook(*sys.exc_info())
        code = 1
    code = _finish(known, code)
    if code < 0:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    os._exit(code & 0xFF)


def _exit_code(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _finish(known: frozenset[str], code: int) -> int:
    try:
        threading = sys.modules.get("threading")
        if threading is not None and threading.active_count() > 1:
            threading._shutdown()
        atexit._run_exitfuncs()
        for name in ("__main__", *(sys.modules.keys() - known)):
            _let_go(sys.modules.get(name))
        _flush_files()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:  # noqa: BLE001 - the program's own handlers may raise anything
        return code or 120  # as CPython says when it cannot flush
    return code


def _flush_files() -> None:
    """What is still open, because something holds on to it, and has not been written."""
    if not _some_are_open():
        return
    for thing in gc.get_objects():
        if issubclass(type(thing), io.TextIOWrapper | io.BufferedWriter) and not thing.closed:
            thing.flush()


def _some_are_open() -> bool:
    """Whether there are descriptors besides the standard ones, asked in one call."""
    poll = select.poll()
    asked = range(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for fd in asked:
        poll.register(fd, 0)
    try:
        closed = sum(bool(events & select.POLLNVAL) for _, events in poll.poll(0))
    except OSError:  # more than the kernel answers at once
        return True
    return closed < len(asked)


def _let_go(module: Any) -> None:
    """Drop the variables of a program's own module, so that what they hold is closed."""
    names = getattr(module, "__dict__", None)
    if names is None or os.path.isabs(str(names.get("__file__", "/"))):
        return
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") == private:
                names[name] = None

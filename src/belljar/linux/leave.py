"""The end of a program that ran in a fork of a warm interpreter: CPython's, but for teardown.

Threads are joined, exit handlers run, what the program left open is flushed. Modules are not torn
down: that would copy every page that the fork shares.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys

from . import own_frames
from .bare import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    MoreAreOpen = Callable[[], bool]  # whether there are descriptors besides the standard ones


class Loaded:
    """The modules of now; later ones are the program's."""

    def __init__(self) -> None:
        self.names = frozenset(sys.modules)
        self._last = next(reversed(sys.modules))

    def added(self) -> set[str]:
        """Those that have come since."""
        # A set of all names would copy every page that has one of them.
        if next(reversed(sys.modules), None) == self._last:
            return set()
        return sys.modules.keys() - self.names


def run_and_leave(
    program: Callable[[], None], loaded: Loaded, more_are_open: MoreAreOpen
) -> NoReturn:
    """Call `program` and end this process as it says; `loaded` was there before it."""
    code = 0
    try:
        program()
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - the program may raise anything
        sys.excepthook(*sys.exc_info())
        code = 1
    code = _finish(loaded, more_are_open, code)
    # The host reads to the end of them while the kernel takes our memory apart.
    for fd in (1, 2):
        try:
            os.close(fd)
        except OSError:
            continue  # the program has closed it
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _exit_code(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _finish(loaded: Loaded, more_are_open: MoreAreOpen, code: int) -> int:
    try:
        threading = sys.modules.get("threading")
        if threading is not None and threading.active_count() > 1:
            _wait_for_threads(threading)
        if hasattr(atexit, "_run_exitfuncs"):  # nothing public runs them
            atexit._run_exitfuncs()
        let_go_of_files(loaded, more_are_open)
    except BaseException:  # noqa: BLE001 - the program's own handlers may raise anything
        return code or 120  # as CPython says when it cannot flush
    return code


def _wait_for_threads(threading: Any) -> None:
    if hasattr(threading, "_shutdown"):  # CPython's own way, private to it
        threading._shutdown()
        return
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def let_go_of_files(loaded: Loaded, more_are_open: MoreAreOpen) -> None:
    """Close those that only the program's variables hold, flush those that others do."""
    _let_go(getattr(sys.modules.get("__main__"), "__dict__", None))
    for name in loaded.added():
        names = getattr(sys.modules.get(name), "__dict__", {})
        if not os.path.isabs(str(names.get("__file__", "/"))):
            _let_go(names)
    if more_are_open():
        for thing in gc.get_objects():
            if issubclass(type(thing), io.TextIOWrapper | io.BufferedWriter) and not thing.closed:
                thing.flush()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _let_go(names: Any) -> None:
    """Drop the variables of a program's own module, so that what they hold is closed."""
    if names is None:
        return
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") == private:
                names[name] = None


own_frames.without_path(run_and_leave)

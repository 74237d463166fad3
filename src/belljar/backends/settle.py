"""What is done for a run after its caller has the result.

For `settle="later"`: waiting for the kernel's word. A run keeps its place, its control group and
its user id until it is gone; one that goes on after it said that it had ended is killed when its
time is up. For every other run, which is gone: giving its place back and ordering the next jail,
which its caller need not wait for.

One thread, started when there is something to do, looks after all of them.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

try:  # all that we need of `queue`, which imports more
    from _queue import Empty, SimpleQueue
except ImportError:
    from queue import Empty, SimpleQueue

if TYPE_CHECKING:
    from .jail_watch import JailWatch
    from .shelves import Jail

_LOOK_MILLISECONDS = 2
_CLOSE_SECONDS = 30.0
_EMPTY_SECONDS = 10.0  # to take apart the memory of a run that is over


class _Open:
    """A run that the kernel has not confirmed."""

    def __init__(
        self, watch: JailWatch, cleanup: contextlib.ExitStack, jail: Jail, parked: int
    ) -> None:
        self.watch, self._cleanup, self._jail, self._parked = watch, cleanup, jail, parked

    @property
    def wakes(self) -> int:
        return self.watch.control

    def is_over(self) -> bool:
        try:
            if not self.watch.is_gone():
                return False
            self.watch.until_gone()  # closes what it holds
            self._jail.replenish(self._parked)
            self._jail.fetch_next()
        except Exception as error:  # noqa: BLE001 - one run must not keep the others from settling
            # Its result is long with the caller; the jail is killed and not used again.
            self.watch.abandon()
            import logging

            logging.getLogger("belljar").error("a run that was not waited for: %s", error)
        try:
            self._cleanup.close()
        except Exception as error:  # noqa: BLE001 - nor must its place
            import logging

            logging.getLogger("belljar").error("after a run: %s", error)
        return True

    def kill(self) -> None:
        self.watch.kill()


class _Over:
    """A run that is gone, and whose place is to be given back when its memory is, too."""

    def __init__(self, cleanup: contextlib.ExitStack, jail: Jail, parked: int) -> None:
        self._cleanup, self._jail, self._parked = cleanup, jail, parked
        self._deadline = time.monotonic() + _EMPTY_SECONDS

    @property
    def wakes(self) -> int:
        return self._jail.pidfd

    def is_over(self) -> bool:
        if not self._jail.is_empty(0) and time.monotonic() < self._deadline:
            return False
        try:
            with self._cleanup:
                self._jail.patience = 0.0  # it has been waited for
                self._jail.replenish(self._parked)
                self._jail.fetch_next()
        except Exception as error:  # noqa: BLE001 - the result is with the caller
            import logging

            logging.getLogger("belljar").error("after a run: %s", error)
        return True

    def kill(self) -> None:
        self._deadline = 0.0


class Settler:
    """All runs of one backend that something is left to do for. Called from many threads."""

    def __init__(self) -> None:
        self._arriving: SimpleQueue[_Open | _Over | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._then: Callable[[], None] = lambda: None

    def add(self, watch: JailWatch, cleanup: contextlib.ExitStack, jail: Jail, parked: int) -> None:
        """Take over: `cleanup` is run when the kernel has confirmed the end."""
        run = _Open(watch, cleanup, jail, parked)
        if self._took(run):
            return
        if self._closed:
            run.kill()
        while not run.is_over():
            time.sleep(_LOOK_MILLISECONDS / 1000)

    def finish(self, cleanup: contextlib.ExitStack, jail: Jail, parked: int) -> None:
        """Run `cleanup` of a run that is gone, and have the next jail made."""
        run = _Over(cleanup, jail, parked)
        if not self._took(run):
            run.kill()
            run.is_over()

    def _took(self, run: _Open | _Over) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="belljar-settle", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # this process can have no more: the caller does it himself
                    return False
                self._thread = thread
            self._arriving.put(run)
            return True

    def close(self, then: Callable[[], None]) -> None:
        """Kill what is left, wait until it is gone, and do `then`."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is threading.current_thread():
            # The collector came upon a dropped backend in the midst of this thread's work, with
            # locks that `then` wants to have: all of this is for later.
            self._then = then
            self._arriving.put(None)
            return
        try:
            if thread is not None:
                self._arriving.put(None)
                thread.join(_CLOSE_SECONDS)
        finally:
            then()

    def _work(self) -> None:
        try:
            self._look_after_all()
        finally:
            self._then()

    def _look_after_all(self) -> None:
        pending: list[_Open | _Over] = []
        closing = False
        while pending or not closing:
            # With nothing to look at there is nothing to do but wait for more.
            block = not pending
            while True:
                try:
                    arrived = self._arriving.get(block=block)
                except Empty:
                    break
                block = False
                if arrived is None:
                    closing = True
                elif not isinstance(arrived, _Over) or not arrived.is_over():
                    pending.append(arrived)
            if closing:
                for each in pending:
                    each.kill()
            if not pending:
                continue
            looking = select.poll()
            for each in pending:
                looking.register(each.wakes, select.POLLIN)
            looking.poll(_LOOK_MILLISECONDS)
            pending = [each for each in pending if not each.is_over()]

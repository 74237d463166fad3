"""The poll loop of a run in a jail: it is waiting already, and is killed by pidfd."""

from __future__ import annotations

import os
import select
import signal
import time

from ..events import Emit
from ..records import replace
from ..report import Report
from . import outcome
from .base import Cancel, Plan
from .pieces import Pieces
from .shelves import Jail
from .supervise import Ended, Watch

_QUICK_MILLISECONDS = 3
_KILL_SECONDS = 10.0  # a jail that still lives then is broken


class JailWatch(Watch):
    """See `supervise.Watch`. The program starts when this is made; wait `until_gone`."""

    def __init__(
        self,
        jail: Jail,
        plan: Plan,
        message: Pieces,
        report: Report,
        emit: Emit,
        cancel: Cancel,
    ) -> None:
        request, limits = plan.request, plan.policy.limits
        self._jail = jail
        self._killed = 0.0
        if not request.stdin:
            os.close(jail.stdin)
        # Then at once: the guest is waiting for it, and is at work while we get ready to listen.
        self._began = time.monotonic()
        jail.send(message)
        group = jail.group
        super().__init__(
            run=request.id,
            control=jail.run,
            frames=jail.frames,
            program=message,
            stdout=jail.stdout,
            stderr=jail.stderr,
            stdin=jail.stdin if request.stdin else None,
            data=request.stdin,
            timeout=limits.timeout,
            captured=outcome.captures(plan, capped="output_cap" in plan.spec.layers),
            report=report,
            emit=emit,
            cancel=cancel,
            on_kill=group.release if group is not None else lambda: None,
        )
        self._started = True
        self._deadline = self._began + self._timeout

    def until_gone(self) -> Ended:
        try:
            self._wait_for_a_quick_end()
            ended = super().until_gone()
        except BaseException:
            self.abandon()  # its slot is gone, or nobody is going to wait for it any more
            raise
        ended = replace(ended, started=min(self._began, ended.ended))
        # A guest that had ended when our kill came was not ended by it.
        if ended.reason or not self.reason or ended.wait_status != signal.SIGKILL:
            return ended
        passed = max(0.0, ended.ended - self._killed)
        return replace(ended, reason="host", kill_seconds=ended.kill_seconds + passed)

    def until_said(self) -> bool:
        """Wait for the guest's own word that it has ended; False if `until_gone` knows more."""
        try:
            return self._has_said()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Kill the run and let go of all that was held of it."""
        self._jail.kill()
        self._close()

    def _has_said(self) -> bool:
        while self.ended is None and not self.reason:
            if len(self._readers) == 1:  # the slot's: the guest has closed all of its own
                if self._report.said is None:
                    return False
                self._emit_rest()
                self._poll.unregister(self._cancel.fileno())  # the caller's, who does not wait
                return True
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._out_of_time()
                return False
            for fd, events in self._poll.poll(min(left, 3600) * 1000):
                self._handle(fd, events)
        return False

    def as_said(self) -> Ended:
        """The end as the guest tells it, with none of what only the kernel knows."""
        assert self._report.said is not None
        return Ended(
            wait_status=self._report.said << 8,
            cpu=0.0,
            peak_memory=0,
            started=self._began,
            ended=time.monotonic(),
            survivors=0,
            kill_seconds=0.0,
            reason="",
        )

    def kill(self) -> None:
        self._jail.kill()

    def is_gone(self) -> bool:
        """Look, without waiting, whether the kernel's word has come; kills what is overdue."""
        for fd, events in self._poll.poll(0):
            self._handle(fd, events)
        if self.ended is None and time.monotonic() > self._deadline:
            self._out_of_time()
        return self.ended is not None

    def _wait_for_a_quick_end(self) -> None:
        """Let a short program end in peace: being woken for each of its words costs it more time
        than it needs. What it says waits in pipes, which a longer one soon finds us reading."""
        if self._outgoing or self.ended is not None:
            return  # it has not got all of its input yet, or is over
        quick = select.poll()
        quick.register(self._control, select.POLLIN)
        quick.register(self._cancel.fileno(), select.POLLIN)
        if self._jail.stderr in self._readers:
            quick.register(self._jail.stderr, 0)  # its end: the program has closed its streams
        quick.poll(min(_QUICK_MILLISECONDS, self._timeout * 1000))

    def _supervisor_says(self, fd: int) -> None:
        super()._supervisor_says(fd)
        self._jail.over = self.ended is not None
        if self.ended is not None and fd in self._readers:
            self._done_with(fd)  # its last word; that it ends too is nobody's business

    def _kill(self, reason: str) -> None:
        if self.ended is not None or self.reason:
            return
        self.reason = reason
        self._killed = time.monotonic()
        self._deadline = self._killed + _KILL_SECONDS
        self._on_kill()
        self._jail.kill()

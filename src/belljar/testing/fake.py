"""A backend that runs nothing: it answers from a script, so that the edges can be tested alone.

    fake = FakeBackend(lambda request: Result(status=Status.SUCCESS, value=42))
    engine = Engine(backends={"fake": fake})
    assert engine.run(Request(code="6 * 7"), backend="fake").value == 42
    assert fake.requests[0].code == "6 * 7"

It keeps the contract of a backend as far as a script can: it honours cancel, timeout and the output
cap, refuses what its enforcement report does not hold, and refuses to run once closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from ..backends.base import (
    FIELDS,
    Availability,
    Cancel,
    Plan,
    enforced,
    refuse_unless_held,
)
from ..capture import HeadTail
from ..errors import BackendUnavailable
from ..events import Emit, Output
from ..policy import Isolation, Policy
from ..types import Enforcement, Request, Result, Status, Usage

Chunks = Iterable[tuple[Literal["stdout", "stderr"], bytes]]


def succeed(request: Request) -> Result:
    return Result(status=Status.SUCCESS, exit_code=0)


def say_nothing(request: Request) -> Chunks:
    return ()


def at_once(request: Request) -> float:
    return 0.0


class FakeBackend:
    """Functions of the request script a run: what it answers, what it says, how long it takes.

    `respond` may raise, as a backend that breaks would. `plans` holds what was run, in order.
    """

    takes_images = False

    def __init__(
        self,
        respond: Callable[[Request], Result] = succeed,
        *,
        output: Callable[[Request], Chunks] = say_nothing,
        delay: Callable[[Request], float] = at_once,
        name: str = "fake",
        isolation: Isolation = Isolation.JAIL,
        enforcement: Mapping[str, Enforcement] | None = None,
        availability: Availability | None = None,
    ) -> None:
        self.name = name
        self.isolation = isolation
        self.plans: list[Plan] = []
        self.running = threading.Event()
        self.closed = False
        self._respond = respond
        self._output = output
        self._delay = delay
        self._report = {field: enforced("the script") for field in FIELDS} | dict(enforcement or {})
        self._availability = availability or Availability(available=True)

    @property
    def requests(self) -> list[Request]:
        return [plan.request for plan in self.plans]

    def probe(self) -> Availability:
        return self._availability

    def compile(self, policy: Policy, request: Request) -> Plan:
        refuse_unless_held(self.name, self.isolation, policy, self._report)
        return Plan(
            backend=self.name,
            isolation=self.isolation,
            request=request,
            policy=policy,
            enforcement=self._report,
        )

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self.closed:
            raise BackendUnavailable(f"backend {self.name!r} is closed")
        started = time.monotonic()
        request, limits = plan.request, plan.policy.limits
        self.plans.append(plan)
        self.running.set()
        cap, more = limits.output, plan.request.stream_cap
        captured = {"stdout": HeadTail(cap, more), "stderr": HeadTail(cap, more)}
        for stream, data in self._output(request):
            if live := captured[stream].feed(data):
                emit(Output(id=request.id, stream=stream, data=live))
        delay = self._delay(request)
        if cancel.wait(min(delay, limits.timeout)):
            result = Result(status=Status.KILLED, signal=9)
        elif delay > limits.timeout:
            result = Result(status=Status.TIMEOUT, signal=9)
        else:
            result = self._respond(request)
        out, err = captured["stdout"], captured["stderr"]
        return replace(
            result,
            id=request.id,
            stdout=out.text() or result.stdout,
            stderr=err.text() or result.stderr,
            truncated=out.truncated or err.truncated or result.truncated,
            usage=Usage(
                wall=time.monotonic() - started, stdout_bytes=out.total, stderr_bytes=err.total
            ),
            enforcement=plan.enforcement,
            backend=self.name,
            isolation=self.isolation.value,
        )

    def close(self) -> None:
        self.closed = True

"""What happens during a run, as values, and where those values go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from .policy import Policy
from .records import record
from .trusted_imports import calls_application
from .types import Display, Request, Result


@record
class RunStarted:
    """A request was admitted and its backend chosen, under `policy`."""

    request: Request
    backend: str
    policy: Policy | None = None


@record
class Output:
    """Bytes the guest wrote, exactly as written, within the output cap or `Request.stream_cap`."""

    id: str
    stream: Literal["stdout", "stderr"]
    data: bytes


@record
class Displayed:
    """Something the guest showed."""

    id: str
    display: Display


@record
class RunFinished:
    """The run is over and nothing of it is left; or the import lint refused it before it began."""

    result: Result
    request: Request | None = None


@record
class RunFailed:
    """A run that had started has no result: the sandbox broke, or the caller ended it.

    `code` is the error's own, as `backend_failed`; `aborted` where what ended it was not ours: a
    callback that raised, an interrupt.
    """

    id: str
    backend: str
    code: str
    message: str
    retryable: bool = False
    request: Request | None = None


Event = RunStarted | Output | Displayed | RunFinished | RunFailed
Emit = Callable[[Event], None]


class Sink(Protocol):
    """Receives every event of every run, on the thread of that run."""

    def __call__(self, event: Event, /) -> None: ...


class FanOut:
    """One emit over many sinks. Sinks may be added while runs go on."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks: tuple[Sink, ...] = tuple(sinks)
        self._lock = threading.Lock()

    def add(self, sink: Sink) -> None:
        with self._lock:
            self._sinks = (*self._sinks, sink)

    @calls_application
    def __call__(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)

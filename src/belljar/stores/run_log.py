"""Two lines of the logger `belljar` for each run: what starts under which limits, how it ended.

A line has the run's id, the language, a hash of the program, limits, status and times: never the
program, its input, its output or its environment, because logs are read and kept by others.
"""

from __future__ import annotations

from .. import log
from ..events import Event, RunFailed, RunFinished, RunStarted
from ..explanation import network_text
from ..policy import Policy
from ..policy_fields import SIZES
from ..records import plain
from ..types import Request, Result, Status
from ..units import exact_size
from . import program

# How ends are said: a limit that was hit is a warning, a program's own failure is not.
_USUAL = (Status.SUCCESS, Status.ERROR, Status.REFUSED)
_ENDED_BY_CALLER = ("aborted",)
_MOST_TEXT = 300


def run_log(event: Event) -> None:
    """A sink of every engine. Costs next to nothing while the logger takes no INFO."""
    if isinstance(event, RunStarted):
        if log.informs():
            log.info(_started(event.request, event.backend, event.policy))
    elif isinstance(event, RunFinished):
        if event.result.status not in _USUAL:
            log.warning(_ended(event.result))
        elif log.informs():
            if event.result.status is Status.REFUSED and event.request is not None:
                log.info(_started(event.request, "none", None))
            log.info(_ended(event.result))
    elif isinstance(event, RunFailed):
        say = log.info if event.code in _ENDED_BY_CALLER else log.error
        backend, message = event.backend, log.printable(event.message, _MOST_TEXT)
        say(f"run {event.id} failed: backend={backend} code={event.code} message={message}")


def _started(request: Request, backend: str, policy: Policy | None) -> str:
    language = "command" if request.command else log.printable(request.language, 40)
    words = [f"language={language}", f"sha256={program.sha256(request)}", f"backend={backend}"]
    if policy is not None:
        limits = plain(policy.limits)
        words += [f"{name}={_number(name, most)}" for name, most in limits.items() if most]
        words.append(f"network={log.printable(network_text(policy), 200)}")
    return f"run {request.id} started: {' '.join(words)}"


def _number(name: str, most: float) -> str:
    return exact_size(int(most)) if name in SIZES else f"{most:g}"


def _ended(result: Result) -> str:
    words = [f"status={result.status}", f"backend={result.backend or 'none'}"]
    words += [
        f"{name}={value}"
        for name, value in (
            ("limit", result.limit_hit),
            ("exit_code", result.exit_code),
            ("signal", result.signal),
            ("peak_memory", result.usage.peak_memory),
        )
        if value is not None
    ]
    return f"run {result.id} ended: {' '.join(words)} seconds={result.usage.wall:.4f}"

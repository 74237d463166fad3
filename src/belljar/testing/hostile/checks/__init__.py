"""The outside assertions: name -> what to look at on the host after (and during) a run.

A check returns None if all is well, else what it saw; `Noise` if a busy machine may be the cause,
and the case is then tried again. A name without a check is an error of the suite, never a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..scene import Failure, Noise, Scene

Check = Callable[[Scene, str], str | None]
Companion = Callable[[Scene], AbstractContextManager[None]]

CHECKS: dict[str, Check] = {}
COMPANIONS: dict[str, Companion] = {}
# Checks that race with what the guest left running come before those that take their time.
_URGENT: set[str] = set()


class NotImplementedAssertion(LookupError):
    """The case file asks for an assertion that nobody has written."""


def check(name: str, *, urgent: bool = False) -> Callable[[Check], Check]:
    """Register a function as the assertion `name`."""

    def register(function: Check) -> Check:
        assert name not in CHECKS, name
        CHECKS[name] = function
        if urgent:
            _URGENT.add(name)
        return function

    return register


def companion(name: str) -> Callable[[Companion], Companion]:
    """Register what goes on beside the guest while a case with the assertion `name` runs."""

    def register(function: Companion) -> Companion:
        COMPANIONS[name] = function
        return function

    return register


def require(assertions: tuple[str, ...]) -> None:
    """NotImplementedAssertion if one of these has no check."""
    for assertion in assertions:
        name = assertion.partition(":")[0]
        if name not in CHECKS:
            raise NotImplementedAssertion(name)


def companions(assertions: tuple[str, ...]) -> list[Companion]:
    """Who accompanies a case with these assertions; each at most once."""
    found = [COMPANIONS[name] for name in assertions if name in COMPANIONS]
    return list(dict.fromkeys(found))


def host_failures(scene: Scene) -> list[Failure]:
    """Every assertion of the scene's case that does not hold."""
    require(scene.case.expect.asserts)
    failures = []
    for assertion in sorted(scene.case.expect.asserts, key=_when):
        name, _, argument = assertion.partition(":")
        why = CHECKS[name](scene, scene.stage.fill(argument))
        if why is not None:
            failures.append(Failure(name, str(why), noisy=isinstance(why, Noise)))
    return failures


def _when(assertion: str) -> int:
    name = assertion.partition(":")[0]
    # The follow-up run comes last: it would hide what the case itself left behind.
    return 0 if name in _URGENT else 2 if name == "next_run_ok" else 1


from . import endings, files, host, neighbours, outputs, values  # noqa: E402, F401

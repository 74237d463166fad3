"""What backends made of layers share: leaving some out for a test, and saying so in results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .. import languages
from . import outcome
from .base import Plan, absent, best_effort, enforced, refuse_unless_held

if TYPE_CHECKING:
    from ..linux.cgroup import Home
    from ..linux.probe import HostFacts
    from ..policy import Isolation, Policy
    from ..types import Enforcement, Request


def data_limit(memory: int, *, counted: bool) -> int:
    """RLIMIT_DATA for a process of a run that has `memory` bytes.

    It holds address space, of which `import torch` takes three times what it uses. Where a control
    group counts the memory (`counted`) it is there only for a MemoryError instead of a kill when
    one allocation is far too large; elsewhere it is part of what holds the memory.
    """
    return memory + ((1 << 30) if counted else (256 << 20))


def needs_data_limit(*, counted: bool, worker: bool) -> bool:
    """Whether processes of a run have RLIMIT_DATA.

    Where a control group counts it would only refuse what AddressSanitizer maps, unless the program
    is Python, which gets a MemoryError from it.
    """
    return worker or not counted


class Layered:
    """A backend whose `disable` names layers to leave out, for tests that ask what each is for."""

    name: str
    isolation: Isolation

    def __init__(self, disable: frozenset[str], known: tuple[str, ...]) -> None:
        if unknown := disable - set(known):
            raise ValueError(f"unknown layers {sorted(unknown)}; known: {', '.join(known)}")
        self.disabled = disable
        self._closed = False

    def hold(self, policy: Policy, report: Mapping[str, Enforcement]) -> None:
        """Raise PolicyUnenforceable if `report` is not enough for `policy`.

        With a layer switched off on purpose the report says what is missing, and the run goes on;
        the isolation floor stands.
        """
        refuse_unless_held(self.name, self.isolation, policy, {} if self.disabled else report)

    def planned(
        self,
        policy: Policy,
        request: Request,
        report: Mapping[str, Enforcement],
        spec: Any,
        warnings: tuple[str, ...] = (),
    ) -> Plan:
        return Plan(
            backend=self.name,
            isolation=self.isolation,
            request=request,
            policy=policy,
            enforcement=report,
            spec=spec,
            warnings=(*warnings, *outcome.notices(self.disabled)),
        )


def grouped_memory(home: Home, what: str) -> Enforcement:
    """What a control group made in `home` says for the field `memory`; `what` is in it."""
    held = f"cgroup v{home.version} memory controller, {what}"
    if home.uncounted:
        left_out = " and ".join(home.uncounted)
        return best_effort(f"{held}, but this kernel was started or built not to count {left_out}")
    return enforced(held + home.sockets)


def besides_limits(
    policy: Policy, request: Request, active: frozenset[str], strict: str
) -> Iterator[tuple[str, Enforcement]]:
    """What a backend of processes says of wishes that few have. `strict` is what its strict seccomp
    profile, which a language may ask for, closes."""
    if policy.limits.fuel is not None:
        yield "fuel", absent("a process has no fuel; the wasm backend counts it")
    if policy.modules.active:
        yield "modules", best_effort("import lint before the run; a lint, not a boundary")
    if request.command:
        return
    language, words = languages.of(request), []
    if language.seccomp != "default":
        words.append(f"the strict profile: {strict}")
    if language.seccomp_filter:
        words.append("the profile of the language file, as a filter beside ours")
    if words:
        held = enforced("; ".join(words))
        yield "seccomp", held if "seccomp" in active else absent("no seccomp of ours")


class HostLayered(Layered):
    """One whose layers are this host's kernel's; `facts` replaces what is found out about it."""

    def __init__(
        self, disable: frozenset[str], known: tuple[str, ...], facts: HostFacts | None
    ) -> None:
        super().__init__(disable, known)
        self._given_facts = facts

    @property
    def facts(self) -> HostFacts:
        if self._given_facts is not None:
            return self._given_facts
        from ..linux import probe

        return probe.facts()

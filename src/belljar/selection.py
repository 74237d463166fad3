"""Which backend runs a request: the one that was named, or what `auto` decides; or why none can.

`choose.py` says in which order, the backends themselves say whether they can hold the policy. The
isolation floor is checked here once more, whoever wrote the backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from . import choose, languages, libraries
from .backends import registry
from .backends.base import Backend, Plan, never, refuse_unless_held
from .config import Settings
from .errors import (
    BackendUnavailable,
    BelljarError,
    LanguageMissing,
    LibrariesMissing,
    PolicyUnenforceable,
    RequestError,
)
from .events import Event
from .policy import Policy
from .records import positional_record, record, replace
from .types import Request

NAMED = "named by the caller"


class NotHere(BackendUnavailable):
    """The host lacks what the backend needs."""


@positional_record
class Chosen:
    """A backend, its plan, why it, and what the host lacks for a backend that would come first."""

    backend: Backend
    plan: Plan
    reason: str
    lacking: str = ""


@record
class Verdict:
    """What `explain` says of one backend; `able`: it could run the program."""

    name: str
    able: bool
    why: str
    fix: str | None = None


class Selection:
    """Chooses among the backends of one engine. `given` are those handed to it, if any were."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[str], Backend],
        names: Callable[[], tuple[str, ...]],
        given: Mapping[str, Backend] | None,
    ) -> None:
        self._settings = settings
        self._load = load
        self._names = names
        self._given = given
        self._asked: dict[tuple[object, ...], tuple[str, ...]] = {}

    def select(
        self, request: Request, policy: Policy, name: str | None, *, start: bool = False
    ) -> Chosen:
        """The backend for a run. Unless `start`, nothing is started to find out about libraries."""
        name = name or self._settings.backend
        if request.require_libraries:
            _check_language(request)
        if name == "auto":
            return self._auto(request, policy, start)
        chosen = self._load(name)
        try:
            plan = self.compile(chosen, policy, request)
        except BackendUnavailable as error:
            return self._fall_back(name, chosen, policy, request, error, start)
        if request.require_libraries:
            self._need_libraries(chosen, plan, start)
        return Chosen(chosen, plan, NAMED)

    def candidates(self, request: Request, policy: Policy) -> Iterator[choose.Candidate]:
        # Backends handed to us are all candidates; of the installed ones only those we vouch for.
        if self._given is None:
            return choose.candidates(registry.PREFERENCE, registry.RUNGS, policy, request)
        rungs = {name: backend.isolation for name, backend in self._given.items()}
        return choose.candidates(self._given, rungs, policy, request)

    def _auto(self, request: Request, policy: Policy, start: bool) -> Chosen:
        refusals: dict[str, BelljarError] = {}
        passed: dict[str, str] = {}
        lacking = ""
        for candidate in self.candidates(request, policy):
            name = candidate.name
            try:
                if candidate.stand_in and any(
                    isinstance(refusal, LanguageMissing) for refusal in refusals.values()
                ):
                    raise BackendUnavailable(f"it {candidate.doubt}")
                backend, plan = self._try(name, policy, request, start)
            except (PolicyUnenforceable, BackendUnavailable) as error:
                refusals[name] = error
                passed.setdefault(name, _short(error))
                if isinstance(error, NotHere) and not candidate.doubt and not lacking:
                    lacking = f"{error.message}; it would have been used"
                    lacking += f" (fix: {error.fix})" if error.fix else ""
                continue
            others = self._passed_over(name, passed, request, policy)
            reason = choose.reason(name, others, candidate.doubt)
            return Chosen(backend, plan, reason, lacking)
        raise _nobody(refusals)

    def _passed_over(
        self, name: str, passed: Mapping[str, str], request: Request, policy: Policy
    ) -> dict[str, str]:
        """Why not those that are preferred to `name` or were tried before it."""
        preference = registry.PREFERENCE if self._given is None else tuple(self._given)
        before = preference[: preference.index(name)]
        if not before and not passed:
            return {}
        doubts = {each.name: each.doubt for each in self.candidates(request, policy) if each.doubt}
        return {other: doubts.get(other) or passed[other] for other in (*before, *passed)}

    def _try(
        self, name: str, policy: Policy, request: Request, start: bool
    ) -> tuple[Backend, Plan]:
        backend = self._load(name)
        plan = self.compile(backend, policy, request)
        if request.require_libraries:
            self._need_libraries(backend, plan, start)
        return backend, plan

    def _fall_back(
        self,
        name: str,
        wanted: Backend,
        policy: Policy,
        request: Request,
        why: BackendUnavailable,
        start: bool,
    ) -> Chosen:
        """Instead of a missing backend: an equal or stronger one, or one the operator allows.

        Never silently: the plan carries a warning into the result.
        """
        for other, plan in self._instead(wanted, policy, request, start):
            warning = f"{why.message}; ran on {other.name!r}"
            plan = replace(plan, warnings=(*plan.warnings, warning))
            return Chosen(other, plan, f"fallback from {name}")
        raise why

    def _instead(
        self, wanted: Backend, policy: Policy, request: Request, start: bool
    ) -> Iterator[tuple[Backend, Plan]]:
        allowed = self._settings.fallback_allow
        for candidate in dict.fromkeys((*registry.PREFERENCE, *allowed)):
            if candidate == wanted.name or candidate not in self._names():
                continue
            try:
                other = self._load(candidate)
                if candidate not in allowed and not other.isolation.at_least(wanted.isolation):
                    continue
                yield self._try(candidate, policy, request, start)
            except (PolicyUnenforceable, BackendUnavailable):
                continue

    def another(self, failed: Chosen, name: str | None, module: str) -> tuple[Backend, Plan] | None:
        """Where else a program may run that missed `module` on `failed`; never below the floor.

        A backend that was named is replaced by what it may fall back to, and by nothing else.
        """
        plan, request = failed.plan, failed.plan.request
        policy = plan.policy
        if (name or self._settings.backend) == "auto":
            places = self._all(policy, request)
        else:
            places = self._instead(failed.backend, policy, request, True)
        needed = (module,) if module else ()
        here = libraries.side(failed.backend.name, request)
        for other, other_plan in places:
            if other.name == failed.backend.name:
                continue
            there = libraries.side(other.name, request)
            if here == there or libraries.missing(other.name, request, needed):
                continue
            return other, other_plan
        return None

    def _all(self, policy: Policy, request: Request) -> Iterator[tuple[Backend, Plan]]:
        for candidate in self.candidates(request, policy):
            try:
                yield self._try(candidate.name, policy, request, True)
            except (PolicyUnenforceable, BackendUnavailable):
                continue

    @staticmethod
    def compile(backend: Backend, policy: Policy, request: Request) -> Plan:
        """The plan, or why this backend cannot run the request here."""
        found = backend.probe()
        if not found.available:
            raise NotHere(
                f"backend {backend.name!r} is not available: {found.reason}", fix=found.fix
            )
        if request.image and not getattr(backend, "takes_images", False):
            raise PolicyUnenforceable(
                f"backend {backend.name!r} runs no images, and {request.image!r} is asked for",
                fields=("image",),
                fix="choose docker or gvisor, or leave the image out",
            )
        plan = backend.compile(policy, request)
        profile = request.resolved.seccomp if request.resolved is not None else "default"
        if profile != "default" and "seccomp" not in plan.enforcement:
            raise PolicyUnenforceable(
                f"backend {backend.name!r} has no seccomp profile {profile!r}, which the language"
                f" {request.language} asks for",
                fields=("seccomp",),
                fix="choose another backend, or change seccomp in the language file",
            )
        # The floor is ours to hold, whoever wrote the backend.
        refuse_unless_held(backend.name, plan.isolation, policy, {})
        return plan

    def _need_libraries(self, backend: Backend, plan: Plan, start: bool) -> None:
        request = plan.request
        names = request.require_libraries
        missing = libraries.missing(backend.name, request, names)
        if missing is None:
            missing = self._ask(backend, plan, names) if start else ()
        if missing:
            raise LibrariesMissing(
                f"{', '.join(missing)} cannot be imported on {backend.name!r}",
                libraries=missing,
                fix="install what is missing there, or choose another backend or image",
            )

    def _ask(self, backend: Backend, plan: Plan, names: tuple[str, ...]) -> tuple[str, ...]:
        """Run a program that looks for itself; what it said is kept."""
        request = plan.request
        key = (backend.name, request.image, request.python, request.language, names)
        if key not in self._asked:
            check = replace(
                request, code=libraries.CHECK, args=names, id=f"{request.id}-libraries", stdin=b"",
                context={}, files={}, outputs=(), mounts=(), require_libraries=(), retry=False,
            )  # fmt: skip
            answer = backend.run(self.compile(backend, plan.policy, check), _nowhere, never())
            if not isinstance(answer.value, list):
                return ()  # it could not tell; the program itself will
            self._asked[key] = tuple(name for name in names if name in answer.value)
        return self._asked[key]

    def verdicts(self, request: Request, policy: Policy) -> list[Verdict]:
        """What speaks against each backend, in the order in which they would be tried."""
        order = {each.name: each for each in self.candidates(request, policy)}
        found = []
        for each in dict.fromkeys((*order, *self._names())):
            candidate = order.get(each) or choose.Candidate(each)
            doubt = candidate.doubt
            try:
                self._try(each, policy, request, False)
            except (PolicyUnenforceable, BackendUnavailable) as error:
                why, fix = (doubt, None) if doubt else (_short(error), error.fix)
                found.append(Verdict(name=each, able=False, why=why, fix=fix))
                continue
            if not doubt and each not in order:
                doubt = "is used only when named"
            found.append(Verdict(name=each, able=True, why=doubt))
        return found


_told: set[str] = set()
_told_lock = threading.Lock()


def once(text: str) -> tuple[str, ...]:
    """A warning about the host, the first time in this process; nothing after that."""
    if not text:
        return ()
    with _told_lock:
        if text in _told:
            return ()
        _told.add(text)
        return (text,)


def _nobody(refusals: Mapping[str, BelljarError]) -> BelljarError:
    """What to raise when every backend has refused."""
    for refusal in refusals.values():
        if isinstance(refusal, LanguageMissing):  # the policy would be held
            return refusal
    # That others run no images helps nobody who asked for one.
    about = {n: e for n, e in refusals.items() if getattr(e, "fields", ()) != ("image",)}
    refusals = about or refusals
    if len(refusals) == 1:
        return next(iter(refusals.values()))
    told = "; ".join(f"{known}: {error.message}" for known, error in refusals.items())
    lacked = [error for error in refusals.values() if isinstance(error, LibrariesMissing)]
    if lacked:
        return LibrariesMissing(
            f"no backend here has every library that the program requires: {told}",
            libraries=dict.fromkeys(name for error in lacked for name in error.libraries),
            fix="install them where programs run, or name an image that has them",
        )
    fields = tuple(
        dict.fromkeys(
            field for error in refusals.values() for field in getattr(error, "fields", ())
        )
    )
    return PolicyUnenforceable(
        f"no backend here can enforce this policy: {told or 'none is installed'}",
        fields=fields,
        fix="belljar doctor",
    )


def _short(error: BelljarError) -> str:
    """A refusal in a few words that go after the backend's name."""
    match error:
        case PolicyUnenforceable():
            return f"cannot hold {', '.join(error.fields)}"
        case NotHere():
            return f"cannot be had here ({error.message.partition(': ')[2].partition(' (')[0]})"
        case LibrariesMissing():
            return f"cannot import {', '.join(error.libraries)}"
    return f"cannot run it ({error.message})"


def _check_language(request: Request) -> None:
    if request.command or languages.of(request).family != "python":
        raise RequestError("require_libraries", "is for Python programs")


def _nowhere(event: Event) -> None:
    return None

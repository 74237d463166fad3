"""Which backend runs a request: the one that was named, or what `auto` decides; or why none can.

`choose.py` says in which order, the backends themselves say whether they can hold the policy. The
isolation floor is checked here once more, whoever wrote the backend.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from . import choose, languages, libraries, minima, refusals
from .backends import registry, working_directory
from .backends.base import Backend, Plan, never, refuse_hidden, refuse_unless_held
from .config import Settings
from .errors import (
    BackendUnavailable,
    BelljarError,
    LanguageMissing,
    LibrariesMissing,
    LimitValue,
    PolicyUnenforceable,
    RequestError,
    SetupFailed,
)
from .events import Event
from .policy import Isolation, Policy, level_policy
from .records import positional_record, record, replace
from .types import Fallback, Request
from .units import exact_size, human_size

NAMED = "named by the caller"
# How long a backend that could not be set up is not tried again.
_BROKEN_SECONDS = 300.0


@positional_record
class Chosen:
    """A backend, its plan, why it, and what the host lacks for a backend that would come first.

    `fallback` if it runs instead of another one.
    """

    backend: Backend
    plan: Plan
    reason: str
    lacking: str = ""
    fallback: Fallback | None = None
    auto: bool = False


class _Broken(refusals.NotHere):
    """`probe` calls it available, and it could not be set up."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why, "ask `belljar doctor`; it is tried again after some minutes")
        self.message = f"{name!r} could not be used: {why}"


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
        self._broken: dict[str, tuple[str, float]] = {}  # why, and until when it is not tried
        self._worked: set[str] = set()

    def select(
        self, request: Request, policy: Policy, name: str | None, *, start: bool = False
    ) -> Chosen:
        """The backend for a run. Unless `start`, nothing is started to find out about libraries."""
        if request.require_libraries:
            _check_language(request)
        if not name and self._settings.found_backend:
            return self._found(self._settings.found_backend, request, policy, start)
        name = name or self._settings.backend
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
        return choose.candidates(self._order(request), self._rungs(), policy, request)

    def _rungs(self) -> Mapping[str, Isolation]:
        if self._given is None:
            return registry.RUNGS
        return {name: backend.isolation for name, backend in self._given.items()}

    def _strongest_first(self, request: Request) -> bool:
        return (request.prefer or self._settings.prefer) == "isolation"

    def _order(self, request: Request) -> tuple[str, ...]:
        """What `auto` tries, the preferred first."""
        preference = registry.PREFERENCE if self._given is None else tuple(self._given)
        if not self._strongest_first(request):
            return preference
        return choose.strongest_first(preference, self._rungs())

    def _auto(self, request: Request, policy: Policy, start: bool) -> Chosen:
        refused: dict[str, BelljarError] = {}
        passed: dict[str, str] = {}
        lacking = ""
        doubts: set[str] = set()
        later: list[choose.Candidate] = []
        for candidate in itertools.chain(self.candidates(request, policy), later):
            name = candidate.name
            try:
                if candidate.stand_in and any(
                    isinstance(refusal, LanguageMissing) for refusal in refused.values()
                ):
                    raise BackendUnavailable(f"it {candidate.doubt}")
                backend, plan = self._try(name, policy, request, start)
            except (PolicyUnenforceable, BackendUnavailable) as error:
                refused[name] = error
                passed.setdefault(name, _short(error))
                if candidate.doubt:
                    doubts.add(name)
                here = not isinstance(error, refusals.NotHere) or isinstance(error, _Broken)
                if not here and not candidate.doubt and not lacking:
                    lacking = f"{error.message}; it would have been used"
                    lacking += f" (fix: {error.fix})" if error.fix else ""
                continue
            if not candidate.doubt and (doubt := _doubt(backend, policy, request)):
                passed[name] = doubt
                later.append(choose.Candidate(name, doubt))
                continue
            passed.pop(name, None)
            others = self._passed_over(name, passed, request, policy)
            reason = choose.reason(
                name, others, candidate.doubt, strongest=self._strongest_first(request)
            )
            plan = self._weaker(plan, refused, doubts)
            for left in later:
                if not plan.isolation.at_least(self._load(left.name).isolation):
                    warning = f"{name!r} isolates less than {left.name!r}, which {left.doubt}"
                    plan = replace(plan, warnings=(*plan.warnings, warning))
            fallback = None
            for wanted, refusal in refused.items():
                if isinstance(refusal, _Broken) and wanted not in doubts:
                    why = refusal.reason
                    found = Fallback(wanted=wanted, used=name, why=why, fix=refusal.fix)
                    plan = replace(plan, warnings=(*plan.warnings, found.sentence))
                    fallback = fallback or found
            return Chosen(backend, plan, reason, lacking, fallback, auto=True)
        failure = refusals.of_all(refused, policy, registry.RUNGS)
        for other, plan in self._allowed(policy, request, start):
            why = f"nothing here reaches isolation {policy.min_isolation.value}"
            return self._fallen_back("auto", other, plan, why, failure.fix)
        raise failure

    def _weaker(
        self, plan: Plan, refused: Mapping[str, BelljarError], doubts: Collection[str]
    ) -> Plan:
        """`plan`, with a warning if it isolates less than a backend that refused the policy.

        If only the value of a limit stands against the stronger one, that is raised instead: the
        value can be changed, and a number alone must not lower the isolation.
        """
        for name, error in refused.items():
            if not isinstance(error, PolicyUnenforceable) or name in doubts:
                continue
            stronger = self._load(name).isolation
            if plan.isolation.at_least(stronger):
                continue
            if isinstance(error, LimitValue):
                weaker = plan.backend
                raise LimitValue(
                    f"{error.message}; and {weaker!r}, the next backend, isolates less"
                    f" ({plan.isolation.value} is below {stronger.value})",
                    fields=error.fields,
                    fits=error.fits,
                    fix=f'{error.fix}; or take the weaker one: backend="{weaker}"',
                )
            fields = ", ".join(field for field in error.fields if field != "min_isolation")
            warning = (
                f"{plan.backend!r} isolates less than {name!r} ({plan.isolation.value} is below"
                f" {stronger.value}), which cannot hold {fields or 'the policy'}"
            )
            return replace(plan, warnings=(*plan.warnings, warning))
        return plan

    def _found(self, name: str, request: Request, policy: Policy, start: bool) -> Chosen:
        """The backend that a found belljar.toml names, if it isolates as well as what `auto` takes.

        The file may have come with the program: it neither weakens the sandbox, nor brings in a
        backend that is not Belljar's own, because loading one imports its code.
        """
        auto = self._auto(request, policy, start)
        if auto.backend.name == name:
            return auto
        try:
            if name not in (registry.BUILT_IN if self._given is None else self._given):
                raise BackendUnavailable("it is not one of Belljar's own")
            backend, plan = self._try(name, policy, request, start)
            if plan.isolation.at_least(auto.plan.isolation):
                return Chosen(backend, plan, "named by the belljar.toml in the current directory")
            why = f"it isolates less ({plan.isolation} is below {auto.plan.isolation})"
        except (PolicyUnenforceable, BackendUnavailable) as error:
            why = error.message
        warning = (
            f"the belljar.toml found in the current directory names the backend {name!r}, which was"
            f" not used: {why}; to trust that file set BELLJAR_CONFIG=belljar.toml or give --config"
        )
        plan = replace(auto.plan, warnings=(*auto.plan.warnings, warning))
        return Chosen(auto.backend, plan, auto.reason, auto.lacking)

    def _passed_over(
        self, name: str, passed: Mapping[str, str], request: Request, policy: Policy
    ) -> dict[str, str]:
        """Why not those that are preferred to `name` or were tried before it."""
        preference = self._order(request)
        before = preference[: preference.index(name)]
        if not before and not passed:
            return {}
        doubts = {each.name: each.doubt for each in self.candidates(request, policy) if each.doubt}
        return {other: doubts.get(other) or passed[other] for other in (*before, *passed)}

    def _try(
        self, name: str, policy: Policy, request: Request, start: bool
    ) -> tuple[Backend, Plan]:
        backend = self._load(name)
        self._refuse_broken(name)
        plan = self.compile(backend, policy, request)
        if request.require_libraries:
            self._need_libraries(backend, plan, start)
        return backend, plan

    # -- a backend that cannot be set up here, whatever `probe` says

    def worked(self, name: str) -> None:
        """A run on it came to a result: what fails there from now on is not this host's fault."""
        self._worked.add(name)

    def after(self, failed: Chosen, error: SetupFailed) -> Chosen:
        """Where to run what could not be set up on `failed`, before any of its code ran.

        Only if `auto` chose that backend, nothing has run on it yet, and the simplest program
        cannot be set up there either: otherwise a request could choose weaker isolation for
        itself, and for others, by what it asks for. Raises `error` if it has to stay.
        """
        name, plan = failed.backend.name, failed.plan
        request = plan.request
        if not (failed.auto and request.fallback and self._settings.fallback_enabled):
            raise error
        if name in self._worked or not self._fails_always(failed):
            raise error
        until = time.monotonic() + _BROKEN_SECONDS
        self._broken[name] = (refusals.brief(error.message), until)
        try:
            return self._auto(request, plan.policy, True)
        except (PolicyUnenforceable, BackendUnavailable):
            raise error from None

    def _fails_always(self, failed: Chosen) -> bool:
        floor = failed.plan.policy.min_isolation
        policy = replace(level_policy("standard"), min_isolation=floor, asked_isolation=floor)
        trial = Request(code="pass", id=f"{failed.plan.request.id}-trial")
        try:
            failed.backend.run(failed.backend.compile(policy, trial), _nowhere, never())
        except SetupFailed:
            return True
        except BelljarError:
            return False
        return False

    def _refuse_broken(self, name: str) -> None:
        why, until = self._broken.get(name, ("", 0.0))
        if time.monotonic() < until:
            raise _Broken(name, why)

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

        Never silently: `Chosen.fallback` goes into the result, and so does a warning.
        """
        if not (request.fallback and self._settings.fallback_enabled):
            raise why
        for other, plan in self._instead(wanted, policy, request, start):
            return self._fallen_back(name, other, plan, refusals.why_unavailable(why), why.fix)
        raise why

    @staticmethod
    def _fallen_back(wanted: str, other: Backend, plan: Plan, why: str, fix: str | None) -> Chosen:
        fallback = Fallback(wanted=wanted, used=other.name, why=why, fix=fix)
        plan = replace(plan, warnings=(*plan.warnings, fallback.sentence))
        return Chosen(other, plan, f"fallback from {wanted}", fallback=fallback)

    def _instead(
        self, wanted: Backend, policy: Policy, request: Request, start: bool
    ) -> Iterator[tuple[Backend, Plan]]:
        allowed = self._settings.fallback_allow
        for candidate in dict.fromkeys((*registry.PREFERENCE, *allowed)):
            if candidate == wanted.name or candidate not in self._names():
                continue
            try:
                other = self._load(candidate)
                if candidate in allowed:
                    yield self._try(candidate, _undercut(policy, other), request, start)
                elif other.isolation.at_least(wanted.isolation):
                    yield self._try(candidate, policy, request, start)
            except (PolicyUnenforceable, BackendUnavailable):
                continue

    def _allowed(
        self, policy: Policy, request: Request, start: bool
    ) -> Iterator[tuple[Backend, Plan]]:
        """What the operator lets run a program for which `auto` finds nothing."""
        if not (request.fallback and self._settings.fallback_enabled):
            return
        for name in self._settings.fallback_allow:
            try:
                if name in self._names():
                    lowered = _undercut(policy, self._load(name))
                    yield self._try(name, lowered, request, start)
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
            if not (request.fallback and self._settings.fallback_enabled):
                return None
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

    def _of_a_value(
        self, error: PolicyUnenforceable, backend: Backend, policy: Policy, request: Request
    ) -> LimitValue | None:
        """The refusal of a disk that memory cannot hold, if the backend holds all the rest."""
        limits = policy.limits
        if error.fields != ("disk",) or limits.disk <= limits.memory:
            return None
        enough = replace(policy, limits=replace(limits, memory=limits.disk))
        try:
            backend.compile(enough, request)
        except PolicyUnenforceable:
            return None
        most = self._settings.ceiling.memory
        raised = most is None or limits.disk <= most
        fits = {"memory": limits.disk} if raised else {"disk": limits.memory}
        return LimitValue(
            f"disk={human_size(limits.disk)} does not fit into memory={human_size(limits.memory)}:"
            f" backend {backend.name!r} keeps files in memory",
            fields=error.fields,
            fits={name: exact_size(size) for name, size in fits.items()},
        )

    def compile(self, backend: Backend, policy: Policy, request: Request) -> Plan:
        """The plan, or why this backend cannot run the request here."""
        found = backend.probe()
        if not found.available:
            raise refusals.NotHere(backend.name, found.reason, found.fix)
        if request.image and not getattr(backend, "takes_images", False):
            raise PolicyUnenforceable(
                f"backend {backend.name!r} runs no images, and {request.image!r} is asked for",
                fields=("image",),
                fix="choose docker or gvisor, or leave the image out",
            )
        refuse_hidden(policy, request)
        working_directory.check(policy, request)
        minima.refuse_below(backend.name, getattr(backend, "least", {}), policy.limits)
        try:
            plan = backend.compile(policy, request)
        except PolicyUnenforceable as error:
            raise self._of_a_value(error, backend, policy, request) or error from None
        lacking = {}
        for name in self._settings.demanded:
            held = plan.enforcement.get(name)
            if held is None or held.state != "enforced":
                lacking[name] = "absent" if held is None else f"{held.state}: {held.by}"
        if lacking:
            why = "; ".join(f"{name} ({reason})" for name, reason in lacking.items())
            raise PolicyUnenforceable(
                f"backend {backend.name!r} cannot enforce what this server demands: {why}",
                fields=tuple(lacking),
                lacking=lacking,
                fix="choose a stronger backend (`belljar backends`)",
            )
        if plan.image and not self._settings.ceiling.allows_image(plan.image):
            raise PolicyUnenforceable(
                f"image {plan.image!r} is not in the operator's ceiling.images",
                fields=("image",),
                fix="name an image from that list, or ask the operator to add this one",
            )
        profile = "default"
        if request.resolved is not None:
            own = "of its own" if request.resolved.seccomp_filter else "default"
            profile = own if request.resolved.seccomp == "default" else request.resolved.seccomp
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
                context={}, files={}, outputs=(), mounts=(), workdir="", require_libraries=(),
                retry=False,
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


def _doubt(backend: Backend, policy: Policy, request: Request) -> str:
    """What a backend itself has against a program that it could be given; begins with "cannot"."""
    ask = getattr(backend, "doubt", None)
    return str(ask(policy, request)) if ask is not None else ""


def _undercut(policy: Policy, backend: Backend) -> Policy:
    """The policy under which a backend runs that the operator's fallback.allow names.

    It may be below the floor that comes with the level, never below an explicit one.
    """
    if backend.isolation.at_least(policy.min_isolation) or not refusals.is_the_levels(policy):
        return policy
    return replace(policy, min_isolation=policy.asked_isolation)


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


def _short(error: BelljarError) -> str:
    """A refusal in a few words that go after the backend's name."""
    match error:
        case PolicyUnenforceable():
            return f"cannot hold {', '.join(error.fields)}"
        case _Broken():
            return f"cannot be set up here ({error.reason})"
        case refusals.NotHere():
            return f"cannot be had here ({error.message.partition(': ')[2].partition(' (')[0]})"
        case LibrariesMissing():
            return f"cannot import {', '.join(error.libraries)}"
    return f"cannot run it ({error.message})"


def _check_language(request: Request) -> None:
    if request.command or languages.of(request).family != "python":
        raise RequestError("require_libraries", "is for Python programs")


def _nowhere(event: Event) -> None:
    return None

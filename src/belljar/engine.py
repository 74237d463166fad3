"""The one path from a request to a result: resolve, lint, select, compile, run, tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from . import languages
from .backends import registry
from .backends.base import Backend, Cancel, Plan, never, refuse_unless_held
from .config import Settings, load
from .errors import BackendUnavailable, BelljarError, LanguageMissing, PolicyUnenforceable
from .events import Emit, Event, FanOut, RunFailed, RunFinished, RunStarted, Sink
from .policy import DANGEROUS_MODULES, Modules, Policy
from .records import replace
from .resolve import Resolved, resolve
from .types import GuestError, Request, Result, Status


class Engine:
    """Runs requests. Thread-safe; backends are loaded on first use and kept until `close`."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        sinks: Iterable[Sink] = (),
        backends: Mapping[str, Backend] | None = None,
    ) -> None:
        self.settings = settings if settings is not None else load()
        self.sinks = FanOut(sinks)
        self._given = dict(backends) if backends is not None else None
        self._loaded: dict[str, Backend] = {}
        self._lock = threading.Lock()

    def backend_names(self) -> tuple[str, ...]:
        return tuple(self._given) if self._given is not None else registry.names()

    def backend(self, name: str) -> Backend:
        """The backend called `name`; BackendUnavailable if there is none."""
        if self._given is not None and name in self._given:
            return self._given[name]
        if self._given is not None:
            known = ", ".join(self._given)
            raise BackendUnavailable(f"no backend is called {name!r}; known: {known}")
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = registry.load(
                    name, user=self.settings.user, docker_host=self.settings.docker_host
                )
            return self._loaded[name]

    def run(
        self,
        request: Request,
        *,
        level: str | None = None,
        wishes: Mapping[str, Any] | None = None,
        backend: str | None = None,
        emit: Emit | None = None,
        cancel: Cancel | None = None,
    ) -> Result:
        """Run `request` to its end. A guest's failure is a Result; ours is a BelljarError."""
        began = time.monotonic()
        request = self._understood(request)
        resolved = self._resolve(request, level, wishes)
        refused = _lint(request, resolved.policy)
        if refused is not None:
            return self._tell(replace(refused, warnings=resolved.warnings), emit)
        chosen, plan, reason = self._select(request, resolved, backend)
        self._emit(RunStarted(request=request, backend=chosen.name), emit)

        def forward(event: Event) -> None:
            self._emit(event, emit)

        planned = time.monotonic()
        try:
            result = chosen.run(plan, forward, cancel if cancel is not None else never())
        except BaseException as error:
            # A caller whose own callback raised is not called again.
            caller = emit if isinstance(error, BelljarError) else None
            self._emit(_failure(request, chosen.name, error), caller)
            raise
        return self._tell(
            replace(
                result,
                backend_reason=reason,
                # A backend may pass its plan's warnings on; a fallback must be told in any case.
                warnings=tuple(
                    dict.fromkeys((*resolved.warnings, *plan.warnings, *result.warnings))
                ),
                timings={"plan": planned - began, **result.timings},
            ),
            emit,
        )

    def plan(
        self,
        request: Request,
        *,
        level: str | None = None,
        wishes: Mapping[str, Any] | None = None,
        backend: str | None = None,
    ) -> Plan:
        """What `run` would do, without doing it. Raises what `run` would raise."""
        request = self._understood(request)
        resolved = self._resolve(request, level, wishes)
        plan = self._select(request, resolved, backend)[1]
        return replace(plan, warnings=(*resolved.warnings, *plan.warnings))

    def close(self) -> None:
        """End everything that backends keep warm."""
        with self._lock:
            for backend in (*self._loaded.values(), *(self._given or {}).values()):
                backend.close()
            self._loaded.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _understood(self, request: Request) -> Request:
        """The request with its language as these settings have it, whoever built it."""
        if request.command:
            return request
        language = languages.find(request.language, self.settings)
        if request.resolved is language and not language.env:
            return request
        env = {**language.env, **request.env}
        return replace(request, language=language.name, resolved=language, env=env)

    def _resolve(
        self, request: Request, level: str | None, wishes: Mapping[str, Any] | None
    ) -> Resolved:
        settings = self.settings
        resolved = resolve(
            level or settings.level,
            wishes or {},
            mounts=request.mounts,
            ceiling=settings.ceiling,
            defaults=settings.defaults,
            language=request.resolved,
        )
        if settings.block_dangerous_imports and "modules" not in resolved.policy.explicit:
            modules = resolved.policy.modules
            deny = tuple(dict.fromkeys((*modules.deny, *DANGEROUS_MODULES)))
            policy = replace(resolved.policy, modules=Modules(allow=modules.allow, deny=deny))
            resolved = replace(resolved, policy=policy)
        return resolved

    def _select(
        self, request: Request, resolved: Resolved, name: str | None
    ) -> tuple[Backend, Plan, str]:
        """(backend, plan, why this one). `auto` takes the first preferred one that can hold it."""
        name = name or self.settings.backend
        policy = resolved.policy
        if name != "auto":
            chosen = self.backend(name)
            try:
                return chosen, self._compile(chosen, policy, request), "named by the caller"
            except BackendUnavailable as error:
                return self._fall_back(name, chosen, policy, request, error)
        # Backends handed to us are all candidates; of the installed ones only those we vouch for.
        candidates = registry.PREFERENCE if self._given is None else tuple(self._given)
        refusals: dict[str, BelljarError] = {}
        for candidate in candidates:
            try:
                chosen = self.backend(candidate)
                plan = self._compile(chosen, policy, request)
            except (PolicyUnenforceable, BackendUnavailable) as error:
                refusals[candidate] = error
                continue
            return chosen, plan, f"auto: the first of {', '.join(candidates)} that can hold it"
        for refusal in refusals.values():
            if isinstance(refusal, LanguageMissing):  # the policy would be held
                raise refusal
        if len(refusals) == 1:
            raise next(iter(refusals.values()))
        fields = tuple(
            dict.fromkeys(
                field for error in refusals.values() for field in getattr(error, "fields", ())
            )
        )
        told = "; ".join(f"{known}: {error.message}" for known, error in refusals.items())
        raise PolicyUnenforceable(
            f"no backend here can enforce this policy: {told or 'none is installed'}",
            fields=fields,
            fix="belljar doctor",
        )

    def _fall_back(
        self,
        name: str,
        wanted: Backend,
        policy: Policy,
        request: Request,
        why: BackendUnavailable,
    ) -> tuple[Backend, Plan, str]:
        """Instead of a missing backend: an equal or stronger one, or one the operator allows.

        Never silently: the plan carries a warning into the result.
        """
        allowed = self.settings.fallback_allow
        for candidate in dict.fromkeys((*registry.PREFERENCE, *allowed)):
            if candidate == name or candidate not in self.backend_names():
                continue
            try:
                other = self.backend(candidate)
                if candidate not in allowed and not other.isolation.at_least(wanted.isolation):
                    continue
                plan = self._compile(other, policy, request)
            except (PolicyUnenforceable, BackendUnavailable):
                continue
            warning = f"backend {name!r} is not available ({why.message}); ran on {candidate!r}"
            plan = replace(plan, warnings=(*plan.warnings, warning))
            return other, plan, f"fallback from {name}"
        raise why

    @staticmethod
    def _compile(backend: Backend, policy: Policy, request: Request) -> Plan:
        found = backend.probe()
        if not found.available:
            raise BackendUnavailable(
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

    def _emit(self, event: Event, emit: Emit | None) -> None:
        self.sinks(event)
        if emit is not None:
            emit(event)

    def _tell(self, result: Result, emit: Emit | None) -> Result:
        self._emit(RunFinished(result=result), emit)
        return result


def _failure(request: Request, backend: str, error: BaseException) -> RunFailed:
    if isinstance(error, BelljarError):
        code, message, retryable = error.code, error.message, error.retryable
    else:
        code, message, retryable = "aborted", f"{type(error).__name__}: {error}", False
    return RunFailed(
        id=request.id, backend=backend, code=code, message=message, retryable=retryable
    )


def _lint(request: Request, policy: Policy) -> Result | None:
    """A Result that says `refused` if the import lint objects, else None."""
    if not policy.modules.active or request.code is None:
        return None
    language = languages.of(request)
    if language.family != "python":
        return None
    from . import lint

    foreign = bool(request.python or language.version or language.command or language.places)
    findings = lint.check_files(request.code, request.files, policy.modules, foreign=foreign)
    if not findings:
        return None
    return Result(
        id=request.id,
        status=Status.REFUSED,
        error=GuestError(type="ImportRefused", message=lint.report(findings)),
        backend_reason="refused by the import lint; nothing was started",
    )

"""The one path from a request to a result: resolve, lint, select, compile, run, tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import languages, log, selection, trusted_imports
from .backends import registry
from .backends.base import Backend, Cancel, Plan, never
from .config import Settings, load
from .errors import BackendUnavailable, BelljarError, PolicyUnenforceable, RequestError, SetupFailed
from .events import Emit, Event, FanOut, RunFailed, RunFinished, RunStarted, Sink
from .explanation import explained
from .policy import DANGEROUS_MODULES, Modules, Policy, level_policy
from .records import record, replace
from .resolve import Resolved, resolve
from .selection import Chosen, Selection, Verdict
from .stores.run_log import run_log
from .types import GuestError, Language, Request, Result, Status

if TYPE_CHECKING:
    from . import retrying
    from .files.destination import Destination


_REMEMBERED = 64
_PLAIN = frozenset({str, int, float, bool, type(None)})


@record
class Explanation:
    """What `Engine.explain` answers; `backend` is None if nothing would run it.

    `refused`: the import lint would, before any backend is asked.
    """

    backend: str | None
    reason: str
    verdicts: tuple[Verdict, ...]
    fix: str | None = None
    policy: Policy | None = None
    refused: bool = False


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
        self.sinks = FanOut((run_log, *sinks))
        if self.settings.store_code != "never":
            from .stores.artifacts import Artifacts

            self.sinks.add(Artifacts(self.settings.artifacts, self.settings.store_code))
        self._given = dict(backends) if backends is not None else None
        self._loaded: dict[str, Backend] = {}
        self._lock = threading.Lock()
        # Most callers ask for the same again and again.
        self._resolved: dict[tuple[object, ...], tuple[Language | None, Settings, Resolved]] = {}
        self._selection = Selection(self.settings, self.backend, self.backend_names, self._given)

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
                    name,
                    user=self.settings.user,
                    docker_host=self.settings.docker_host,
                    firejail_profile=self.settings.firejail_profile,
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
            refused = replace(refused, warnings=resolved.warnings)
            return self._tell(explained(refused, resolved.policy, request), request, emit)
        chosen = self._selection.select(request, resolved.policy, backend, start=True)
        if chosen.fallback is not None:
            log.warning(chosen.plan.warnings[-1])

        def forward(event: Event) -> None:
            self._emit(event, emit)

        planned = time.monotonic()
        timings = {"plan": planned - began}
        switch = cancel if cancel is not None else never()
        retried: str | None = None
        exposed: tuple[str, ...] = ()
        if request.mounts or resolved.policy.filesystem.read_write:
            exposed = _note_writable(request, resolved.policy)
        # Before the program starts: one that can write beside it could put a link in its place.
        into = _destination(request) if request.outputs_to else None
        try:
            if request.retry:
                from . import retrying

                unheard = retrying.Unheard(forward)
                chosen, result = self._run(chosen, unheard, switch, emit, into)
                another = self._elsewhere(chosen, result, unheard, backend, switch)
                if another is None:
                    unheard.release()
                else:
                    retried, chosen = chosen.backend.name, another
                    timings["first"] = time.monotonic() - planned
                    chosen, result = self._run(chosen, forward, switch, emit, into)
            else:
                chosen, result = self._run(chosen, forward, switch, emit, into)
        finally:
            if into is not None:
                into.close()
        told = (
            *resolved.warnings, *exposed, *chosen.plan.warnings, *result.warnings,
            *_not_found(request.outputs, result),
        )  # fmt: skip
        result = replace(
            result,
            backend_reason=chosen.reason,
            fallback=chosen.fallback,
            retried=retried,
            # A backend may pass its plan's warnings on; a fallback must be told in any case.
            warnings=tuple(dict.fromkeys((*told, *selection.once(chosen.lacking)))),
            timings={**timings, **result.timings},
        )
        return self._tell(explained(result, chosen.plan.policy, request), request, emit)

    def _run(
        self,
        chosen: Chosen,
        forward: Emit,
        cancel: Cancel,
        emit: Emit | None,
        into: Destination | None,
    ) -> tuple[Chosen, Result]:
        """The result, and where it is from: another backend if `chosen` could not be set up."""
        try:
            while True:
                name = chosen.backend.name
                plan = chosen.plan
                started = RunStarted(request=plan.request, backend=name, policy=plan.policy)
                self._emit(started, emit)
                try:
                    plan = chosen.plan if into is None else replace(chosen.plan, destination=into)
                    result = chosen.backend.run(plan, forward, cancel)
                except SetupFailed as error:
                    run = chosen.plan.request.id
                    log.error(f"run {run}: {name} could not be set up: {log.printable(error)}")
                    chosen = self._selection.after(chosen, error)
                    continue
                self._selection.worked(name)
                return chosen, result if into is None else into.with_rest(result)
        except BaseException as error:
            # A caller whose own callback raised is not called again.
            caller = emit if isinstance(error, BelljarError) else None
            failed = _failure(chosen.plan.request, chosen.backend.name, error)
            self._emit(failed, caller)
            raise

    def _elsewhere(
        self,
        failed: Chosen,
        result: Result,
        unheard: retrying.Unheard,
        named: str | None,
        cancel: Cancel,
    ) -> Chosen | None:
        """Where to run once more what missed a module and did nothing else; None: nowhere."""
        from . import retrying

        module = retrying.missing_module(result, failed.plan, unheard)
        if module is None or cancel.is_set():
            return None
        found = self._selection.another(failed, named, module)
        if found is None:
            return None
        other, plan = found
        lacked = f"module {module!r}" if module else "something that the program imports"
        reason = f"retried on {other.name} because {failed.backend.name} has no {lacked}"
        return Chosen(other, replace(plan, warnings=(*plan.warnings, reason)), reason)

    def plan(
        self,
        request: Request,
        *,
        level: str | None = None,
        wishes: Mapping[str, Any] | None = None,
        backend: str | None = None,
    ) -> Plan:
        """What `run` would do, without doing it. Raises what `run` would raise.

        That the import lint would refuse the program is a warning: the plan is for the policy.
        """
        request = self._understood(request)
        resolved = self._resolve(request, level, wishes)
        plan = self._selection.select(request, resolved.policy, backend).plan
        refused = _lint(request, resolved.policy)
        lint = (refused.error.message,) if refused is not None and refused.error is not None else ()
        return replace(plan, warnings=(*resolved.warnings, *plan.warnings, *lint))

    def explain(
        self,
        request: Request,
        *,
        level: str | None = None,
        wishes: Mapping[str, Any] | None = None,
        backend: str | None = None,
    ) -> Explanation:
        """Which backend would run it, why, and what speaks against each other one."""
        request = self._understood(request)
        policy = self._resolve(request, level, wishes).policy
        verdicts = tuple(self._selection.verdicts(request, policy))
        refused = _lint(request, policy)
        if refused is not None and refused.error is not None:
            said, _, fix = refused.error.message.rpartition("\n")
            return Explanation(
                backend=None, reason=said, verdicts=verdicts, fix=fix, policy=policy, refused=True
            )
        try:
            chosen = self._selection.select(request, policy, backend)
        except (PolicyUnenforceable, BackendUnavailable) as error:
            return Explanation(
                backend=None, reason=error.message, verdicts=verdicts, fix=error.fix, policy=policy
            )
        return Explanation(
            backend=chosen.backend.name,
            reason=chosen.reason,
            verdicts=verdicts,
            policy=chosen.plan.policy,
        )

    def stats(self) -> dict[str, dict[str, int]]:
        """What each backend that was used keeps warm: fork servers, their memory in bytes, parked
        sandboxes and running programs. Backends that keep nothing are left out."""
        with self._lock:
            backends = {**self._loaded, **(self._given or {})}
        found: dict[str, Mapping[str, int]] = {
            name: getattr(each, "stats", dict)() for name, each in backends.items()
        }
        return {name: dict(numbers) for name, numbers in found.items() if numbers}

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
        if self.settings.ceiling.interpreters is not None:
            language = languages.bounded(language, request.python, self.settings)
        if request.filename is not None:
            language = replace(language, file=request.filename)
        elif request.resolved is language and not language.env:
            return request
        env = {**language.env, **request.env}
        return replace(request, language=language.name, resolved=language, env=env)

    def _resolve(
        self, request: Request, level: str | None, wishes: Mapping[str, Any] | None
    ) -> Resolved:
        wishes, language = wishes or {}, request.resolved
        key: tuple[object, ...] | None = None
        plain = type(level) in _PLAIN and all(type(wish) in _PLAIN for wish in wishes.values())
        if plain and not request.mounts:
            # With their types: True is equal to 1, and not the same wish.
            key = (level, *((name, type(wish), wish) for name, wish in wishes.items()))
            known = self._resolved.get(key)
            if known is not None and known[0] is language and known[1] is self.settings:
                return known[2]
        resolved = self._resolve_anew(request, level, wishes)
        if key is not None:
            if len(self._resolved) >= _REMEMBERED:
                self._resolved.clear()
            self._resolved[key] = language, self.settings, resolved
        return resolved

    def _resolve_anew(
        self, request: Request, level: str | None, wishes: Mapping[str, Any]
    ) -> Resolved:
        settings = self.settings
        resolved = resolve(
            level or settings.level,
            wishes,
            mounts=request.mounts,
            ceiling=settings.ceiling,
            defaults=settings.defaults,
            language=request.resolved,
            found=settings.found,
            data_directory=settings.data_directory,
        )
        if settings.block_dangerous_imports and "modules" not in resolved.policy.explicit:
            modules = resolved.policy.modules
            deny = tuple(dict.fromkeys((*modules.deny, *DANGEROUS_MODULES)))
            policy = replace(resolved.policy, modules=Modules(allow=modules.allow, deny=deny))
            resolved = replace(resolved, policy=policy)
        return resolved

    @trusted_imports.calls_application
    def _emit(self, event: Event, emit: Emit | None) -> None:
        self.sinks(event)
        if emit is not None:
            emit(event)

    def _tell(self, result: Result, request: Request, emit: Emit | None) -> Result:
        self._emit(RunFinished(result=result, request=request), emit)
        return result


def _note_writable(request: Request, policy: Policy) -> tuple[str, ...]:
    """Before a run that may write to host paths: note them for late imports; warnings."""
    written = [mount.src for mount in request.mounts if mount.mode == "rw"]
    written += policy.filesystem.read_write
    return tuple(
        f"{path!r} is writable and holds the Python that runs Belljar: what the program changes"
        " there, Belljar's helper processes run later; install Belljar outside of it, or mount less"
        for path in trusted_imports.note_writable(written)
    )


def _failure(request: Request, backend: str, error: BaseException) -> RunFailed:
    if isinstance(error, BelljarError):
        code, message, retryable = error.code, error.message, error.retryable
    else:
        code, message, retryable = "aborted", f"{type(error).__name__}: {error}", False
    return RunFailed(
        id=request.id,
        backend=backend,
        code=code,
        message=message,
        retryable=retryable,
        request=request,
    )


def _level_of_list(policy: Policy) -> str | None:
    """The level whose list of modules the policy has, if it has a level's."""
    own = level_policy(policy.level).modules
    return policy.level if policy.modules.allow and policy.modules.allow == own.allow else None


def _destination(request: Request) -> Destination:
    """The directory that the request has its files written to. Raises RequestError."""
    from .files.destination import Destination

    try:
        return Destination(request.outputs_to, request.outputs)
    except OSError as error:
        problem = f"{request.outputs_to!r} cannot be opened: {error.strerror}"
        fix = "name a directory that you can write to"
        raise RequestError("outputs_to", problem, fix=fix) from None


def _not_found(outputs: tuple[str, ...], result: Result) -> Iterator[str]:
    """A warning for each glob of `outputs` that the run left nothing for."""
    if outputs:
        from .files import collect

        for glob in collect.unmatched(outputs, result.files):
            if glob.strip("*/"):  # else it asks for whatever there is
                yield f"outputs: the run left no new or changed file that matches {glob!r}"


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
        error=GuestError(
            type="ImportRefused",
            message=lint.report(findings, policy.modules, _level_of_list(policy)),
        ),
        backend_reason="refused by the import lint; nothing was started",
    )

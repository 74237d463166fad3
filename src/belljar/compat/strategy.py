"""One `CodeSandbox` interface with a strategy that the environment names: local, docker, e2b.

sandbox = get_sandbox()          # SANDBOX_TYPE=local|docker|e2b, SANDBOX_TIMEOUT_SEC, ...
sandbox.execute("print(6 * 7)").stdout
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from .. import api, log
from ..config import Settings, load
from ..errors import NotBuiltYet
from ..policy import DANGEROUS_MODULES
from ..records import plain, replace
from ..types import Status
from . import _answers

_TIMEOUT = 30.0
_warned: set[str] = set()


@dataclass
class ExecutionResult:
    """What a program printed, and how it ended; `meta` says under which rules, and why."""

    stdout: str
    stderr: str
    exit_code: int
    duration: float
    meta: dict[str, Any] = field(default_factory=dict)


class CodeSandbox(Protocol):
    """What every strategy can do."""

    def execute(
        self, code: str, language: str = "python", timeout: float | None = None
    ) -> ExecutionResult: ...


class _Sandbox:
    """`settings` are what `get_sandbox` reads; None reads them now."""

    backend: ClassVar[str]

    def __init__(self, settings: Settings | None = None) -> None:
        settings = _with_records(settings if settings is not None else load())
        self.timeout = settings.defaults.get("timeout", _TIMEOUT)
        self.blocks_imports = settings.block_dangerous_imports
        self._runner = api.create_runner(
            backend=self.backend, settings=settings, timeout=self.timeout
        )
        if not self.blocks_imports and "imports" not in _warned:
            _warned.add("imports")
            log.warning(
                "imports are not blocked: set SANDBOX_BLOCK_DANGEROUS_IMPORTS=true to refuse "
                f"{', '.join(DANGEROUS_MODULES)}"
            )

    def execute(
        self, code: str, language: str = "python", timeout: float | None = None
    ) -> ExecutionResult:
        """Run `code`. BelljarError if the sandbox itself fails, or the language is unknown."""
        request = api.build_request(
            code=code, language=language, settings=self._runner.engine.settings
        )
        wishes = {"timeout": timeout if timeout is not None else self.timeout}
        engine = self._runner.engine
        limits = engine.plan(request, wishes=wishes, backend=self.backend).policy.limits
        result = engine.run(request, wishes=wishes, backend=self.backend)
        refused = result.status is Status.REFUSED
        return ExecutionResult(
            stdout=result.stdout,
            stderr=_answers.stderr(result),
            exit_code=_answers.exit_code(result),
            duration=result.usage.wall,
            meta={
                "runtime": result.backend or self.backend,
                "isolation": result.isolation,
                "language": request.language,
                "status": result.status.value,
                "limits": plain(limits),
                "blocked_imports": list(DANGEROUS_MODULES) if self.blocks_imports else [],
                "refused": (refused and result.error is not None and result.error.message) or None,
                "truncated": result.truncated,
                "warnings": list(result.warnings),
                "id": result.id,
            },
        )

    def close(self) -> None:
        self._runner.close()


class LocalSandbox(_Sandbox):
    """A process of this host's, with limits: needs nothing, and is no wall against malice."""

    backend = "subprocess"


class DockerSandbox(_Sandbox):
    """A container. Without an engine: what isolates as well or better, with a warning."""

    backend = "docker"


class E2BSandbox:
    """A sandbox in the cloud."""

    def __init__(self, settings: Settings | None = None) -> None:
        raise NotBuiltYet("E2BSandbox", available=("SANDBOX_TYPE=local", "SANDBOX_TYPE=docker"))


def get_sandbox() -> CodeSandbox:
    """The sandbox that SANDBOX_TYPE names: local (the default), docker or e2b."""
    settings = load()
    match settings.backend:
        case "e2b":
            return E2BSandbox(settings)  # type: ignore[return-value]  # it raises
        case "docker":
            return DockerSandbox(settings)
        case "auto" | "subprocess":
            return LocalSandbox(settings)
    from ..errors import ConfigError

    raise ConfigError(
        "SANDBOX_TYPE", f"{settings.backend!r} is not local, docker or e2b",
        fix=f"use belljar.run(backend={settings.backend!r}) for other backends",
    )  # fmt: skip


def _with_records(settings: Settings) -> Settings:
    """A record of each run that failed, unless SANDBOX_STORE_CODE says otherwise."""
    chosen = settings.sources.get("store_code", "default") != "default"
    if chosen or settings.store_code != "never":
        return settings
    return replace(settings, store_code="on_error")

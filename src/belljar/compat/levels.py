"""Three security levels: a runner for each, with one configuration and one result.

with create_runner(SecurityLevel.STANDARD) as runner:
    runner.execute("df['x'].sum()", {"df": frame}).result
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from .. import api
from ..config import Settings, load
from ..types import Result, Status


class SecurityLevel(Enum):
    PERMISSIVE = "permissive"
    STANDARD = "standard"
    STRICT = "strict"


@dataclass(frozen=True)
class SandboxConfig:
    """What a runner allows. Processors, files and the network come with the level."""

    security_level: SecurityLevel = SecurityLevel.STANDARD
    timeout_seconds: float = 30.0
    max_memory_mb: int = 512
    allowed_modules: tuple[str, ...] = ("pandas", "math", "statistics", "json")

    @classmethod
    def for_level(cls, level: SecurityLevel) -> SandboxConfig:
        """The level's own numbers and modules, which are those of `belljar.run(level=...)`."""
        from ..policy import LEVEL_MODULES, level_policy

        limits = level_policy(level.value).limits
        return cls(
            security_level=level,
            timeout_seconds=limits.timeout,
            max_memory_mb=limits.memory >> 20,
            allowed_modules=LEVEL_MODULES[level_policy(level.value).level],
        )


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended; `result` is its last expression, else its variable `result`."""

    success: bool
    result: Any
    stdout: str
    stderr: str
    error: str | None
    execution_time_ms: float
    memory_used_mb: float | None


class SandboxedRunner(ABC):
    """Runs programs under one configuration until `cleanup`; also a context manager."""

    @abstractmethod
    def __init__(self, config: SandboxConfig) -> None: ...

    @abstractmethod
    def execute(self, code: str, context: dict[str, Any]) -> SandboxResult:
        """Run Python `code` with `context` as its variables. BelljarError if the sandbox fails."""

    @abstractmethod
    def cleanup(self) -> None:
        """Release what the runner keeps warm."""

    def __enter__(self) -> SandboxedRunner:
        return self

    def __exit__(self, *args: Any) -> None:
        self.cleanup()


class _Runner(SandboxedRunner):
    backend: ClassVar[str]
    level: ClassVar[SecurityLevel | None] = None  # instead of the configuration's

    def __init__(
        self,
        config: SandboxConfig,
        *,
        settings: Settings | None = None,
        instead_of: str | None = None,
    ) -> None:
        """`instead_of` is the backend that this one takes over for: the engine falls back."""
        self.config = config
        self._runner = api.create_runner(
            (self.level or config.security_level).value,
            backend=instead_of or self.backend,
            settings=settings or load(),
            timeout=config.timeout_seconds,
            memory=config.max_memory_mb << 20,
            modules=config.allowed_modules,
            network="off",
        )

    def execute(self, code: str, context: Mapping[str, Any] | None = None) -> SandboxResult:
        result = self._runner.execute(code, context or {})
        memory = result.usage.peak_memory
        return SandboxResult(
            success=result.success,
            result=result.value,
            stdout=result.stdout,
            stderr=result.stderr,
            error=_error(result),
            execution_time_ms=result.usage.wall * 1000,
            memory_used_mb=None if memory is None else memory / (1 << 20),
        )

    def would_run_on(self) -> str:
        """The backend that takes this runner's programs now; BelljarError if there is none."""
        request = api.build_request(code="", settings=self._runner.engine.settings)
        plan = self._runner.engine.plan(
            request, level=self.config.security_level.value, backend=self.backend,
        )  # fmt: skip
        return plan.backend

    def cleanup(self) -> None:
        self._runner.close()


class InProcessRunner(_Runner):
    """In this very process, for development: no isolation at all, whatever the level."""

    backend = "inprocess"
    level = SecurityLevel.PERMISSIVE


class SubprocessRunner(_Runner):
    """In a process of its own, with limits."""

    backend = "subprocess"


class DockerRunner(_Runner):
    """In a container. Without an engine: in what isolates as well, or the operator allows."""

    backend = "docker"


class JailRunner(_Runner):
    """In Belljar's jail, which isolates as a container does and needs no engine."""

    backend = "jail"


def create_runner(
    level: SecurityLevel = SecurityLevel.STANDARD,
    config: SandboxConfig | None = None,
    *,
    settings: Settings | None = None,
) -> SandboxedRunner:
    """The runner of a level: strict in a container, standard in a process, permissive in this one.

    Without a container engine strict is a runner of equal isolation, else what the operator's
    `fallback.allow` lists, and the logger `belljar` says so; else a BelljarError.
    """
    config = config or SandboxConfig.for_level(level)
    level = max(level, config.security_level, key=list(SecurityLevel).index)
    config = replace(config, security_level=level)
    if level is SecurityLevel.PERMISSIVE:
        return InProcessRunner(config, settings=settings)
    if level is SecurityLevel.STANDARD:
        return SubprocessRunner(config, settings=settings)
    strict = DockerRunner(config, settings=settings)
    used = strict.would_run_on()
    for instead in (JailRunner, SubprocessRunner):
        if used == instead.backend:
            strict.cleanup()
            from .. import log

            log.warning(f"no container engine: the level strict runs on {used!r}")
            return instead(config, settings=settings, instead_of=strict.backend)
    return strict


class LLMExecutor:
    """Has a model write the code for a task, and runs it; comes with the executor loop."""

    def __init__(self, llm: Any, sandbox_level: SecurityLevel = SecurityLevel.STANDARD) -> None:
        from ..errors import NotBuiltYet

        raise NotBuiltYet("LLMExecutor", available=("create_runner(level).execute(code, context)",))


def _error(result: Result) -> str | None:
    """One line, or the import lint's report; names MemoryError or "killed" for want of memory."""
    if result.success:
        return None
    if result.status is Status.REFUSED or result.error is None:
        killed = "killed: " if result.status in (Status.OOM, Status.TIMEOUT) else ""
        return f"{killed}{result.explanation}"
    return f"{result.error.type}: {result.error.message}".removesuffix(": ")

"""The names that Belljar's design documents use, over the engine and with nothing of their own.

    sandbox = get_sandbox(SecurityLevel.STRICT)
    sandbox.execute("import math; math.pi * r ** 2", {"r": 2}).value
    sandbox.cleanup()

    HybridSandbox().execute_code("print(open('project/README.md').read())", project_path=".")

New code is better served by `belljar.run` and `belljar.create_runner`, which these are made of.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self

from .api import Runner, create_runner
from .errors import BelljarError, Partial, RequestError
from .records import plain, record
from .types import Mount, Result, Status

Context = Mapping[str, Any] | None


class SecurityLevel(StrEnum):
    PERMISSIVE = "permissive"
    STANDARD = "standard"
    STRICT = "strict"


@record
class SandboxConfig:
    """A level and what differs from it. None leaves a field to the configuration and the level."""

    level: SecurityLevel | None = None
    backend: str | None = None
    timeout: float | str | None = None
    memory: int | str | None = None
    cpus: float | str | None = None
    network: Any = None
    modules: Any = None

    @classmethod
    def for_level(cls, level: SecurityLevel | str | None, **changes: Any) -> SandboxConfig:
        """The configuration of `level` with `changes`. ValueError for an unknown level."""
        return cls(level=None if level is None else SecurityLevel(level), **changes)

    def options(self) -> dict[str, Any]:
        """The keywords for `create_runner`."""
        return {name: value for name, value in plain(self).items() if value is not None}


class Sandbox:
    """Runs programs under one configuration until `cleanup`; also a context manager."""

    backend: ClassVar[str | None] = None

    def __init__(self, config: SandboxConfig | None = None, **settings: Any) -> None:
        """`settings` are the keywords of `create_runner`; they win over `config`."""
        self.config = config or SandboxConfig()
        options = {"backend": self.backend, **self.config.options(), **settings}
        self._runner: Runner = create_runner(**options)

    def execute(self, code: str, context: Context = None, **options: Any) -> Result:
        """Run `code` with `context` as variables; `options` are the keywords of `belljar.run`."""
        return self._runner.execute(code, context, **options)

    def cleanup(self) -> None:
        """End what is kept warm. Afterwards the sandbox refuses to run."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cleanup()


def get_sandbox(
    level: SecurityLevel | str | None = None,
    *,
    config: SandboxConfig | None = None,
    **settings: Any,
) -> Sandbox:
    """A sandbox of `level`, or of `config`; `settings` are the keywords of `create_runner`."""
    return Sandbox(config or SandboxConfig.for_level(level), **settings)


class HybridSandbox(Sandbox):
    """A sandbox on whatever `auto` chooses for each program, answering with plain dicts."""

    backend = "auto"

    def execute_code(
        self,
        code: str,
        project_path: str | os.PathLike[str] | None = None,
        timeout: float | str | None = None,
        require_libraries: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Run `code`, with `project_path` read-only at `project/`. Raises no BelljarError.

        `status` is that of a Result, or "system_failure" if Belljar and not the program failed:
        `stderr` then ends with the reason. `require_libraries` are names; nothing is installed.
        """
        began = time.monotonic()
        mounts = () if project_path is None else (Mount(os.path.abspath(project_path), "project"),)
        try:
            _check_libraries(require_libraries)
            result = self.execute(code, timeout=timeout, mounts=mounts)
        except BelljarError as error:
            partial = error.partial or Partial()
            return {
                "status": "system_failure",
                "stdout": partial.stdout,
                "stderr": f"{partial.stderr}{error}",
                "exit_code": None,
                "execution_time_ms": (time.monotonic() - began) * 1000,
                "fuel_consumed": None,
            }
        refusal = result.error.message if result.error and result.status is Status.REFUSED else ""
        return {
            "status": result.status.value,
            "stdout": result.stdout,
            "stderr": result.stderr or refusal,
            "exit_code": result.exit_code,
            "execution_time_ms": result.usage.wall * 1000,
            "fuel_consumed": result.usage.fuel,
        }


class DockerSandbox(HybridSandbox):
    backend = "docker"


class WasmSandbox(HybridSandbox):
    backend = "wasm"


def _check_libraries(names: Iterable[str]) -> None:
    if isinstance(names, str):
        raise RequestError("require_libraries", "is a list", fix=f"write [{names!r}]")
    for name in names:
        if not isinstance(name, str) or not name.replace("-", "_").replace(".", "_").isidentifier():
            raise RequestError("require_libraries", f"{name!r} is not the name of a library")

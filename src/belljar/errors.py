"""What Belljar raises when it, and not the guest, is at fault.

    BelljarError                      code, retryable, fix, partial
    ├── RequestError(ValueError)      the call itself is malformed; `field` says where
    │   ├── LanguageUnknown           no such language; the message lists the known ones
    │   └── CommandNotFound           the command to run is not installed
    ├── PolicyError(ValueError)       the policy is malformed or past the ceiling
    ├── PolicyUnenforceable           no admissible backend can hold `fields`; exit code 126
    │   └── LimitValue                the value of a limit is all that is against it; `fits` does
    ├── ConfigError(ValueError)       belljar.toml or the environment is wrong
    ├── BackendUnavailable            not usable on this host; `fix` says how to get it
    │   ├── LanguageMissing           the language is known, and not installed where it would run
    │   ├── LibrariesMissing          a library that the program requires is not there
    │   └── NotBuiltYet               planned, and in no release yet; names what there is instead
    ├── BackendFailed                 the sandbox broke in mid-run; `partial` holds what came so far
    │   └── SetupFailed               it broke before any of the program's code ran
    └── ProgramFailed                 only from `Result.check`: the program failed; see `result`

A guest that fails is a `Result`; `Result.check` turns it into an exception on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .records import record

if TYPE_CHECKING:
    from .types import Result


@record
class Partial:
    """Output that reached us before the sandbox itself failed."""

    stdout: str = ""
    stderr: str = ""


class BelljarError(Exception):
    """Root of everything Belljar raises. `code` is stable and safe to match on."""

    code: ClassVar[str] = "belljar_error"

    def __init__(
        self,
        message: str,
        *,
        fix: str | None = None,
        retryable: bool = False,
        partial: Partial | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.retryable = retryable
        self.partial = partial

    def __str__(self) -> str:
        if not self.fix:
            return self.message
        if "\n" in self.message:
            return f"{self.message}\nfix: {self.fix}"
        return f"{self.message} (fix: {self.fix})"

    def to_dict(self) -> dict[str, Any]:
        """Stable JSON, as `--json` prints it."""
        return {
            "code": self.code,
            "message": self.message,
            "fix": self.fix,
            "retryable": self.retryable,
        }


class FieldError(BelljarError, ValueError):
    """One named field has a value that cannot be accepted."""

    def __init__(self, field: str, problem: str, **rest: Any) -> None:
        super().__init__(f"{field}: {problem}", **rest)
        self.field = field

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "field": self.field}


class RequestError(FieldError):
    code = "request_invalid"


class LanguageUnknown(RequestError):
    code = "language_unknown"


class CommandNotFound(RequestError):
    code = "command_not_found"


class PolicyError(FieldError):
    code = "policy_invalid"


class ConfigError(FieldError):
    code = "config_invalid"


class PolicyUnenforceable(BelljarError):
    """The policy asks for something that no admissible backend holds: nothing was run."""

    code = "policy_unenforceable"

    def __init__(
        self,
        message: str,
        *,
        fields: Iterable[str],
        lacking: Mapping[str, str] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(message, **rest)
        self.fields = tuple(fields)
        self.lacking = dict(lacking or {})  # field -> why it is not held

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "fields": list(self.fields)}


class LimitValue(PolicyUnenforceable):
    """A limit has a value that the backend cannot hold; `fits` names values that it can."""

    def __init__(
        self, message: str, *, fields: Iterable[str], fits: Mapping[str, str], **rest: Any
    ) -> None:
        rest.setdefault("fix", ", ".join(f"{name}={_quoted(fits[name])}" for name in fits))
        super().__init__(message, fields=fields, **rest)
        self.fits = dict(fits)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "fits": self.fits}


def _quoted(value: str) -> str:
    return value if value.replace(".", "").isdecimal() else f'"{value}"'


class BackendUnavailable(BelljarError):
    code = "backend_unavailable"


class LanguageMissing(BackendUnavailable):
    code = "language_missing"


class LibrariesMissing(BackendUnavailable):
    code = "libraries_missing"

    def __init__(self, message: str, *, libraries: Iterable[str], **rest: Any) -> None:
        super().__init__(message, **rest)
        self.libraries = tuple(libraries)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "libraries": list(self.libraries)}


class NotBuiltYet(BackendUnavailable):
    """A part of Belljar that is planned; `available` names what can be used instead."""

    code = "not_built_yet"

    def __init__(self, what: str, *, available: Iterable[str]) -> None:
        self.available = tuple(available)
        instead = ", ".join(self.available)
        super().__init__(f"{what} is not built yet", fix=f"use one of: {instead}")

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "available": list(self.available)}


class BackendFailed(BelljarError):
    code = "backend_failed"


class SetupFailed(BackendFailed):
    """Raised only where it is certain that none of the program's code has run."""


class ProgramFailed(BelljarError):
    """The program, not the sandbox, failed; `result` is what became of it."""

    code = "program_failed"

    def __init__(self, result: Result) -> None:
        super().__init__(result.explanation or f"the program ended: {result.status.value}")
        self.result = result

    def __reduce__(self) -> tuple[type[ProgramFailed], tuple[Result]]:
        return type(self), (self.result,)

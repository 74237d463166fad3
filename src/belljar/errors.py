"""What Belljar raises when it, and not the guest, is at fault.

    BelljarError                      code, retryable, fix, partial
    ├── RequestError(ValueError)      the call itself is malformed; `field` says where
    │   ├── LanguageUnknown           no such language; the message lists the known ones
    │   └── CommandNotFound           the command to run is not installed
    ├── PolicyError(ValueError)       the policy is malformed or past the ceiling
    ├── PolicyUnenforceable           no admissible backend can hold `fields`; exit code 126
    ├── ConfigError(ValueError)       belljar.toml or the environment is wrong
    ├── BackendUnavailable            not usable on this host; `fix` says how to get it
    │   └── LanguageMissing           the language is known, and not installed where it would run
    └── BackendFailed                 the sandbox broke in mid-run; `partial` holds what came so far

A guest that fails is a `Result`, never one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from .records import record


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
        return f"{self.message} (fix: {self.fix})" if self.fix else self.message

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

    def __init__(self, message: str, *, fields: Iterable[str], **rest: Any) -> None:
        super().__init__(message, **rest)
        self.fields = tuple(fields)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "fields": list(self.fields)}


class BackendUnavailable(BelljarError):
    code = "backend_unavailable"


class LanguageMissing(BackendUnavailable):
    code = "language_missing"


class BackendFailed(BelljarError):
    code = "backend_failed"

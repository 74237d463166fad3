"""Errors as problem JSON (RFC 9457), each with Belljar's stable code and the right HTTP status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Response

from ...errors import (
    BackendFailed,
    BackendUnavailable,
    BelljarError,
    ConfigError,
    FieldError,
    LanguageMissing,
    LibrariesMissing,
    PolicyUnenforceable,
)
from ..remote import NotAllowed
from .strict_json import Malformed

MEDIA_TYPE = "application/problem+json"
_MOST_TEXT = 2000

Headers = Mapping[str, str]


class HttpError(BelljarError):
    """What HTTP itself has a status for: no token, no such path, too large, too busy."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: Headers | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(message, **rest)
        self.status, self.headers = status, dict(headers or {})
        self.code = code  # type: ignore[misc]


def status_of(error: BelljarError, *, named_backend: bool = False) -> int:
    """`named_backend`: the request itself chose the backend, so that its absence is its mistake."""
    match error:
        case HttpError():
            return error.status
        case Malformed():
            return 400
        case NotAllowed():
            return 403
        case LanguageMissing() | LibrariesMissing() | PolicyUnenforceable():
            return 422
        case BackendUnavailable():
            return 422 if named_backend and not error.retryable else 503
        case BackendFailed():
            return 503 if error.retryable else 500
        case ConfigError():
            return 500
        case FieldError():
            return 422
    return 500


def problem(error: BelljarError, status: int) -> dict[str, Any]:
    """The body of the answer: `type`, `title`, `status`, `detail`, and the error's own fields."""
    told = error.to_dict()
    code, message = told.pop("code"), told.pop("message")
    body = {
        "type": f"urn:belljar:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": _short(message),
        "code": code,
        **{name: _short(value) for name, value in told.items()},
    }
    if error.partial is not None:
        body["partial"] = {"stdout": error.partial.stdout, "stderr": error.partial.stderr}
    return body


def failure(error: BelljarError, status: int | None = None) -> Response:
    """The whole answer for `error`."""
    status = status_of(error) if status is None else status
    headers = error.headers if isinstance(error, HttpError) else {}
    if status == 503 and "Retry-After" not in headers and error.retryable:
        headers = {**headers, "Retry-After": "1"}
    return Response(encoded(problem(error, status)), status, headers, media_type=MEDIA_TYPE)


def encoded(body: object) -> bytes:
    """Strict JSON, escaped to ASCII, so that no half of a surrogate pair can spoil it."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")


def _short(value: Any) -> Any:
    """A message may repeat what was sent, and that may be a megabyte."""
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[:_MOST_TEXT]}... ({len(value)} characters)"
    return value

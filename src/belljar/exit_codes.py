"""The one number for how a run ended, as the command line and the documents' interfaces give it."""

from __future__ import annotations

from .types import Result, Status


def of_result(result: Result) -> int:
    """The program's own exit code; 124 timeout, 126 refused, 128+n signal n, 137 other limits."""
    match result.status:
        case Status.SUCCESS:
            return (result.exit_code or 0) & 0xFF
        case Status.TIMEOUT:
            return 124
        case Status.REFUSED:
            return 126
        case Status.ERROR | Status.LIMIT if result.signal is None and result.exit_code:
            # A program that met a limit and gave up by itself keeps the code it chose.
            return result.exit_code & 0xFF or 1
        case Status.ERROR:
            return 128 + result.signal if result.signal else 1
    return 137

"""Belljar's own failures on the command line: the message, the JSON form and the exit code."""

from __future__ import annotations

from ..errors import (
    BackendUnavailable,
    BelljarError,
    CommandNotFound,
    LanguageUnknown,
    PolicyUnenforceable,
)
from . import terminal


def exit_code(error: BaseException) -> int:
    match error:
        case PolicyUnenforceable():
            return 126
        case LanguageUnknown() | BackendUnavailable() | CommandNotFound():
            return 127
    return 125


def report(error: Exception, *, as_json: bool) -> int:
    """Tell the user about `error` and return the exit code."""
    if not isinstance(error, BelljarError):
        return _report_bug(error, as_json=as_json)
    if as_json:
        print_json({"error": error.to_dict()})
    else:
        terminal.complain(error.message, error.fix)
    return exit_code(error)


def _report_bug(error: Exception, *, as_json: bool) -> int:
    import traceback

    message = f"internal error: {type(error).__name__}: {error}"
    fix = "this is a bug in Belljar; please report it with the lines above"
    if as_json:
        print_json(
            {"error": {"code": "internal", "message": message, "fix": fix, "retryable": False}}
        )
    else:
        terminal.say(terminal.visible("".join(traceback.format_exception(error)).rstrip()))
        terminal.complain(message, fix)
    return 125


def print_json(value: object) -> None:
    """One strict JSON object on stdout. Escaped to ASCII, so that no terminal can obey it."""
    import json
    import sys

    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()

"""Belljar's own failures on the command line: the message, the JSON form and the exit code."""

from __future__ import annotations

import re

from ..errors import (
    BackendUnavailable,
    BelljarError,
    CommandNotFound,
    LanguageUnknown,
    PolicyUnenforceable,
)
from ..policy_fields import LIMITS
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
    told = error if isinstance(error, BelljarError) else _bug(error)
    if as_json:
        try:
            print_json({"error": told.to_dict()})
        except BelljarError:  # stdout itself is what failed
            as_json = False
    if not as_json:
        terminal.complain(told.message, _as_flags(told.fix))
    return exit_code(told)


_FLAGS = (*LIMITS, "level", "backend", "modules", "network")
_KEYWORD = re.compile(r"\b(" + "|".join(_FLAGS) + r')="?([\w.]+)"?')


def _as_flags(fix: str | None) -> str | None:
    """A fix for a call, `memory="2G"`, as one for the command line, `--memory 2G`."""
    if fix is None:
        return None
    return _KEYWORD.sub(lambda found: f"--{found[1].replace('_', '-')} {found[2]}", fix)


def _bug(error: Exception) -> BelljarError:
    """An exception that nobody foresaw, with its traceback on stderr for whoever mends it."""
    import traceback

    terminal.say(terminal.visible("".join(traceback.format_exception(error)).rstrip()))
    return BelljarError(
        f"internal error: {type(error).__name__}: {error}",
        fix="this is a bug in Belljar; please report it with the traceback",
    )


def print_json(value: object) -> None:
    """One strict JSON object on stdout. Escaped to ASCII, so that no terminal can obey it."""
    import json

    terminal.show(json.dumps(value, allow_nan=False))

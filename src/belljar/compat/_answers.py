"""How a Result is said in the documents' words: exit codes as numbers, reasons on stderr."""

from __future__ import annotations

from .. import exit_codes
from ..types import Result, Status

SYSTEM_FAILURE = -1  # the exit code of a run that Belljar itself could not do


def exit_code(result: Result) -> int:
    """The program's own code, where it has one; 124 for a timeout, as `timeout` has it."""
    return exit_codes.of_result(result)


def stderr(result: Result) -> str:
    """What the program wrote; for an end that was not its own doing, also why it ended."""
    if result.status in (Status.SUCCESS, Status.ERROR):
        return result.stderr
    line_break = "" if not result.stderr or result.stderr.endswith("\n") else "\n"
    return f"{result.stderr}{line_break}{result.explanation}\n"

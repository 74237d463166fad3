"""What the line of the log for a request says beside its path and status: the run that it started.

The guard, which writes the line, stands outside of the code that knows the run.
"""

from __future__ import annotations

from starlette.types import Scope

Note = dict[str, str]
_KEY = "belljar.note"


def begin(scope: Scope) -> Note:
    """An empty note in the scope of a new request."""
    note: Note = {}
    scope[_KEY] = note
    return note


def of(scope: Scope) -> Note:
    """The note of the request whose scope, or a copy of it, this is."""
    note: Note = scope[_KEY]
    return note

"""The least value of each limit: below it a sandbox cannot start its first process.

`LEAST` holds on every backend and is checked when a policy is read. A backend whose own processes
need more has a class attribute `least` of the same form; it is checked before the backend compiles.
The numbers were found by trying (tests/test_minima.py and the conformance suite try them again).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import units
from .errors import LimitValue, PolicyError
from .policy import Limits

LEAST: Mapping[str, float] = {
    "timeout": 0.001,
    "memory": 4 << 20,
    "cpus": 0.01,  # a cgroup gives no less than 1 ms of 100 ms; a container engine neither
    "disk": 64 << 10,  # containers divide it by eight, and memory file systems are made of pages
    "open_files": 16,  # the supervisor, the interpreter and the worker open ten before the program
}
_SIZES = ("memory", "disk", "output")

Reader = Callable[[str, object], Any]


def checked(read: Reader) -> Reader:
    """A reader of a limit that refuses what is below `LEAST`."""

    def reader(field: str, given: object) -> Any:
        number = read(field, given)
        least = LEAST.get(field.rpartition(".")[2])
        if least is not None and number < least:
            name = field.rpartition(".")[2]
            raise PolicyError(
                field,
                f"{_written(name, number)} is less than {_written(name, least)}, the least"
                f" that a sandbox can start with{_meant(name, given)}",
                fix=f"write {name}={_literal(name, least)} or more",
            )
        return number

    return reader


def refuse_below(backend: str, least: Mapping[str, float], limits: Limits) -> None:
    """Raise LimitValue if `backend` cannot start with these limits."""
    for name, needed in least.items():
        value = getattr(limits, name)
        if value is not None and value < needed:
            raise LimitValue(
                f"backend {backend!r} cannot start with {name}={_written(name, value)}:"
                f" it needs {_written(name, needed)}",
                fields=(name,),
                fits={name: _literal(name, needed).strip('"')},
            )


def _written(name: str, number: float) -> str:
    if name in _SIZES:
        size = int(number)
        return f"{size} bytes" if size < 1 << 20 else units.human_size(size)
    return f"{number:g} s" if name == "timeout" else f"{number:g}"


def _literal(name: str, number: float) -> str:
    """A value as it is written in a call."""
    if name in _SIZES:
        size = int(number)
        return f'"{size >> 20}M"' if size >= 1 << 20 else f'"{size >> 10}K"'
    return f"{number:g}"


def _meant(name: str, given: object) -> str:
    """A hint for a number without its unit."""
    text = str(given).strip()
    if name in _SIZES and text.isdecimal() and not isinstance(given, bool) and int(text) < 1 << 20:
        return f": did you mean {text}M?"
    return ""

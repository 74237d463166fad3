"""Sizes and times as people write them: `"128M"`, `"1.5s"`, or plain numbers."""

from __future__ import annotations

import math
import re

from .errors import PolicyError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", re.IGNORECASE)
_COUNT = re.compile(r"[0-9]{1,20}")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def size(field: str, given: object) -> int:
    """`given` as bytes: 1048576, "1M", "1MiB" and "1 mb" are the same."""
    if isinstance(given, str):
        match = _SIZE.fullmatch(given.strip())
        if not match:
            raise PolicyError(field, f"{given!r} is not a size", fix='write bytes or "128M", "1G"')
        given = float(match[1]) * 1024 ** _POWERS[match[2].lower()]
    number = int(_positive(field, given))
    if number < 1:
        raise PolicyError(field, f"{given!r} bytes is less than one")
    return number


def seconds(field: str, given: object) -> float:
    """`given` as seconds: 1.5, "1.5s", "1500ms", "2m"."""
    if isinstance(given, str):
        match = _TIME.fullmatch(given.strip())
        if not match:
            raise PolicyError(field, f"{given!r} is not a time", fix='write 1.5, "1.5s" or "2m"')
        given = float(match[1]) * _SECONDS[(match[2] or "s").lower()]
    return _positive(field, given)


def count(field: str, given: object) -> int:
    """`given` as a whole number of things, at least one: 5, "5", "2e6"."""
    if isinstance(given, str):
        text = given.strip()
        try:
            given = int(text) if _COUNT.fullmatch(text) else float(text)
        except ValueError:
            raise PolicyError(field, f"{given!r} is not a number") from None
    number = _positive(field, given)
    if number != int(number):
        raise PolicyError(field, f"{given!r} is not a whole number")
    return int(number)


def cores(field: str, given: object) -> float:
    """`given` as a number of processors, fractions allowed."""
    if isinstance(given, str):
        try:
            given = float(given)
        except ValueError:
            raise PolicyError(field, f"{given!r} is not a number of cores") from None
    return _positive(field, given)


def _positive(field: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise PolicyError(field, f"expected a number, got {type(given).__name__}")
    # Compared before anything else touches it: an int past the floats breaks isfinite and str.
    if isinstance(given, int) and abs(given) > 2**62:
        raise PolicyError(field, "is larger than any machine")
    if not math.isfinite(given) or given <= 0:
        raise PolicyError(field, f"must be a positive, finite number, not {given}")
    if given > 2**62:
        raise PolicyError(field, "is larger than any machine")
    return given


def exact_size(number: int) -> str:
    """2147483648 as "2G": the shortest text that `size` reads as `number`."""
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if number % (1 << power) == 0:
            return f"{number >> power}{unit}"
    return str(number)


def human_size(number: int) -> str:
    """1536 as "1.5 KiB"."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

"""Belljar's logger, `logging.getLogger("belljar")`: for an operator to see.

`logging` is never imported here, because importing it takes longer than starting a run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

_ready = False


def _logger() -> logging.Logger:
    """An application without handlers of its own shows nothing, as with any library."""
    import logging

    global _ready
    logger = logging.getLogger("belljar")
    if not _ready:
        _ready = True
        logger.addHandler(logging.NullHandler())
    return logger


def informs() -> bool:
    """Whether an application wants a line about each run: its logging is set up for INFO."""
    logging = sys.modules.get("logging")
    return logging is not None and _logger().isEnabledFor(logging.INFO)


def _heard() -> bool:
    """Without `logging` in the process nothing can have a handler."""
    return "logging" in sys.modules


def printable(text: object, most: int = 1000) -> str:
    """`text` on one line: an escape instead of what could begin another, or move a terminal."""
    return ascii(str(text)[:most])[1:-1]


def info(text: str) -> None:
    if _heard():
        _logger().info(text)


def warning(text: str) -> None:
    if _heard():
        _logger().warning(text)


def error(text: str) -> None:
    if _heard():
        _logger().error(text)

"""Belljar's logger, `logging.getLogger("belljar")`: for an operator to see.

`logging` is imported at the first message, because importing it takes longer than starting a run.
"""

from __future__ import annotations

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


def warning(text: str) -> None:
    _logger().warning(text)


def error(text: str) -> None:
    _logger().error(text)

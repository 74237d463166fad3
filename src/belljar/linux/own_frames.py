"""Our functions below a program on its stack, without the path where Belljar is installed.

A fork runs the program below the frames of its fork server, and what prints a whole stack (a crash
report by faulthandler, `traceback.print_stack`) would tell the path.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

NAME = "<belljar>"


def without_path(*functions: Callable[..., Any]) -> None:
    """Give the code of `functions`, and of those inside them, a name instead of a path."""
    for function in functions:
        function.__code__ = _renamed(function.__code__)


def _renamed(code: CodeType) -> CodeType:
    inner = tuple(_renamed(each) if type(each) is type(code) else each for each in code.co_consts)
    return code.replace(co_filename=NAME, co_consts=inner)

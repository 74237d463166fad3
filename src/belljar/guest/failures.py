"""What is said about an exception that nobody caught: text, capped, whatever the exception does.

Everything here runs after the program, in its interpreter: its exceptions may lie, hang or raise
when asked for their text, memory or descriptors may be used up (so nothing more of ours is imported
from here), and a file of the program's may be named like a module of the standard library.
"""

from __future__ import annotations

import errno
import sys

from .protocol import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

MAX_MESSAGE = 8 << 10
MAX_TRACEBACK = 64 << 10
# As many as CPython itself prints.
_MAX_FRAMES = 1000
_MAX_SHORT_FRAMES = 50


def describe(
    error: BaseException, trace: TracebackType | None, filename: str, lines: list[str]
) -> dict[str, Any]:
    """The payload of an ERROR frame.

    `errno` and `memory` are hints about limits: the host believes them only as far as a program may
    say of itself that it ran out of something.
    """
    kind = type(error)
    wire: dict[str, Any] = {"type": type_name(kind), "message": message(error)}
    wire["traceback"] = format_traceback(error, trace, filename, lines)
    if issubclass(kind, MemoryError):
        wire["memory"] = True
    elif issubclass(kind, OSError):
        number = OSError.__dict__["errno"].__get__(error)
        if type(number) is int and 0 < number < 4096:
            wire["errno"] = number
        if note := _hint(number, wire["message"], trace):
            wire["traceback"] += f"belljar: {note}\n"
    elif kind is RuntimeError and wire["message"] == "can't start new thread":
        wire["errno"] = errno.EAGAIN  # which CPython had in its hand and did not pass on
    return wire


# Where other sandboxes and notebooks have files written.
_ELSEWHERE = (
    r"(?<![\w./])/(?:mnt/data|home/\w+|workspace|workdir|app|data|outputs?|content|kaggle/working)"
    r"(?=/|'|\"|$)"
)
_REFUSED = (
    None, errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
)  # fmt: skip
_SHARED = ("multiprocessing/synchronize.py", "multiprocessing/shared_memory.py")


def _hint(number: object, message: str, trace: TracebackType | None) -> str:
    """What an error that programs often meet means in a sandbox; mostly nothing."""
    if number in _REFUSED and _stdlib("re").search(_ELSEWHERE, message):
        return f"files are kept in {work or 'the working directory'} only: give no other path"
    where = ""
    while trace is not None:
        where = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    if number == errno.EACCES and where.endswith(_SHARED):
        return "there is no memory here for processes to share: use threads, or the jail backend"
    return ""


def type_name(kind: type) -> str:
    """The name as tracebacks print it."""
    try:
        module, name = kind.__module__, kind.__qualname__
        if type(module) is str and type(name) is str:
            full = name if module in ("builtins", "__main__") else f"{module}.{name}"
            return cut(full, 200)
    except BaseException:
        return "Exception"
    return "Exception"


def message(error: BaseException) -> str:
    try:
        return cut(str.__str__(str(error)), MAX_MESSAGE)
    except BaseException:
        return "<exception str() failed>"


def cut(text: str, size: int) -> str:
    """`text` in at most `size` characters: its head, a mark, its tail. Exactly a `str`."""
    if len(text) <= size:
        return clean(text)
    mark = f"\n... {len(text) - size} characters cut ...\n"
    keep = max(0, size - len(mark))
    return clean(text[: keep - keep // 2] + mark + text[len(text) - keep // 2 :])


def format_traceback(
    error: BaseException, trace: TracebackType | None, filename: str, lines: list[str]
) -> str:
    try:
        return _long(error, trace, filename, lines)
    except BaseException:
        # No memory, no descriptor to import with, or an exception that objects to being printed.
        return _short(error, trace, filename, lines)


def _long(
    error: BaseException, trace: TracebackType | None, filename: str, lines: list[str]
) -> str:
    linecache, traceback = _stdlib("linecache"), _stdlib("traceback")
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    if issubclass(type(error), SyntaxError):
        _add_source(error, filename, lines)
    report = traceback.TracebackException(type(error), error, trace, limit=-_MAX_FRAMES)
    _cut_messages(report)
    return cut("".join(report.format()), MAX_TRACEBACK)


# The directories that modules of the program's own are imported from, and where it started.
of_program: set[str] = set()
work = ""


def _stdlib(name: str) -> Any:
    """Import a module of the standard library, not a file of the program's of the same name."""
    path = sys.path
    sys.path = [entry for entry in path if entry and entry not in of_program]
    try:
        return __import__(name)
    finally:
        sys.path = path


def _add_source(error: Any, filename: str, lines: list[str]) -> None:
    """Give the error its line: the compiler looks for it in a file that need not exist."""
    number = error.lineno
    if error.text is None and error.filename == filename and 0 < (number or 0) <= len(lines):
        error.text = lines[number - 1]


def _cut_messages(report: Any) -> None:
    """Cap the message of every exception in the chain before they are copied into one text."""
    waiting, seen = [report], set()
    while waiting:
        item = waiting.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if type(getattr(item, "_str", None)) is str:
            item._str = cut(item._str, MAX_MESSAGE)
        waiting += [item.__cause__, item.__context__, *(getattr(item, "exceptions", None) or ())]


def _short(
    error: BaseException, trace: TracebackType | None, filename: str, lines: list[str]
) -> str:
    """A traceback that needs no import and next to no memory."""
    entries = []
    while trace is not None:
        code, number = trace.tb_frame.f_code, trace.tb_lineno
        entry = f'  File "{code.co_filename}", line {number}, in {code.co_name}\n'
        if code.co_filename == filename and 0 < number <= len(lines):
            entry += f"    {lines[number - 1].strip()}\n"
        entries.append(entry)
        del entries[:-_MAX_SHORT_FRAMES]
        trace = trace.tb_next
    head = ["Traceback (most recent call last):\n"] if entries else []
    text = message(error)
    last = type_name(type(error)) + (f": {text}" if text else "") + "\n"
    return cut("".join([*head, *entries, last]), MAX_TRACEBACK)

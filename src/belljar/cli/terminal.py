"""What a guest wrote, made harmless for a terminal; and our own few lines on stderr.

A terminal obeys what is printed on it: escape sequences move the cursor, rewrite the window's
title, answer back on standard input; a carriage return hides what stood before; bidirectional
controls reorder text. A pipe obeys nothing, so only terminals get the visible form.
"""

from __future__ import annotations

import codecs
import os
import sys
from typing import TextIO

from ..errors import BelljarError

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINE_BREAKS = (0x2028, 0x2029)

# Everything that does more than stand in its cell. Newline and tab stay as they are.
_VISIBLE: dict[int, str] = {
    **{code: f"^{chr(code ^ 0x40)}" for code in (*range(0x20), 0x7F) if code not in (0x09, 0x0A)},
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in (*_BIDI, *_LINE_BREAKS)},
}


def visible(text: str) -> str:
    """`text` with every control character spelled out."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


class Neutraliser:
    """Makes a byte stream safe to show, chunk by chunk, wherever the chunks are cut."""

    def __init__(self, encoding: str = "utf-8") -> None:
        # An 8-bit terminal would take the bytes of a UTF-8 sequence for C1 controls.
        self._encoding = "utf-8" if codecs.lookup(encoding).name == "utf-8" else "ascii"
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""  # a carriage return whose line feed may come with the next chunk

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        text = self._held + self._decoder.decode(data, final)
        self._held = ""
        if text.endswith("\r") and not final:
            text, self._held = text[:-1], "\r"
        return visible(text).encode(self._encoding, "backslashreplace")


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """`text` in `colour` where the stream (default stderr) is a terminal that may be coloured."""
    stream = sys.stderr if stream is None else stream
    if not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{_COLOURS[colour]}m{text}\033[0m"


def speaks_unicode(stream: TextIO | None) -> bool:
    encoding = getattr(stream, "encoding", None) or "ascii"
    return codecs.lookup(encoding).name == "utf-8"


def show(text: str) -> None:
    """A line, or several, of ours on stdout."""
    try:
        write_all(1, _encoded(text, sys.stdout))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BelljarError(f"cannot write to stdout: {error.strerror}") from None


def say(text: str) -> None:
    """One line of ours on stderr. A closed or broken stderr is nobody we could tell about it."""
    try:
        write_all(2, _encoded(text, sys.stderr))
    except OSError:
        return


def _encoded(text: str, stream: TextIO | None) -> bytes:
    encoding = "utf-8" if speaks_unicode(stream) else "ascii"
    return (text + "\n").encode(encoding, "backslashreplace")


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, also to a pipe that somebody else made non-blocking, and whatever
    PYTHONUNBUFFERED says: then sys.stdout loses what a short write leaves over."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            import select

            select.select([], [descriptor], [])


def complain(message: str, fix: str | None = None, *, colour: str = "red") -> None:
    """The form of every message: `belljar: what happened`, then `fix: what to do`."""
    say(f"{paint('belljar:', colour)} {visible(message)}")
    if fix:
        say(f"  {paint('fix:', 'bold')} {visible(fix)}")

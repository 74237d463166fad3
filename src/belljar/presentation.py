"""A result and a display as people, notebooks and models see them."""

from __future__ import annotations

import itertools
import json
import os
import reprlib
from typing import Any

from .guest.values import from_base64
from .records import replace
from .types import Display, Result, Status

_SUFFIXES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".svg": "image/svg+xml",
    ".html": "text/html",
    ".md": "text/markdown",
    ".tex": "text/latex",
    ".json": "application/json",
    ".txt": "text/plain",
}
# Pictures cannot run anything in a notebook's page. HTML and SVG can, and the guest wrote them.
_PICTURES = ("image/png", "image/jpeg")
_LONGEST_DATA = 4 << 20
_PACKED = {
    "gzip": "application/gzip",
    "bzip2": "application/x-bzip2",
    "xz": "application/x-xz",
}
_LEAST_SUMMARY = 200
# CPython refuses to write an integer of more than 4300 digits.
_MOST_BITS = 4000


class _Short(reprlib.Repr):
    """The first items of large containers, and integers that Python refuses to write by their size.

    Writing all of a value takes time and memory for what is cut off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 6
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 50
        self.maxstring = self.maxother = self.maxlong = 400

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the value's own order; the library's sorts."""
        if level <= 0 and x:
            return "{...}"
        items = itertools.islice(x.items(), self.maxdict)
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in items]
        return "{" + ", ".join([*shown, *(["..."] if len(x) > self.maxdict else [])]) + "}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= self.maxother else f"{x[: self.maxother]!r}..."

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return f"<an integer of {bits} bits>" if bits > _MOST_BITS else repr(x)


def as_json(result: Result) -> dict[str, Any]:
    """`result.to_dict()`, without the value if that has no form in JSON: a warning says so then."""
    try:
        return result.to_dict()
    except (ValueError, TypeError, RecursionError) as problem:
        lost = f"the value was dropped: it has no form in JSON ({problem})"
        return replace(result, value=None, warnings=(*result.warnings, lost)).to_dict()


def value_text(value: Any) -> str:
    """The beginning of a value as people read it. Never raises, whatever the value is."""
    try:
        return _Short().repr(value)
    except Exception as problem:  # noqa: BLE001 - pandas and numpy format what a guest made up
        return f"<{type(value).__name__}, which cannot be shown: {type(problem).__name__}>"


def one_line(text: str, most: int) -> str:
    """`text` in one line of printable characters, at most `most` of them."""
    line = " ".join(text[: 4 * most].split())
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return line if len(line) <= most else line[: most - 1] + "…"


def of_result(result: Result) -> str:
    """`<Result success value=42 stdout='hi' jail 1.4 ms>`"""
    parts = [result.status.value]
    if result.limit_hit is not None:
        parts.append(f"limit={result.limit_hit}")
    elif result.signal is not None:
        parts.append(f"signal={result.signal}")
    elif result.exit_code:
        parts.append(f"exit_code={result.exit_code}")
    if result.error is not None:
        parts.append(one_line(f"{result.error.type}: {result.error.message}", 80))
    if result.value is not None:
        parts.append(f"value={one_line(value_text(result.value), 60)}")
    for name in ("stdout", "stderr"):
        if text := getattr(result, name):
            parts.append(f"{name}={one_line(repr(text[:200]), 60)}")
    for name in ("displays", "files", "warnings"):
        if found := getattr(result, name):
            parts.append(f"{name}={len(found)}")
    return f"<Result {' '.join(parts)} {result.backend or 'no backend'} {_time(result)}>"


def summary(result: Result, max_chars: int) -> str:
    """See `Result.summary`."""
    most = max(_LEAST_SUMMARY, max_chars)
    ended = result.status.value
    if result.exit_code:
        ended += f", exit code {result.exit_code}"
    head = [f"status: {ended}"]
    if result.explanation:
        head.append(f"explanation: {_cut(result.explanation, most // 4)}")
    if result.value is not None:
        head.append(f"value: {_cut(value_text(result.value), most // 4)}")
    tail = []
    if result.displays:
        kinds = ", ".join(_kind(shown) for shown in result.displays[:20])
        tail.append(f"displays: {_cut(kinds, most // 8)}")
    if result.files:
        listed = result.files.items()
        names = ", ".join(f"{one_line(path, 500)} ({file.size} bytes)" for path, file in listed)
        tail.append(f"files: {_cut(names, most // 8)}")
    if result.truncated:
        tail.append("Some output was cut; the limits say how much is kept.")
    tail += [f"warning: {_cut(text, 200)}" for text in result.warnings[:3]]
    sections = [("stdout", result.stdout)]
    error = result.error.traceback if result.error is not None else ""
    # The worker prints the traceback on stderr as well: once is enough.
    sections.append(("stderr", result.stderr.replace(error, "") if error else result.stderr))
    sections.append(("error", error))
    sections = [(name, text.strip("\n")) for name, text in sections if text.strip()]
    room = most - sum(len(line) + 1 for line in (*head, *tail))
    share = max(0, room // max(1, len(sections)) - 20)
    body = [f"{name}:\n{_cut(text, share)}" for name, text in sections]
    return "\n".join([*head, *body, *tail])[:most]


def mime_type(path: str) -> str:
    """The MIME type that the suffix of a file's name stands for.

    The name is a guest's: only its plain characters are looked at, because `mimetypes` reads names
    as URLs, and raises for some.
    """
    import mimetypes  # late: it reads the system's tables

    name = path.rsplit("/", 1)[-1]
    plain = "".join(char for char in name if char.isascii() and (char.isalnum() or char in "._+-"))
    kind, packed = mimetypes.guess_type(f"x{plain}")
    if packed is not None:  # of the packed file, not of what is inside
        return _PACKED.get(packed, "application/octet-stream")
    return kind or "application/octet-stream"


def bundle(result: Result) -> dict[str, Any]:
    """A notebook's view of a result: text, and its pictures. Nothing of the guest's can run."""
    import html  # late: its table of names takes milliseconds

    parts = [f"<code>{html.escape(of_result(result))}</code>"]
    if result.explanation:
        parts.append(f"<p>{html.escape(result.explanation)}</p>")
    for name in ("stdout", "stderr"):
        if text := getattr(result, name):
            parts.append(f"<pre>{html.escape(_cut(text, 10_000))}</pre>")
    for shown in result.displays[:20]:
        mime = next((kind for kind in _PICTURES if kind in shown.data), None)
        if mime is not None:
            parts.append(f'<img src="data:{mime};base64,{html.escape(shown.data[mime])}">')
        else:
            parts.append(f"<pre>{html.escape(_cut(shown.text, 10_000))}</pre>")
    return {"text/plain": of_result(result), "text/html": "\n".join(parts)}


def of_display(shown: Display) -> dict[str, Any]:
    """A notebook's view of a display: its picture, or its plain text."""
    pictures = {kind: shown.data[kind] for kind in _PICTURES if kind in shown.data}
    return {"text/plain": shown.text or repr(shown), **pictures}


def data(shown: Display, mime: str) -> dict[str, Any] | None:
    """What the JSON of a display says; None if it has none, or the guest wrote another thing."""
    text = shown.data.get(mime, "")
    if not text or len(text) > _LONGEST_DATA:
        return None
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return found if type(found) is dict else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def save(shown: Display, path: str | os.PathLike[str]) -> None:
    """See `Display.save`."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    mime = _SUFFIXES.get(suffix)
    if mime is None or mime not in shown.data:
        have = [ending for ending, kind in _SUFFIXES.items() if kind in shown.data]
        raise ValueError(
            f"this display has no form for {suffix or 'a path without suffix'!r}; "
            f"it can be saved as {', '.join(have) or 'nothing'}"
        )
    text = shown.data[mime]
    data = from_base64(text) if mime in _PICTURES else text.encode("utf-8", "replace")
    with open(path, "wb") as file:
        file.write(data)


def _kind(shown: Display) -> str:
    rich = [mime for mime in shown.data if mime != "text/plain"]
    return rich[0] if rich else "text/plain"


def _cut(text: str, most: int) -> str:
    """Head and tail of a long text, and how much is missing between."""
    if len(text) <= most:
        return text
    mark = f"\n[... {len(text) - most} characters cut ...]\n"
    keep = max(0, most - len(mark))
    return text[: keep - keep // 2] + mark + (text[-(keep // 2) :] if keep > 1 else "")


def _time(result: Result) -> str:
    wall = result.usage.wall
    if result.status is Status.REFUSED:
        return "not run"
    return f"{wall * 1000:.1f} ms" if wall < 1 else f"{wall:.1f} s"

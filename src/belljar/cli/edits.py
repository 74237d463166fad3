"""Changes to configuration files that are the user's: one value in, everything else as it was.

TOML is changed as text, because nothing in the standard library writes it with its comments. The
new text is read back: unless it differs from the old one in exactly what was meant to change, the
file is left alone and the user is told what to write. A file that is replaced keeps its mode, a
link stays a link, and what was there before is kept beside it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
import tomllib
from collections.abc import Mapping
from typing import Any

from .arguments import UsageError


def read_text(path: str) -> str:
    """The file's text; empty if there is none."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def replace_file(path: str, text: str) -> str | None:
    """Write `text` in one step; returns where the old content is kept, if there was any."""
    path = os.path.realpath(path)
    new = f"{path}.{secrets.token_hex(4)}.new"
    kept = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.exists(path):
            kept = f"{path}.before-belljar-{time.strftime('%Y%m%d-%H%M%S')}"
            shutil.copy2(path, kept)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            if kept is not None:
                shutil.copymode(path, new)
            os.replace(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return kept


def json_with(text: str, keys: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """JSON `text` with `values` set in the object below `keys`, which is made where it is missing.

    Raises ValueError if the text is not strict JSON or something else is in the way.
    """
    whole = json.loads(text) if text.strip() else {}
    below = whole
    for key in keys:
        if not isinstance(below, dict):
            raise ValueError(f"what holds {key!r} is not an object")
        below = below.setdefault(key, {})
    if not isinstance(below, dict):
        raise ValueError(f"{keys[-1]!r} is not an object")
    below |= values
    indent = re.search(r"\n([ \t]+)\"", text)
    space = indent[1] if indent else "  "
    return json.dumps(whole, indent=space, ensure_ascii=False) + "\n"


def toml_with(text: str, table: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """TOML `text` with `values` set in `table`, which is added at the end where it is missing.

    Raises ValueError if the text is not TOML or is written in a way that this cannot change.
    """
    before = tomllib.loads(text)
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split(end)
    start = _header(lines, table)
    written = {key: f"{key} = {_literal(value)}" for key, value in values.items()}
    if start is None:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += [*([""] if lines else []), f"[{'.'.join(table)}]", *written.values(), ""]
    else:
        stop = _section_end(lines, start)
        for key, line in written.items():
            at = _key_line(lines, start, stop, key)
            if at is None:
                lines.insert(start + 1, line)
                stop += 1
            else:
                lines[at] = line
    after = end.join(lines)
    wanted = _merged(before, table, values)
    try:
        right = tomllib.loads(after) == wanted
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"[{'.'.join(table)}] is written in a form that only an editor can change")
    return after


def toml_entry(table: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """What a user would add by hand."""
    return toml_with("", table, values).rstrip("\n")


def _header(lines: list[str], table: tuple[str, ...]) -> int | None:
    names = r"\s*\.\s*".join(rf"(?:{re.escape(name)}|\"{re.escape(name)}\")" for name in table)
    header = re.compile(rf"\s*\[\s*{names}\s*\]\s*(?:#.*)?")
    return next((at for at, line in enumerate(lines) if header.fullmatch(line)), None)


def _section_end(lines: list[str], start: int) -> int:
    following = range(start + 1, len(lines))
    return next((at for at in following if re.match(r"\s*\[", lines[at])), len(lines))


def _key_line(lines: list[str], start: int, stop: int, key: str) -> int | None:
    pattern = re.compile(rf"\s*(?:{re.escape(key)}|\"{re.escape(key)}\")\s*=")
    return next((at for at in range(start + 1, stop) if pattern.match(lines[at])), None)


def _merged(
    before: Mapping[str, Any], table: tuple[str, ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    whole = dict(before)
    if not table:
        return whole | dict(values)
    inner = whole.get(table[0], {})
    if not isinstance(inner, dict):
        raise ValueError(f"{table[0]!r} is not a table")
    whole[table[0]] = _merged(inner, table[1:], values)
    return whole


def _literal(value: Any) -> str:
    """JSON's texts, lists and booleans are TOML's, but for what JSON writes as surrogates."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

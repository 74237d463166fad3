"""A result as MCP shows it: structured content with a schema, text, pictures and files."""

from __future__ import annotations

import json
from typing import Any, Literal
from urllib.parse import quote

from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel, Field

from ...guest.values import from_base64, to_base64
from ...presentation import mime_type, value_text
from ...records import plain
from ...types import Display, File, Result, clean_text

# All pictures of an answer together, in base64, and all contents of files: more would not fit into
# what clients take, and is named only.
MAX_PICTURES = 4 << 20
MAX_FILES = 1 << 20
MAX_FILE = 256 << 10
_MAX_SUMMARY = 6000  # characters
_MAX_VALUE = 16 << 10
_MAX_SHOWN = 8 << 10
_MAX_LISTED = 100
_PICTURES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}


class ProgramError(BaseModel):
    """An exception that the program raised and did not catch."""

    type: str
    message: str
    traceback: str


class FileLeft(BaseModel):
    """A file that the program left in its work directory."""

    path: str
    size: int = Field(description="bytes")
    included: bool = Field(description="whether its content is among the answer's resources")


class FileChange(BaseModel):
    """What the program did to one file of its work directory."""

    path: str
    kind: Literal["created", "changed", "deleted"]
    size: int | None
    sha256: str | None = Field(description="of the whole content; null where it was not read")
    mime_type: str = Field(description="what the name's suffix says")


class Outcome(BaseModel):
    """How a program ended, and what it wrote."""

    status: Literal[
        "success", "error", "timeout", "oom", "fuel_exhausted", "limit", "refused", "killed"
    ]
    explanation: str = Field(description="what happened, in a sentence; empty for a success")
    exit_code: int | None
    signal: int | None
    limit_hit: str | None = Field(description="the limit that ended the program")
    stdout: str
    stderr: str
    truncated: bool = Field(description="whether the middle of an output was cut out")
    value: str | int | float | bool | list[Any] | dict[str, Any] | None = Field(
        description="the last expression: JSON, else the beginning of its text"
    )
    error: ProgramError | None
    displays: list[list[str]] = Field(description="the MIME types of each thing shown")
    files: list[FileLeft]
    changes: list[FileChange]
    execution_time: float = Field(description="seconds")
    peak_memory: int | None = Field(description="bytes")
    backend: str
    isolation: str
    warnings: list[str]
    id: str


def answer(result: Result) -> CallToolResult:
    """A summary for the model, the pictures and files that fit, and the whole as an Outcome."""
    files, included = _files(result)
    content = [*_summary(result), *_displays(result), *files]
    return CallToolResult(content=content, structured_content=_outcome(result, included))


def compact(result: Result) -> CallToolResult:
    """A summary for the model, and the pictures that fit."""
    return CallToolResult(content=[*_summary(result), *_displays(result)])


def failure(message: str) -> CallToolResult:
    """What the client gets when a call was not carried out."""
    return CallToolResult(content=[TextContent(text=clean_text(message))], is_error=True)


def _summary(result: Result) -> list[ContentBlock]:
    return [TextContent(text=clean_text(result.summary(_MAX_SUMMARY)))]


def _outcome(result: Result, included: set[str]) -> dict[str, Any]:
    error = result.error and {key: clean_text(text) for key, text in plain(result.error).items()}
    listed = list(result.files.values())[:_MAX_LISTED]
    warnings = list(result.warnings)
    if len(result.files) > len(listed):
        warnings.append(f"only the first {len(listed)} of {len(result.files)} files are listed")
    return {
        "status": result.status.value,
        "explanation": clean_text(result.explanation),
        "exit_code": result.exit_code,
        "signal": result.signal,
        "limit_hit": result.limit_hit,
        "stdout": clean_text(result.stdout),
        "stderr": clean_text(result.stderr),
        "truncated": result.truncated,
        "value": _value(result.value),
        "error": error,
        "displays": [[clean_text(mime) for mime in shown.data] for shown in result.displays],
        "files": [
            {"path": clean_text(file.path), "size": file.size, "included": file.path in included}
            for file in listed
        ],
        "changes": [
            {
                **plain(change),
                "path": clean_text(change.path),
                "mime_type": change.mime_type,
            }
            for change in result.changes[:_MAX_LISTED]
        ],
        "execution_time": result.usage.wall,
        "peak_memory": result.usage.peak_memory,
        "backend": result.backend,
        "isolation": result.isolation,
        "warnings": [clean_text(text) for text in warnings],
        "id": result.id,
    }


def _value(value: Any) -> Any:
    """JSON as it is if it is short, anything else as text: a DataFrame, a set, a long list."""
    pieces, room = [], _MAX_VALUE
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                return clean_text(value_text(value))
        same = json.loads(clean_text("".join(pieces)))
        return same if same == value else clean_text(value_text(value))
    except (TypeError, ValueError, RecursionError):
        return clean_text(value_text(value))


def _displays(result: Result) -> list[ContentBlock]:
    blocks: list[ContentBlock] = []
    room, texts = MAX_PICTURES, _MAX_SHOWN
    for shown in result.displays:
        mime = next((kind for kind in _PICTURES if _is_picture(shown, kind)), None)
        if mime is not None and len(shown.data[mime]) <= room:
            room -= len(shown.data[mime])
            blocks.append(ImageContent(data=shown.data[mime], mime_type=mime))
            continue
        text = shown.text if mime is None else f"({mime}: too large to be shown)"
        if text := text[:texts]:
            texts -= len(text)
            blocks.append(TextContent(text=clean_text(text)))
    return blocks


def _is_picture(shown: Display, mime: str) -> bool:
    """Whether the guest's bytes begin as such a picture does.

    Model interfaces refuse the whole conversation over a picture that they cannot read.
    """
    try:
        return from_base64(shown.data.get(mime)).startswith(_PICTURES[mime])
    except ValueError:
        return False


def _files(result: Result) -> tuple[list[ContentBlock], set[str]]:
    blocks: list[ContentBlock] = []
    included: set[str] = set()
    room = MAX_FILES
    for file in result.files.values():
        if file.data is None or file.truncated or file.size > min(MAX_FILE, room):
            continue
        room -= file.size
        included.add(file.path)
        blocks.append(EmbeddedResource(resource=_resource(result.id, file, file.data)))
    return blocks, included


def _resource(run: str, file: File, data: bytes) -> TextResourceContents | BlobResourceContents:
    path = clean_text(file.path)
    uri = f"belljar://run/{run}/{quote(path)}"
    mime = mime_type(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return BlobResourceContents(uri=uri, mime_type=mime, blob=to_base64(data))
    kind = "text/plain" if mime == "application/octet-stream" else mime
    return TextResourceContents(uri=uri, mime_type=kind, text=text)

"""The values that cross every edge of Belljar: what is asked, and the one result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from .errors import ProgramFailed
from .guest import values
from .guest.marked import Fields as Fields
from .guest.marked import Member as Member
from .guest.marked import Opaque as Opaque
from .records import field, plain, positional_record, record


class Status(StrEnum):
    """How a run ended. Only SUCCESS is success; REFUSED means that the program never started."""

    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    OOM = "oom"
    FUEL_EXHAUSTED = "fuel_exhausted"
    LIMIT = "limit"
    REFUSED = "refused"
    KILLED = "killed"


Limit = Literal["timeout", "memory", "pids", "disk", "output", "fds", "fuel"]
_MOST_OBJECTS = 1 << 20  # of a value that no guest has sent: of the host's own making
State = Literal["enforced", "best_effort", "absent"]


@positional_record
class Mount:
    """A host path shown to the guest at `dst`; a relative one is below the work directory.

    In a writable one what tools execute (`.git/hooks`, `.mcp.json`, ...) stays read-only, on every
    backend that has mounts of its own, unless `protect` is false.
    """

    src: str
    dst: str
    mode: Literal["ro", "rw"] = "ro"
    protect: bool = True


@record
class Usage:
    """What the run cost, as the kernel counted it. Seconds and bytes; None where nobody counted."""

    wall: float = 0.0
    cpu: float | None = None
    peak_memory: int | None = None
    fuel: int | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0


@record
class GuestError:
    """An exception that the guest's own program raised and nobody caught."""

    type: str
    message: str
    traceback: str = ""


@record
class Display:
    """One thing the program showed: MIME type to text (binary types as base64, as Jupyter does)."""

    data: Mapping[str, str]

    @property
    def text(self) -> str:
        """The plain form, which every display has; empty if the guest left it out."""
        return self.data.get("text/plain", "")

    @property
    def html(self) -> str | None:
        """What the guest wrote as HTML: show it only where scripts cannot do harm."""
        return self.data.get("text/html")

    @property
    def png(self) -> bytes | None:
        picture = self.data.get("image/png")
        return None if picture is None else values.from_base64(picture)

    @property
    def chart(self) -> dict[str, Any] | None:
        """What a matplotlib figure plots, as `guest/charts.py` describes it."""
        from . import presentation

        return presentation.data(self, "application/vnd.belljar.chart+json")

    @property
    def table(self) -> dict[str, Any] | None:
        """Columns, types and first rows of a table, as `guest/previews.py` describes them."""
        from . import presentation

        return presentation.data(self, "application/vnd.belljar.table+json")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the form that the path's suffix names; ValueError if there is no such form."""
        from . import presentation

        presentation.save(self, path)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from . import presentation

        return presentation.of_display(self)

    def __repr__(self) -> str:
        from . import presentation

        return f"<Display {', '.join(self.data)}: {presentation.one_line(self.text, 60)}>"


@record
class File:
    """A file that the run left changed. `data` is None unless an output glob asked for it.

    `saved` is where it is on the host, if the run had `outputs_to`; `data` is None then.
    """

    path: str
    size: int
    data: bytes | None = None
    truncated: bool = False
    saved: str | None = None

    @property
    def text(self) -> str:
        return (self.data or b"").decode("utf-8", "replace")


@record
class Change:
    """What a run did to one file of its work directory, and what the file is now.

    `size` is None for a deleted file. `sha256` is that of the whole content; None for a deleted
    file, one that was cut, and one that was too large to be read for its hash alone.
    """

    path: str
    kind: Literal["created", "changed", "deleted"]
    size: int | None = None
    sha256: str | None = None

    @property
    def mime_type(self) -> str:
        """What the name's suffix says; the content may be anything."""
        from . import presentation

        return presentation.mime_type(self.path)


@record
class Enforcement:
    """What a backend does about one policy field, and with which mechanism."""

    state: State
    by: str


@record
class KillProof:
    """How the run was ended and what was left of it: `survivors` is counted after the kill."""

    reason: str
    survivors: int
    seconds: float


@record
class Fallback:
    """Why a run was not on the backend that was asked for, and how to get that one."""

    wanted: str
    used: str
    why: str
    fix: str | None = None

    @property
    def sentence(self) -> str:
        """The warning that is in the result as well."""
        if self.wanted == "auto":
            return f"{self.why}; ran on {self.used!r}, which the operator's fallback.allow names"
        return f"{self.wanted!r} could not be used: {self.why}; ran on {self.used!r}"


def new_id() -> str:
    """A run's id: unguessable, short enough to type."""
    return os.urandom(8).hex()


@record
class Result:
    """The one answer to a run, whatever backend gave it."""

    status: Status
    exit_code: int | None = None
    signal: int | None = None
    limit_hit: Limit | None = None
    explanation: str = ""  # what happened, in a sentence or two; empty for a success
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    value: Any = None
    error: GuestError | None = None
    displays: tuple[Display, ...] = ()
    files: Mapping[str, File] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timings: Mapping[str, float] = field(default_factory=dict)
    enforcement: Mapping[str, Enforcement] = field(default_factory=dict)
    kill: KillProof | None = None
    settled: bool = True  # False: the kernel has not confirmed the end yet, the guest has said it
    backend: str = ""
    backend_reason: str = ""
    fallback: Fallback | None = None
    retried: str | None = None  # the backend where it had failed first, for want of a module
    isolation: str = "none"
    warnings: tuple[str, ...] = ()
    id: str = field(default_factory=new_id)

    @property
    def success(self) -> bool:
        return self.status is Status.SUCCESS

    def check(self) -> Result:
        """This result, if the program succeeded; otherwise raises ProgramFailed, which has it."""
        if not self.success:
            raise ProgramFailed(self)
        return self

    def summary(self, max_chars: int = 4000) -> str:
        """What an agent shows its model: how it ended, value, output, error, files, displays.

        At most `max_chars` characters; long output keeps its head and its tail.
        """
        from . import presentation

        return presentation.summary(self, max_chars)

    def __repr__(self) -> str:
        from . import presentation

        return presentation.of_result(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from . import presentation

        return presentation.bundle(self)

    def to_dict(self) -> dict[str, Any]:
        """Stable, strict JSON: no NaN, no lone surrogates, bytes as base64."""
        import base64

        return {
            "id": self.id,
            "status": self.status.value,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "limit_hit": self.limit_hit,
            "explanation": clean_text(self.explanation),
            "stdout": clean_text(self.stdout),
            "stderr": clean_text(self.stderr),
            "truncated": self.truncated,
            "value": values.encode(self.value, objects=_MOST_OBJECTS),
            "error": self.error
            and {
                "type": clean_text(self.error.type),
                "message": clean_text(self.error.message),
                "traceback": clean_text(self.error.traceback),
            },
            "displays": [
                {clean_text(mime): clean_text(text) for mime, text in shown.data.items()}
                for shown in self.displays
            ],
            "files": {
                clean_text(path): {
                    "size": file.size,
                    "data": None if file.data is None else base64.b64encode(file.data).decode(),
                    "truncated": file.truncated,
                    "saved": file.saved and clean_text(file.saved),
                }
                for path, file in self.files.items()
            },
            "changes": [
                {
                    "path": clean_text(change.path),
                    "kind": change.kind,
                    "size": change.size,
                    "sha256": change.sha256,
                    "mime_type": change.mime_type,
                }
                for change in self.changes
            ],
            "usage": plain(self.usage),
            "timings": dict(self.timings),
            "enforcement": {
                name: {"state": held.state, "by": held.by}
                for name, held in self.enforcement.items()
            },
            "kill": self.kill and plain(self.kill),
            "settled": self.settled,
            "backend": self.backend,
            "backend_reason": self.backend_reason,
            "fallback": self.fallback and plain(self.fallback),
            "retried": self.retried,
            "isolation": self.isolation,
            "warnings": list(self.warnings),
        }


def clean_text(text: str) -> str:
    """`text` without lone surrogates, which no strict JSON reader accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text


@record
class Place:
    """What one backend starts a language with, where that is not the language's own."""

    command: tuple[str, ...] | None = None
    image: str | None = None


@record
class Language:
    """How programs in one language are started, and the limits that they start from.

    `command` is an argv prefix; the program's file and arguments follow it. A language of the
    family `python` is run by our worker instead: its command is just an interpreter, and none at
    all means the one that runs Belljar. `version` is what its name asks for. `paths` are what the
    interpreter reads besides the system's own directories. `interpreters` are those that the
    operator's ceiling leaves to it; None is any.
    """

    name: str
    family: str
    file: str
    command: tuple[str, ...] = ()
    version: tuple[int, ...] = ()
    install: str | None = None
    extensions: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    seccomp: str = "default"
    seccomp_filter: bytes = b""  # of the operator's profile, which holds beside ours
    limits: Mapping[str, Any] = field(default_factory=dict)
    allow_network: bool | None = None
    places: Mapping[str, Place] = field(default_factory=dict)
    interpreters: tuple[str, ...] | None = None

    def command_on(self, backend: str) -> tuple[str, ...]:
        place = self.places.get(backend)
        return self.command if place is None or place.command is None else place.command

    def image_on(self, backend: str) -> str | None:
        place = self.places.get(backend)
        return self.image if place is None or place.image is None else place.image


@record
class Request:
    """One program to run, without the rules it runs under (those are the Policy).

    Exactly one of `code` (a program in `language`) and `command` (an argv) is given. `resolved` is
    what the language's name stands for under the engine's settings: `languages.of` reads it.
    """

    code: str | None = None
    command: tuple[str, ...] = ()
    language: str = "python"
    stdin: bytes = b""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    outputs_to: str = ""  # the host's directory that collected files are written to; "": memory
    outputs_each: int | None = None  # bytes of one collected file
    outputs_total: int | None = None  # bytes of all of them
    context: Mapping[str, Any] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    workdir: str = ""  # where the program starts, if not in the work directory
    python: str | None = None
    image: str | None = None
    settle: Literal["now", "later"] = "now"
    require_libraries: tuple[str, ...] = ()
    retry: bool = False
    fallback: bool = True
    prefer: Literal["", "speed", "isolation"] = ""  # what `auto` puts first; "": the configuration
    stream_cap: int = 0  # bytes of a stream that Output events carry, if more than a result keeps
    filename: str | None = None  # the program's own, instead of the language's
    resolved: Language | None = None
    id: str = field(default_factory=new_id)

"""The host's side of the guest protocol: reads whatever a guest wrote and keeps what makes sense.

A guest may write any bytes at all on its descriptor. `Report.feed` survives all of them in bounded
memory; at the first thing that an honest worker would not have sent it stops listening, says so in
`warnings`, and keeps what came before. Nothing in a report decides how a run ended: exit status,
times and limits come from the kernel, and `hint` only explains an ordinary failure.
"""

from __future__ import annotations

# Unused by name: `_json`, which reads the frames, raises what this module defines.
import json.decoder  # noqa: F401
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from .errors import RequestError
from .guest import protocol, values
from .guest.displays import MAX_DISPLAYS, is_mime
from .guest.failures import MAX_MESSAGE, MAX_TRACEBACK, cut
from .records import record
from .types import Display, GuestError, Request

# Everything that one run may report: a value, an error and all displays together.
MAX_REPORT = 64 << 20
MAX_CONTEXT = 256 << 20


@record
class Hint:
    """What the exception says the program ran out of: the guest's word, not a measurement."""

    errno: int | None = None
    memory: bool = False


class Report:
    """What one program said about itself, built up from the bytes of its channel.

    `feed` never raises for what the guest sent; what `on_display` raises passes through. Read the
    attributes when the run is over: `value` is decoded when it is first asked for. A value of more
    than `max_value` bytes is dropped, and `truncated` set.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_REPORT,
        max_frame: int = protocol.MAX_FRAME,
        max_value: int | None = None,
        on_display: Callable[[Display], None] | None = None,
    ) -> None:
        self.error: GuestError | None = None
        self.hint = Hint()
        self.ready = False
        self.ended = False
        self.said: int | None = None  # the exit code it claims; the kernel knows better, but later
        self.truncated = False
        self._max_value = max_value
        self._room = max_bytes
        self._decoder = protocol.Decoder(protocol.FROM_GUEST, max_frame)
        self._on_display = on_display
        self._displays: list[Display] = []
        self._warnings: list[str] = []
        self._deaf = False
        self._wire: bytes | None = None
        self._value: Any = None

    @property
    def displays(self) -> tuple[Display, ...]:
        return tuple(self._displays)

    @property
    def value(self) -> Any:
        """What the program returned; None too if it could not be read, as `warnings` then say."""
        if self._wire is not None:
            wire, self._wire = self._wire, None
            try:
                self._value = values.decode(protocol.loads(wire))
            except (ValueError, RecursionError, MemoryError) as problem:
                self._warnings.append(f"the value could not be read: {problem}")
        return self._value

    @property
    def warnings(self) -> tuple[str, ...]:
        _ = self.value
        return tuple(self._warnings)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the channel, in pieces of any size."""
        if self._deaf or self.ended:
            return
        self._room -= len(data)
        if self._room < 0:
            self._stop("the guest reported more than is allowed")
            return
        try:
            frames, problem = self._decoder.feed(data), ""
        except protocol.ProtocolError as malformed:
            frames, problem = list(malformed.frames), str(malformed)
        for frame in frames:
            try:
                shown = self._take(frame)
            except (ValueError, RecursionError) as malformed:
                self._stop(str(malformed))
                return
            if shown is not None and self._on_display is not None:
                self._on_display(shown)
            if self.ended:
                return
        if problem:
            self._stop(problem)

    def _stop(self, problem: str) -> None:
        self._deaf = True
        self._decoder = protocol.Decoder()  # and with it whatever was half received
        self._warnings.append(f"the guest broke the protocol ({problem}); the rest is ignored")

    def _take(self, frame: protocol.Frame) -> Display | None:
        match frame.kind:
            case protocol.READY:
                self.ready = True
            case protocol.VALUE:
                self._take_value(frame.payload)
            case protocol.ERROR:
                self._take_error(_fields(frame))
            case protocol.DISPLAY:
                return self._take_display(_fields(frame))
            case protocol.END:
                self.ended = True
                if 1 <= len(frame.payload) <= 3 and frame.payload.isdigit():
                    self.said = min(255, int(frame.payload))
            case _:
                raise protocol.ProtocolError(f"frame kind 0x{frame.kind:02x} has no place in a run")
        return None

    def _take_value(self, wire: bytes) -> None:
        """Keep the value if it is within the output cap: it is output like any other."""
        if self._max_value is not None and len(wire) > self._max_value:
            self.truncated = True
            self._warnings.append(
                f"the value was dropped: it has {len(wire)} bytes, the output limit is "
                f"{self._max_value}; raise `output`, or write it to a file"
            )
        else:
            self._wire = wire

    def _take_error(self, fields: Mapping[str, Any]) -> None:
        errno = fields.get("errno")
        self.error = GuestError(
            type=_text(fields, "type", 200),
            message=_text(fields, "message", MAX_MESSAGE),
            traceback=_text(fields, "traceback", MAX_TRACEBACK),
        )
        self.hint = Hint(
            errno=errno if type(errno) is int and 0 < errno < 4096 else None,
            memory=fields.get("memory") is True,
        )

    def _take_display(self, fields: Mapping[str, Any]) -> Display | None:
        for mime, text in fields.items():
            if type(text) is not str or not is_mime(mime):
                raise protocol.ProtocolError("a display is MIME types and text")
            if mime.startswith("image/") and not mime.startswith("image/svg"):
                values.from_base64(text)
        if len(self._displays) >= MAX_DISPLAYS:
            dropped = f"only the first {MAX_DISPLAYS} displays were kept"
            if dropped not in self._warnings:
                self._warnings.append(dropped)
            return None
        shown = Display(data=fields)
        self._displays.append(shown)
        return shown


def _fields(frame: protocol.Frame) -> dict[str, Any]:
    fields = protocol.loads(frame.payload)
    if type(fields) is not dict:
        raise protocol.ProtocolError("a payload is an object")
    return fields


def _text(fields: Mapping[str, Any], name: str, size: int) -> str:
    text = fields.get(name)
    if type(text) is not str:
        raise protocol.ProtocolError(f"{name} is text")
    return cut(text, size)


def run_frame(request: Request, filename: str = "main.py") -> bytes:
    """The RUN frame that hands `request` to a worker; RequestError names what cannot be sent."""
    payload = protocol.dumps(run_fields(request, filename))
    if len(payload) > protocol.MAX_HOST_FRAME:
        raise RequestError("context", "is larger than a frame can be")
    return protocol.encode(protocol.RUN, payload)


def run_fields(request: Request, filename: str) -> dict[str, Any]:
    """What a RUN frame says, in plain values; RequestError names what cannot be sent."""
    context = {}
    for name, value in request.context.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise RequestError("context", f"{name!r} is not a variable name")
        try:
            context[name] = values.encode(value, MAX_CONTEXT, max_nodes=1 << 24)
        except values.Unrepresentable as problem:
            raise RequestError(
                "context",
                f"variable {name!r} ({type(value).__name__}) cannot be sent: {problem}",
                fix="send plain data, numbers, arrays or tables; write anything else to a file",
            ) from None
    code, args = request.code or "", list(request.args)
    for field, texts in (("code", (code,)), ("args", args)):
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError:
            raise RequestError(field, "contains half of a surrogate pair") from None
    return {"code": code, "args": args, "filename": filename, "context": context}

"""The host's side of the guest protocol: reads whatever a guest wrote and keeps what makes sense.

A guest may write any bytes at all on its descriptor. `Report.feed` survives all of them in bounded
memory; at the first thing that an honest worker would not have sent it stops listening, says so in
`warnings`, and keeps what came before. Nothing in a report decides how a run ended: exit status,
times and limits come from the kernel, and `hint` only explains an ordinary failure.
"""

from __future__ import annotations

# Unused by name: `_json`, which reads the frames, raises what this module defines.
import io
import json.decoder  # noqa: F401
import keyword
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from .errors import RequestError
from .guest import drops, protocol, values
from .guest.displays import MAX_DISPLAYS, MAX_SHOWN, MAX_TYPES, cost, is_mime
from .guest.failures import MAX_MESSAGE, MAX_TRACEBACK, cut
from .policy import Limits
from .records import record
from .types import Display, GuestError, Request
from .units import human_size

MAX_CONTEXT = 1 << 30
# An error in full, with every character escaped; and what else a worker says in one frame.
_MAX_SMALL = 4 << 20
# A list takes a mark for each of these, a bundle of MIME types three.
_FEW = 4 * MAX_TYPES
# Making a copy of a value to send it takes the program about this many times its bytes.
_COPIES = 8
_MAX_PROBLEM = 200
_MOST_NAMES = 3


@record
class Budgets:
    """What a guest may make the host keep, in decoded bytes and 64 for each value in it.

    `copy` bounds the bytes that a program copies to send its value: past it the copies could use up
    the memory of a program that had ended well. Where they are not `held`, for a test of what they
    are good for, a value may multiply as it is decoded.
    """

    value: int = protocol.DEFAULT_VALUE
    displays: int = MAX_SHOWN
    copy: int = protocol.DEFAULT_VALUE
    held: bool = True


@lru_cache(maxsize=16)  # the same for most runs of a caller
def budgets(limits: Limits) -> Budgets:
    """The budgets of a run under `limits`."""
    copy = max(1, min(limits.value, limits.memory // _COPIES))
    return Budgets(value=limits.value, displays=limits.displays, copy=copy)


@lru_cache(maxsize=16)
def _room(allowed: Budgets) -> tuple[int, int]:
    """The largest frame, and all frames together, in bytes."""
    value = min(protocol.MAX_FRAME, protocol.room(allowed.value))
    displays = protocol.room(allowed.displays)
    largest = max(value, _MAX_SMALL, min(protocol.MAX_FRAME, displays))
    return largest, value + 2 * displays + 4 * _MAX_SMALL


NO_BUDGETS = Budgets(displays=protocol.MAX_FRAME * MAX_DISPLAYS, held=False)


@record
class Hint:
    """What the exception says the program ran out of: the guest's word, not a measurement."""

    errno: int | None = None
    memory: bool = False


class Report:
    """What one program said about itself, built up from the bytes of its channel.

    `feed` never raises for what the guest sent; what `on_display` raises passes through. Read the
    attributes when the run is over: `value` is decoded when it is first asked for. A value past its
    budget is dropped, and so is a display with which all would be; `truncated` and one warning for
    each kind say so.
    """

    def __init__(
        self,
        *,
        budgets: Budgets | None = None,
        max_bytes: int | None = None,
        max_frame: int | None = None,
        on_display: Callable[[Display], None] | None = None,
    ) -> None:
        self._budgets = allowed = budgets or Budgets()
        largest, together = _room(allowed)
        max_frame = largest if max_frame is None else max_frame
        max_bytes = together if max_bytes is None else max_bytes
        self.error: GuestError | None = None
        self.hint = Hint()
        self.ready = False
        self.ended = False
        self.said: int | None = None  # the exit code it claims; the kernel knows better, but later
        self._truncated = False
        self._room = max_bytes
        self._display_room = allowed.displays
        self._buffer_room = allowed.value
        self._dropped = ""  # why there is no value
        self._too_large = 0  # displays
        self._too_many = False
        self._decoder = protocol.Decoder(protocol.FROM_GUEST, max_frame)
        self._on_display = on_display
        self._displays: list[Display] = []
        self._warnings: list[str] = []
        self._deaf = False
        self._wire: bytes | None = None
        self._buffers: list[io.BytesIO] = []  # those that the next value refers to
        self._of_value: list[io.BytesIO] = []
        self._value: Any = None
        self.max_frame = max_frame

    @property
    def displays(self) -> tuple[Display, ...]:
        return tuple(self._displays)

    @property
    def truncated(self) -> bool:
        """Whether the value or a display was dropped for its size."""
        _ = self.value
        return self._truncated

    @property
    def value(self) -> Any:
        """What the program returned; None too if it could not be read, as `warnings` then say."""
        if self._wire is not None:
            self._value = self._decoded()
        return self._value

    def _decoded(self) -> Any:
        """The value of the last VALUE frame; None, with a warning, if there is no reading it.

        Every form of it is let go of before the next but one is made: the bytes, their text, the
        JSON, the value.
        """
        allowed = self._budgets.value
        found: dict[str, Any] = {"type": "it", "count": 0, "unit": ""}
        try:
            tree = protocol.parse(
                protocol.read_text(
                    self._taken(),
                    max_nodes=protocol.nodes(allowed),
                    max_memory=2 * allowed + (1 << 17),
                )
            )
            buffers, self._of_value = self._of_value, []
            found = drops.of_wire(tree, [len(each.getbuffer()) for each in buffers])
            held = self._budgets.held
            opaque: dict[str, int] = {}
            value = values.decode(tree, allowed if held else sys.maxsize, buffers, opaque)
            if any(each is not None for each in buffers):
                raise ValueError("a buffer is used by nothing")
            if opaque:
                self._dropped = _without_form(opaque)
            return value
        except (protocol.TooMuch, values.TooLarge):
            self._drop({**found, "field": "value", "why": ""})
        except Exception as problem:  # noqa: BLE001 - a library that breaks at import raises any
            self._dropped = f"the value could not be read: {cut(str(problem), _MAX_PROBLEM)}"
        return None

    def _taken(self) -> bytes:
        wire, self._wire = self._wire or b"", None
        return wire

    @property
    def warnings(self) -> tuple[str, ...]:
        _ = self.value
        found = [*([self._dropped] if self._dropped else []), *self._warnings]
        if self._too_many:
            found.append(f"only the first {MAX_DISPLAYS} displays were kept")
        if self._too_large:
            found.append(
                f"{self._too_large} of the displays were dropped: together they take more than the "
                f"{human_size(self._budgets.displays)} that `displays` allows; raise `displays`, "
                "or write them to files"
            )
        return tuple(found)

    @property
    def wanted(self) -> memoryview | None:
        """Where the next bytes of the channel can be read to; if None, they go through `feed`."""
        return None if self._deaf or self.ended else self._decoder.wanted

    def filled(self, size: int) -> None:
        """So many bytes have been read into `wanted`."""
        self._heard(size, lambda: self._decoder.filled(size))

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the channel, in pieces of any size."""
        self._heard(len(data), lambda: self._decoder.feed(data))

    def _heard(self, size: int, decode: Callable[[], list[protocol.Frame]]) -> None:
        if self._deaf or self.ended:
            return
        self._room -= size
        if self._room < 0:
            self._stop("the guest reported more than is allowed")
            return
        try:
            frames, problem = decode(), ""
        except protocol.ProtocolError as malformed:
            frames, problem = list(malformed.frames), str(malformed)
        frames.reverse()
        while frames:
            frame = frames.pop()  # the list must not keep the memory of a buffer
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
        self._buffers.clear()
        self._warnings.append(f"the guest broke the protocol ({problem}); the rest is ignored")

    def _take(self, frame: protocol.Frame) -> Display | None:
        match frame.kind:
            case protocol.READY:
                self.ready = True
            case protocol.VALUE:
                self._take_value(frame.payload)
            case protocol.BUFFER:
                self._take_buffer(frame.payload)
            case protocol.ERROR:
                self._take_error(_fields(frame, _MAX_SMALL))
            case protocol.DISPLAY:
                return self._take_display(frame)
            case protocol.DROPPED:
                self._take_dropped(_fields(frame, _MAX_SMALL))
            case protocol.END:
                self.ended = True
                if 1 <= len(frame.payload) <= 3 and frame.payload.isdigit():
                    self.said = min(255, int(frame.payload))
            case _:
                raise protocol.ProtocolError(f"frame kind 0x{frame.kind:02x} has no place in a run")
        return None

    def _take_value(self, wire: bytes) -> None:
        self._wire, self._dropped = wire, ""
        self._of_value, self._buffers = self._buffers, []

    def _take_buffer(self, data: bytes) -> None:
        self._buffer_room -= len(data) + protocol.NODE
        if self._buffer_room < 0:
            raise protocol.ProtocolError("buffers of more than a value may have")
        self._buffers.append(io.BytesIO(data))  # shares the memory

    def _take_dropped(self, fields: Mapping[str, Any]) -> None:
        """What the worker could not send; a worker that lies only spoils its own report."""
        if fields.get("what") == "display":
            if len(self._displays) >= MAX_DISPLAYS:
                self._too_many = True
            else:
                self._drop_display()
            return
        count = fields.get("count")
        if (
            fields.get("what") != "value"
            or type(count) is not int
            or not 0 <= count < 1 << 63
            or fields.get("unit") not in drops.UNITS
            or fields.get("field") not in drops.FIELDS
        ):
            raise protocol.ProtocolError("a notice has a type, a size and a reason")
        kind = _text(fields, "type", drops.MAX_TYPE)
        self._drop({**fields, "type": kind, "why": _text(fields, "why", drops.MAX_REASON)})

    def _drop(self, what: Mapping[str, Any]) -> None:
        """Warn of a value that is not in the result, with its type, its size and the way out."""
        size = f" of {what['count']} {what['unit']}" if what["unit"] and what["count"] else ""
        also = "write it to a file"
        match what["field"]:
            case "value":
                most = self._budgets.value
                why = f"takes more than the {human_size(most)} that `value` allows"
                fix = f"raise `value`, or {also}" if most < protocol.MAX_VALUE else also
            case "memory":
                why = "takes more memory to send than the program has"
                fix = f"raise `memory`, or {also}"
            case _:
                why, fix = f"cannot be sent: {what['why']}", f"return plain data, or {also}"
        self._truncated = self._truncated or bool(what["field"])
        self._dropped = f"the value was dropped: {what['type']}{size} {why}; {fix}"

    def _drop_display(self) -> None:
        self._truncated = True
        self._too_large += 1

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

    def _take_display(self, frame: protocol.Frame) -> Display | None:
        """The display of a frame; None for one that is past the budget, or past their number."""
        if len(self._displays) >= MAX_DISPLAYS:
            self._too_many = True
            return None
        room = self._display_room
        try:
            fields = _fields(frame, protocol.room(room), 2 * room)
        except protocol.TooMuch:
            self._drop_display()
            return None
        for mime, text in fields.items():
            if type(text) is not str or not is_mime(mime):
                raise protocol.ProtocolError("a display is MIME types and text")
            if mime.startswith("image/") and not mime.startswith("image/svg"):
                values.from_base64(text)
        size = cost(fields)
        if size > room:
            self._drop_display()
            return None
        self._display_room -= size
        shown = Display(data=fields)
        self._displays.append(shown)
        return shown


def _without_form(opaque: Mapping[str, int]) -> str:
    """What is said of objects that came as their `repr`."""
    names = [cut(name, drops.MAX_TYPE) for name in list(opaque)[:_MOST_NAMES]]
    more = ", ..." if len(opaque) > _MOST_NAMES else ""
    return (
        f"the value has objects without a form that can be sent, of type {', '.join(names)}{more}: "
        "their repr() is sent instead; return plain data, or write it to a file"
    )


def _fields(frame: protocol.Frame, max_bytes: int, max_memory: int | None = None) -> dict[str, Any]:
    """The flat object of a frame. TooMuch if it takes too much memory to read."""
    if len(frame.payload) > max_bytes:
        raise protocol.TooMuch(f"a frame of {len(frame.payload)} bytes")
    text = protocol.read_text(frame.payload, _FEW, max_depth=2, max_memory=max_memory)
    fields = protocol.parse(text)
    if type(fields) is not dict:
        raise protocol.ProtocolError("a payload is an object")
    return fields


def _text(fields: Mapping[str, Any], name: str, size: int) -> str:
    text = fields.get(name)
    if type(text) is not str:
        raise protocol.ProtocolError(f"{name} is text")
    return cut(text, size)


def run_pieces(
    request: Request, filename: str = "main.py", budgets: Budgets | None = None
) -> list[Any]:
    """The RUN frame that hands `request` to a worker, after its buffers: pieces of bytes, the large
    ones in the memory of the request. RequestError names what cannot be sent."""
    buffers: list[Any] = []
    return encode_run(run_fields(request, filename, budgets, buffers), buffers)


def encode_run(fields: dict[str, Any], buffers: list[Any]) -> list[Any]:
    """The pieces of a RUN frame that says `fields`, after `buffers`."""
    payload = protocol.dumps(fields)
    if len(payload) > protocol.MAX_HOST_FRAME:
        raise RequestError("context", "is larger than a frame can be")
    return protocol.encode_all(protocol.RUN, payload, buffers)


def run_frame(request: Request, filename: str = "main.py", budgets: Budgets | None = None) -> bytes:
    """All of `run_pieces`, copied together."""
    return b"".join(run_pieces(request, filename, budgets))


def run_fields(
    request: Request,
    filename: str,
    budgets: Budgets | None = None,
    buffers: list[Any] | None = None,
) -> dict[str, Any]:
    """What a RUN frame says, in plain values; RequestError names what cannot be sent.

    Large binary data is appended to `buffers`, if there is such a list, in the caller's memory.

    `budgets` spare the worker from sending what the host would drop; the host counts again.
    """
    context = {}
    for name, value in request.context.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise RequestError("context", f"{name!r} is not a variable name")
        try:
            context[name] = values.encode(value, MAX_CONTEXT, max_nodes=1 << 24, buffers=buffers)
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
    fields: dict[str, Any] = {"code": code, "args": args, "filename": filename, "context": context}
    if budgets is not None:
        fields["budget"] = {
            "value": budgets.value, "displays": budgets.displays, "copy": budgets.copy
        }  # fmt: skip
    return fields

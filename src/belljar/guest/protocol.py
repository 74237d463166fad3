"""The frames that a guest and its host exchange, and the strict JSON inside them.

A frame is one byte of kind, four bytes of big-endian length, and that many bytes of payload. One
descriptor carries them both ways, and one live interpreter may answer many RUN frames:

    host -> guest   any GIVEN, then RUN (a program), RETURN (answer to CALL), INTERRUPT, CLOSE
    guest -> host   READY, then per RUN any of DISPLAY, BUFFER, VALUE, ERROR, DROPPED, then END
                    (OUTPUT, CALL, RETURN and INTERRUPT are reserved)

Payloads are JSON in UTF-8, except those of GIVEN and BUFFER: these are raw bytes that the next RUN
or VALUE refers to by number. The guest may write anything at all: `Decoder` checks a length before
it makes room for the payload, and `loads` refuses whatever `dumps` would not have written, before
it builds anything large.
"""

from __future__ import annotations

import io
import os

TYPE_CHECKING = False  # as `typing` has it; importing that costs the guest half a start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Scan = Callable[[str, int], tuple[Any, int]]
    Write = Callable[[object], str]

# What to hand to `boot_code`; inside a guest it is wherever the files were put.
GUEST_DIR = os.path.dirname(os.path.realpath(__file__))

RUN = 0x01
RETURN = 0x02
INTERRUPT = 0x03
CLOSE = 0x04
GIVEN = 0x05
READY = 0x81
VALUE = 0x82
ERROR = 0x83
DISPLAY = 0x84
OUTPUT = 0x85
CALL = 0x86
END = 0x87
DROPPED = 0x88
BUFFER = 0x89

FROM_HOST = frozenset((RUN, RETURN, INTERRUPT, CLOSE, GIVEN))
FROM_GUEST = frozenset((READY, VALUE, ERROR, DISPLAY, OUTPUT, CALL, END, DROPPED, BUFFER))

HEADER = 5
# What each value, key and item in a budget counts for besides its own bytes: a list of empty lists
# costs about sixty bytes of memory for every three on the wire.
NODE = 64
# The largest budget that a value may have: one frame must be able to carry it.
MAX_VALUE = 1 << 30
DEFAULT_VALUE = 64 << 20


def room(budget: int) -> int:
    """What a frame may hold whose content is bounded by `budget`: base64 adds a third to bytes."""
    return budget + budget // 2 + (1 << 16)


def nodes(budget: int) -> int:
    """How many marks of JSON a document within `budget` may have: a tag adds some to a value."""
    return 2 * (budget // NODE) + 64


# What one frame from a guest may hold. A host's frame may use the whole of the length field.
MAX_FRAME = room(MAX_VALUE)
MAX_HOST_FRAME = (1 << 32) - 1
MAX_NODES = nodes(MAX_VALUE)
MAX_DEPTH = 256
# Longer than any integer that `values` writes as digits; conversion takes quadratic time.
MAX_DIGITS = 400

# A frame from this size on is received into memory of its own, made once for the whole of it.
_LARGE = 1 << 16
_WINDOW = 1 << 20
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CONTINUATIONS = bytes(range(0x80, 0xC0))


class Frame:
    """One message: a kind and its payload."""

    __slots__ = ("kind", "payload")

    def __init__(self, kind: int, payload: bytes) -> None:
        self.kind = kind
        self.payload = payload


class ProtocolError(ValueError):
    """The other side sent something that no honest peer sends.

    `frames` holds those that were complete before it, when a Decoder raised this.
    """

    def __init__(self, problem: str, frames: tuple[Frame, ...] = ()) -> None:
        super().__init__(problem)
        self.frames = frames


class TooMuch(ProtocolError):
    """It may be well formed, but reading it would take more memory than is allowed."""


def encode(kind: int, payload: bytes = b"") -> bytes:
    """The bytes of one frame."""
    return bytes((kind,)) + len(payload).to_bytes(4, "big") + payload


class Decoder:
    """Turns a stream of bytes into frames, whatever the pieces it arrives in.

    `feed` raises ProtocolError on an unknown kind or a length over `max_frame`, as soon as the
    header is there, and again on every later call: a stream that lost its framing never regains it.
    What is missing of a large frame may be read right into `wanted`; `filled` says how much was.
    """

    def __init__(self, kinds: frozenset[int] = FROM_GUEST, max_frame: int = MAX_FRAME) -> None:
        self._kinds = kinds
        self._max_frame = max_frame
        self._buffer = bytearray()
        self._large: io.BytesIO | None = None
        self._kind = 0  # of the large one
        self._rest = memoryview(b"")  # of its room
        self._problem = ""

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame are held."""
        if self._large is None:
            return len(self._buffer)
        return HEADER + len(self._large.getbuffer()) - len(self._rest)

    @property
    def wanted(self) -> memoryview | None:
        """Where to read the rest of a large frame; None while there is none."""
        return self._rest if self._large is not None else None

    def filled(self, size: int) -> list[Frame]:
        """So much has been read into `wanted`: the frame, if it is whole."""
        if self._problem or self._large is None:
            raise ProtocolError(self._problem or "no frame is on its way")
        before, self._rest = self._rest, self._rest[size:]
        before.release()
        if self._rest:
            return []
        self._rest.release()
        # While nothing else refers to its memory, this is that memory and no copy of it.
        frame, self._large = Frame(self._kind, self._large.getvalue()), None
        return [frame]

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        if self._problem:
            raise ProtocolError(self._problem)
        frames: list[Frame] = []
        if self._large is not None:
            size = min(len(data), len(self._rest))
            self._rest[:size] = data[:size]
            frames += self.filled(size)
            data = data[size:]
        self._buffer += data
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= HEADER:
                kind = view[start]
                size = int.from_bytes(view[start + 1 : start + HEADER], "big")
                self._problem = self._judge(kind, size)
                begin, end = start + HEADER, start + HEADER + size
                if self._problem:
                    break
                if end > len(view):
                    if size >= _LARGE:
                        self._make_room(kind, size)
                        here = len(view) - begin
                        self._rest[:here] = view[begin:]
                        self.filled(here)
                        start = len(view)
                    break
                frames.append(Frame(kind, bytes(view[begin:end])))
                start = end
        if self._problem:
            self._buffer.clear()
            raise ProtocolError(self._problem, tuple(frames))
        del self._buffer[:start]
        return frames

    def _make_room(self, kind: int, size: int) -> None:
        # The kernel gives this memory page by page as it is written to: a frame that never comes
        # takes none.
        self._kind, self._large = kind, io.BytesIO(bytes(size))
        self._rest = self._large.getbuffer()

    def _judge(self, kind: int, size: int) -> str:
        if kind not in self._kinds:
            return f"unknown frame kind 0x{kind:02x}"
        if size > self._max_frame:
            return f"a frame of {size} bytes is over the cap of {self._max_frame}"
        return ""


def encode_all(kind: int, payload: bytes, buffers: list[Any]) -> list[Any]:
    """The pieces of a RUN or VALUE frame and of those with its buffers; none of them is copied."""
    of_buffers = GIVEN if kind in FROM_HOST else BUFFER
    pieces: list[Any] = []
    for buffer in buffers:
        pieces += (bytes((of_buffers,)) + len(buffer).to_bytes(4, "big"), buffer)
    return [*pieces, encode(kind, payload)]


class _ScannerSettings:
    """What `_json` asks its decoder for."""

    strict = True
    array_hook = None  # since 3.15
    object_hook = None
    object_pairs_hook = None

    @staticmethod
    def parse_float(digits: str) -> float:
        number = float(digits)
        if number - number != 0.0:
            raise ProtocolError("a number that is not finite")
        return number

    @staticmethod
    def parse_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise ProtocolError(f"an integer of {len(digits)} digits")
        return int(digits)

    @staticmethod
    def parse_constant(name: str) -> None:
        raise ProtocolError(f"{name} is not JSON")


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is not JSON")


def _accelerated_codec() -> tuple[Scan, Write]:
    import _json

    # The stub describes `make_scanner` as the class it is in Python, not as what C accepts.
    scan: Scan = _json.make_scanner(_ScannerSettings)  # type: ignore[arg-type]
    chunks = _json.make_encoder(
        None, _refuse, _json.encode_basestring, None, ":", ",", False, False, False
    )

    def write(value: object) -> str:
        return "".join(chunks(value, 0))

    sample = '{"é":[1,0.5]}'
    if write(scan(sample, 0)[0]) != sample:
        raise ImportError("_json is not the module we know")
    return scan, write


def _plain_codec() -> tuple[Scan, Write]:
    import json

    decoder = json.JSONDecoder(
        parse_float=_ScannerSettings.parse_float,
        parse_int=_ScannerSettings.parse_int,
        parse_constant=_ScannerSettings.parse_constant,
    )
    writer = json.JSONEncoder(
        ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
    )
    return decoder.raw_decode, writer.encode


# CPython's `json` package wraps `_json`, but importing the wrapper (it compiles expressions) takes
# half as long as starting the interpreter does: it is for where the accelerator is missing, or is
# another than the one we know, whatever it then raises.
try:
    _scan, _write = _accelerated_codec()
except Exception:
    _scan, _write = _plain_codec()


def clean(text: str) -> str:
    """`text` without lone surrogates, which strict JSON has no bytes for."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def dumps(value: object) -> bytes:
    """`value`, of plain JSON types, as compact UTF-8. ValueError for NaN and lone surrogates."""
    return _write(value).encode("utf-8")


def loads(data: bytes, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH) -> Any:
    """Read what `dumps` wrote; ProtocolError for everything else.

    Of duplicate keys the last one wins. There is no white space around the value, no NaN, no escape
    that could name half of a surrogate pair (non-ASCII text is never escaped), and no integer
    longer than MAX_DIGITS. Numbers are finite.
    """
    return parse(read_text(data, max_nodes, max_depth))


def read_text(
    data: bytes,
    max_nodes: int = MAX_NODES,
    max_depth: int = MAX_DEPTH,
    max_memory: int | None = None,
) -> str:
    """The text of a document that `check_shape` accepts; TooMuch if it takes over `max_memory`.

    Apart from `parse`, so that a caller can let go of the bytes before anything is built of them.
    """
    check_shape(data, max_nodes, max_depth)
    if max_memory is not None and len(data) > max_memory // 4 and not data.isascii():
        size = _text_memory(data)
        if size > max_memory:
            raise TooMuch(f"as text it takes {size} bytes")
    try:
        return data.decode("utf-8")
    except ValueError as problem:
        raise ProtocolError(f"not strict JSON: {type(problem).__name__}") from None


def parse(text: str) -> Any:
    """What a text from `read_text` says, under the rules of `loads`."""
    try:
        value, end = _scan(text, 0)
    except ProtocolError:
        raise
    except (ValueError, StopIteration, RecursionError, SystemError) as problem:
        # Without `json.decoder` loaded, `_json` has no exception to raise: hence SystemError.
        raise ProtocolError(f"not strict JSON: {type(problem).__name__}") from None
    if end != len(text):
        raise ProtocolError("not strict JSON: something follows the value")
    return value


def _text_memory(data: bytes) -> int:
    """Bytes of memory for UTF-8 `data` as one `str`: its widest character sets the width of all."""
    characters, width = 0, 1
    for start in range(0, len(data), _WINDOW):
        leads = data[start : start + _WINDOW].translate(None, _CONTINUATIONS)
        characters += len(leads)
        highest = max(leads, default=0)
        width = max(width, 4 if highest >= 0xF0 else 2 if highest >= 0xC4 else 1)
    return characters * width


def check_shape(data: bytes, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH) -> None:
    """Refuse too many values or too deep a nesting by looking at the punctuation outside strings.

    Everything up to the first malformed byte is judged as the parser will judge it, so nothing
    large is built from a document that is refused later. Windows keep the pieces small.
    """
    inside = depth = nodes = 0
    rest = b""  # of a window: an escape that it cuts
    for start in range(0, len(data), _WINDOW):
        flat = (rest + data[start : start + _WINDOW]).replace(b"\\\\", b"")
        rest = b"\\u" if flat.endswith(b"\\u") else b"\\" if flat.endswith(b"\\") else b""
        flat = flat[: len(flat) - len(rest)].replace(b'\\"', b"")
        if b"\\ud" in flat or b"\\uD" in flat:
            raise ProtocolError("an escaped surrogate")
        pieces = flat.split(b'"')
        outside = b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) & 1
        brackets = outside.translate(None, _NOT_BRACKETS)
        nodes += outside.count(b",") + outside.count(b":")
        # A dict takes three times the memory that a list does.
        nodes += brackets.count(b"[") + 2 * brackets.count(b"{")
        if nodes > max_nodes:
            raise TooMuch(f"more than {max_nodes} values")
        if depth + len(brackets) <= max_depth:  # too few to go too deep, whatever their order
            depth += len(brackets) - 2 * (brackets.count(b"]") + brackets.count(b"}"))
            continue
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > max_depth:
                raise ProtocolError(f"nested more than {max_depth} deep")


def boot_code(directory: str, fd: int, write_fd: int | None = None) -> str:
    """The program for `python -I -c` that starts the worker on descriptor `fd`.

    `fd` goes both ways (a socket) unless `write_fd` is given (two pipes). The program makes a
    package out of `directory` without running anybody's `__init__`, so that the worker's relative
    imports work and its byte code is cached like any module's.
    """
    return (
        f"import sys;p=type(sys)('belljar_guest');p.__path__=[{directory!r}];"
        "sys.modules['belljar_guest']=p;"
        f"from belljar_guest.worker import main;main({fd!r},{write_fd!r})"
    )

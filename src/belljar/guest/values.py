"""Typed Python values as plain JSON and back, without pickle and without trusting either side.

`encode` runs in the guest on objects that may be hostile, and on the host for a result's JSON.
`decode` runs on the host on JSON that a guest wrote, and in the guest for its context.

None, booleans, finite floats, text, lists and dicts with text keys are themselves. Everything else
is `{"$": tag, "v": ...}`:

    float       "nan", "inf", "-inf"            int         hexadecimal, beyond 1024 bits
    bytes, bytearray    base64                  complex     [real, imaginary]
    tuple, set, frozenset   [items]             dict        [[key, value], ...] with other keys
    range       [start, stop, step]             timedelta   [days, seconds, microseconds]
    date, time, datetime    ISO 8601            decimal, uuid   text
    fraction    [numerator, denominator]        ndarray, dataframe, series   see `tables`

Subclasses (named tuples, enums of text or numbers, counters) cross as the type they extend, read
through that type's own methods, so nothing that they override runs. Numpy scalars cross as Python
numbers, and time zones as offsets. Lone surrogates in text become U+FFFD.
"""

from __future__ import annotations

import sys

from .protocol import MAX_NODES, MAX_VALUE, NODE, clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_DEPTH = 60
# Above what a frame can carry, so that whatever was decoded can be encoded again.
MAX_BYTES = 4 * MAX_VALUE
# A JSON reader that knows only doubles still reads integers below this one.
_PLAIN_INT = 1 << 1024
_MAX_INT_BITS = 1 << 22
# Reducing a fraction takes quadratic time.
_MAX_FRACTION_BITS = 1 << 12
_MAX_EQUAL_HASHES = 64
# An integer below this one takes no more than its share of a node.
_WORD = 1 << 64
_OVER = "it takes more memory than its budget"
_PIECE = 3 << 16  # a multiple of three, as base64 wants it
_TEXT_HEAD = sys.getsizeof("")
# What an empty set takes besides its node.
_SET = 192


class Unrepresentable(ValueError):
    """This object has no form that may cross the boundary, or is too large or too deep to."""


class TooLarge(Unrepresentable):
    """It does not fit; `field` names the limit that could be raised."""

    def __init__(self, why: str, field: str = "value") -> None:
        super().__init__(why)
        self.field = field


def encode(
    obj: object,
    max_bytes: int = MAX_BYTES,
    max_nodes: int = MAX_NODES,
    budget: int = sys.maxsize,
) -> Any:
    """`obj` as JSON values; Unrepresentable if it holds anything that cannot be.

    `max_bytes` bounds what is copied, `budget` what the host would have to keep: decoded bytes and
    NODE for each value.
    """
    try:
        return Writer(max_bytes, max_nodes, budget).write(obj, 0)
    except Unrepresentable:
        raise
    except Exception as problem:
        # Other threads may change a container under us, and time zones are the program's own code.
        raise Unrepresentable(f"reading it failed: {type(problem).__name__}") from None


def decode(wire: object, budget: int = sys.maxsize) -> Any:
    """The value that `encode` wrote; ValueError for anything that it would not have written.

    TooLarge if it takes more than `budget`, in decoded bytes and NODE for each value. `wire` is
    used up: its lists and dicts become those of the value, so that both need not fit into memory.
    """
    try:
        return Reader(budget).read(wire, 0)
    except (TypeError, ArithmeticError, LookupError, AttributeError) as problem:
        raise ValueError(f"malformed value: {type(problem).__name__}") from None


def tagged(tag: str, wire: object) -> dict[str, Any]:
    return {"$": tag, "v": wire}


def to_base64(data: bytes) -> str:
    import binascii  # not `base64`, which imports regular expressions

    return binascii.b2a_base64(data, newline=False).decode("ascii")


def from_base64(text: object) -> bytes:
    import binascii

    if type(text) is not str or not text.isascii():
        raise ValueError("base64 is ASCII text")
    data = binascii.a2b_base64(text)
    # The reader is more generous than the writer. Compared piece by piece, for the memory's sake.
    size = 4 * ((len(data) + 2) // 3)
    for start in range(0, len(data), _PIECE):
        piece = binascii.b2a_base64(data[start : start + _PIECE], newline=False)
        place = start // 3 * 4
        if piece != text[place : place + len(piece)].encode("ascii"):
            size = -1
    if size != len(text):
        raise ValueError("not in canonical form")
    return data


def text_size(text: str) -> int:
    """Bytes of memory for the characters of `text`; its widest one sets the width of all."""
    return len(text) if text.isascii() else sys.getsizeof(text) - _TEXT_HEAD


class Writer:
    """One encoding with its budgets, which `tables` shares."""

    def __init__(self, max_bytes: int, max_nodes: int, budget: int = sys.maxsize) -> None:
        self._bytes = max_bytes
        self._nodes = max_nodes
        self._budget = budget

    def write(self, obj: Any, depth: int) -> Any:
        self._nodes -= 1
        self._budget -= NODE
        if self._nodes < 0 or self._budget < 0:
            raise TooLarge("it holds too many values")
        kind = type(obj)
        if obj is None or kind is bool:
            return obj
        write = _WRITERS.get(kind)
        if write is not None:
            return write(self, obj, depth)
        # `issubclass` asks the type; `isinstance` would also ask the object's own `__class__`.
        for base, write in _WRITERS.items():
            if issubclass(kind, base):
                return write(self, obj, depth)
        return self._other(obj, kind, depth)

    def spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise TooLarge("it is too large")
        self._bytes -= size
        if self._bytes < 0:
            raise TooLarge("it is too large to be copied", "memory")

    def binary(self, data: bytes) -> str:
        self.spend(len(data))
        return to_base64(data)

    def items(self, items: Iterable[object], depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            raise Unrepresentable("it is nested too deeply")
        return [self.write(item, depth + 1) for item in items]

    def text(self, obj: str, depth: int) -> str:
        exact = str.__str__(obj)
        self.spend(text_size(exact))
        return clean(exact)

    def integer(self, obj: int, depth: int) -> Any:
        exact = int.__int__(obj)
        if -_PLAIN_INT < exact < _PLAIN_INT:
            return exact
        if exact.bit_length() > _MAX_INT_BITS:
            raise Unrepresentable("it holds too large an integer")
        self.spend(exact.bit_length() // 8)
        return tagged("int", hex(exact))

    def real(self, obj: float, depth: int) -> Any:
        exact = float.__float__(obj)
        if exact - exact == 0.0:
            return exact
        return tagged("float", repr(exact))

    def mapping(self, obj: dict[Any, Any], depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise Unrepresentable("it is nested too deeply")
        # An OrderedDict keeps its order apart from the dict's, and only its own method knows it.
        ordered = getattr(sys.modules.get("collections"), "OrderedDict", None)
        pairs = list(obj.items() if type(obj) is ordered else dict.items(obj))
        if all(issubclass(type(key), str) and str.__ne__(key, "$") for key, _ in pairs):
            return {self.text(key, 0): self.write(value, depth + 1) for key, value in pairs}
        for key, _ in pairs:
            if issubclass(type(key), (list, dict, set, bytearray)):
                raise Unrepresentable("a key of a dict is not hashable")
        return tagged(
            "dict",
            [[self.write(key, depth + 1), self.write(value, depth + 1)] for key, value in pairs],
        )

    def _other(self, obj: Any, kind: type, depth: int) -> Any:
        """Types whose module the program must have loaded, else it could not have made one."""
        if _loaded("pandas", "NaT") is obj:
            return None
        for module, name, tag, write in _LAZY_WRITERS:
            base = _loaded(module, name)
            if base is not None and issubclass(kind, base):
                wire = write(self, base, obj)
                self.spend(len(wire))
                return tagged(tag, wire)
        if "numpy" in sys.modules:
            from . import tables

            return tables.write(self, obj, kind, depth)
        raise Unrepresentable(f"{kind.__module__}.{kind.__qualname__} cannot cross the boundary")


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _fraction(writer: Writer, base: Any, obj: Any) -> Any:
    pair = (base.numerator.fget(obj), base.denominator.fget(obj))
    if max(part.bit_length() for part in pair) > _MAX_FRACTION_BITS:
        raise Unrepresentable("it holds too large a fraction")
    return [writer.integer(part, 0) for part in pair]


_WRITERS: dict[type, Callable[[Writer, Any, int], Any]] = {
    str: Writer.text,
    int: Writer.integer,
    float: Writer.real,
    list: lambda w, obj, depth: w.items(list.__iter__(obj), depth),
    dict: Writer.mapping,
    tuple: lambda w, obj, depth: tagged("tuple", w.items(tuple.__iter__(obj), depth)),
    bytes: lambda w, obj, depth: tagged("bytes", w.binary(bytes.__getitem__(obj, slice(None)))),
    bytearray: lambda w, obj, depth: tagged(
        "bytearray", w.binary(bytes(bytearray.__getitem__(obj, slice(None))))
    ),
    set: lambda w, obj, depth: tagged("set", w.items(set.__iter__(obj), depth)),
    frozenset: lambda w, obj, depth: tagged("frozenset", w.items(frozenset.__iter__(obj), depth)),
    complex: lambda w, obj, depth: tagged(
        "complex",
        [w.real(complex.real.__get__(obj), 0), w.real(complex.imag.__get__(obj), 0)],
    ),
    range: lambda w, obj, depth: tagged(
        "range", [w.integer(part, 0) for part in (obj.start, obj.stop, obj.step)]
    ),
}

# Module, class, tag, and how to write it; a datetime is a date too, so it comes first.
_LAZY_WRITERS: tuple[tuple[str, str, str, Callable[[Writer, Any, Any], Any]], ...] = (
    ("datetime", "datetime", "datetime", lambda w, base, obj: base.isoformat(obj)),
    ("datetime", "date", "date", lambda w, base, obj: base.isoformat(obj)),
    ("datetime", "time", "time", lambda w, base, obj: base.isoformat(obj)),
    (
        "datetime",
        "timedelta",
        "timedelta",
        lambda w, base, obj: [
            getattr(base, part).__get__(obj) for part in ("days", "seconds", "microseconds")
        ],
    ),
    ("decimal", "Decimal", "decimal", lambda w, base, obj: base.__str__(obj)),
    ("fractions", "Fraction", "fraction", _fraction),
    ("uuid", "UUID", "uuid", lambda w, base, obj: base.__str__(obj)),
)


class Reader:
    """One decoding with its budget, which `tables` shares."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise TooLarge(_OVER)

    def read(self, wire: Any, depth: int) -> Any:
        """What `wire` says inside a value that is `depth` containers deep. Uses `wire` up."""
        kind = type(wire)
        self._budget -= NODE
        if kind is str:
            self._budget -= text_size(wire)
        elif kind is int and not -_WORD < wire < _WORD:
            self._budget -= wire.bit_length() // 8
        if self._budget < 0:
            raise TooLarge(_OVER)
        if kind is str or kind is int or wire is None or kind is bool:
            return wire
        if kind is float:
            if wire - wire != 0.0:
                raise ValueError("a number that is not finite")
            return wire
        if kind is list:
            return self.items(wire, depth)
        if kind is not dict:
            raise ValueError(f"{kind.__name__} is not JSON")
        if "$" not in wire:
            check_depth(depth)
            for key, item in wire.items():
                self._budget -= NODE + text_size(key)
                wire[key] = self.read(item, depth + 1)
            return wire
        tag, inner = wire["$"], wire.get("v")
        if len(wire) != 2 or "v" not in wire or type(tag) is not str:
            raise ValueError("a tagged value has exactly a tag and a value")
        if tag in ("ndarray", "dataframe", "series"):
            from . import tables

            return tables.read(self, tag, inner, depth)
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](self, inner, depth)
        if tag not in _READERS:
            raise ValueError("an unknown tag")
        self.spend(_payload(tag, inner))
        return _READERS[tag](inner, depth)

    def items(self, wire: Any, depth: int) -> list[Any]:
        check_depth(depth)
        items: list[Any] = expect(list, wire)
        for place, item in enumerate(items):
            items[place] = self.read(item, depth + 1)
        return items


def _payload(tag: str, inner: Any) -> int:
    """Bytes that a tagged value without other values in it takes besides its node, at most."""
    if type(inner) is not str:
        longest = _MAX_FRACTION_BITS // 8
        parts = (part.bit_length() // 8 if type(part) is int else longest for part in inner)
        return 2 * NODE + sum(parts)
    if tag in ("bytes", "bytearray"):
        return len(inner) * 3 // 4
    return len(inner) // 2 if tag == "int" else NODE + len(inner)


def check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise ValueError("nested too deeply")


def expect(kind: Any, wire: Any, length: int | None = None) -> Any:
    if type(wire) is not kind or (length is not None and len(wire) != length):
        raise ValueError(f"expected a {kind.__name__}")
    return wire


def _hashables(items: list[Any]) -> list[Any]:
    """`items`, unless they were chosen to collide: a set of n equal hashes takes n*n steps."""
    if len(items) > _MAX_EQUAL_HASHES:
        seen: dict[int, int] = {}
        for item in items:
            number = hash(item)
            seen[number] = seen.get(number, 0) + 1
            if seen[number] > _MAX_EQUAL_HASHES:
                raise ValueError("keys that collide")
    return items


def _read_dict(reader: Reader, wire: Any, depth: int) -> dict[Any, Any]:
    check_depth(depth)
    pairs = expect(list, wire)
    keys = _hashables([reader.read(expect(list, pair, 2)[0], depth + 1) for pair in pairs])
    return {key: reader.read(pairs[place][1], depth + 1) for place, key in enumerate(keys)}


def _read_set(reader: Reader, wire: Any, depth: int) -> set[Any]:
    reader.spend(_SET)
    return set(_hashables(reader.items(wire, depth)))


def _read_float(wire: Any, depth: int) -> float:
    if wire not in ("nan", "inf", "-inf"):
        raise ValueError("a tagged float is not finite")
    return float(wire)


def _read_int(wire: Any, depth: int) -> int:
    number = int(expect(str, wire), 16)
    if number.bit_length() > _MAX_INT_BITS:
        raise ValueError("too large an integer")
    return int(_canonical(wire, number, hex))


def _read_real(wire: Any) -> float:
    return float(expect(float, Reader(sys.maxsize).read(wire, MAX_DEPTH)))


def _read_complex(wire: Any, depth: int) -> complex:
    real, imaginary = expect(list, wire, 2)
    return complex(_read_real(real), _read_real(imaginary))


def _read_integers(wire: Any, length: int) -> list[int]:
    reader = Reader(sys.maxsize)
    return [expect(int, reader.read(part, MAX_DEPTH)) for part in expect(list, wire, length)]


def _read_fraction(wire: Any, depth: int) -> Any:
    from fractions import Fraction

    pair = _read_integers(wire, 2)
    if max(part.bit_length() for part in pair) > _MAX_FRACTION_BITS:
        raise ValueError("too large a fraction")
    return Fraction(*pair)


def _read_decimal(wire: Any, depth: int) -> Any:
    from decimal import Decimal

    return _canonical(wire, Decimal(expect(str, wire)), Decimal.__str__)


def _read_uuid(wire: Any, depth: int) -> Any:
    from uuid import UUID

    return _canonical(wire, UUID(expect(str, wire)), UUID.__str__)


def _canonical(wire: Any, value: Any, write: Callable[[Any], str]) -> Any:
    """`value`, unless the reader was more generous than the writer is."""
    if write(value) != wire:
        raise ValueError("not in canonical form")
    return value


def _read_timedelta(wire: Any, depth: int) -> Any:
    from datetime import timedelta

    return timedelta(*_read_integers(wire, 3))


def _read_moment(name: str) -> Callable[[Any, int], Any]:
    def read_iso(wire: Any, depth: int) -> Any:
        import datetime

        kind = getattr(datetime, name)
        return _canonical(wire, kind.fromisoformat(expect(str, wire)), kind.isoformat)

    return read_iso


_CONTAINERS: dict[str, Callable[[Reader, Any, int], Any]] = {
    "tuple": lambda reader, wire, depth: tuple(reader.items(wire, depth)),
    "set": _read_set,
    "frozenset": lambda reader, wire, depth: frozenset(_read_set(reader, wire, depth)),
    "dict": _read_dict,
}
_READERS: dict[str, Callable[[Any, int], Any]] = {
    "float": _read_float,
    "int": _read_int,
    "bytes": lambda wire, depth: from_base64(wire),
    "bytearray": lambda wire, depth: bytearray(from_base64(wire)),
    "complex": _read_complex,
    "range": lambda wire, depth: range(*_read_integers(wire, 3)),
    "date": _read_moment("date"),
    "time": _read_moment("time"),
    "datetime": _read_moment("datetime"),
    "timedelta": _read_timedelta,
    "decimal": _read_decimal,
    "fraction": _read_fraction,
    "uuid": _read_uuid,
}

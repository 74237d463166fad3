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
    fraction    [numerator, denominator]        path   [flavour, text]
    ndarray, dataframe, series, index   see `tables`; arrow, polars   see `arrow`
    member      {type, name, value} of an enumeration
    fields      {type, kind, fields} of a dataclass or a model of pydantic
    object      {type, repr} of anything else, if that is wanted; see `marked`
    floats, ints    a long list of nothing else, as eight bytes each in a buffer

Where the two sides can exchange raw buffers, large binary data (BINARY) is the number of a buffer
instead of base64. Every buffer is used exactly once, because otherwise two arrays could share one
memory.

Subclasses (named tuples, enums of text or numbers, counters) cross as the type they extend, read
through that type's own methods, so nothing that they override runs. Numpy scalars cross as Python
numbers, and time zones as offsets. Lone surrogates in text become U+FFFD.
"""

from __future__ import annotations

import sys

from .failures import cut, type_name
from .marked import Fields, Member, Opaque
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
# Smaller data takes less time as base64 than as a buffer.
BINARY = 2048
# A list of numbers from this length on crosses as a buffer.
_LONG = 256
MAX_TYPE = 200
_MOST_TYPES = 100
TABLES = frozenset((
    "ndarray", "dataframe", "series", "index", "arrow", "polars", "polars_series",
    "period", "interval", "period_array", "interval_array", "categorical",
))  # fmt: skip
_LIBRARIES = frozenset(("numpy", "pandas", "polars", "pyarrow"))


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
    buffers: list[Any] | None = None,
    objects: int = 0,
) -> Any:
    """`obj` as JSON values; Unrepresentable if it holds anything that cannot be.

    `max_bytes` bounds what is copied, `budget` what the host would have to keep: decoded bytes and
    NODE for each value. Large binary data is appended to `buffers`, if there is such a list: as
    views of `obj`'s own memory where that can be. So many objects of unknown types become their
    `repr`.
    """
    try:
        return Writer(max_bytes, max_nodes, budget, buffers, objects).write(obj, 0)
    except Unrepresentable:
        raise
    except Exception as problem:
        # Other threads may change a container under us, and time zones are the program's own code.
        raise Unrepresentable(f"reading it failed: {type(problem).__name__}") from None


def decode(
    wire: object,
    budget: int = sys.maxsize,
    buffers: list[Any] | None = None,
    opaque: dict[str, int] | None = None,
) -> Any:
    """The value that `encode` wrote; ValueError for anything that it would not have written.

    TooLarge if it takes more than `budget`, in decoded bytes and NODE for each value. `wire` is
    used up: its lists and dicts become those of the value, so that both need not fit into memory.
    `buffers` are those of one or several values, each a BytesIO, or has its two methods; arrays
    keep theirs. `opaque` is given the types of objects that are only their `repr`, with their
    numbers.
    """
    try:
        return Reader(budget, buffers, opaque).read(wire, 0)
    except (TypeError, ArithmeticError, LookupError, AttributeError, BufferError) as problem:
        raise ValueError(f"malformed value: {type(problem).__name__}") from None


def tagged(tag: str, wire: object) -> dict[str, Any]:
    return {"$": tag, "v": wire}


def to_base64(data: bytes | bytearray | memoryview) -> str:
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

    def __init__(
        self,
        max_bytes: int,
        max_nodes: int,
        budget: int = sys.maxsize,
        buffers: list[Any] | None = None,
        objects: int = 0,
    ) -> None:
        self._objects = objects
        self._bytes = max_bytes
        self._nodes = max_nodes
        self._budget = budget
        self.buffers = buffers

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
        self.keep(size)
        self._bytes -= size
        if self._bytes < 0:
            raise TooLarge("it is too large to be copied", "memory")

    def keep(self, size: int) -> None:
        """Count what the host keeps and nothing here copies."""
        self._budget -= size
        if self._budget < 0:
            raise TooLarge("it is too large")

    def binary(self, data: bytes | bytearray | memoryview, *, copied: bool = False) -> Any:
        """`data`, of single bytes, as base64 or as the number of a buffer. `copied` says that it is
        the only reference to a copy, so that its size counts as one."""
        if self.buffers is None or len(data) < BINARY:
            self.spend(len(data))
            return to_base64(data)
        if copied:
            self.spend(len(data))
        else:
            self.keep(len(data))
        self.buffers.append(data)
        return len(self.buffers) - 1

    def array(self, obj: list[Any], depth: int) -> Any:
        """A list; a long one of floats alone, or of small integers, takes no text."""
        if self.buffers is not None and list.__len__(obj) >= _LONG:
            if depth >= MAX_DEPTH:
                raise Unrepresentable("it is nested too deeply")
            kinds = set(map(type, list.__iter__(obj)))
            for kind, tag, code in ((float, "floats", "d"), (int, "ints", "q")):
                packed = _packed(obj, code) if kinds == {kind} else None
                if packed is not None:
                    self._nodes -= len(packed)
                    self._bytes -= 8 * len(packed)
                    self.keep(NODE * len(packed))
                    if self._nodes < 0:
                        raise TooLarge("it holds too many values")
                    if self._bytes < 0:
                        raise TooLarge("it is too large to be copied", "memory")
                    self.buffers.append(memoryview(packed).cast("B"))
                    return tagged(tag, len(self.buffers) - 1)
        return self.items(list.__iter__(obj), depth)

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
        sent = len(self.buffers or ())
        try:
            fields = _fields(obj, kind)
            if fields is not None:
                return self._marked(obj, fields, depth)
            if not _LIBRARIES.isdisjoint(sys.modules):
                from . import tables

                return tables.write(self, obj, kind, depth)
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise Unrepresentable(f"{name} cannot cross the boundary")
        except TooLarge:
            raise
        except Exception:
            self._objects -= 1
            if self._objects < 0:
                raise
            if self.buffers:
                del self.buffers[sent:]  # of what could not be finished
        from .displays import plain

        return self._opaque(cut(type_name(kind), MAX_TYPE), plain(obj))

    def _opaque(self, kind: str, text: str) -> dict[str, Any]:
        self.spend(len(kind) + text_size(text))
        return tagged("object", {"type": clean(kind), "repr": clean(text)})

    def _marked(self, obj: Any, marked: Any, depth: int) -> dict[str, Any]:
        if depth >= MAX_DEPTH:
            raise Unrepresentable("it is nested too deeply")
        kind = cut(marked.type, MAX_TYPE)
        self.spend(2 * len(kind))
        if type(marked) is Member:
            wire = {"name": self.text(marked.name, 0), "value": self.write(marked.value, depth + 1)}
            return tagged("member", {"type": clean(kind), **wire})
        fields = {self.text(name, 0): self.write(each, depth + 1) for name, each in marked.items()}
        return tagged("fields", {"type": clean(kind), "kind": marked.kind, "fields": fields})


def _fields(obj: Any, kind: type) -> Any:
    """What is plain data of an object of the program's own type; None if nothing is."""
    if kind is Member or kind is Fields:
        return obj
    enum, model = _loaded("enum", "Enum"), _loaded("pydantic.main", "BaseModel")
    if enum is not None and issubclass(kind, enum):
        return Member(type_name(kind), obj._name_, obj._value_)
    if model is not None and issubclass(kind, model):
        return Fields.of("model", type_name(kind), obj.model_dump())
    declared = getattr(kind, "__dataclass_fields__", None)
    if type(declared) is dict and "dataclasses" in sys.modules:
        field = sys.modules["dataclasses"]._FIELD
        names = [name for name, each in declared.items() if each._field_type is field]
        found = {name: getattr(obj, name) for name in names}
        return Fields.of("dataclass", type_name(kind), found)
    return None


def _packed(obj: list[Any], code: str) -> Any:
    """The numbers of a list as an array, little-endian; None if they do not fit in eight bytes."""
    from array import array

    try:
        packed = array(code, list.__iter__(obj))
    except OverflowError:
        return None
    if sys.byteorder != "little":
        packed.byteswap()
    return packed


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _fraction(writer: Writer, base: Any, obj: Any) -> Any:
    pair = (base.numerator.fget(obj), base.denominator.fget(obj))
    if max(part.bit_length() for part in pair) > _MAX_FRACTION_BITS:
        raise Unrepresentable("it holds too large a fraction")
    return [writer.integer(part, 0) for part in pair]


def _path(writer: Writer, base: Any, obj: Any) -> list[str]:
    pathlib = sys.modules["pathlib"]
    windows = issubclass(type(obj), pathlib.PureWindowsPath)
    flavour = "path" if issubclass(type(obj), pathlib.Path) else "windows" if windows else "posix"
    return [flavour, writer.text(base.__str__(obj), 0)]


_WRITERS: dict[type, Callable[[Writer, Any, int], Any]] = {
    Opaque: lambda w, obj, depth: w._opaque(obj.type, str.__str__(obj)),
    Fields: lambda w, obj, depth: w._marked(obj, obj, depth),
    str: Writer.text,
    int: Writer.integer,
    float: Writer.real,
    list: Writer.array,
    dict: Writer.mapping,
    tuple: lambda w, obj, depth: tagged("tuple", w.items(tuple.__iter__(obj), depth)),
    bytes: lambda w, obj, depth: tagged(
        "bytes", w.binary(bytes.__getitem__(obj, slice(None)), copied=type(obj) is not bytes)
    ),
    # Copied, because while it is being sent the program could not change its size.
    bytearray: lambda w, obj, depth: tagged(
        "bytearray", w.binary(bytearray.__getitem__(obj, slice(None)), copied=True)
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
    ("pathlib", "PurePath", "path", _path),
)


class Reader:
    """One decoding with its budget, which `tables` shares."""

    def __init__(
        self,
        budget: int,
        buffers: list[Any] | None = None,
        opaque: dict[str, int] | None = None,
    ) -> None:
        self._budget = budget
        self._of_type = opaque if opaque is not None else {}
        self._buffers = buffers if buffers is not None else []

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
        if tag in TABLES:
            from . import tables

            return tables.read(self, tag, inner, depth)
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](self, inner, depth)
        if tag not in _READERS:
            raise ValueError("an unknown tag")
        self.spend(_payload(tag, inner))
        return _READERS[tag](inner, depth)

    def buffer(self, number: object) -> Any:
        """The buffer of this number, a BytesIO, which then belongs to the caller."""
        if type(number) is not int or not 0 <= number < len(self._buffers):
            raise ValueError("there is no such buffer")
        found, self._buffers[number] = self._buffers[number], None
        if found is None:
            raise ValueError("a buffer is used twice")
        self.spend(len(found.getbuffer()))
        return found

    def binary(self, wire: object) -> bytes:
        """Bytes that cross as base64 or in a buffer."""
        if type(wire) is not str:
            data: bytes = self.buffer(wire).getvalue()
            return data
        self.spend(len(wire) * 3 // 4)
        return from_base64(wire)

    def numbers(self, wire: object, code: str, depth: int) -> list[Any]:
        from array import array

        check_depth(depth)
        with self.buffer(wire).getbuffer() as data:
            self.spend((NODE - 8) * (len(data) // 8))
            packed = array(code)
            packed.frombytes(data)  # ValueError unless it is whole items
        if sys.byteorder != "little":
            packed.byteswap()
        return packed.tolist()

    def opaque(self, wire: Any) -> Opaque:
        kind, text = self._parts(wire, "type", "repr")
        if len(self._of_type) < _MOST_TYPES or kind in self._of_type:
            self._of_type[kind] = self._of_type.get(kind, 0) + 1
        self.spend(NODE + len(kind) + text_size(expect(str, text)))
        return Opaque.of(kind, text)

    def member(self, wire: Any, depth: int) -> Member:
        check_depth(depth)
        kind, name, value = self._parts(wire, "type", "name", "value")
        self.spend(2 * NODE + len(kind) + text_size(expect(str, name)))
        return Member(kind, name, self.read(value, depth + 1))

    def fields(self, wire: Any, depth: int) -> Fields:
        check_depth(depth)
        name, kind, fields = self._parts(wire, "type", "kind", "fields")
        if kind not in ("dataclass", "model"):
            raise ValueError("fields of something else")
        self.spend(4 * NODE + len(name))
        for key, item in expect(dict, fields).items():
            self.spend(NODE + text_size(key))
            fields[key] = self.read(item, depth + 1)
        return Fields.of(kind, name, fields)

    def _parts(self, wire: Any, *names: str) -> list[Any]:
        """The fields of an object that begins with the name of a type."""
        if expect(dict, wire).keys() != set(names):
            raise ValueError("other fields")
        if len(expect(str, wire["type"])) > MAX_TYPE:
            raise ValueError("too long a name of a type")
        return [wire[name] for name in names]

    def items(self, wire: Any, depth: int) -> list[Any]:
        check_depth(depth)
        items: list[Any] = expect(list, wire)
        for place, item in enumerate(items):
            items[place] = self.read(item, depth + 1)
        return items


def _payload(tag: str, inner: Any) -> int:
    """Bytes that a tagged value without other values in it takes besides its node, at most."""
    if tag == "path":
        return 8 * NODE + 2 * text_size(expect(str, expect(list, inner, 2)[1]))
    if type(inner) is not str:
        longest = _MAX_FRACTION_BITS // 8
        parts = (part.bit_length() // 8 if type(part) is int else longest for part in inner)
        return 2 * NODE + sum(parts)
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


def _read_path(wire: Any, depth: int) -> Any:
    import pathlib

    flavour, text = expect(list, wire, 2)
    if flavour not in ("path", "posix", "windows") or "\0" in expect(str, text):
        raise ValueError("not a path")
    if flavour == "windows":
        return pathlib.PureWindowsPath(text)
    # A guest's own kind of path, not the host's: on Windows they differ.
    native = flavour == "path" and sys.platform != "win32"
    return pathlib.Path(text) if native else pathlib.PurePosixPath(text)


def _read_moment(name: str) -> Callable[[Any, int], Any]:
    def read_iso(wire: Any, depth: int) -> Any:
        import datetime

        kind = getattr(datetime, name)
        return _canonical(wire, kind.fromisoformat(expect(str, wire)), kind.isoformat)

    return read_iso


_CONTAINERS: dict[str, Callable[[Reader, Any, int], Any]] = {
    "bytes": lambda reader, wire, depth: reader.binary(wire),
    "bytearray": lambda reader, wire, depth: bytearray(reader.binary(wire)),
    "floats": lambda reader, wire, depth: reader.numbers(wire, "d", depth),
    "ints": lambda reader, wire, depth: reader.numbers(wire, "q", depth),
    "tuple": lambda reader, wire, depth: tuple(reader.items(wire, depth)),
    "object": lambda reader, wire, depth: reader.opaque(wire),
    "member": lambda reader, wire, depth: reader.member(wire, depth),
    "fields": lambda reader, wire, depth: reader.fields(wire, depth),
    "set": _read_set,
    "frozenset": lambda reader, wire, depth: frozenset(_read_set(reader, wire, depth)),
    "dict": _read_dict,
}
_READERS: dict[str, Callable[[Any, int], Any]] = {
    "float": _read_float,
    "int": _read_int,
    "complex": _read_complex,
    "range": lambda wire, depth: range(*_read_integers(wire, 3)),
    "date": _read_moment("date"),
    "time": _read_moment("time"),
    "datetime": _read_moment("datetime"),
    "timedelta": _read_timedelta,
    "decimal": _read_decimal,
    "fraction": _read_fraction,
    "uuid": _read_uuid,
    "path": _read_path,
}

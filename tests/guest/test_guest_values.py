"""Typed values: what crosses comes back equal and of its type, and nothing hostile gets through."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import json
import math
import pathlib
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.guest import protocol, tables, values
from belljar.guest.marked import Fields, Member, Opaque
from belljar.guest.values import Unrepresentable, decode, encode


def cross(value: Any) -> Any:
    """What the other side makes of `value`: in text, and then in buffers, however small it is."""
    value = decode(json.loads(protocol.dumps(encode(value))))
    thresholds = values.BINARY, values._LONG, tables._LARGE_COLUMN
    values.BINARY, values._LONG, tables._LARGE_COLUMN = 1, 1, 1
    try:
        buffers: list[Any] = []
        wire = json.loads(protocol.dumps(encode(value, buffers=buffers)))
    finally:
        values.BINARY, values._LONG, tables._LARGE_COLUMN = thresholds
    received: list[Any] = [io.BytesIO(bytes(each)) for each in buffers]
    value = decode(wire, buffers=received)
    assert received == [None] * len(buffers)
    return value


def canonical(value: Any) -> Any:
    """`value` in a form in which equal means same type, same content, NaN included."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(canonical(key), canonical(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return kind, [canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted((canonical(item) for item in value), key=repr)
    if isinstance(value, dt.datetime | dt.time):
        return kind, value.isoformat()
    return kind, repr(value)


zones = st.none() | st.timezones()
hashable_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1 << 1020, max_value=1 << 1030)
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.dates()
    | st.times()
    | st.datetimes(timezones=zones)
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
everything = st.recursive(
    hashable_leaves
    | st.binary().map(bytearray)
    | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner)
        | st.dictionaries(hashables, inner)
        | st.sets(hashables)
    ),
    max_leaves=20,
)
tags = [*values._READERS, *values._CONTAINERS, *values.TABLES, "unknown"]
wires = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(tags),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.fixed_dictionaries({"$": st.sampled_from(tags), "v": inner})
        | st.fixed_dictionaries({"$": inner, "v": inner})
    ),
    max_leaves=20,
)


@given(everything)
def test_every_type_comes_back_as_it_went(value: Any) -> None:
    assert canonical(cross(value)) == canonical(value)


@given(everything)
def test_the_wire_is_strict_json(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False, ensure_ascii=False)
    text.encode("utf-8")
    assert json.loads(text) == encode(value)


@given(wires)
def test_decode_raises_nothing_but_valueerror_and_encode_takes_what_it_gives(wire: Any) -> None:
    try:
        value = decode(wire)
    except ValueError:
        return
    assert canonical(cross(value)) == canonical(value)


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 3


class Planet(enum.Enum):
    EARTH = object()


class Word(str):
    def encode(self, *how: Any) -> bytes:
        raise AssertionError("asked")

    def __str__(self) -> str:
        raise AssertionError("asked")

    __len__ = __iter__ = __ne__ = __repr__ = __str__  # type: ignore[assignment]
    __hash__ = str.__hash__


class Number(int):
    def __index__(self) -> int:
        raise AssertionError("asked")

    __int__ = __lt__ = __gt__ = __repr__ = bit_length = __index__  # type: ignore[assignment]


class Float(float):
    def __float__(self) -> float:
        raise AssertionError("asked")

    __sub__ = __repr__ = __float__  # type: ignore[assignment]


class Mapping(dict[str, Any]):
    def items(self) -> Any:
        raise AssertionError("asked")

    __iter__ = keys = values = __len__ = __getitem__ = items  # type: ignore[assignment]


class Items(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("asked")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


class Blob(bytes):
    def __bytes__(self) -> bytes:
        raise AssertionError("asked")

    __iter__ = __len__ = __getitem__ = __bytes__  # type: ignore[assignment]


class Liar:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("asked")


# Made inside the test: pytest itself would ask them for their names.
SUBCLASSES: list[tuple[Callable[[], Any], Any]] = [
    (lambda: Point(1, 2), (1, 2)),
    (lambda: Colour.RED, 3),
    (lambda: collections.Counter("aab"), {"a": 2, "b": 1}),
    (lambda: collections.defaultdict(list, a=[1]), {"a": [1]}),
    (lambda: Word("x"), "x"),
    (lambda: Number(3), 3),
    (lambda: Float(1.5), 1.5),
    (lambda: Mapping(a=1), {"a": 1}),
    (lambda: Items([1, 2]), [1, 2]),
    (lambda: Blob(b"xy"), b"xy"),
    (lambda: {Word("k"): Number(1)}, {"k": 1}),
    (lambda: [True, Number(1)], [True, 1]),
]


@pytest.mark.parametrize(("make", "expected"), SUBCLASSES)
def test_a_subclass_crosses_as_what_it_extends_without_being_asked(
    make: Callable[[], Any], expected: Any
) -> None:
    assert canonical(cross(make())) == canonical(expected)


def test_an_ordered_dict_keeps_its_own_order() -> None:
    ordered = collections.OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    assert list(cross(ordered)) == ["b", "a"]


@pytest.mark.parametrize(
    "make",
    [
        object,
        Liar,
        lambda: len,
        lambda: int,
        lambda: [object()],
        lambda: {"a": lambda: 0},
        lambda: Planet.EARTH,
    ],
)
def test_what_has_no_form_is_unrepresentable(make: Callable[[], object]) -> None:
    with pytest.raises(Unrepresentable, match="cannot cross"):
        encode(make())


@pytest.mark.parametrize(
    ("text", "crossed"),
    [("\ud800", "�"), ("a\udfffb", "a�b"), ("\ud83d\ude00", "😀"), ("é\x00😀", "é\x00😀")],
)
def test_lone_surrogates_are_replaced_in_text_and_keys(text: str, crossed: str) -> None:
    assert cross({text: text}) == {crossed: crossed}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_depth_is_capped_alike_on_both_sides() -> None:
    assert cross(nested(values.MAX_DEPTH)) == nested(values.MAX_DEPTH)
    with pytest.raises(Unrepresentable, match="deep"):
        encode(nested(values.MAX_DEPTH + 1))
    with pytest.raises(ValueError, match="deep"):
        decode(nested(values.MAX_DEPTH + 1))


@pytest.mark.parametrize("wrap", [tuple, frozenset, list])
def test_the_deepest_value_of_any_kind_fits_the_frame(wrap: Any) -> None:
    value = wrap()
    for _ in range(values.MAX_DEPTH - 1):
        value = wrap([value])
    assert cross(value) == value
    keyed: dict[Any, Any] = {0: 0}
    for _ in range(values.MAX_DEPTH - 1):
        keyed = {0: keyed}
    assert cross(keyed) == keyed


def test_cycles_and_shared_branches_end() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(Unrepresentable):
        encode(cycle)
    shared: list[Any] = []
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(Unrepresentable, match="too many"):
        encode(shared, max_nodes=10_000)
    assert encode([[], []], max_nodes=3) == [[], []]


def test_a_dict_that_holds_the_tag_key_at_every_level_stays_small() -> None:
    value: Any = 1
    for _ in range(30):
        value = {"$": value}
    assert cross(value) == value
    assert len(protocol.dumps(encode(value))) < 2000


def test_bytes_are_capped() -> None:
    assert encode("x" * 100, max_bytes=100) == "x" * 100
    for value in ("x" * 101, b"x" * 101, ["x" * 60, "x" * 60], {"x" * 101: 1}, 1 << 2000):
        with pytest.raises(Unrepresentable, match="too large"):
            encode(value, max_bytes=100)


def test_integers_of_any_sane_size_cross_and_absurd_ones_do_not() -> None:
    assert encode((1 << 1024) - 1) == (1 << 1024) - 1
    assert encode(1 << 1024) == {"$": "int", "v": hex(1 << 1024)}
    assert cross(-math.factorial(10_000)) == -math.factorial(10_000)
    with pytest.raises(Unrepresentable, match="integer"):
        encode(1 << (1 << 23))


def test_not_a_number_crosses_tagged_because_json_has_none() -> None:
    assert encode([math.nan, math.inf, -math.inf]) == [
        {"$": "float", "v": "nan"},
        {"$": "float", "v": "inf"},
        {"$": "float", "v": "-inf"},
    ]


def test_keys_chosen_to_collide_are_refused_quickly() -> None:
    colliding = [[i * (2**61 - 1), 0] for i in range(50_000)]
    honest = [[i, 0] for i in range(50_000)]
    assert len(decode({"$": "dict", "v": honest})) == 50_000
    started = time.monotonic()
    for wire in (
        {"$": "dict", "v": colliding},
        {"$": "set", "v": [key for key, _ in colliding]},
        {"$": "frozenset", "v": [key for key, _ in colliding]},
    ):
        with pytest.raises(ValueError, match="collide"):
            decode(wire)
    # Fifty thousand equal hashes take minutes.
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "wire",
    [
        {"$": "nothing", "v": 1}, {"$": "tuple"}, {"$": "tuple", "v": [], "x": 1},
        {"$": 1, "v": 1}, {"$": ["tuple"], "v": []}, {"$": "tuple", "v": {}},
        {"$": "set", "v": [[]]}, {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[{}, 1]]},
        {"$": "float", "v": "1.5"}, {"$": "float", "v": 1.5}, {"$": "float", "v": ["nan"]},
        {"$": "int", "v": "1_0"}, {"$": "int", "v": " 0x1"}, {"$": "int", "v": "0x" + "f" * 2**21},
        {"$": "bytes", "v": "a"}, {"$": "bytes", "v": "YQ==YQ=="}, {"$": "bytes", "v": "YR=="},
        {"$": "bytes", "v": "é"}, {"$": "complex", "v": [1, 2]}, {"$": "complex", "v": [1.0]},
        {"$": "date", "v": "2020-13-01"}, {"$": "date", "v": "20200101"}, {"$": "time", "v": "1"},
        {"$": "datetime", "v": "yesterday"}, {"$": "timedelta", "v": [10**10, 0, 0]},
        {"$": "timedelta", "v": [True, 0, 0]}, {"$": "decimal", "v": " 1"},
        {"$": "decimal", "v": "1E+99999999999999999999"}, {"$": "fraction", "v": [1, 0]},
        {"$": "fraction", "v": [1 << 5000, 3]}, {"$": "uuid", "v": "{" + "0" * 32 + "}"},
        {"$": "range", "v": [0, 1, 0]}, math.nan, math.inf, (1,), {1}, b"x", object(),
        {"$": "ndarray", "v": 1}, {"$": "dataframe", "v": []}, {"$": "series", "v": {}},
    ],
)  # fmt: skip
def test_malformed_wires_are_refused(wire: Any) -> None:
    with pytest.raises(ValueError):
        decode(wire)


def test_a_pickle_crosses_as_the_bytes_it_is() -> None:
    payload = b"cos\nsystem\n(S'exit 1'\ntR."
    assert cross(payload) == payload


def test_examples_of_every_documented_tag() -> None:
    samples = {
        "float": math.inf,
        "int": 1 << 2000,
        "bytes": b"x",
        "bytearray": bytearray(b"x"),
        "complex": 1j,
        "tuple": (),
        "set": set(),
        "frozenset": frozenset(),
        "dict": {1: 2},
        "range": range(3),
        "timedelta": dt.timedelta(1),
        "date": dt.date(2020, 1, 2),
        "time": dt.time(3),
        "datetime": dt.datetime(2020, 1, 2, 3, tzinfo=dt.UTC),
        "decimal": decimal.Decimal("1.50"),
        "uuid": uuid.UUID(int=5),
        "fraction": fractions.Fraction(1, 3),
        "path": pathlib.PurePosixPath("a/b"),
        "object": Opaque.of("Own", "mine"),
        "member": Member("Colour", "RED", 1),
        "fields": Fields.of("dataclass", "Point", {"x": 1}),
    }
    tags = {**values._CONTAINERS, **values._READERS}.keys()
    assert samples.keys() | {"floats", "ints"} == tags
    assert encode([0.5] * 300, buffers=[])["$"] == "floats"
    assert encode([5] * 300, buffers=[])["$"] == "ints"
    for tag, value in samples.items():
        assert encode(value)["$"] == tag
        assert canonical(cross(value)) == canonical(value)


@pytest.mark.parametrize(
    "value",
    [
        b"x" * 5000,
        bytearray(b"y" * 5000),
        [1.5, math.inf, -0.0] * 1000,
        [-(1 << 63), (1 << 63) - 1] * 1000,
        {"a": b"1" * 3000, "b": (b"2" * 3000, [0.5] * 300)},
        [1 << 63] * 300,
        [True] * 300,
        [1, 2.0] * 300,
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:20]}",
)
def test_what_crosses_in_buffers_is_what_crosses_in_text(value: Any) -> None:
    assert canonical(cross(value)) == canonical(value)
    buffers: list[Any] = []
    wire = protocol.loads(protocol.dumps(encode(value, buffers=buffers)))
    received: list[Any] = [io.BytesIO(bytes(each)) for each in buffers]
    assert canonical(decode(wire, buffers=received)) == canonical(value)
    assert received == [None] * len(buffers)


@pytest.mark.parametrize("number", [-1, 1, True, 0.0, None, [0], 1 << 70])
def test_a_number_of_no_buffer_is_refused(number: Any) -> None:
    for tag in ("bytes", "bytearray", "floats", "ints"):
        with pytest.raises(ValueError):
            decode({"$": tag, "v": number}, buffers=[io.BytesIO(b"x" * 8)])


def test_a_buffer_that_is_used_twice_is_refused() -> None:
    wire = [{"$": "bytes", "v": 0}, {"$": "bytes", "v": 0}]
    with pytest.raises(ValueError, match="twice"):
        decode(wire, buffers=[io.BytesIO(b"x")])


def test_a_buffer_of_broken_numbers_is_refused() -> None:
    with pytest.raises(ValueError):
        decode({"$": "floats", "v": 0}, buffers=[io.BytesIO(b"x" * 9)])


def test_buffers_are_counted_as_what_they_become() -> None:
    with pytest.raises(values.TooLarge):
        decode({"$": "floats", "v": 0}, 8000, [io.BytesIO(bytes(8 * 200))])
    assert decode({"$": "floats", "v": 0}, 16000, [io.BytesIO(bytes(8 * 200))]) == [0.0] * 200

"""Frames and their JSON: what was written comes back, and nothing else is accepted."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.guest import protocol
from belljar.guest.protocol import Decoder, ProtocolError, dumps, encode, loads

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
frames = st.lists(st.tuples(st.sampled_from(sorted(protocol.FROM_GUEST)), st.binary(max_size=50)))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at the given places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(frames, st.lists(st.integers(min_value=0)))
def test_frames_survive_any_cutting_of_the_stream(
    sent: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(encode(kind, payload) for kind, payload in sent)
    decoder = Decoder()
    received = [frame for piece in pieces(stream, cuts) for frame in decoder.feed(piece)]
    assert [(frame.kind, frame.payload) for frame in received] == sent
    assert decoder.pending == 0


@given(frames, st.lists(st.integers(min_value=0)), st.lists(st.integers(1, 90), min_size=1))
def test_large_frames_may_be_read_into_their_room(
    sent: list[tuple[int, bytes]], cuts: list[int], reads: list[int]
) -> None:
    """With every frame a large one, and each read going where the decoder wants it."""
    stream = b"".join(encode(kind, payload) for kind, payload in sent)
    decoder, received, large = Decoder(), [], protocol._LARGE
    protocol._LARGE = 0
    try:
        for piece in pieces(stream, cuts):
            left = piece
            while left:
                room, size = decoder.wanted, reads[len(left) % len(reads)]
                if room is None:
                    received += decoder.feed(left[:size])
                else:
                    size = min(size, len(room), len(left))
                    room[:size] = left[:size]
                    received += decoder.filled(size)
                left = left[size:]
    finally:
        protocol._LARGE = large
    assert [(frame.kind, frame.payload) for frame in received] == sent
    assert (decoder.pending, decoder.wanted) == (0, None)


def test_a_large_frame_is_received_once_and_copied_never() -> None:
    size = 32 << 20
    decoder, piece = Decoder(), bytes(1 << 18)
    tracemalloc.start()
    try:
        frames = decoder.feed(bytes((protocol.BUFFER,)) + size.to_bytes(4, "big"))
        while not frames:
            frames = decoder.feed(piece)
        assert len(frames[0].payload) == size
        assert tracemalloc.get_traced_memory()[1] < size + (2 << 20)
    finally:
        tracemalloc.stop()


def test_a_length_over_the_cap_is_refused_at_the_header() -> None:
    decoder = Decoder(max_frame=100)
    assert [f.payload for f in decoder.feed(encode(protocol.VALUE, b"x" * 100))] == [b"x" * 100]
    with pytest.raises(ProtocolError, match="over the cap"):
        decoder.feed(encode(protocol.VALUE, b"x" * 101)[: protocol.HEADER])
    assert decoder.pending == 0


def test_a_huge_length_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            Decoder().feed(bytes([protocol.VALUE]) + b"\xff\xff\xff\xff")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_complete_frames_before_a_malformed_one_are_handed_over() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError, match="unknown frame kind 0x00") as caught:
        decoder.feed(encode(protocol.VALUE, b"1") + b"\x00" * protocol.HEADER)
    assert [frame.payload for frame in caught.value.frames] == [b"1"]


def test_a_stream_that_lost_its_framing_never_regains_it() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError):
        decoder.feed(b"\x00" * protocol.HEADER)
    with pytest.raises(ProtocolError):
        decoder.feed(encode(protocol.END))


@pytest.mark.parametrize("kind", sorted(protocol.FROM_HOST))
def test_a_guest_cannot_send_what_only_hosts_send(kind: int) -> None:
    with pytest.raises(ProtocolError):
        Decoder(protocol.FROM_GUEST).feed(encode(kind))
    assert Decoder(protocol.FROM_HOST).feed(encode(kind))[0].kind == kind


@given(json_values)
def test_json_comes_back_as_it_was_written(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert json.loads(dumps(value)) == value


@given(json_values)
def test_both_codecs_write_and_read_the_same(value: Any) -> None:
    accelerated_scan, accelerated_write = protocol._accelerated_codec()
    plain_scan, plain_write = protocol._plain_codec()
    assert accelerated_write(value) == plain_write(value)
    assert accelerated_scan(plain_write(value), 0) == plain_scan(plain_write(value), 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", {"a": -math.inf}, {1, 2}])
def test_what_json_has_no_form_for_is_not_written(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        dumps(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b" 1", b"1 ", b"1 2", b"NaN", b"1e999", b"[-1e999]", b"[Infinity]",
        b"-Infinity", b'"\\ud800"', b'"\\uDC00"',
        b'{"a":1', b'{"a":1,}', b"[1,]", b"'a'", b'"\n"', b"[]]", b"\xff", b'"\xed\xa0\x80"',
        b'"\\x"', b"01", b"nul", b"{1:2}", b"[" * 300 + b"]" * 300, b"[" * 1_000_000, b"9" * 401,
        b'{"":' * 100_000, b'"', b'"\\', b"\\", b'\\"', b"\xef\xbb\xbf1",
    ],
)  # fmt: skip
def test_anything_but_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        loads(data)


def test_an_escaped_backslash_before_ud_is_text_and_not_a_surrogate() -> None:
    assert loads(dumps("\\ud800 \\\\ud800")) == "\\ud800 \\\\ud800"


def test_of_duplicate_keys_the_last_wins() -> None:
    assert loads(b'{"a":1,"a":2}') == {"a": 2}


def test_nesting_up_to_the_cap_is_read() -> None:
    depth = protocol.MAX_DEPTH
    value = loads(b"[" * depth + b"]" * depth)
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


@pytest.mark.parametrize("item", [b"[]", b'{"":0}', b"0", b'""', b'"[,["'])
def test_too_many_values_are_refused_before_they_are_built(item: bytes) -> None:
    assert len(loads(b"[" + b",".join([item] * 100) + b"]", max_nodes=400)) == 100
    many = b"[" + b",".join([item] * (protocol.MAX_NODES + 1)) + b"]"
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="more than"):
            loads(many)
        # One copy of the text, and nothing for every value.
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_punctuation_inside_text_is_not_counted() -> None:
    text = '[{,"\\' * 1000
    assert loads(dumps([text, text]), max_nodes=2, max_depth=1) == [text, text]


@given(st.binary(max_size=200))
def test_loads_raises_nothing_but_its_own_error(data: bytes) -> None:
    try:
        value = loads(data)
    except ProtocolError:
        return
    assert loads(dumps(value)) == value

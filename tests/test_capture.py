"""Bounded capture: never more than the cap, the right head and tail, and nothing lost unsaid."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.capture import HeadTail

# Bytes as programs write them: text of one to four bytes a character, and rubbish between.
PIECES = st.lists(
    st.one_of(st.binary(max_size=64), st.text(max_size=32).map(str.encode), st.just(b"\xff" * 9)),
    max_size=30,
)
CAPS = st.integers(1, 400)
MARKER = re.compile(rb"\n\[\.\.\. (\d+) bytes dropped \.\.\.\]\n")


def fed(cap: int, pieces: list[bytes]) -> tuple[HeadTail, list[bytes]]:
    captured = HeadTail(cap)
    return captured, [captured.feed(piece) for piece in pieces]


@given(CAPS, PIECES)
def test_output_within_the_cap_is_kept_whole_and_seen_live(cap: int, pieces: list[bytes]) -> None:
    whole = b"".join(pieces)[:cap]
    captured, live = fed(cap, [whole[i : i + 7] for i in range(0, len(whole), 7)])
    assert captured.bytes() == b"".join(live) == whole
    assert captured.rest() == b""
    assert not captured.truncated


@given(CAPS, PIECES)
def test_never_more_than_the_cap_is_kept(cap: int, pieces: list[bytes]) -> None:
    captured, live = fed(cap, pieces)
    assert captured.total == sum(map(len, pieces))
    assert captured.truncated == (captured.total > cap)
    assert len(captured.bytes()) <= cap
    assert len(b"".join(live)) <= cap


@given(CAPS, PIECES)
def test_text_is_within_the_cap_and_can_always_be_encoded(cap: int, pieces: list[bytes]) -> None:
    text = fed(cap, pieces)[0].text()
    assert len(text.encode("utf-8")) <= cap


def test_text_of_bad_bytes_loses_none_of_its_neighbours() -> None:
    # Fourteen characters of four bytes and four bad bytes: as U+FFFD they would not fit.
    captured, _ = fed(60, ["\U0001f600".encode() * 14 + b"\xff\xfe\xff\xfe"])
    assert captured.text() == "\U0001f600" * 14 + "????"
    roomy, _ = fed(100, ["\U0001f600".encode() * 14 + b"\xff"])
    assert roomy.text() == "\U0001f600" * 14 + "\ufffd"


@given(CAPS, PIECES)
def test_what_is_dropped_is_between_a_true_head_and_a_true_tail(
    cap: int, pieces: list[bytes]
) -> None:
    captured, _ = fed(cap, pieces)
    whole, kept = b"".join(pieces), captured.bytes()
    if not captured.truncated:
        return
    head = whole[: cap // 2]
    assert kept.startswith(head)
    marker = MARKER.match(kept, len(head))
    # Random output does not look like a marker; a cap too small for one has head and tail only.
    tail = kept[marker.end() :] if marker else kept[len(head) :]
    assert whole.endswith(tail)
    if marker:
        assert int(marker[1]) == len(whole) - len(head) - len(tail)
    else:
        assert len(kept) == cap


@given(CAPS, PIECES)
def test_a_live_reader_sees_the_beginning_and_the_end(cap: int, pieces: list[bytes]) -> None:
    captured, live = fed(cap, pieces)
    whole, seen, rest = b"".join(pieces), b"".join(live), captured.rest()
    assert seen == whole[:cap]
    marker = MARKER.match(rest)
    if marker is None:
        assert seen + rest == whole
    else:
        tail = rest[marker.end() :]
        assert whole.endswith(tail)
        assert int(marker[1]) == len(whole) - len(seen) - len(tail)


@pytest.mark.parametrize("size", [2, 1 << 15])
def test_memory_is_bounded_however_the_output_is_cut(size: int) -> None:
    cap = 1 << 17
    captured = HeadTail(cap)
    tracemalloc.start()
    try:
        for number in range(4 * cap // size):
            captured.feed((number % 65536).to_bytes(size, "big"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert captured.total == 4 * cap
    assert peak < 4 * cap

"""The host's side: any bytes at all are survived, and what was honest before them is kept."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.errors import RequestError
from belljar.guest import protocol, values
from belljar.guest.displays import MAX_DISPLAYS
from belljar.guest.failures import MAX_MESSAGE, MAX_TRACEBACK
from belljar.guest.protocol import DISPLAY, END, ERROR, READY, VALUE, encode
from belljar.report import Hint, Report, run_frame
from belljar.types import Display, GuestError, Request, Result, Status


def frame(kind: int, content: object = None) -> bytes:
    return encode(kind, b"" if content is None else protocol.dumps(content))


TAGS = sorted([*values._CONTAINERS, *values._READERS])
AN_ERROR = {"type": "OSError", "message": "m", "traceback": "t", "errno": 28}
HONEST = [
    frame(READY, {"protocol": 1, "python": "3.12.1"}),
    frame(DISPLAY, {"text/plain": "shown", "image/png": "iVBO"}),
    frame(VALUE, values.encode({"a": (1, 2.5, b"x")})),
    frame(ERROR, AN_ERROR),
    frame(END),
]


def told(*frames: bytes) -> Report:
    report = Report()
    for piece in frames:
        report.feed(piece)
    return report


def everything(report: Report) -> Any:
    """All that a report says, as the strict JSON of the result that is made of it."""
    result = Result(
        id="x",
        status=Status.ERROR,
        value=report.value,
        error=report.error,
        displays=report.displays,
        warnings=report.warnings,
    )
    text = json.dumps(result.to_dict(), allow_nan=False, ensure_ascii=False)
    text.encode("utf-8")
    return text, report.hint, report.ended, report.ready


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def test_an_honest_report_is_read() -> None:
    report = told(*HONEST)
    assert report.ready
    assert report.ended
    assert report.value == {"a": (1, 2.5, b"x")}
    assert report.error == GuestError(type="OSError", message="m", traceback="t")
    assert report.hint == Hint(errno=28)
    assert report.displays == (Display(data={"text/plain": "shown", "image/png": "iVBO"}),)
    assert report.warnings == ()


def test_silence_is_a_report_too() -> None:
    report = Report()
    assert (report.value, report.error, report.displays) == (None, None, ())
    assert (report.ready, report.ended, report.hint, report.warnings) == (False, False, Hint(), ())


@given(st.lists(st.integers(min_value=0)))
def test_the_cutting_of_the_stream_does_not_matter(places: list[int]) -> None:
    stream = b"".join(HONEST)
    assert everything(told(*cut(stream, places))) == everything(told(stream))


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_any_bytes_are_survived(pieces: list[bytes]) -> None:
    everything(told(*pieces))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.sampled_from(["type", "message", "traceback", "text/plain", "image/png"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["type", "message", "traceback", "errno", "memory", "text/html"])
        | st.text(max_size=5),
        inner,
        max_size=5,
    )
    | st.fixed_dictionaries({"$": st.sampled_from(TAGS), "v": inner}),
    max_leaves=10,
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(sorted(protocol.FROM_GUEST)), json_values), max_size=8))
def test_any_well_formed_frames_with_any_json_are_survived(sent: list[tuple[int, Any]]) -> None:
    everything(told(*(frame(kind, content) for kind, content in sent)))


@settings(max_examples=500)
@given(st.data())
def test_an_honest_stream_with_anything_changed_is_survived(data: st.DataObject) -> None:
    stream = bytearray(b"".join(HONEST))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(stream)))
        match data.draw(st.sampled_from(["insert", "delete", "change", "repeat"])):
            case "insert":
                stream[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "delete":
                del stream[at : at + data.draw(st.integers(1, 8))]
            case "change":
                stream[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "repeat":
                stream[at:at] = stream[at : at + data.draw(st.integers(1, 40))]
    places = data.draw(st.lists(st.integers(min_value=0), max_size=5))
    assert everything(told(*cut(bytes(stream), places))) == everything(told(bytes(stream)))


@pytest.mark.parametrize(
    "malformed",
    [
        b"\x00\x00\x00\x00\x00",
        b"\xff" * 16,
        encode(protocol.RUN, b"{}"),
        bytes([VALUE]) + b"\xff\xff\xff\xff",
        frame(ERROR, {"type": "E"}),
        frame(ERROR, [1]),
        frame(ERROR, {**AN_ERROR, "message": 3}),
        encode(ERROR, b"{"),
        frame(DISPLAY, {"text/plain": 3}),
        frame(DISPLAY, {"nonsense": "x"}),
        frame(DISPLAY, {"image/png": "not base64"}),
        frame(DISPLAY, ["x"]),
        encode(DISPLAY, b'{"text/plain":"\\ud800"}'),
        frame(protocol.CALL, {}),
        frame(protocol.OUTPUT, {}),
    ],
)
def test_after_something_malformed_the_rest_is_ignored_and_said_so(malformed: bytes) -> None:
    report = told(HONEST[2], malformed, HONEST[1], HONEST[3], HONEST[4])
    assert report.value == {"a": (1, 2.5, b"x")}
    assert (report.error, report.displays, report.ended) == (None, (), False)
    assert len(report.warnings) == 1
    assert "broke the protocol" in report.warnings[0]
    control = told(HONEST[2], HONEST[1], HONEST[3], HONEST[4])
    assert control.ended
    assert control.error is not None


@pytest.mark.parametrize(
    "payload", [b"nope", b'{"$":"tuple"}', b"NaN", b'{"$":"pickle","v":"gASVAQ=="}', b"[" * 10**6]
)
def test_a_value_that_cannot_be_read_is_none_and_a_warning(payload: bytes) -> None:
    report = told(encode(VALUE, payload), HONEST[3], HONEST[4])
    assert report.value is None
    assert report.error is not None
    assert report.ended
    assert len(report.warnings) == 1
    assert "value could not be read" in report.warnings[0]


def test_nothing_counts_after_the_end() -> None:
    report = told(*HONEST, frame(VALUE, "FORGED"), b"\xff" * 50)
    assert report.value == {"a": (1, 2.5, b"x")}
    assert report.warnings == ()


def test_a_flood_is_cut_off() -> None:
    flood = frame(VALUE, "x" * 1000)
    within, past = Report(max_bytes=100_000), Report(max_bytes=100_000)
    for _ in range(90):
        within.feed(flood)
    assert (within.value, within.warnings) == ("x" * 1000, ())
    for _ in range(1000):
        past.feed(flood)
    assert "more than is allowed" in past.warnings[0]


def test_a_flood_of_unfinished_frames_costs_bounded_memory() -> None:
    report = Report(max_bytes=1 << 40)
    piece = b"x" * (1 << 20)
    tracemalloc.start()
    try:
        report.feed(bytes([VALUE]) + (8 << 20).to_bytes(4, "big"))
        for _ in range(200):
            report.feed(piece)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert len(report.warnings) == 2


def test_long_errors_are_capped_again_here() -> None:
    long = {"type": "T" * 10**6, "message": "m" * 10**6, "traceback": "t" * 10**6}
    error = told(frame(ERROR, long)).error
    assert error is not None
    assert len(error.type) <= 200
    assert len(error.message) <= MAX_MESSAGE
    assert len(error.traceback) <= MAX_TRACEBACK


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"errno": 24}, Hint(errno=24)),
        ({"errno": True}, Hint()),
        ({"errno": -1}, Hint()),
        ({"errno": 10**20}, Hint()),
        ({"errno": "24"}, Hint()),
        ({"memory": True}, Hint(memory=True)),
        ({"memory": 1}, Hint()),
    ],
)
def test_hints_are_read_strictly(fields: dict[str, Any], hint: Hint) -> None:
    assert told(frame(ERROR, {"type": "E", "message": "", "traceback": "", **fields})).hint == hint


def test_displays_are_passed_on_as_they_come_and_counted() -> None:
    seen: list[Display] = []
    report = Report(on_display=seen.append)
    report.feed(HONEST[1])
    assert [display.data["text/plain"] for display in seen] == ["shown"]
    for _ in range(MAX_DISPLAYS + 10):
        report.feed(HONEST[1])
    assert len(seen) == len(report.displays) == MAX_DISPLAYS
    assert report.warnings == (f"only the first {MAX_DISPLAYS} displays were kept",)


def sent(request: Request) -> dict[str, Any]:
    (received,) = protocol.Decoder(protocol.FROM_HOST).feed(run_frame(request, "main.py"))
    assert received.kind == protocol.RUN
    content: dict[str, Any] = protocol.loads(received.payload)
    return content


def test_a_request_becomes_one_frame() -> None:
    content = sent(Request(code="x = 'é'", args=("a", "b"), context={"n": (1,)}))
    assert content == {
        "code": "x = 'é'",
        "args": ["a", "b"],
        "filename": "main.py",
        "context": {"n": {"$": "tuple", "v": [1]}},
    }


@pytest.mark.parametrize("name", ["not a name", "class", "", "a.b", "1a", 3])
def test_a_context_name_must_be_a_variable_name(name: Any) -> None:
    with pytest.raises(RequestError, match="is not a variable name") as caught:
        run_frame(Request(code="", context={name: 1}))
    assert caught.value.field == "context"
    assert sent(Request(code="", context={"name": 1}))["context"] == {"name": 1}


def test_a_context_value_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(RequestError, match=r"'handle'.*cannot be sent") as caught:
        run_frame(Request(code="", context={"fine": 1, "handle": object()}))
    assert caught.value.field == "context"


@pytest.mark.parametrize(
    ("request_", "field"),
    [(Request(code="'\ud800'"), "code"), (Request(code="", args=("\udcff",)), "args")],
)
def test_half_characters_in_a_request_are_refused(request_: Request, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        run_frame(request_)
    assert caught.value.field == field

"""The values that cross the edges: stable JSON, no surprises in text, nothing mutable."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.types import (
    Change,
    Display,
    Enforcement,
    File,
    GuestError,
    KillProof,
    Mount,
    Request,
    Result,
    Status,
    Usage,
    clean_text,
    new_id,
)

KEYS = [
    "id", "status", "exit_code", "signal", "limit_hit", "explanation", "stdout", "stderr",
    "truncated", "value", "error", "displays", "files", "changes", "usage", "timings",
    "enforcement", "kill", "settled", "backend", "backend_reason", "fallback", "retried",
    "isolation", "warnings",
]  # fmt: skip

any_text = st.text(st.characters(), max_size=20)  # lone surrogates included
plain_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), any_text, st.binary(max_size=8)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(any_text, inner, max_size=3),
    ),
    max_leaves=8,
)


@given(
    status=st.sampled_from([*Status]),
    text=any_text,
    value=plain_values,
    data=st.one_of(st.none(), st.binary(max_size=10)),
)
def test_any_result_is_strict_json(status: Status, text: str, value: Any, data: Any) -> None:
    result = Result(
        status=status,
        stdout=text,
        stderr=text,
        value=value,
        error=GuestError(type=text, message=text, traceback=text),
        displays=(Display(data={"text/plain": text}),),
        files={text: File(path=text, size=3, data=data)},
        changes=(Change(path=text, kind="created", size=3),),
        kill=KillProof(reason="timeout", survivors=0, seconds=0.1),
        enforcement={"memory": Enforcement(state="enforced", by="rlimit")},
    )
    shown = result.to_dict()
    assert list(shown) == KEYS
    encoded = json.dumps(shown, allow_nan=False)
    encoded.encode("utf-8")
    assert json.loads(encoded) == shown


def test_the_keys_of_a_result_are_pinned() -> None:
    shown = Result(status=Status.SUCCESS).to_dict()
    assert list(shown) == KEYS
    assert shown["error"] is None
    assert shown["kill"] is None
    assert list(shown["usage"]) == [
        "wall", "cpu", "peak_memory", "fuel", "stdout_bytes", "stderr_bytes",
    ]  # fmt: skip


def test_every_part_of_a_result_is_in_its_json() -> None:
    fields = {field.name for field in dataclasses.fields(Result)}
    assert fields == set(KEYS)


def test_statuses_are_the_documented_words() -> None:
    assert [status.value for status in Status] == [
        "success", "error", "timeout", "oom", "fuel_exhausted", "limit", "refused", "killed",
    ]  # fmt: skip


@pytest.mark.parametrize("status", [*Status])
def test_only_success_is_success(status: Status) -> None:
    assert Result(status=status).success == (status is Status.SUCCESS)


def test_file_contents_cross_as_base64() -> None:
    file = File(path="a", size=2, data=b"\xff\x00")
    shown = Result(status=Status.SUCCESS, files={"a": file}).to_dict()["files"]["a"]
    assert base64.b64decode(shown["data"]) == b"\xff\x00"
    assert (shown["size"], shown["truncated"]) == (2, False)
    unasked = Result(status=Status.SUCCESS, files={"a": File(path="a", size=2)}).to_dict()
    assert unasked["files"]["a"]["data"] is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a/b.csv", "text/csv"),
        ("plot.png", "image/png"),
        ("table.csv.gz", "application/gzip"),
        ("out.tar.xz", "application/x-xz"),
        ("old.Z", "application/octet-stream"),
        (".png", "image/png"),
        ("no-suffix", "application/octet-stream"),
        ("", "application/octet-stream"),
        ("data:text/html,x", "application/octet-stream"),
        ("http://[x", "application/octet-stream"),
    ],
)
def test_a_mime_type_is_what_the_suffix_says(path: str, kind: str) -> None:
    assert Change(path=path, kind="created").mime_type == kind


def test_a_file_s_text_is_its_data_whatever_that_is() -> None:
    assert File(path="a", size=3, data="ü".encode()).text == "ü"
    assert File(path="a", size=1, data=b"\xff").text == "\ufffd"
    assert File(path="a", size=1).text == ""


@given(any_text)
def test_clean_text_changes_only_what_utf8_cannot_say(text: str) -> None:
    clean = clean_text(text)
    clean.encode("utf-8")
    assert len(clean) == len(text)
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert clean == text


def test_ids_are_unguessable_and_distinct() -> None:
    made = {new_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(len(each) == 16 and int(each, 16) >= 0 for each in made)
    assert Request(code="1").id != Request(code="1").id


@pytest.mark.parametrize(
    "value",
    [
        Request(code="1"), Result(status=Status.SUCCESS), Mount("a", "b"), Usage(),
        File(path="a", size=1), GuestError(type="a", message="b"), Display(data={}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_are_frozen(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, "changed")


def test_mounts_are_read_only_unless_said() -> None:
    assert Mount("/src", "dst").mode == "ro"

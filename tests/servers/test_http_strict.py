"""Bodies that are wrong are answered with 4xx and the field; none is half understood."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest
from http_server import Server
from hypothesis import example, given, settings
from hypothesis import strategies as st

from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BelljarError, RequestError
from belljar.guest import values
from belljar.servers.http import strict_json, wire
from belljar.servers.http.problems import problem, status_of
from belljar.servers.remote import Rights, bounded
from belljar.testing import FakeBackend


def post(server: Server, body: bytes) -> tuple[int, dict[str, Any]]:
    with server.client() as client:
        headers = {"Content-Type": "application/json"}
        answer = client.post("/v1/run", content=body, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, "body"),
        (b"{", 400, "body"),
        (b"\xff", 400, "body"),
        (b"\xef\xbb\xbf{}", 400, "body"),
        (b"{} {}", 400, "body"),
        (b"{'code': 1}", 400, "body"),
        (b'{"code": "1",}', 400, "body"),
        (b"[]", 400, "body"),
        (b'"code"', 400, "body"),
        (b'{"code": "1", "code": "2"}', 400, "code"),
        (b'{"code": "1", "env": {"A": "1", "A": "2"}}', 400, "env.A"),
        (b'{"code": "1", "env": {"A": {"x": 1, "x": 2}, "A": "2"}}', 400, "env.A"),
        (b'{"code": "1", "timeout": NaN}', 400, "timeout"),
        (b'{"code": "1", "timeout": -Infinity}', 400, "timeout"),
        (b'{"code": "1", "policy": {"timeout": Infinity}}', 400, "policy.timeout"),
        (b'{"code": "1", "timeout": 1e999}', 400, "timeout"),
        (b'{"code": "1", "context": {"x": [0, NaN]}}', 400, "context.x[1]"),
        (b'{"code": "1", "memory": ' + b"9" * 5000 + b"}", 400, "memory"),
        (b'{"code": "\\ud800"}', 400, "code"),
        (b'{"code": "1", "files": {"\\ud800": ""}}', 400, "files"),
        (b'{"code": "1", "context": ' + b'{"x":' * 200 + b"1" + b"}" * 200 + b"}", 400, None),
        (b"[" * 100_000, 400, "body"),
        (b'{"code": "1", "network": ' + b"[" * 500 + b"]" * 500 + b"}", 400, None),
        (b"{}", 422, "code"),
        (b'{"code": null}', 422, "code"),
        (b'{"code": 1}', 422, "code"),
        (b'{"code": "a\\u0000b"}', 422, "code"),
        (b'{"code": "1", "cmd": "ls"}', 422, "cmd"),
        (b'{"code": "1", "command": ["ls"]}', 422, "command"),
        (b'{"code": "1", "user": "0:0"}', 422, "user"),
        (b'{"code": "1", "docker_host": "tcp://192.0.2.1"}', 422, "docker_host"),
        (b'{"code": "1", "on_stdout": "print"}', 422, "on_stdout"),
        (b'{"code": "1", "functions": {}}', 422, "functions"),
        (b'{"code": "1", "timeout": true}', 422, "timeout"),
        (b'{"code": "1", "timeout": []}', 422, "timeout"),
        (b'{"code": "1", "timeout": "soon"}', 422, "timeout"),
        (b'{"code": "1", "timeout": -1}', 422, "timeout"),
        (b'{"code": "1", "timeout": 1e300}', 422, "timeout"),
        (b'{"code": "1", "memory": 99999999999999999999999}', 422, "memory"),
        (b'{"code": "1", "processes": 1.5}', 422, "processes"),
        (b'{"code": "1", "retry": 1}', 422, "retry"),
        (b'{"code": "1", "retry": "yes"}', 422, "retry"),
        (b'{"code": "1", "args": "a b"}', 422, "args"),
        (b'{"code": "1", "args": [1]}', 422, "args"),
        (b'{"code": "1", "args": {"a": 1}}', 422, "args"),
        (b'{"code": "1", "env": {"A": 1}}', 422, "env"),
        (b'{"code": "1", "env": {"A=B": "1"}}', 422, "env"),
        (b'{"code": "1", "stdin": {"base64": "??"}}', 422, "stdin.base64"),
        (b'{"code": "1", "stdin": {"base64": "AA"}}', 422, "stdin.base64"),
        (b'{"code": "1", "stdin": {"hex": "00"}}', 422, "stdin"),
        (b'{"code": "1", "stdin": {"base64": "", "x": 1}}', 422, "stdin"),
        (b'{"code": "1", "files": {"a": {"base64": "AA=="}, "b": {"base64": "A"}}}', 422,
         "files.b.base64"),
        (b'{"code": "1", "files": ["/etc/passwd"]}', 422, "files"),
        (b'{"code": "1", "files": {"a": {"path": "/etc/passwd"}}}', 422, "files"),
        (b'{"code": "1", "files": {"../a": ""}}', 422, "files"),
        (b'{"code": "1", "files": {"/etc/a": ""}}', 422, "files"),
        (b'{"code": "1", "files": {"a": "", "a/b": ""}}', 422, "files"),
        (b'{"code": "1", "outputs": ["/etc/*"]}', 422, "outputs"),
        (b'{"code": "1", "context": {"a b": 1}}', 422, "context"),
        (b'{"code": "1", "context": {"x": {"$": "os.system", "v": "id"}}}', 422, "context.x"),
        (b'{"code": "1", "context": {"x": {"$": "bytes"}}}', 422, "context.x"),
        (b'{"code": "1", "language": "cobol"}', 422, "language"),
        (b'{"code": "1", "language": ["python"]}', 422, "language"),
        (b'{"code": "1", "level": "lax"}', 422, "level"),
        (b'{"code": "1", "backend": "none"}', 422, "backend"),
        (b'{"code": "1", "min_isolation": "bricks"}', 422, "min_isolation"),
        (b'{"code": "1", "modules": 5}', 422, "modules"),
        (b'{"code": "1", "policy": {"timout": 1}}', 422, "timout"),
        (b'{"code": "1", "policy": []}', 422, "policy"),
        (b'{"code": "1", "settle": "never"}', 422, "settle"),
        (b'{"code": "1", "prefer": "luck"}', 422, "prefer"),
        (b'{"code": "1", "workdir": "/etc"}', 422, "workdir"),
        (b'{"code": "1", "workdir": "../.."}', 422, "workdir"),
        (b'{"code": "1", "require_libraries": ["a b"]}', 422, "require_libraries"),
        (b'{"code": "1", "min_isolation": "vm"}', 422, None),
        (b'{"code": "1", "require_libraries": ["no_such_library"]}', 422, None),
        (b'{"code": "1", "language": "python3.99"}', 422, None),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_with_the_field(
    server: Server, body: bytes, status: int, field: str | None
) -> None:
    answered, told = post(server, body)
    assert answered == told["status"] == status, told
    assert field in (None, told.get("field")), told
    assert told["code"]
    assert told["type"] == f"urn:belljar:problem:{told['code']}"


def null_column(rows: int) -> dict[str, Any]:
    """An Arrow table of no bytes to speak of, which takes 8 bytes a row."""
    return values.encode(pa.table({"a": pa.nulls(rows)}))


def test_a_request_has_a_bounded_number_of_everything(server: Server) -> None:
    """With the field that is too much; one less is a run."""
    many: dict[str, tuple[int, Any, Any]] = {
        "args": (10_000, "a", ["a"]),
        "env": (1000, "a", None),
        "files": (10_000, "", None),
        "outputs": (1000, "a", ["a"]),
        "context": (1000, 1, None),
        "require_libraries": (1000, "os", ["os"]),
    }
    for field, (most, value, words) in many.items():
        for count in (most, most + 1):
            given = words * count if words else {f"v{place}": value for place in range(count)}
            status, told = post(server, json.dumps({"code": "1", field: given}).encode())
            if count > most:
                assert (status, told.get("field")) == (422, field), told
            else:
                assert status == 200, told


def test_names_and_variables_have_a_bounded_length(server: Server) -> None:
    for field, wrong, fits in (
        ("env", {"A" * 5000: ""}, {"A" * 4000: ""}),
        ("env", {"A": "é" * (64 << 10)}, {"A": "é" * (63 << 10)}),
        ("env", {f"A{i}": "x" * 100_000 for i in range(11)}, {"A": "x" * 100_000}),
        ("files", {"a/" * 3000 + "a": ""}, {"a/a": ""}),
        ("context", {"a" * 5000: 1}, {"a" * 4000: 1}),
    ):
        status, told = post(server, json.dumps({"code": "1", field: wrong}).encode())
        assert (status, told.get("field")) == (422, field), told
        assert post(server, json.dumps({"code": "1", field: fits}).encode())[0] == 200


def test_all_variables_of_a_request_share_one_budget(engine: Engine) -> None:
    column = null_column(4 << 20)  # 32 MiB of memory
    few, many = ({f"v{i}": column for i in range(count)} for count in (2, 20))
    wire.parse(json.dumps({"code": "1", "context": few}).encode(), engine, Rights())
    with pytest.raises(RequestError) as refusal:
        wire.parse(json.dumps({"code": "1", "context": many}).encode(), engine, Rights())
    assert refusal.value.field.startswith("context.v")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"code":"1","args":[' + b"1," * 200_000 + b"1]}", "args"),
        (b'{"code":"1","network":[' + b"1," * 200_000 + b"1]}", "network"),
        (b'{"code":"1",' + b",".join(b'"k%d":0' % i for i in range(100_000)) + b"}", "k0"),
        (
            b'{"code":"1","files":{"a":{' + b",".join(b'"k%d":0' % i for i in range(100_000))
            + b"}}}",
            "files",
        ),
        (b'{"code":"\\u0041","context":{"' + b"a" * 10_000 + b'":[' + b"0," * 20_000 + b"0]}}",
         "context"),
    ],
    ids=["args", "network", "names", "content", "places"],
)  # fmt: skip
def test_a_wrong_body_takes_no_more_memory_than_a_right_one(
    engine: Engine, body: bytes, field: str
) -> None:
    """A validator describes each wrong item, and a reader names the place of each one."""
    tracemalloc.start()
    try:
        with pytest.raises(BelljarError) as refusal:
            wire.parse(body, engine, Rights())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusal.value.field == field  # type: ignore[attr-defined]
    assert peak < 40 << 20


def test_lists_and_objects_of_a_body_are_counted_before_they_are_made() -> None:
    for each in (b"[]", b"{}", b'{"":0}'):
        text = b"[" + b",".join([each] * strict_json.MAX_CONTAINERS) + b"]"
        with pytest.raises(strict_json.Malformed, match="lists and objects"):
            strict_json.loads(text)
    # In strings they are none: of a file that is JSON itself, say.
    text = json.dumps({"a": '[{"b": "\\"}]' * strict_json.MAX_CONTAINERS})
    assert len(strict_json.loads(text.encode())["a"]) > strict_json.MAX_CONTAINERS
    # A quote without its second one is looked for once, not from every other place again.
    with pytest.raises(strict_json.Malformed):
        strict_json.loads(b'"[' + b'\\"[' * strict_json.MAX_CONTAINERS)


def test_a_problem_repeats_no_megabyte(server: Server) -> None:
    for option in ("language", "level", "backend", "min_isolation"):
        _, told = post(server, json.dumps({"code": "1", option: "x" * 1_000_000}).encode())
        assert len(json.dumps(told)) < 10_000


def test_a_wrong_value_is_not_repeated(server: Server) -> None:
    _, told = post(server, json.dumps({"code": "1", "env": ["API_KEY=hunter2"]}).encode())
    assert "hunter2" not in json.dumps(told)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
@settings(max_examples=200)
def test_what_is_strict_json_is_read_as_it_was_written(value: Any) -> None:
    assert strict_json.loads(json.dumps(value).encode()) == value
    assert strict_json.loads(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\ud8f0e9NaInfity-+. ').map(str.encode))
@settings(max_examples=500)
@example(b'{"a": 1, "a": NaN, "b": {"a": 1e999}}')
@example(b'["\\ud83d\\ude00", "\\ud83d"]')
def test_any_bytes_are_json_or_malformed(data: bytes) -> None:
    try:
        value = strict_json.loads(data)
    except strict_json.Malformed as error:
        assert error.field
        return
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()
    assert json.loads(data) == value


ANY = st.sampled_from([*wire.OFFERED, "x", "command"])
ODD = JSON | st.sampled_from(
    ["auto", "any", "off", "vm", "strict", "python3.9", "a.txt", "/etc/passwd", "1s", "1G", "\0",
     {"base64": "AA=="}, {"base64": "A"}, {"$": "bytes", "v": "AA=="}, {"$": "dataframe", "v": 1},
     {"mode": "any"}, {"read_only": ["/etc"]}, ["a:b"], 2**70, -1, 0.5, True],
)  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(bounded(Settings()), backends={"fake": FakeBackend()})


@given(st.dictionaries(ANY, ODD, max_size=4), st.booleans())
@settings(max_examples=400, suppress_health_check=[])
def test_any_object_is_a_run_or_a_problem(
    engine: Engine, options: dict[str, Any], with_code: bool
) -> None:
    if with_code:
        options = {"code": "1", **options}
    try:
        job = wire.parse(json.dumps(options).encode(), engine, Rights())
    except BelljarError as error:
        status = status_of(error)
        assert 400 <= status < 500, (error, options)
        told = problem(error, status)
        json.dumps(told, allow_nan=False)
        assert told["field"]
    else:
        assert options["code"] == job.request.code
        assert not job.request.mounts
        assert not (job.request.image or job.request.python)
        assert all(not (isinstance(each, float) and math.isnan(each)) for each in options.values())

"""`POST /v1/run` over a real socket: every option arrives, and every answer is the engine's."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
from typing import Any

import httpx
import pytest
from http_server import Server

import belljar
from belljar.api import REQUEST_KEYS
from belljar.resolve import POLICY_KEYS
from belljar.servers.http.wire import OPTIONS, RunRequest


def test_curl_with_the_token_runs_code(server: Server) -> None:
    done = subprocess.run(
        [
            "curl", "-sS", "--fail", "-H", f"Authorization: Bearer {server.token}",
            "-H", "Content-Type: application/json", "-d", '{"code": "print(1); 6 * 7"}',
            f"{server.url}/v1/run",
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["stdout"], result["value"]) == ("success", "1\n", 42)


def test_the_answer_has_every_field_of_a_result_of_the_library(server: Server) -> None:
    assert server.run("1/0").keys() == belljar.run("1/0").to_dict().keys()
    assert server.run("1/0")["error"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"stdin": "hé"}, "stdout", "hé"),
        ({"stdin": {"base64": base64.b64encode("ü".encode()).decode()}}, "stdout", "ü"),
        ({"args": ["a", "b c"]}, "value", ["a", "b c"]),
        ({"env": {"GREETING": "hi"}}, "value", "hi"),
        ({"files": {"in.txt": "text"}}, "value", "text"),
        ({"files": {"in.txt": {"base64": "dGV4dA=="}}}, "value", "text"),
        ({"context": {"x": [1, None, {"a": 1.5}]}}, "value", [1, None, {"a": 1.5}]),
        ({"context": {"x": {"$": "bytes", "v": "AAE="}}}, "value", {"$": "bytes", "v": "AAE="}),
        ({"language": "bash", "code": "echo $0 >&2; echo bash"}, "stdout", "bash\n"),
        ({"timeout": "300ms", "code": "while True: pass"}, "limit_hit", "timeout"),
        ({"policy": {"timeout": 0.3}, "code": "while True: pass"}, "status", "timeout"),
        ({"memory": "64M", "code": "x = bytearray(10**9)"}, "status", "oom"),
        ({"level": "strict", "code": "import os"}, "status", "refused"),
        ({"level": "strict", "modules": "any", "code": "import os"}, "status", "success"),
        ({"backend": "subprocess"}, "backend", "subprocess"),
        ({"min_isolation": "jail"}, "status", "success"),
        ({"timeout": None, "env": None}, "status", "success"),
        ({"require_libraries": ["json"], "retry": True, "fallback": False}, "status", "success"),
    ],
)  # fmt: skip
def test_an_option_means_what_it_means_to_run(
    server: Server, options: dict[str, Any], field: str, expected: object
) -> None:
    codes = {
        "stdin": "import sys; print(sys.stdin.read(), end='')",
        "args": "import sys; sys.argv[1:]",
        "env": "import os; os.environ.get('GREETING')",
        "files": "open('in.txt').read()",
        "context": "x",
    }
    code = codes.get(next(iter(options)), "1")
    assert server.run(**{"code": code, **options})[field] == expected


def test_files_come_back_as_base64(server: Server) -> None:
    code = "open('out.bin', 'wb').write(open('in.bin', 'rb').read()[::-1])"
    files = {"in.bin": {"base64": "AAEC"}}
    result = server.run(code, files=files, outputs=["*.bin"])
    assert result["files"] == {
        "out.bin": {"size": 3, "data": "AgEA", "truncated": False, "saved": None}
    }
    assert result["changes"] == [
        {
            "path": "out.bin",
            "kind": "created",
            "size": 3,
            "sha256": hashlib.sha256(b"\2\1\0").hexdigest(),
            "mime_type": "application/octet-stream",
        }
    ]


def test_a_value_without_a_form_in_json_is_dropped_with_a_warning(server: Server) -> None:
    result = server.run("'\\ud800'")
    assert result["status"] == "success"


@pytest.mark.parametrize(
    ("option", "refused", "allowed"),
    [
        ("outputs_to", "/tmp/belljar-canary", None),
        ("outputs_total", "65M", "64M"),
        ("outputs_each", "65M", "64M"),
    ],
)
def test_a_remote_caller_has_files_in_the_answer_and_within_bounds(
    server: Server, option: str, refused: str, allowed: str | None
) -> None:
    body = {"code": "open('a', 'w').write('x')", "outputs": ["a"]}
    with server.client() as client:
        answer = client.post("/v1/run", json={**body, option: refused})
    assert answer.json()["code"] == "not_allowed"
    assert not os.path.exists("/tmp/belljar-canary")
    if allowed is not None:  # the control arm
        assert server.run(**body, **{option: allowed})["files"]["a"]["size"] == 1


def test_every_option_of_run_has_its_decision() -> None:
    given = {"code", *REQUEST_KEYS, *POLICY_KEYS, "level", "backend", "policy"}
    assert given - set(RunRequest.model_fields) == set(), "give it a line in wire.OPTIONS"
    assert set(OPTIONS) - given == set(), "these are no options of run any more"


def test_without_the_token_nothing_runs(server: Server) -> None:
    before = server.metric("sandbox_executions_total") if server.run("1") else 0
    for headers in ({}, {"Authorization": "Bearer bj_wrong"}, {"Authorization": "Basic x"}):
        answer = httpx.post(f"{server.url}/v1/run", json={"code": "1"}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert answer.json()["code"] in ("token_missing", "token_invalid")
    assert server.metric("sandbox_executions_total") == before

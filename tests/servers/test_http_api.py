"""The other routes: health, backends, metrics, the description, and a search for answers of 5xx."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import COMMAND, Server, environment, serving

from belljar.errors import ConfigError
from belljar.servers.http.listening import listen
from belljar.servers.http.wire import OFFERED


def get(server: Server, path: str, token: bool = True) -> httpx.Response:
    headers = {"Authorization": f"Bearer {server.token}"} if token else {}
    return httpx.get(server.url + path, headers=headers, timeout=100)


def test_liveness_needs_no_token_and_tells_nothing(server: Server) -> None:
    assert get(server, "/healthz", token=False).json() == {"status": "ok"}


def test_health_with_backends_runs_a_program_on_each(server: Server) -> None:
    assert get(server, "/healthz?backends", token=False).status_code == 401
    before = server.metric("sandbox_executions_total")
    told = get(server, "/healthz?backends").json()
    usable = [each["name"] for each in backends(server) if each["usable"]]
    assert list(told["backends"]) == usable
    assert all(each["ok"] for each in told["backends"].values()), told
    ran = server.metric("sandbox_executions_total") - before
    assert ran == len(usable)
    assert get(server, "/healthz?backends").json() == told, "the last answer is still fresh"
    assert server.metric("sandbox_executions_total") == before + ran


def test_health_is_503_where_a_backend_fails(tmp_path: Path) -> None:
    with serving(tmp_path, "--set", "ceiling.timeout=1ms") as server:
        answer = get(server, "/healthz?backends")
    assert answer.status_code == 503
    assert answer.json()["status"] in ("degraded", "failing")
    failed = [each for each in answer.json()["backends"].values() if not each["ok"]]
    assert all("longer than" in each["problem"] for each in failed), failed


def backends(server: Server) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = get(server, "/v1/backends").json()["backends"]
    return told


def test_backends_are_those_of_the_command(server: Server) -> None:
    done = subprocess.run(
        [*COMMAND, "backends", "--json"],
        capture_output=True, text=True, timeout=100, env=environment(server.directory),
    )  # fmt: skip
    told = json.loads(done.stdout)
    names = [(each["name"], each["isolation"]) for each in told["backends"]]
    assert [(each["name"], each["isolation"]) for each in backends(server)] == names
    inprocess = next(each for each in backends(server) if each["name"] == "inprocess")
    assert not inprocess["usable"]


def test_metrics_count_what_happened_under_their_exact_names(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.run("1")
        server.run("1/0")
        server.run("while True: pass", timeout=0.3)
        server.run("x = bytearray(10**9)", memory="64M")
        server.run("import os", level="strict")
        server.run("1", backend="wasm", fuel=10**10)
        with server.client() as client:
            text = client.get("/metrics").text
            assert client.get("/metrics").headers["Content-Type"].startswith("text/plain; version=")
        values = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.M))
        types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    assert {name: kind for name, kind in types.items() if name.startswith("sandbox_")} == {
        "sandbox_executions_total": "counter",
        "sandbox_execution_duration_ms": "histogram",
        "sandbox_fuel_consumed": "histogram",
        "sandbox_timeouts_total": "counter",
        "sandbox_oom_failures_total": "counter",
        "sandbox_success_rate": "gauge",
    }
    counts = {
        re.search(r'status="(\w+)"', name)[1]: value  # type: ignore[index]
        for name, value in values.items()
        if name.startswith("sandbox_executions_total") and "wasm" not in name
    }
    assert counts == {"success": "1", "error": "1", "timeout": "1", "oom": "1", "refused": "1"}
    assert values["sandbox_timeouts_total"] == "1"
    assert values["sandbox_oom_failures_total"] == "1"
    assert float(values["sandbox_success_rate"]) == pytest.approx(2 / 6)
    # The program that the lint refused never started.
    assert values["sandbox_execution_duration_ms_count"] == "5"
    assert values['sandbox_execution_duration_ms_bucket{le="+Inf"}'] == "5"
    assert float(values["sandbox_execution_duration_ms_sum"]) >= 300
    assert values["sandbox_fuel_consumed_count"] == "1"
    assert float(values["sandbox_fuel_consumed_sum"]) > 0


def test_the_description_has_every_option_and_its_examples_run(server: Server) -> None:
    document = get(server, "/openapi.json", token=False).json()
    assert document["openapi"].startswith("3.")
    assert set(document["components"]["schemas"]["RunRequest"]["properties"]) == set(OFFERED)
    operation = document["paths"]["/v1/run"]["post"]
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    assert len(examples) >= 3
    for example in examples.values():
        assert server.run(**example["value"])["status"] == "success"
    required = document["components"]["schemas"]["Result"]["required"]
    assert sorted(server.run("1")) == required


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    answer = get(server, "/docs", token=False)
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    for part in ("<script", "src=", "@import", "<link", "url("):
        assert part not in answer.text
    assert set(re.findall(r"https?://[^/\s<&]+", answer.text)) == {"http://127.0.0.1:8765"}
    assert "POST /v1/run" in answer.text


def test_schemathesis_finds_no_answer_of_5xx(server: Server, tmp_path: Path) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json",
            "--header", f"Authorization: Bearer {server.token}",
            "--checks", f"{checks},response_schema_conformance",
            "--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "1",
            "--request-timeout", "60", "--no-color",
        ],
        capture_output=True, text=True, timeout=250, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "No issues found" in done.stdout, done.stdout[-3000:]


def test_without_the_extra_the_command_names_it(tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn", "httptools"):
        code = (
            f"import sys; sys.modules[{package!r}] = None; from belljar.cli import main; "
            "sys.exit(main(['serve', '--port', '0']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, timeout=60, env=environment(tmp_path),
        )  # fmt: skip
        assert done.returncode == 125
        assert "pip install 'belljar[server]'" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_named(server: Server, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--port", str(server.port)],
        capture_output=True, text=True, timeout=60, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 125
    assert f"port {server.port}" in done.stderr
    assert "--port" in done.stderr
    assert done.stdout == ""


def test_a_port_is_taken_before_its_server_is_ready() -> None:
    """Two servers that start at the same time: one has the port, the other a sentence."""
    with listen("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot listen"):
        listen("127.0.0.1", first.getsockname()[1])


def test_help_teaches_the_first_call() -> None:
    done = subprocess.run([*COMMAND, "serve", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for part in ("belljar token create", "curl", "/v1/run", "--allow-network", "SIGTERM", "/docs"):
        assert part in done.stdout

"""What the servers write down of each request: caller, run and end; never what it held."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path

import pytest
from http_server import COMMAND, Raw, environment, lasting_program, marked, serving, until
from mcp_sessions import HttpServer, stdio_session

SECRET = "hunter2"


def test_a_line_of_http_has_the_run_its_end_and_its_backend(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        result = server.run(f"print({SECRET!r})", stdin=SECRET, env={"KEY": SECRET})
        late = server.run("while True: pass", timeout=0.3)
        with server.client() as client:
            refused = client.post("/v1/run", json={"code": SECRET, "mounts": ["/etc:/x"]})
            assert refused.status_code == 403
            client.get("/v1/run%0d%0a2026-01-01 INFO forged")
        server.stop()
        log = server.log.read_text()
    told = f"token=[0-9a-f]{{8}} run={result['id']} status=success backend={result['backend']}"
    assert re.search(rf"INFO POST /v1/run 200 \d+\.\d ms {told}\n", log), log
    assert f"INFO run {result['id']} started: language=python sha256=" in log
    assert re.search(rf"WARNING run {late['id']} ended: status=timeout .*limit=timeout", log), log
    assert re.search(r"INFO POST /v1/run 403 \d+\.\d ms token=[0-9a-f]{8}\n", log), log
    assert SECRET not in log and server.token not in log
    assert not re.search(r"^2026-01-01 INFO forged", log, re.MULTILINE)


def test_a_client_that_has_gone_is_told_of(tmp_path: Path) -> None:
    code, token = lasting_program()
    with serving(tmp_path) as server:
        for accept in ("application/json", "text/event-stream"):
            with Raw(server) as raw:
                raw.post(code, Accept=accept)
                until(lambda: marked(token))
        until(lambda: server.log.read_text().count("client=gone") == 2)
        assert "POST /v1/run 499" in server.log.read_text()


def test_a_quiet_server_tells_of_limits_and_a_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "runs.log"
    with serving(tmp_path, "--quiet", "--log", str(path)) as server:
        fine, late = server.run("1"), server.run("while True: pass", timeout=0.3)
        assert server.log.read_text().count("\n") <= 1  # no line of the log's, on stderr
    log = path.read_text()
    assert late["id"] in log and fine["id"] not in log
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_call_of_mcp_has_its_lines_over_http_and_in_a_file(tmp_path: Path) -> None:
    over_http, over_stdio = tmp_path / "http.log", tmp_path / "stdio.log"
    with (
        HttpServer(tmp_path, "--log", str(over_http)) as server,
        server.session("auto") as session,
        stdio_session("--log", str(over_stdio)) as other,
    ):
        code = f"print({SECRET!r})"
        first = session.call("execute_code", language="python", code=code).structured_content
        second = other.call("execute_code", language="python", code=code).structured_content
        token = server.token
        ended = f" run={first['id']} status=success backend={first['backend']}\n"
        until(lambda: ended in over_http.read_text(), 10)
    told = over_http.read_text()
    assert re.search(r"INFO POST /mcp 200 \d+\.\d ms token=[0-9a-f]{8}" + ended, told), told
    assert f"INFO run {second['id']} started: language=python" in over_stdio.read_text()
    for log in (told, over_stdio.read_text()):
        assert SECRET not in log and token not in log


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--level", "strict"], "level strict): timeout 10 s, memory 256 MiB"),
        (
            ["--allow-network", "any", "--set", "ceiling.network=hosts"],
            "network hosts, mounts none",
        ),
        (["--set", "defaults.min_isolation=vm"], "no Python program can run here now"),
    ],
)
def test_a_server_says_at_its_start_what_programs_get(
    tmp_path: Path, words: list[str], said: str
) -> None:
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(tmp_path),
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            told = ""
            while "callers may ask for at most: timeout 300 s" not in told:
                line = process.stderr.readline()
                assert line, told
                told += line
            assert said in told and "belljar serves http://127.0.0.1:" in told
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()

"""`belljar mcp` as a process: what ends its guests, what its streams carry, what flags do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mcp_sessions import COMMAND, SOON, Raw, Sleeper, environment, stdio_session

# Writes to every descriptor that a process of Belljar's could have, and reads from each.
INTRUDE = """
import fcntl, os
for fd in range(256):
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
        os.write(fd, b'{"jsonrpc":"2.0","id":7,"result":{"forged":true}}\\n')
    except OSError:
        pass
    try:
        os.read(fd, 1 << 20)
    except OSError:
        pass
"""


def test_the_end_of_standard_input_kills_the_guest_and_ends_the_server() -> None:
    sleeper = Sleeper()
    with Raw() as server:
        server.shake_hands()
        server.call(2, "run_command", command=sleeper.command)
        sleeper.wait_started()
        server.stdin.close()
        sleeper.wait_gone()
        assert server.process.wait(SOON) == 0
        assert "error" in server.answer(2), "the SDK says that the connection is closed"
        assert server.stdout.read() == b""


def test_a_client_that_is_killed_takes_the_guest_and_the_server_with_it() -> None:
    """Its pipes close both ways while the server reports progress to it."""
    sleeper = Sleeper()
    with Raw() as server:
        server.shake_hands()
        arguments = {"command": f"echo begun; {sleeper.command}"}
        told = {"name": "run_command", "arguments": arguments, "_meta": {"progressToken": 5}}
        server.send("tools/call", told, 2)
        while b"notifications/progress" not in server.stdout.readline():
            pass
        sleeper.wait_started()
        server.stdout.close()
        server.stdin.close()
        sleeper.wait_gone()
        assert server.process.wait(SOON) in (0, 141)
        assert server.stderr.read() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_kills_the_guest_and_ends_the_server(number: signal.Signals) -> None:
    sleeper = Sleeper()
    with Raw() as server:
        server.shake_hands()
        server.call(2, "run_command", command=sleeper.command)
        sleeper.wait_started()
        server.process.send_signal(number)
        sleeper.wait_gone()
        ended = server.process.wait(SOON)
        assert ended == (-number if number == signal.SIGKILL else 128 + number)


def test_a_cancelled_request_kills_the_guest_and_gets_no_answer() -> None:
    sleeper = Sleeper()
    with Raw() as server:
        server.shake_hands()
        server.call(2, "run_command", command=sleeper.command)
        sleeper.wait_started()
        server.send("notifications/cancelled", {"requestId": 2})
        sleeper.wait_gone()
        server.call(3, "run_python_code", code="6 * 7")
        assert "42" in server.answer(3)["result"]["content"][0]["text"]


@pytest.mark.parametrize("backend", ["jail", "subprocess", "landlock"])
def test_a_guest_reaches_none_of_the_servers_streams(backend: str) -> None:
    with Raw("--backend", backend, "--no-fallback") as server:
        server.shake_hands()
        server.call(7, "execute_code", language="python", code=INTRUDE)
        server.send("ping", {}, 8)  # may be waiting in the pipe while the guest reads
        assert server.answer(8)["result"] == {}
        told = server.answer(7)["result"]
        assert "forged" not in told
        assert told["structuredContent"]["backend"] == backend
        assert "forged" in told["structuredContent"]["stdout"], "its own stdout is its own"


def test_the_intruder_would_reach_streams_that_it_inherits() -> None:
    """The control arm of the test above."""
    done = subprocess.run([sys.executable, "-c", INTRUDE], capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[0])["result"] == {"forged": True}


def test_malformed_input_does_not_end_the_server() -> None:
    lines = (
        b"not json\n", b"\n", b"\xff\xfe\x00\n", b"[]\n", b"null\n", b"{}\n", b'"text"\n',
        b"[" * 100_000 + b"\n", b"9" * 100_000 + b"\n", b'{"jsonrpc":"2.0"}\n',
        b'{"jsonrpc":"1.0","id":5,"method":"ping"}\n',
        b'{"jsonrpc":"2.0","id":{},"method":"ping"}\n',
        b'{"jsonrpc":"2.0","id":6,"method":"tools/call"}\n',
        b'{"jsonrpc":"2.0","id":6,"method":"tools/call","params":[]}\n',
        b'{"jsonrpc":"2.0","id":6,"method":"tools/call","params":{"name":5,"arguments":7}}\n',
        b'{"jsonrpc":"2.0","id":6,"method":"no/such","params":{}}\n',
        b'{"jsonrpc":"2.0","id":99,"result":{}}\n',
        b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":[]}}\n',
        b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":12345}}\n',
    )  # fmt: skip
    with Raw() as server:
        for line in lines:
            server.write(line)
        server.shake_hands()
        for line in lines:
            server.write(line)
        code = {"name": "run_python_code", "arguments": {"code": "6 * 7"}}
        server.send("tools/call", code, 20)
        assert "42" in server.answer(20)["result"]["content"][0]["text"]


def test_flags_set_the_policy_and_the_tools() -> None:
    flags = ("--level", "strict", "--timeout", "4", "--memory", "200M", "--languages", "python")
    with stdio_session(*flags) as session:
        tools = {tool.name: tool for tool in session.do(lambda client: client.list_tools()).tools}
        assert list(tools) == ["execute_code", "run_python_code", "describe_environment"]
        said = tools["execute_code"].description or ""
        assert "may import only: json, math, statistics." in said
        assert "timeout 4 s, memory 200 MiB" in said and "at most 4 s" in said

        refused = session.call("execute_code", language="python", code="import os")
        assert refused.structured_content["status"] == "refused"
        late = session.call("execute_code", language="python", code="1", timeout=5)
        assert late.is_error and "maximum of 4 s" in str(late.content)
        other = session.call("execute_code", language="bash", code="echo")
        assert other.is_error and "'bash' is not offered here; known: python" in str(other.content)


def test_configuration_sets_the_policy_under_the_flags() -> None:
    extra = {"BELLJAR_CEILING_TIMEOUT": "6s", "BELLJAR_MEMORY": "300M", "BELLJAR_OUTPUT": "1000"}
    with stdio_session("--max-timeout", "5", "--network", "any", **extra) as session:
        told = session.call("describe_environment").structured_content
        assert told["max_timeout"] == 5
        limits = told["languages"][0]["limits"]
        assert (limits["memory"], limits["output"], limits["timeout"]) == (300 << 20, 1000, 5)
        assert told["languages"][0]["network"] == "any"


@pytest.mark.parametrize("mode", ["ro", "rw"])
def test_programs_work_in_a_directory_that_the_operator_shows(tmp_path: Path, mode: str) -> None:
    (tmp_path / "given").write_text("from the host")
    flags = ("--mount", f"{tmp_path}:/project:{mode}", "--workdir", "/project")
    with stdio_session(*flags) as session:
        tools = {tool.name: tool for tool in session.do(lambda client: client.list_tools()).tools}
        bash = tools["run_command"]
        assert "starts a new program in /project." in (bash.description or "")
        named = {"ro": "/project (read-only)", "rw": "/project (writable)"}[mode]
        assert named in (bash.description or "")
        assert bash.annotations is not None
        assert bash.annotations.destructive_hint is (mode == "rw")
        told = session.call("describe_environment").structured_content
        assert told["mounts"] == [{"path": "/project", "mode": mode}]
        done = session.call("run_command", command="cat given; echo made > new")
        assert done.structured_content["stdout"] == "from the host"
        assert done.structured_content["status"] == {"ro": "error", "rw": "success"}[mode]
    assert (tmp_path / "new").exists() == (mode == "rw")


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (("--backend", "inprocess", "--no-fallback"), 126, "min_isolation"),
        (("--max-timeout", "1h"), 125, "1h is past the operator's ceiling 600 s"),
        (("--languages", "cobol"), 127, "'cobol' is unknown"),
        (("--level", "lax"), 125, "'lax' is not one of"),
        (("--timeout", "soon"), 125, "'soon' is not a time"),
        (("--concurrency", "0"), 125, "max_concurrency"),
        (("--http", "--port", "70000"), 125, "70000 is not a number"),
        (("--port", "8000"), 125, "add --http"),
        (("--print",), 125, "--install"),
        (("--install", "codex", "--http"), 125, "start the server themselves"),
        (("serve",), 125, "unrecognized arguments"),
    ],
)
def test_a_server_that_cannot_work_says_why_on_stderr(
    flags: tuple[str, ...], status: int, said: str
) -> None:
    done = subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=60, input="",
        env=environment(BELLJAR_CEILING_TIMEOUT="600s"),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_without_the_extra_the_command_names_it() -> None:
    code = "import sys; sys.modules['mcp'] = None\nfrom belljar.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "mcp"],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (125, "")
    assert "pip install 'belljar[mcp]'" in done.stderr

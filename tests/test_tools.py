"""The sandbox as tools for agents: answers, the switch, schemas, calls of a model."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from belljar import tools
from belljar.api import Runner
from belljar.config import Settings
from belljar.errors import RequestError


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(settings=Settings()) as made:
        yield made


def test_python_comes_back_as_a_short_text(runner: Runner) -> None:
    assert tools.run_python_code("print('x'); 6 * 7", runner=runner) == (
        "status: success\nvalue: 42\nstdout:\nx"
    )
    late = tools.run_python_code("while True: pass", 0.5, runner=runner)
    assert late.startswith("status: timeout") and "0.5 s" in late
    assert len(tools.run_python_code("print('a' * 10**6)", runner=runner)) <= 4000


def test_what_cannot_be_run_is_said_in_the_text(runner: Runner) -> None:
    assert tools.run_python_code("a\0b", runner=runner).startswith("status: not run\nexplanation:")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo out; echo err >&2", (True, "out\n", "err\n", 0)),
        ("exit 3", (False, "", "", 3)),
        ("kill -15 $$", (False, "", "", 143)),
    ],
)
def test_a_command_in_the_sandbox(
    runner: Runner, command: str, expected: tuple[bool, str, str, int]
) -> None:
    answer = tools.BashTool(runner=runner)(command)
    assert (answer.success, answer.stdout, answer.stderr, answer.exit_code) == expected
    assert answer.sandboxed and answer.duration_ms > 0
    assert list(answer.to_dict()) == [
        "success", "stdout", "stderr", "exit_code", "duration_ms", "sandboxed",
    ]  # fmt: skip


def test_a_command_that_meets_a_limit_says_which(runner: Runner) -> None:
    answer = tools.BashTool(runner=runner)("echo begun >&2; sleep 60", timeout=0.5)
    assert (answer.success, answer.exit_code) == (False, 124)
    assert answer.stderr == "begun\n[The program ran longer than 0.5 s.]\n"


def test_a_command_for_asyncio(runner: Runner) -> None:
    answer = asyncio.run(tools.BashTool(runner=runner).acall("echo $((6 * 7))"))
    assert answer.stdout == "42\n"


def test_a_disabled_tool_runs_nothing(tmp_path: Path) -> None:
    with tools.BashTool(settings=Settings(sandbox_enabled=False)) as bash:
        assert not bash.enabled
        answer = bash(f"touch {tmp_path}/ran")
        assert (answer.success, answer.exit_code) == (False, 126)
        assert "Sandbox not enabled" in answer.stderr and "settings sandbox enable" in answer.stderr
        assert asyncio.run(bash.acall("true")) == bash("true")
        bash.enable()
        assert bash("echo here").stdout == "here\n"
        bash.disable()
        assert bash("true").exit_code == 126
    assert not (tmp_path / "ran").exists()


def test_direct_execution_needs_the_operators_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The control arm of the test above: the same command reaches the host."""
    settings = Settings(sandbox_enabled=False, sandbox_allow_direct=True)
    with tools.BashTool(settings=settings) as bash, caplog.at_level(logging.WARNING):
        answer = bash(f"touch {tmp_path}/ran; echo done; exit 2")
        assert (answer.stdout, answer.exit_code, answer.sandboxed) == ("done\n", 2, False)
        assert "runs on the host" in caplog.text
        assert (tmp_path / "ran").exists()
        assert bash("sleep 60 & sleep 60", timeout=0.5).exit_code == 124
        assert bash("kill -9 $$").exit_code == 137
        assert len(bash("head -c 3000000 /dev/zero | tr '\\0' x").stdout) == 1 << 20
        bash.enable()
        assert bash(f"ls {tmp_path}").exit_code != 0, "the sandbox has no such directory"


def test_a_runner_and_options_of_another_are_refused(runner: Runner) -> None:
    with pytest.raises(RequestError):
        tools.BashTool(runner=runner, timeout=1)


def test_schemas_have_the_shapes_of_their_interfaces(runner: Runner) -> None:
    chat = tools.openai_tools(runner)
    assert [tool["function"]["name"] for tool in chat] == ["run_python_code", "run_command"]
    assert all(tool["type"] == "function" and tool["function"]["strict"] for tool in chat)
    responses = tools.openai_tools(runner, interface="responses")
    assert [{"type": "function", "function": {k: tool[k] for k in tool if k != "type"}}
            for tool in responses] == chat  # fmt: skip
    parameters = [tool["parameters"] for tool in responses]
    assert [tool["input_schema"] for tool in tools.anthropic_tools(runner)] == parameters
    assert [tool["inputSchema"] for tool in tools.mcp_tools(runner)] == parameters
    for schema in parameters:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["additionalProperties"] is False
        assert sorted(schema["required"]) == sorted(schema["properties"]), (
            "strict wants all of them"
        )
    assert "numpy" in chat[0]["function"]["description"]
    assert "memory 512 MiB" in chat[1]["function"]["description"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("run_python_code", {"code": "6 * 7", "timeout": None}, "value: 42"),
        ("run_python_code", '{"code": "6 * 7", "timeout": 5}', "value: 42"),
        ("run_command", {"command": "echo $((6 * 7))"}, '"stdout": "42\\n"'),
        ("run_python_code", "{", "not run"),
        ("run_python_code", "[" * 100_000, "not run"),
        ("run_python_code", '"text"', "run_python_code takes code and timeout"),
        ("run_python_code", {"code": 5}, "code: is missing or no text"),
        ("run_python_code", {"code": "1", "timeout": "soon"}, "'soon' is not a time"),
        ("run_python_code", {"code": "1", "network": "any"}, "takes code and timeout"),
        ("rm", {}, "known: run_python_code, run_command"),
    ],
)
def test_a_call_of_a_model_is_carried_out_or_answered(
    runner: Runner, name: str, arguments: Any, said: str
) -> None:
    assert said in tools.call(name, arguments, runner)


def test_the_bash_answer_of_a_call_is_json(runner: Runner) -> None:
    told = json.loads(tools.call("run_command", {"command": "exit 3"}, runner))
    assert (told["success"], told["exit_code"]) == (False, 3)

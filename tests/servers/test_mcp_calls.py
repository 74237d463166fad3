"""What an MCP client gets from the tools, with the official client, over every transport."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
from mcp_sessions import HttpServer, Session, Sleeper, stdio_session
from mcp_types import BlobResourceContents, EmbeddedResource, ImageContent, TextContent

from belljar.guest import charts

TOOLS = ["execute_code", "run_python_code", "run_command", "describe_environment"]


# Two revisions of the protocol; test_mcp_stdio speaks the older one on standard streams.
@pytest.fixture(scope="module", params=["stdio-auto", "http-auto", "http-legacy"])
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    transport, _, era = request.param.partition("-")
    if transport == "stdio":
        with stdio_session(era=era) as connected:
            yield connected
        return
    with HttpServer(tmp_path_factory.mktemp("tokens")) as server, server.session(era) as connected:
        yield connected


def text(result: Any) -> str:
    """The first text of an answer, which is what a model reads."""
    assert isinstance(result.content[0], TextContent)
    return result.content[0].text


def test_tools_have_schemas_and_say_what_programs_get(session: Session) -> None:
    tools = {tool.name: tool for tool in session.do(lambda client: client.list_tools()).tools}
    assert list(tools) == TOOLS
    code = tools["execute_code"]
    assert sorted(code.input_schema["properties"]) == ["code", "language", "stdin", "timeout"]
    assert code.input_schema["required"] == ["language", "code"]
    assert code.output_schema is not None
    assert {"stdout", "stderr", "exit_code", "status", "execution_time"} <= set(
        code.output_schema["required"]
    )
    assert tools["run_python_code"].output_schema is None
    for said in ("python (3.", "numpy", "timeout 30 s", "memory 512 MiB", "network off", "300 s"):
        assert said in (code.description or ""), said
    for tool in tools.values():
        assert tool.annotations is not None and tool.annotations.open_world_hint is False


def test_a_program_comes_back_as_text_and_as_structured_content(session: Session) -> None:
    result = session.call(
        "execute_code",
        language="python",
        code="import sys; print(sys.stdin.read()); {'sum': 1 + 2, 'list': [1, None]}",
        stdin="read this",
    )
    assert not result.is_error
    told = result.structured_content
    assert (told["status"], told["exit_code"], told["stdout"]) == ("success", 0, "read this\n")
    assert told["value"] == {"sum": 3, "list": [1, None]}
    assert told["execution_time"] > 0
    assert text(result).startswith("status: success")


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "echo out; echo err >&2; exit 3"),
        ("javascript", "console.log('out'); console.error('err'); process.exit(3)"),
        ("python", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"),
    ],
)
def test_every_language_gives_its_streams_and_exit_code(
    session: Session, language: str, code: str
) -> None:
    told = session.call("execute_code", language=language, code=code).structured_content
    assert (told["status"], told["exit_code"]) == ("error", 3)
    assert (told["stdout"], told["stderr"]) == ("out\n", "err\n")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("float('nan')", "nan"),
        ("(1, 2)", "(1, 2)"),
        ("{1: 2}", "{1: 2}"),
        ("'\\ud800'", "\ufffd"),
        ("None", None),
        ("True", True),
        ("import pandas; pandas.DataFrame({'a': [7]})", "   a\n0  7"),
    ],
)
def test_a_value_is_json_or_else_its_text(session: Session, code: str, value: object) -> None:
    told = session.call("execute_code", language="python", code=code).structured_content
    assert told["value"] == value


def test_a_large_value_comes_as_its_beginning(session: Session) -> None:
    told = session.call("execute_code", language="python", code="list(range(10**6))")
    value = told.structured_content["value"]
    assert value.startswith("[0, 1, 2,") and value.endswith("...]") and len(value) < 1000


def test_long_output_is_cut_in_the_middle_and_says_so(session: Session) -> None:
    told = session.call(
        "execute_code", language="python", code="print('a' * 10**6); print('the end')"
    ).structured_content
    assert told["truncated"]
    assert len(told["stdout"]) < 40_000
    assert told["stdout"].startswith("aaa") and told["stdout"].endswith("the end\n")


def test_python_text_is_compact(session: Session) -> None:
    result = session.call("run_python_code", code="print('x'); 6 * 7")
    assert result.structured_content is None
    assert text(result) == "status: success\nvalue: 42\nstdout:\nx"
    failed = text(session.call("run_python_code", code="print('a' * 10**6); 1/0"))
    assert "ZeroDivisionError: division by zero" in failed
    assert len(failed) <= 6000


def test_a_command_runs_in_bash(session: Session) -> None:
    told = session.call("run_command", command="seq 3 | tac; echo $BASH_VERSION").structured_content
    assert told["stdout"].startswith("3\n2\n1\n5.")


def test_the_environment_is_described(session: Session) -> None:
    told = session.call("describe_environment").structured_content
    python = told["languages"][0]
    assert python["name"] == "python" and python["limits"]["memory"] == 512 << 20
    assert "numpy" in told["libraries"] and told["modules"] is None
    assert told["max_timeout"] == 300
    found = session.call("run_python_code", code="import numpy, pandas; 'there'")
    assert "value: 'there'" in text(found)


def test_a_picture_is_image_content(session: Session) -> None:
    result = session.call(
        "execute_code",
        language="python",
        code="import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()",
    )
    pictures = [block for block in result.content if isinstance(block, ImageContent)]
    assert [picture.mime_type for picture in pictures] == ["image/png"]
    assert base64.b64decode(pictures[0].data).startswith(b"\x89PNG\r\n")
    assert result.structured_content["displays"] == [["text/plain", "image/png", charts.MIME]]


def test_bytes_that_are_no_picture_are_not_sent_as_one(session: Session) -> None:
    """A model's interface may refuse the whole conversation over a picture it cannot read."""
    code = "class Fake:\n    def _repr_png_(self): return b'not a png'\ndisplay(Fake())"
    result = session.call("execute_code", language="python", code=code)
    assert result.structured_content["displays"], result
    assert not any(isinstance(block, ImageContent) for block in result.content)


def test_files_are_embedded_up_to_a_cap(session: Session) -> None:
    result = session.call(
        "execute_code",
        language="python",
        code=(
            "import os; os.mkdir('d')\n"
            "open('d/a b.csv', 'w').write('x,y\\n'); open('raw.bin', 'wb').write(b'\\xff\\x00')\n"
            "open('big.txt', 'w').write('z' * 300_000)\n"
            "for i in range(5): open(f'{i}.txt', 'w').write('z' * 250_000)"
        ),
    )
    listed = {file["path"]: file for file in result.structured_content["files"]}
    assert listed["big.txt"] == {"path": "big.txt", "size": 300_000, "included": False}
    changes = {each["path"]: each for each in result.structured_content["changes"]}
    assert set(changes) == set(listed)
    assert (changes["big.txt"]["kind"], changes["big.txt"]["size"]) == ("created", 300_000)
    assert len(changes["big.txt"]["sha256"]) == 64
    assert changes["big.txt"]["mime_type"] == "text/plain"
    assert sum(listed[f"{i}.txt"]["included"] for i in range(5)) == 4, "a megabyte in all"
    resources = {
        str(block.resource.uri).rpartition("/")[2]: block.resource
        for block in result.content
        if isinstance(block, EmbeddedResource)
    }
    csv, raw = resources["a%20b.csv"], resources["raw.bin"]
    assert csv.mime_type == "text/csv" and csv.text == "x,y\n"
    assert isinstance(raw, BlobResourceContents) and base64.b64decode(raw.blob) == b"\xff\x00"


def test_output_comes_as_progress_while_the_program_runs(session: Session) -> None:
    heard: list[tuple[float, float | None, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message))

    session.call(
        "execute_code",
        hear,
        language="python",
        code="import time\nprint('begun', flush=True)\ntime.sleep(1.5)",
        timeout=20,
    )
    assert "begun\n" in [message for _, _, message in heard]
    times = [progress for progress, _, _ in heard]
    assert times == sorted(set(times)) and {total for _, total, _ in heard} == {20}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"timeout": 301}, "301 s is more than the maximum of 300 s"),
        ({"timeout": 10**400}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"language": "cobol"}, "'cobol' is unknown; known: bash, javascript, python"),
        ({"language": "python2.7"}, "too old"),
        ({"code": None}, "code"),
        ({"code": "a\0b"}, "NUL"),
        ({"memory": "9G"}, "no argument 'memory'; it takes language, code, stdin, timeout"),
    ],
)
def test_a_call_that_cannot_be_carried_out_says_why(
    session: Session, arguments: dict[str, Any], said: str
) -> None:
    result = session.call(
        "execute_code", **{"language": "python", "code": "print('it ran')", **arguments}
    )
    assert result.is_error
    assert said in text(result)
    assert "it ran" not in str(result.content)
    assert session.call("execute_code", language="python", code="1").structured_content


def test_a_timeout_within_the_maximum_is_kept(session: Session) -> None:
    told = session.call("execute_code", language="python", code="while 1: pass", timeout=0.5)
    assert told.structured_content["status"] == "timeout"
    assert told.structured_content["explanation"] == "The program ran longer than 0.5 s."


def test_an_unknown_tool_is_an_error_that_lists_the_tools(session: Session) -> None:
    result = session.call("rm_rf")
    assert result.is_error and "execute_code, run_python_code" in text(result)


def test_sixteen_calls_at_a_time_are_not_crossed(session: Session) -> None:
    started = [
        session.start("execute_code", language="python", code=f"print({i}); {i} * 7", stdin=str(i))
        for i in range(16)
    ]
    wait(started, timeout=120)
    told = [future.result().structured_content for future in started]
    assert [(one["stdout"], one["value"]) for one in told] == [(f"{i}\n", 7 * i) for i in range(16)]
    assert len({one["id"] for one in told}) == 16


def test_leaving_a_call_kills_its_guest_and_no_other(session: Session) -> None:
    left, kept = Sleeper(), Sleeper()
    leaving = session.start("run_command", command=left.command)
    staying = session.start("run_command", command=kept.command)
    left.wait_started()
    kept.wait_started()
    leaving.cancel()
    left.wait_gone()
    assert kept.pids()
    staying.cancel()
    kept.wait_gone()
    assert "42" in text(session.call("run_python_code", code="6 * 7"))

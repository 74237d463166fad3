"""The MCP Inspector, the protocol's own client from npm, sees the same tools and results."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp_sessions import COMMAND, HttpServer, environment, stdio_session

INSPECTOR = Path(__file__).parents[2] / ".node" / "node_modules" / ".bin" / "mcp-inspector"
# Differs from run to run.
OWN = ("id", "execution_time", "peak_memory")
CODE = "print('out'); {'sum': 6 * 7, 'text': 'ü'}"

pytestmark = pytest.mark.skipif(
    not os.access(INSPECTOR, os.X_OK), reason="scripts/test installs the MCP Inspector from npm"
)


def inspector(target: list[str], home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Its words come first: what follows the server's command belongs to the server."""
    return subprocess.run(
        [str(INSPECTOR), "--cli", *target, *words],
        capture_output=True, text=True, timeout=100,
        env=environment(HOME=str(home)), stdin=subprocess.DEVNULL,
    )  # fmt: skip


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_the_inspector_gets_what_the_official_client_gets(tmp_path: Path, transport: str) -> None:
    with HttpServer(tmp_path) as server, stdio_session() as session:
        target = list(COMMAND)
        if transport == "http":
            bearer = server.bearer["Authorization"]
            target = [server.url, "--transport", "http", "--header", f"Authorization: {bearer}"]
        listed = told(inspector(target, tmp_path, "--method", "tools/list", "--strict"))["tools"]
        ours = session.do(lambda client: client.list_tools()).tools
        assert [tool["name"] for tool in listed] == [tool.name for tool in ours]
        for seen, tool in zip(listed, ours, strict=True):
            assert seen["description"] == tool.description
            assert seen["inputSchema"] == tool.input_schema
            assert seen.get("outputSchema") == tool.output_schema

        words = ("--method", "tools/call", "--tool-name", "execute_code")
        arguments = ("--tool-arg", "language=python", "--tool-arg", f"code={CODE}")
        seen = told(inspector(target, tmp_path, *words, *arguments))
        result = session.call("execute_code", language="python", code=CODE)
        assert seen["content"] == [{"type": "text", "text": result.content[0].text}]
        expected = result.structured_content
        assert seen["structuredContent"].keys() == expected.keys()
        for name in expected.keys() - set(OWN):
            assert seen["structuredContent"][name] == expected[name]
        assert expected["value"] == {"sum": 42, "text": "ü"}

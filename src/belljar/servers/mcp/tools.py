"""The tools, their descriptions with the actual limits, and the server that has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, InputRequiredResult, ToolAnnotations
from pydantic import BaseModel, Field

from ..._version import __version__
from ...capabilities import Capabilities
from ...errors import BelljarError
from ...types import Result
from ..http import notes
from .calls import Calls
from .content import Outcome, answer, compact, failure

GONE = "belljar.gone"  # in an HTTP request's scope: the event that its client has left

Code = Annotated[str, Field(description="the whole program")]
Stdin = Annotated[str | None, Field(description="what the program reads on standard input")]
Timeout = Annotated[float | None, Field(description="seconds of wall time; see the maximum above")]


class LanguageOffered(BaseModel):
    name: str
    version: str
    backend: str
    isolation: str
    network: str
    limits: dict[str, int | float]


class MountOffered(BaseModel):
    path: str
    mode: Literal["ro", "rw"]


class EnvironmentOffered(BaseModel):
    """Where programs run. Limits are in seconds, bytes, cores and counts."""

    mounts: list[MountOffered] = Field(description="directories and files of the user's")
    workdir: str = Field(description="where programs start; empty: a work directory of their own")

    languages: list[LanguageOffered]
    libraries: list[str] | None = Field(description="third-party Python libraries; null: unknown")
    modules: list[str] | None = Field(description="the only importable modules; null: any")
    max_timeout: float = Field(description="the most seconds that a call may ask for")


class Server(MCPServer[Any]):
    """An MCPServer that refuses arguments that a tool does not have, instead of ignoring them.

    A model that passes `memory` or `network` must not believe that it has been obeyed.
    """

    def __init__(self, tools: list[Tool], **options: Any) -> None:
        super().__init__("belljar", version=__version__, tools=tools, **options)
        self._arguments = {tool.name: tuple(tool.parameters["properties"]) for tool in tools}

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        known = self._arguments.get(name)
        if known is None:
            return failure(f"there is no tool {name!r}; known: {', '.join(self._arguments)}")
        for argument in arguments:
            if argument not in known:
                return failure(
                    f"{name} has no argument {argument!r}; it takes {', '.join(known) or 'none'}."
                    " Limits, network and files are set by the operator of this server."
                )
        return await super().call_tool(name, arguments, context)


def build(calls: Calls, offered: Capabilities, **options: Any) -> Server:
    """The server for `calls`, whose tools describe what is `offered`."""
    tools = _Tools(calls, offered)
    return Server(tools.all(), instructions=tools.instructions, **options)


class _Tools:
    def __init__(self, calls: Calls, offered: Capabilities) -> None:
        self._calls, self._offered = calls, offered
        self._python = next(
            (name for name in ("python", *(calls.allowed or ())) if self._runs_python(name)), None
        )
        limits = f"Limits: {offered.limits_text()}; `timeout` is at most {calls.max_timeout:g} s."
        kept = "Long output keeps its head and its tail."
        self._common = f"{offered.places_text()} {kept} {limits}"
        self.instructions = (
            "Runs code in a sandbox, apart from the user's machine. Languages:"
            f" {offered.languages_text()}. {offered.libraries_text()} {self._common}"
        )

    def _runs_python(self, name: str) -> bool:
        return name.startswith("python") and self._offered.language(name) is not None

    def all(self) -> list[Tool]:
        """Those tools that have a language to run in."""
        offered, common = self._offered, self._common
        made = [
            self._tool(
                self.execute_code,
                "Run code",
                f"Run a program in a sandbox. Languages: {offered.languages_text()}."
                f" {offered.libraries_text()} The last expression of a Python program comes back"
                " as `value`; pictures that it shows and files that it leaves in its current"
                f" directory come back, too. {common}",
            )
        ]
        if self._python is not None:
            made.append(
                self._tool(
                    self.run_python_code,
                    "Run Python",
                    "Run a Python program in a sandbox and get a short text: how it ended, the"
                    " value of its last expression, output, error."
                    f" {offered.libraries_text()} {common}",
                )
            )
        if offered.language("bash") is not None:
            made.append(
                self._tool(
                    self.run_command,
                    "Run a command",
                    "Run a Bash command line in a sandbox, which has files of its own."
                    f" Nothing can be installed. {common}",
                )
            )
        made.append(
            self._tool(
                self.describe_environment,
                "Describe the sandbox",
                "What programs get here: languages, libraries, limits, network, isolation.",
                read_only=True,
            )
        )
        return made

    def _tool(
        self, call: Callable[..., Any], title: str, description: str, *, read_only: bool = False
    ) -> Tool:
        hints = ToolAnnotations(
            title=title,
            read_only_hint=read_only,
            destructive_hint=not read_only
            and any(mount.mode == "rw" for mount in self._offered.mounts),
            open_world_hint=any(
                spoken.policy.network.mode != "off" for spoken in self._offered.languages
            ),
        )
        tool = Tool.from_function(call, title=title, description=description, annotations=hints)
        tool.parameters["additionalProperties"] = False
        return tool

    # Every tool is async: the SDK runs a synchronous one on a thread that no cancellation reaches,
    # and its guest would go on.

    async def execute_code(
        self,
        language: Annotated[str, Field(description="the language's name, such as python")],
        code: Code,
        ctx: Context[Any, Any],
        stdin: Stdin = None,
        timeout: Timeout = None,
    ) -> Annotated[CallToolResult, Outcome]:
        return await self._call(ctx, answer, code, language, timeout, stdin)

    async def run_python_code(
        self, code: Code, ctx: Context[Any, Any], timeout: Timeout = None
    ) -> CallToolResult:
        return await self._call(ctx, compact, code, self._python or "python", timeout)

    async def run_command(
        self,
        command: Annotated[str, Field(description="a Bash command line or script")],
        ctx: Context[Any, Any],
        timeout: Timeout = None,
    ) -> Annotated[CallToolResult, Outcome]:
        return await self._call(ctx, answer, command, "bash", timeout)

    async def describe_environment(self) -> EnvironmentOffered:
        told = self._offered.to_dict() | {"max_timeout": self._calls.max_timeout}
        return EnvironmentOffered.model_validate(told)

    async def _call(
        self,
        ctx: Context[Any, Any],
        show: Callable[[Result], CallToolResult],
        code: str,
        language: str,
        timeout: float | None,
        stdin: str | None = None,
    ) -> CallToolResult:
        spoken = self._offered.language(language)
        total = timeout or (spoken.policy.limits.timeout if spoken is not None else None)

        async def report(seconds: float, text: str | None) -> None:
            await ctx.report_progress(seconds, total, text)

        request = ctx.request_context.request
        gone: asyncio.Event | None = None if request is None else request.scope.get(GONE)
        note = {} if request is None else notes.of(request.scope)
        try:
            result = await self._calls.run(
                code, language=language, stdin=stdin, timeout=timeout, report=report, gone=gone
            )
        except BelljarError as error:
            note["refused"] = error.code
            return failure(str(error))
        note.update(run=result.id, status=result.status.value, backend=result.backend or "none")
        return show(result)

"""The sandbox as tools for agents: functions, and schemas as interfaces of models want them.

run_python_code(code, timeout)  -> str          what a model reads
BashTool()(command)             -> BashAnswer   success, stdout, stderr, exit_code, duration_ms
openai_tools(), anthropic_tools(), mcp_tools()  schemas; `call` carries out what a model asks
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Literal

from . import api, direct
from .api import Runner
from .capabilities import Capabilities, look
from .errors import BelljarError, RequestError
from .policy_fields import LIMITS
from .records import plain, record
from .types import Result, Status

__all__ = [
    "BashAnswer", "BashTool", "anthropic_tools", "call", "mcp_tools", "openai_tools",
    "run_python_code",
]  # fmt: skip

_log = logging.getLogger(__name__)
_NOT_ENABLED = 126
_DIRECT_TIMEOUT = 300.0
_TIMEOUT = {
    "type": ["number", "null"],
    "description": "seconds of wall time; null for the default",
}


def run_python_code(
    code: str, timeout: float | None = None, *, runner: Runner | None = None
) -> str:
    """Run a Python program in the sandbox: how it ended, value, output, error, in a short text.

    What could not be run at all is said in the text as well, because a model reads it.
    """
    try:
        if runner is None:
            return api.run(code, timeout=timeout).summary()
        return runner.execute(code, timeout=timeout).summary()
    except BelljarError as error:
        return f"status: not run\nexplanation: {error}"


@record
class BashAnswer:
    """What a command did. `exit_code` is 124 after a timeout, 137 after a kill, 126 if refused."""

    success: bool
    stdout: str
    stderr: str
    exit_code: int
    duration_ms: float
    sandboxed: bool = True

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


class BashTool:
    """Runs Bash command lines: in the sandbox while sandbox mode is on.

    While it is off every command is refused, or runs directly on this host where the operator's
    configuration has `sandbox.allow_direct = true`. `enabled` is the configuration's
    `sandbox.enabled` unless given. Other keywords are those of `create_runner`: `mounts` shows the
    commands a directory, `timeout` and `memory` limit them.

    Every command starts afresh: no working directory, variable or file outlives it, but for what it
    writes to a mount.
    """

    def __init__(
        self, *, enabled: bool | None = None, runner: Runner | None = None, **options: Any
    ) -> None:
        if runner is not None and options:
            raise RequestError("runner", "is given, and so are options of another")
        self._runner = Runner(**options) if runner is None else runner
        settings = self._runner.engine.settings
        self._allow_direct = settings.sandbox_allow_direct
        self._enabled = settings.sandbox_enabled if enabled is None else enabled

    @property
    def enabled(self) -> bool:
        """Whether commands run in the sandbox."""
        return self._enabled

    def enable(self) -> None:
        """Turn sandbox mode on for this tool; `belljar settings sandbox enable` does for all."""
        self._enabled = True

    def disable(self) -> None:
        """Turn sandbox mode off for this tool."""
        self._enabled = False

    def __call__(self, command: str, timeout: float | None = None) -> BashAnswer:
        """Run `command` to its end. BelljarError if the sandbox itself cannot do its work."""
        if self._enabled:
            result = self._runner.execute(command, language="bash", timeout=timeout)
            return _answer(result)
        if not self._allow_direct:
            return _refused()
        return _directly(command, timeout)

    async def acall(self, command: str, timeout: float | None = None) -> BashAnswer:
        """The same for asyncio; cancelling the task kills the sandboxed command."""
        if self._enabled:
            result = await self._runner.aexecute(command, language="bash", timeout=timeout)
            return _answer(result)
        if not self._allow_direct:
            return _refused()
        import asyncio

        return await asyncio.to_thread(_directly, command, timeout)

    def close(self) -> None:
        """End what the tool's runner keeps warm."""
        self._runner.close()

    def __enter__(self) -> BashTool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _answer(result: Result) -> BashAnswer:
    code = result.exit_code
    if result.status is Status.TIMEOUT:
        code = 124
    elif code is None:
        code = 128 + (result.signal or 9)
    stderr = result.stderr
    if result.status not in (Status.SUCCESS, Status.ERROR):  # a limit: only we know
        stderr += f"{chr(10) if stderr and not stderr.endswith(chr(10)) else ''}"
        stderr += f"[{result.explanation}]\n"
    return BashAnswer(
        success=result.success,
        stdout=result.stdout,
        stderr=stderr,
        exit_code=code,
        duration_ms=result.usage.wall * 1000,
    )


def _refused() -> BashAnswer:
    return BashAnswer(
        success=False,
        stdout="",
        stderr="Sandbox not enabled: the command was not run"
        " (fix: `belljar settings sandbox enable`, or `enable()` of the tool)\n",
        exit_code=_NOT_ENABLED,
        duration_ms=0.0,
        sandboxed=False,
    )


def _directly(command: str, timeout: float | None) -> BashAnswer:
    """Outside every sandbox, with the rights of this process."""
    _log.warning("the sandbox is off and sandbox.allow_direct is on: a command runs on the host")
    seconds = LIMITS["timeout"]("timeout", _DIRECT_TIMEOUT if timeout is None else timeout)
    done = direct.run(["bash", "-c", command], seconds)
    code = 124 if done.late else done.exit_code
    return BashAnswer(
        success=code == 0,
        stdout=done.stdout,
        stderr=done.stderr,
        exit_code=128 - code if code < 0 else code,
        duration_ms=done.seconds * 1000,
        sandboxed=False,
    )


# Schemas.


def openai_tools(
    runner: Runner | None = None, *, interface: Literal["chat", "responses"] = "chat"
) -> list[dict[str, Any]]:
    """For `tools=` of chat.completions, or of responses; the schemas are strict."""
    tools: list[dict[str, Any]] = []
    for name, description, parameters in _schemas(runner):
        function: dict[str, Any] = {
            "name": name,
            "description": description,
            "parameters": parameters,
            "strict": True,
        }
        if interface == "chat":
            tools.append({"type": "function", "function": function})
        else:
            tools.append({"type": "function", **function})
    return tools


def anthropic_tools(runner: Runner | None = None) -> list[dict[str, Any]]:
    """For `tools=` of Anthropic's messages."""
    return [
        {"name": name, "description": description, "input_schema": parameters}
        for name, description, parameters in _schemas(runner)
    ]


def mcp_tools(runner: Runner | None = None) -> list[dict[str, Any]]:
    """As in the answer to `tools/list`; `belljar mcp` is a whole server."""
    return [
        {"name": name, "description": description, "inputSchema": parameters}
        for name, description, parameters in _schemas(runner)
    ]


def call(name: str, arguments: Mapping[str, Any] | str, runner: Runner | None = None) -> str:
    """Carry out one call of a model, whose arguments may be JSON text; the text to answer with.

    A call that makes no sense is answered with what is wrong with it, because a model reads it.
    """
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        known = _ARGUMENTS.get(name)
        if known is None:
            raise RequestError(
                "name", f"no tool is called {name!r}; known: {', '.join(_ARGUMENTS)}"
            )
        if not isinstance(given, Mapping) or set(given) - {known, "timeout"}:
            raise RequestError("arguments", f"{name} takes {known} and timeout")
        code, timeout = given.get(known), given.get("timeout")
        if not isinstance(code, str):
            raise RequestError(known, "is missing or no text")
        if name == "run_python_code":
            return run_python_code(code, timeout, runner=runner)
        answer = BashTool(runner=runner or api.shared_runner())(code, timeout)
        return json.dumps(answer.to_dict(), ensure_ascii=False)
    except (BelljarError, ValueError, RecursionError) as error:
        return f"status: not run\nexplanation: {error}"


_ARGUMENTS = {"run_python_code": "code", "run_command": "command"}


def _schemas(runner: Runner | None) -> list[tuple[str, str, dict[str, Any]]]:
    offered = look(runner or api.shared_runner(), ("python", "bash"))
    common = f"{offered.places_text()} Limits: {offered.limits_text()}."
    texts = {
        "run_python_code": (
            "Run a Python program in a sandbox and get a short text: how it ended, the value of its"
            f" last expression, output, error. {offered.libraries_text()} {common}"
        ),
        "run_command": (
            f"Run a Bash command line in a sandbox, which has files of its own. {common}"
        ),
    }
    return [
        (name, texts[name], _parameters(argument))
        for name, argument in _ARGUMENTS.items()
        if _runs(offered, name)
    ]


def _runs(offered: Capabilities, name: str) -> bool:
    return offered.language("bash" if name == "run_command" else "python") is not None


def _parameters(argument: str) -> dict[str, Any]:
    what = "the whole program" if argument == "code" else "a Bash command line or script"
    return {
        "type": "object",
        "properties": {argument: {"type": "string", "description": what}, "timeout": _TIMEOUT},
        "required": [argument, "timeout"],
        "additionalProperties": False,
    }

"""The MCP server: the sandbox as tools for agents, on the official SDK.

Processes: this one, and below it what the backends keep. Descriptors: on standard input and output
nothing but the protocol. The SDK moves both above 2 while it serves and puts /dev/null and stderr
in their place; both copies close on exec, so no guest and no helper process can inherit them.

    tools.py      the tools, what they say about themselves, and the server
    calls.py      one call: checked, run, and ended when the client loses interest
    content.py    a result as structured content, text, pictures and files
    stdio.py      served to the process that started this one
    http.py       served to HTTP clients on loopback that know a token

What kills a guest: `notifications/cancelled` and the end of standard input (the SDK cancels the
tool's task), a closed HTTP connection (the task notices it), a signal to this process (every task
is cancelled first), and the death of this process (every backend ends its guests then).

Arguments of a call choose program, language, input and a timeout within the maximum. All else comes
from the operator: configuration files, environment, flags.
"""

from __future__ import annotations

import importlib.util

from ...errors import BelljarError


def require_extra() -> None:
    """Raise BelljarError, which names the fix, if the SDK is not installed."""
    if importlib.util.find_spec("mcp") is None or importlib.util.find_spec("mcp_types") is None:
        raise BelljarError(
            "the MCP server needs the `mcp` package, version 2, which is not installed",
            fix="pip install 'belljar[mcp]'",
        )

"""`belljar mcp`: the sandbox as tools for agents, over the Model Context Protocol."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import config
from ..api import Runner
from ..errors import ConfigError
from ..policy_fields import LIMITS
from ..servers import logs, mcp
from ..stores.kernel_log import KernelLog
from . import mcp_clients, request, terminal
from .arguments import Parser, UsageError, add_common, add_log
from .failures import print_json

if TYPE_CHECKING:
    from ..servers.mcp.calls import Calls
    from ..servers.mcp.tools import Server

EPILOG = """\
An MCP client starts this command itself and speaks with it on standard input and output; run by
hand it only waits. Flags and configuration set the policy. A call chooses the program, its
language, its input and a timeout up to the maximum, and cannot loosen anything.

tools: execute_code, run_python_code, run_command, describe_environment

examples:
  belljar mcp --install claude           add it to Claude Code (or cursor, vscode, codex)
  belljar mcp --install codex --print    only show what would be written
  belljar mcp --level strict             what runs must be pure computation
  belljar mcp --timeout 20s --memory 1G --languages python
  belljar mcp --network any              programs may use the network
  belljar mcp --mount .:/project:ro --workdir /project
                                         programs start in this directory and cannot change it
  belljar mcp --http                     for clients that speak HTTP: http://127.0.0.1:8766/mcp

HTTP clients send `Authorization: Bearer TOKEN`; `belljar token create` prints one. Without any
token the server makes one and prints it, once. It listens on this machine only."""

# A model reads the whole answer. An operator who sets the limit anywhere gets that.
OUTPUT = 32 << 10
MAX_TIMEOUT = 300.0
CONCURRENCY = 8
# Their contents come along up to a cap.
LEFT_FILES = ("*",)


def add_arguments(parser: Parser) -> None:
    where = request.add_policy_arguments(
        parser, output="bytes of stdout and of stderr that an answer keeps (default: 32K)"
    )
    where.add_argument(
        "--modules", metavar="LIST", help="import lint: any, level, safe, or NAME,NAME"
    )
    offered = parser.add_argument_group("what clients get")
    offered.add_argument(
        "--languages", metavar="NAME,NAME", help="offer these only (default: all installed)"
    )
    offered.add_argument(
        "--max-timeout",
        metavar="TIME",
        help="the most that a call may ask for (default: --timeout, else the ceiling)",
    )
    offered.add_argument("--python", metavar="PATH", help="the interpreter of Python programs")
    offered.add_argument(
        "--mount",
        metavar="SRC:DST[:ro|rw]",
        action="append",
        default=[],
        help="show a host path to every program",
    )
    offered.add_argument(
        "--workdir", metavar="DIR", help="start programs in DIR, a directory in a --mount"
    )
    offered.add_argument(
        "--no-files", action="store_true", help="do not send the files that programs leave"
    )
    offered.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        help=f"programs that run at a time (default: {CONCURRENCY})",
    )
    web = parser.add_argument_group("over HTTP instead of standard input and output")
    web.add_argument("--http", action="store_true", help="listen on 127.0.0.1")
    web.add_argument("--port", type=int, metavar="N", help="default: 8766; 0: any free one")
    web.add_argument("--tokens", metavar="FILE", help="the file of `belljar token --tokens`")
    add_log(parser, standard="stderr with --http, else none")
    added = parser.add_argument_group("adding it to a client")
    added.add_argument(
        "--install",
        metavar="CLIENT",
        choices=mcp_clients.CLIENTS,
        help=f"{', '.join(mcp_clients.CLIENTS)}; with the other flags given here",
    )
    added.add_argument(
        "--print", action="store_true", help="with --install: show the entry, change nothing"
    )
    add_common(parser)
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    mcp.require_extra()
    if args.print and args.install is None:
        raise UsageError("--print shows what --install would write", fix="name a client, too")
    if not args.http and (args.port is not None or args.tokens is not None):
        raise UsageError("--port and --tokens are for HTTP", fix="add --http")
    if args.install is not None:
        if args.http:
            raise UsageError(
                "--install is for clients that start the server themselves",
                fix="start `belljar mcp --http`, and give the client its URL and a token",
            )
        settings = _settings(args)  # an entry that could not start is not written
        with Runner(settings=settings, **_options(args, settings)) as runner:
            _refuse_nothing(runner, _names(args.languages))
        return mcp_clients.install(args)
    settings = _settings(args)
    if args.http or args.log is not None:
        logs.start(args.log, quiet=args.quiet)
    else:  # a client that reads no stderr would stop the runs
        logs.start(only_failures_of_ours=True)
    with contextlib.ExitStack() as stack:
        serve = _http(args, stack) if args.http else _stdio
        from ..capabilities import look
        from ..servers.mcp import tools
        from ..servers.mcp.calls import Calls

        runner = stack.enter_context(Runner(settings=settings, **_options(args, settings)))
        if args.http or args.log is not None:
            runner.engine.sinks.add(KernelLog())
        allowed = _names(args.languages)
        calls = Calls(
            runner,
            max_timeout=settings.ceiling.timeout or MAX_TIMEOUT,
            allowed=allowed,
            outputs=() if args.no_files else LEFT_FILES,
        )
        offered = look(runner, allowed)
        if not offered.languages:
            _refuse_nothing(runner, allowed)
        serve(tools.build(calls, offered, log_level="WARNING"), calls)
    return 0


def _stdio(server: Server, calls: Calls) -> None:
    from ..servers.mcp import stdio

    if terminal.is_terminal(sys.stdin):
        terminal.say(
            "belljar mcp speaks MCP on standard input and output: clients start it themselves."
            "\n  to add it to one: belljar mcp --install claude; Ctrl-C ends it"
        )
    stdio.serve(server, calls)


def _http(args: argparse.Namespace, stack: contextlib.ExitStack) -> Callable[[Server, Calls], None]:
    """Check and bind all that can fail before a program is run."""
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("httptools") is None:
        raise UsageError(
            "--http needs packages that are not installed", fix="pip install 'belljar[mcp,server]'"
        )
    from ..servers.auth import Tokens, default_path
    from ..servers.http import listening
    from ..servers.mcp import http

    tokens = Tokens(args.tokens or default_path())
    tokens.all()  # a file that cannot be trusted is an error now, not with the first request
    port = http.PORT if args.port is None else args.port
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is not a number of 0 to 65535")
    listener = stack.enter_context(listening.listen(http.HOST, port))
    made = tokens.create("made by belljar mcp", only_first=True)
    url = f"http://{http.HOST}:{listener.getsockname()[1]}{http.PATH}"

    def started() -> None:
        if args.json:
            print_json({"url": url, **({"token": made} if made else {})})
            return
        terminal.say(f"belljar serves MCP on {url}; Ctrl-C ends it")
        if made:
            terminal.say("there was no token: this one was made, and is not shown again")
            terminal.show(f"token: {made}")

    return lambda server, calls: http.serve(server, calls, tokens, listener, started)


def _refuse_nothing(runner: Runner, allowed: tuple[str, ...] | None) -> None:
    """Raise what a program in the first language would meet."""
    runner.plan("", language=allowed[0] if allowed else "python")


def _settings(args: argparse.Namespace) -> config.Settings:
    """The configuration, under a ceiling that the flags can lower only."""
    given = args.max_timeout or args.timeout
    # Guests of the backend without isolation would share this process with the protocol.
    ceiling: dict[str, Any] = {"min_isolation": "process", "timeout": given}
    settings = config.load(path=args.config, overrides={"ceiling": ceiling})
    most = settings.ceiling.timeout
    if given is not None and most is not None and most < LIMITS["timeout"]("timeout", given):
        raise ConfigError(
            "max_timeout",
            f"{given} is past the operator's ceiling {most:g} s",
            fix="raise ceiling.timeout; `belljar settings` shows where it is set",
        )
    return settings


def _options(args: argparse.Namespace, settings: config.Settings) -> dict[str, Any]:
    """What the operator fixed, as defaults of a Runner."""
    wishes = request.wishes(args)
    if "output" not in wishes and "output" not in settings.defaults:
        wishes["output"] = OUTPUT
    return {
        **wishes,
        "level": args.level,
        "backend": args.backend,
        "image": args.image,
        "python": args.python,
        "mounts": tuple(args.mount) or None,
        "workdir": args.workdir,
        "prefer": args.prefer,
        "fallback": False if args.no_fallback else None,
        "max_concurrency": CONCURRENCY if args.concurrency is None else args.concurrency,
    }


def _names(given: str | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    if not names:
        raise UsageError("--languages names none", fix="write --languages python,bash")
    return names

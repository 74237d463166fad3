"""The `belljar` command: finds the command's module, imports only that one, and renders failures.

A command is one line in `COMMANDS` and a module with `add_arguments(parser)` and
`run(args) -> int`; an optional `EPILOG` holds the examples of its help. `belljar --help` imports
none of them.

Exit codes: the guest's own; 128+n for a guest that died of signal n; 124 timeout; 125 Belljar's own
failure or a usage error; 126 refused or not enforceable; 127 command, language or backend not
found; 137 out of memory, killed or ended by a limit; 130 and 143 for a run that Ctrl-C or SIGTERM
ended; 141 when nobody reads our output any more.
"""

from __future__ import annotations

import gc
import os
import sys

from .._version import __version__

TYPE_CHECKING = False  # as `typing` has it: what is imported here is waited for before all else
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn, TextIO

__all__ = ["COMMANDS", "command", "main"]


class Command:
    """Where a command lives, and the line that `belljar --help` shows for it."""

    __slots__ = ("module", "summary")

    def __init__(self, module: str, summary: str) -> None:
        self.module, self.summary = module, summary


COMMANDS: dict[str, Command] = {
    "run": Command("belljar.cli.run", "run a program: FILE, - (standard input) or -c CODE"),
    "exec": Command("belljar.cli.exec", "run a command: belljar exec -- CMD ARG..."),
    "explain": Command(
        "belljar.cli.explain", "which backend would run a program, and why not the others"
    ),
    "backends": Command("belljar.cli.backends", "list the backends and what each one needs"),
    "languages": Command(
        "belljar.cli.languages", "list the languages and which interpreters are installed"
    ),
    "serve": Command("belljar.cli.serve", "run programs for HTTP clients that have a token"),
    "token": Command("belljar.cli.token", "create, list or revoke the tokens of belljar serve"),
    "doctor": Command("belljar.cli.doctor", "show what this host can do and how to get the rest"),
    "images": Command("belljar.cli.images", "list, build, remove or pull container images"),
    "mcp": Command("belljar.cli.mcp", "serve the sandbox to agents, as MCP tools"),
    "settings": Command(
        "belljar.cli.settings", "show every setting and where its value comes from"
    ),
    "selftest": Command("belljar.cli.selftest", "attack the sandboxes of this host and report"),
    "wasm": Command("belljar.cli.wasm", "prepare the WebAssembly guests: build, compile, show"),
    "bench": Command("belljar.cli.bench", "measure the sandboxes of this host against plain runs"),
}

_EXAMPLES = """\
examples:
  belljar run -c 'print(6 * 7)'          run a line of Python
  belljar run job.py --timeout 5s        run a file, for five seconds at most
  echo 'print(1)' | belljar run -        run what comes on standard input
  belljar exec -- ls -la                 run a command
  belljar doctor                         what can this host do?

Every command takes --json. `belljar COMMAND --help` says more."""


def command() -> NoReturn:
    """The whole process: `main`, and an end that does not take the interpreter apart.

    That would take as long as a run does, for memory that the kernel frees anyway. All else that an
    end does is done; and with threads about, or streams that cannot be flushed, it is CPython's.
    """
    # Imports make tens of thousands of objects, and none of them is garbage.
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    status = main()
    threading = sys.modules.get("threading")
    if threading is None or threading.active_count() == 1:
        import atexit

        atexit._run_exitfuncs()
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except (AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            sys.exit(status)
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_descriptors()
    try:
        return _dispatch(words)
    except SystemExit as ending:  # argparse printed its help
        return ending.code if isinstance(ending.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_output()
        return 141
    except Exception as error:  # noqa: BLE001 - the last resort: exit 125, never Python's own 1
        from . import failures

        return failures.report(error, as_json=_wants_json(words))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if len(words) > 1 and words[0] == "help":
            return _dispatch([words[1], "--help"])
        _print(_help(), sys.stdout if words else sys.stderr)
        return 0 if words else 125
    if words[0] in ("-V", "--version"):
        if "--json" in words:
            _print(f'{{"version": "{__version__}"}}', sys.stdout)
        else:
            _print(f"belljar {__version__}", sys.stdout)
        return 0

    name, rest = words[0], words[1:]
    if name == "run" and _likely_jailed(rest):
        return _with_a_start_ahead(name, rest)
    return _run_command(name, rest)


def _likely_jailed(rest: list[str]) -> bool:
    """Whether it will need an interpreter for the jail, as far as words that nobody read tell."""
    words = iter(rest)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("-h", "--help", "--explain", "--lang", "--python"):
            return False
        if flag == "--backend" and (value if equals else next(words, "")) not in ("jail", "auto"):
            return False
    return sys.platform == "linux"


def _with_a_start_ahead(name: str, rest: list[str]) -> int:
    """That interpreter starts, and the host is probed, while we import all that we need to say what
    is to be done."""
    from ..backends import blank

    try:
        blank.start_ahead()
        from ..linux import probe

        probe.start_ahead()
        try:
            return _run_command(name, rest)
        finally:
            probe.end_ahead()
    finally:
        blank.end_unused()


def _run_command(name: str, rest: list[str]) -> int:
    import importlib

    from .arguments import Parser, UsageError

    command = COMMANDS.get(name)
    if command is None:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `belljar {near[0]}`?" if near else "`belljar --help` lists them"
        if name.startswith("-"):
            hint = f"name a command first: belljar run {name} ..."
        elif os.path.exists(name):
            hint = f"to run that file: belljar run {name}"
        raise UsageError(f"there is no command {name!r}", fix=hint)

    module = importlib.import_module(command.module)
    parser = Parser(name, command.summary, epilog=getattr(module, "EPILOG", None))
    module.add_arguments(parser)
    args = parser.parse_words(rest)
    status: int = module.run(args)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: belljar COMMAND [options]\n\n"
        "Runs code you do not trust: one call, one policy, one truthful result.\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "options:\n  -h, --help     show this help\n  -V, --version  show the version\n\n"
        + _EXAMPLES
    )


def _print(text: str, stream: TextIO) -> None:
    stream.write(text + "\n")
    stream.flush()


def _wants_json(words: list[str]) -> bool:
    ours = words[: words.index("--")] if "--" in words else words
    return "--json" in ours


def _open_standard_descriptors() -> None:
    """Give a closed descriptor 0, 1 or 2 to /dev/null, lest a pipe of ours take the number and
    receive what was meant for the caller."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _forget_output() -> None:
    """Point stdout at /dev/null, so that the interpreter's last flush finds a reader."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)

"""`belljar mcp --install CLIENT`: where clients keep their MCP servers, and our entry there."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from . import edits, terminal
from .arguments import UsageError
from .failures import print_json

NAME = "belljar"


class Client:
    """One client: its name, its file, the keys that lead to its table of servers."""

    def __init__(self, title: str, keys: tuple[str, ...], fields: Mapping[str, str]) -> None:
        self.title, self.keys, self.fields = title, keys, fields


CLIENTS = {
    "claude": Client("Claude Code", ("mcpServers",), {"type": "stdio"}),
    "claude-desktop": Client("Claude Desktop", ("mcpServers",), {}),
    "cursor": Client("Cursor", ("mcpServers",), {}),
    "vscode": Client("VS Code", ("servers",), {"type": "stdio"}),
    "codex": Client("Codex", ("mcp_servers",), {}),
}
# Options of ours that say nothing about the server that the client is to start.
_NOT_PASSED_ON = ("help", "install", "print", "json")
_PATHS = ("config", "log", "python")


def install(args: argparse.Namespace) -> int:
    """Add the server to the client's configuration, or only show the entry."""
    client = CLIENTS[args.install]
    path = location(args.install)
    started = [*belljar_command(), "mcp", *flags(args)]
    command, words = started[0], started[1:]
    entry: dict[str, Any] = {**client.fields, "command": command, "args": words}
    table = (*client.keys, NAME)
    shown = _as_written(args.install, table, entry)
    if args.print:
        if args.json:
            print_json({"client": args.install, "path": path, "entry": entry})
        else:
            terminal.show(f"{path}:\n\n{shown}")
        return 0
    old = edits.read_text(path)
    change = edits.toml_with if path.endswith(".toml") else edits.json_with
    try:
        new = change(old, table, entry)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} was not changed: {error}", fix=f"add this yourself:\n\n{shown}\n"
        ) from None
    kept = edits.replace_file(path, new) if new != old else None
    if args.json:
        changed = new != old
        print_json({"client": args.install, "path": path, "changed": changed, "backup": kept})
        return 0
    done = f"{client.title} has the server {NAME!r} now" if new != old else "nothing to change"
    terminal.show(f"{done}: {path}")
    if kept is not None:
        terminal.show(f"  what was there before: {kept}")
    terminal.show(f"  it starts: {' '.join(started)}\nrestart {client.title} to use it")
    return 0


def location(name: str, environ: Mapping[str, str] | None = None, platform: str = "") -> str:
    """The file in which the client keeps the user's servers."""
    environ, platform = environ or os.environ, platform or sys.platform
    home = os.path.expanduser("~")
    if platform == "darwin":
        applications = os.path.join(home, "Library", "Application Support")
    elif platform == "win32":
        applications = environ.get("APPDATA") or os.path.join(home, "AppData", "Roaming")
    else:
        applications = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    match name:
        case "claude":
            return os.path.join(environ.get("CLAUDE_CONFIG_DIR") or home, ".claude.json")
        case "claude-desktop":
            return os.path.join(applications, "Claude", "claude_desktop_config.json")
        case "cursor":
            return os.path.join(home, ".cursor", "mcp.json")
        case "vscode":
            return os.path.join(applications, "Code", "User", "mcp.json")
    codex = environ.get("CODEX_HOME") or os.path.join(home, ".codex")
    return os.path.join(codex, "config.toml")


def belljar_command() -> list[str]:
    """By absolute path: clients start servers with another PATH and in another directory."""
    beside = os.path.join(os.path.dirname(sys.executable), "belljar")
    for path in (beside, f"{beside}.exe"):
        if os.access(path, os.X_OK):
            return [path]
    return [sys.executable, "-P", "-m", "belljar"]  # -P: not what lies where the client starts it


def flags(args: argparse.Namespace) -> list[str]:
    """The command line's other options, with absolute paths."""
    words: list[str] = []
    for action in args.parser._actions:
        if action.dest in _NOT_PASSED_ON or not action.option_strings:
            continue
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        flag = action.option_strings[-1]
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            for item in value:
                source, colon, rest = item.partition(":")
                words += [flag, f"{os.path.abspath(source)}{colon}{rest}"]
        else:
            words += [flag, os.path.abspath(value) if action.dest in _PATHS else str(value)]
    return words


def _as_written(name: str, table: tuple[str, ...], entry: dict[str, Any]) -> str:
    if location(name).endswith(".toml"):
        return edits.toml_entry(table, entry)
    whole: Any = entry
    for key in reversed(table):
        whole = {key: whole}
    return json.dumps(whole, indent=2, ensure_ascii=False)

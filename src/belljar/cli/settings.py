"""`belljar settings`: every setting, its value, where it came from; and the sandbox switch."""

from __future__ import annotations

import argparse
import os
from contextlib import closing

from .. import config
from ..api import build_request
from ..config_keys import KEYS, VARIABLES
from ..engine import Engine
from ..errors import BelljarError
from ..explanation import limit_text, network_text
from . import edits, running, summary
from .arguments import Parser, UsageError, add_common
from .failures import print_json
from .terminal import show, visible

EPILOG = """\
Settings come from /etc/belljar/belljar.toml, ~/.config/belljar/belljar.toml, the file named by
--config or BELLJAR_CONFIG (else ./belljar.toml), then BELLJAR_* variables; the later wins, but of
every ceiling the strictest holds. A belljar.toml looks like this:

  level = "strict"
  [defaults]
  timeout = "5s"
  memory = "256M"
  [ceiling]
  timeout = "60s"
  network = "off"

`belljar settings sandbox disable` makes the Bash tool of belljar.tools refuse its commands, or run
them on this host where sandbox.allow_direct is true; `enable` brings them back into the sandbox.
Both write to your own file, and keep what was there before beside it.

examples:
  belljar settings
  BELLJAR_TIMEOUT=5s belljar settings --json
  belljar settings sandbox enable"""


def add_arguments(parser: Parser) -> None:
    parser.usage = "belljar settings [options] [sandbox [enable | disable]]"
    parser.add_argument(
        "words",
        metavar="sandbox",
        nargs="*",
        help="the sandbox switch: show it, or sandbox enable, sandbox disable",
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    if args.words:
        if args.words == ["sandbox"]:
            return _tell(args)
        if args.words not in (["sandbox", "enable"], ["sandbox", "disable"]):
            raise UsageError(
                f"{' '.join(args.words)!r} is not a setting that can be changed here",
                fix="write `belljar settings sandbox enable`; the others are set in a belljar.toml",
            )
        return _switch(args, on=args.words[1] == "enable")
    settings = config.load(path=args.config)
    values = settings.to_dict()
    if args.json:
        print_json({"settings": values, "sources": dict(settings.sources)})
        return 0
    variables = {key: name for name, key in VARIABLES.items()}
    rows = [("setting", "value", "from", "variable")]
    for key in KEYS:
        unset = "as the level" if key.startswith("defaults.") else "-"
        value = values.get(key)
        shown = unset if value is None else _text(value)
        source = settings.sources.get(key, "default")
        rows.append((key, shown, source, variables.get(key, "")))
    show(visible(summary.table(rows)))
    return 0


def _switch(args: argparse.Namespace, *, on: bool) -> int:
    """Write the switch to the user's file, and tell what commands get from now on."""
    path = config.user_file(os.environ)
    if path is None:
        raise UsageError("there is no HOME to keep settings in", fix="set HOME")
    config.load(path=args.config)  # a file with a mistake in it is reported as such
    old, table, values = edits.read_text(path), ("sandbox",), {"enabled": on}
    try:
        new = edits.toml_with(old, table, values)
    except ValueError as error:
        raise UsageError(
            f"{path} was not changed: {error}", fix=f"write {edits.toml_entry(table, values)!r}"
        ) from None
    kept = edits.replace_file(path, new) if new != old else None
    settings, told = _state(args)
    if settings.sandbox_enabled != on:
        raise UsageError(
            f"{path} says so now, but {settings.sources['sandbox.enabled']} says otherwise",
            fix="change it there",
        )
    if args.json:
        print_json({"enabled": on, "file": path, "backup": kept, "sandbox": told})
        return 0
    lines = _described(settings, told)
    lines.append(f"Written to {path}" + (f"; before: {kept}" if kept else ""))
    show(visible("\n".join(lines)))
    return 0


def _tell(args: argparse.Namespace) -> int:
    """Show the switch as it is."""
    settings, told = _state(args)
    if args.json:
        print_json({"enabled": settings.sandbox_enabled, "sandbox": told})
        return 0
    lines = _described(settings, told)
    lines.append(f"Set by: {settings.sources.get('sandbox.enabled', 'default')}")
    show(visible("\n".join(lines)))
    return 0


def _state(args: argparse.Namespace) -> tuple[config.Settings, dict[str, str]]:
    with closing(running.open_engine(args)) as engine:
        settings = engine.settings
        return settings, _sandbox(engine) if settings.sandbox_enabled else {}


def _described(settings: config.Settings, told: dict[str, str]) -> list[str]:
    on = settings.sandbox_enabled
    lines = [f"Sandbox mode {'enabled' if on else 'disabled'}."]
    lines += [f"  {name}: {value}" for name, value in told.items()]
    if on:
        return [*lines, "", "Commands of the Bash tool run in the sandbox."]
    if settings.sandbox_allow_direct:
        return [*lines, "", "Commands of the Bash tool run directly on this host."]
    return [*lines, "", "Commands of the Bash tool are refused."]


def _sandbox(engine: Engine) -> dict[str, str]:
    """Where a command would run, and its limits."""
    request = build_request(code="", language="bash", settings=engine.settings)
    try:
        plan = engine.plan(request)
    except BelljarError as error:
        return {"Backend": f"none: {error.message}"}
    policy = plan.policy
    network = network_text(policy)
    return {
        "Backend": f"{plan.backend} (isolation {plan.isolation.value})",
        "Memory limit": limit_text(policy, "memory"),
        "CPU limit": f"{policy.limits.cpus * 100:g}% of a core",
        "Network": "disabled" if network == "off" else network,
        "Timeout": limit_text(policy, "timeout"),
    }


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)

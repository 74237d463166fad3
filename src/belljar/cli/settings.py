"""`belljar settings`: every setting, its value, and the file or variable that it came from."""

from __future__ import annotations

import argparse

from .. import config
from ..config_keys import KEYS, VARIABLES
from . import summary
from .arguments import add_common
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

examples:
  belljar settings
  BELLJAR_TIMEOUT=5s belljar settings --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)


def run(args: argparse.Namespace) -> int:
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


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)

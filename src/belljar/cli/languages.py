"""`belljar languages`: every language, the interpreter behind it, and the backends that run it."""

from __future__ import annotations

import argparse
from contextlib import closing

from .. import language_report
from . import running, summary
from .arguments import add_common
from .failures import print_json
from .terminal import show, visible

EPILOG = """\
examples:
  belljar languages
  belljar run -c 'puts 6 * 7' --lang ruby
  BELLJAR_LANGUAGE_FILE=languages.toml belljar languages --json

A language file (TOML, JSON or YAML) adds languages or overrides these; docs/languages.md says how.
A languages.toml looks like this:

  [ruby]
  command = ["ruby"]
  file = "main.rb"
  extensions = [".rb"]
  [ruby.docker]
  image = "ruby:3.3\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    with closing(running.open_engine(args)) as engine:
        reports = language_report.reports(engine)
        file = engine.settings.language_file
    if args.json:
        print_json({"languages": [report.to_dict() for report in reports], "language_file": file})
        return 0
    rows = [("language", "version", "command", "runs on", "to install")]
    for report in reports:
        rows.append(
            (
                report.name,
                report.version or "-",
                report.command or "not installed",
                ", ".join(report.backends) or "-",
                report.fix or "",
            )
        )
    show(visible(summary.table(rows)) + f"\n\nlanguage file: {file or 'none'}")
    return 0

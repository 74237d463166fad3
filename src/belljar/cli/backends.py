"""`belljar backends`: every backend, how strongly it isolates, and whether it works here."""

from __future__ import annotations

import argparse
from contextlib import closing

from .. import doctor
from . import running, summary
from .arguments import add_common
from .failures import print_json
from .terminal import show, visible

EPILOG = """\
examples:
  belljar backends
  belljar run -c 'print(1)' --backend subprocess

The ladder of isolation: none < process < landlock < jail = container < wasm = gvisor < vm."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    with closing(running.open_engine(args)) as engine:
        reports = doctor.backend_reports(engine)
        chosen = engine.settings.found_backend or engine.settings.backend
        level = engine.settings.level
    if args.json:
        print_json({"backends": [report.to_dict() for report in reports], "default": chosen})
        return 0
    rows = [("backend", "isolation", "here", f"level {level}", "")]
    for report in reports:
        remark = report.problem or "; ".join(report.notes)
        rows.append(
            (
                report.name,
                report.isolation or "?",
                "yes" if report.available else "no",
                "held" if report.usable else "not held",
                remark,
            )
        )
        if report.fix and not report.available:
            rows.append(("", "", "", "", f"fix: {report.fix}"))
    show(visible(summary.table(rows)) + f"\n\ndefault: {chosen}")
    return 0

"""`belljar doctor`: what this host can do, what each backend lacks, and how to fix it."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from .. import doctor
from . import running, summary
from .arguments import add_common
from .failures import print_json
from .terminal import paint, show, visible

EPILOG = """\
examples:
  belljar doctor
  belljar doctor --level strict       can this host hold the strict level?
  belljar doctor --json | jq '.backends[] | select(.usable)'

Exits 0 if at least one backend holds the level's policy here, else 1."""

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "missing": ("--", "dim")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", metavar="LEVEL", help="permissive, standard or strict")
    parser.add_argument("-v", "--verbose", action="store_true", help="what enforces each field")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    with closing(running.open_engine(args, level=args.level)) as engine:
        findings = doctor.host(engine.settings)
        reports = doctor.backend_reports(engine)
        level = engine.settings.level
    usable = [report.name for report in reports if report.usable]
    if args.json:
        print_json(
            {
                "ok": bool(usable),
                "level": level,
                "host": [finding.to_dict() for finding in findings],
                "backends": [report.to_dict() for report in reports],
            }
        )
    else:
        lines = [*_host_lines(findings), "", *_backend_lines(reports, verbose=args.verbose), ""]
        lines.append(_verdict(level, usable))
        show("\n".join(lines))
    return 0 if usable else 1


def _host_lines(findings: list[doctor.Finding]) -> list[str]:
    lines = [paint("host", "bold", sys.stdout)]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word, colour = _MARKS[finding.state]
        mark = paint(f"{word:<4}", colour, sys.stdout)
        lines.append(f"  {mark}  {finding.name:<{width}}  {visible(finding.detail)}")
        if finding.fix:
            lines.append(f"  {'':4}  {'':<{width}}  fix: {visible(finding.fix)}")
    return lines


def _backend_lines(reports: list[doctor.BackendReport], *, verbose: bool) -> list[str]:
    lines = [paint("backends", "bold", sys.stdout)]
    width = max((len(report.name) for report in reports), default=0)
    for report in reports:
        mark = (
            paint("ok  ", "green", sys.stdout)
            if report.usable
            else paint("--  ", "dim", sys.stdout)
        )
        text = f"isolation {report.isolation}" if report.isolation else ""
        if report.problem:
            text = f"{text}; {report.problem}" if text else report.problem
        lines.append(f"  {mark}  {report.name:<{width}}  {visible(text)}")
        weak = [name for name, held in report.enforcement.items() if held.state != "enforced"]
        if weak and not verbose:
            lines.append(f"  {'':4}  {'':<{width}}  best effort only: {', '.join(weak)}")
        lines += [f"  {'':4}  {'':<{width}}  note: {visible(note)}" for note in report.notes]
        if report.fix:
            lines.append(f"  {'':4}  {'':<{width}}  fix: {visible(report.fix)}")
        if verbose and report.enforcement:
            indent = " " * (10 + width)
            lines += [
                indent + row for row in summary.enforcement_table(report.enforcement).split("\n")
            ]
    return lines


def _verdict(level: str, usable: list[str]) -> str:
    if usable:
        return f"level {level}: held here by {', '.join(usable)}"
    return paint(f"level {level}: no backend of this host holds its policy", "red", sys.stdout)

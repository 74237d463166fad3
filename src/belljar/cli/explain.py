"""`belljar explain`: which backend would run a program and why not the others. Runs nothing."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

from .. import languages, needs
from ..engine import Explanation
from ..types import Request
from . import request, running, summary, terminal
from . import run as program
from .arguments import Parser
from .failures import print_json

EPILOG = """\
examples:
  belljar explain job.py
  belljar explain -c 'import numpy' --min-isolation wasm
  belljar explain job.py --require pandas --json

It takes what `belljar run` takes. The exit code is 126 if no backend would run it."""


def add_arguments(parser: Parser) -> None:
    program.add_arguments(parser)
    parser.usage = "belljar explain [options] (FILE | - | -c CODE)"
    parser.set_defaults(explain=True)


def run(args: argparse.Namespace) -> int:
    with closing(running.open_engine(args)) as engine:
        wanted = program.reader(args)(engine.settings)
        found = engine.explain(
            wanted, level=args.level, wishes=request.wishes(args), backend=args.backend
        )
        if args.json:
            print_json(_plain(found, wanted))
        else:
            _show(found, wanted)
    return 0 if found.backend is not None else 126


def _facts(wanted: Request) -> dict[str, Any]:
    """What the source tells, where it tells something."""
    if wanted.code is None or languages.of(wanted).family != "python":
        return {"language": wanted.language}
    read = needs.of_python(wanted.code, wanted.files)
    return {
        "language": wanted.language,
        "imports": list(read.modules),
        "unreadable": read.unreadable or None,
    }


def _plain(found: Explanation, wanted: Request) -> dict[str, Any]:
    return {
        "backend": found.backend,
        "reason": found.reason,
        "fix": found.fix,
        "refused": found.refused,
        "modules": None
        if found.policy is None or found.policy.modules.allow is None
        else sorted(found.policy.modules.allow),
        "program": _facts(wanted),
        "others": [
            {
                "name": each.name,
                "able": each.able,
                "why": _why(each.able, each.why),
                "fix": each.fix,
            }
            for each in found.verdicts
            if each.name != found.backend
        ],
    }


def _show(found: Explanation, wanted: Request) -> None:
    facts = _facts(wanted)
    rows = [("backend", found.backend or "none"), ("reason", found.reason)]
    fix = summary.lint_fix(found.policy) if found.refused else found.fix
    if fix:
        rows.append(("fix", fix))
    rows.append(("language", facts["language"]))
    if found.policy is not None and "imports" in facts:
        rows.append(("modules", summary.modules_text(found.policy)))
    if "imports" in facts:
        rows.append(("imports", ", ".join(facts["imports"]) or "nothing"))
    if facts.get("unreadable"):
        rows.append(("unreadable", facts["unreadable"]))
    others = [("other backend", "why not")]
    others += [
        (each.name, _why(each.able, each.why))
        for each in found.verdicts
        if each.name != found.backend
    ]
    text = summary.table(rows) + "\n\n" + summary.table(others)
    terminal.show(terminal.visible(text))


def _why(able: bool, why: str) -> str:
    if able:
        return f"could, but {why or 'comes later'}"
    return why

"""`belljar selftest`: attack the sandboxes of this host with hostile programs, and report."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from ..policy import Isolation
from . import running
from .arguments import UsageError, add_common
from .failures import print_json
from .terminal import complain, is_terminal, show, visible

if TYPE_CHECKING:
    from ..testing.hostile import Card

EPILOG = """\
examples:
  belljar selftest                              every backend here that promises isolation
  belljar selftest --backend subprocess --group memory
  belljar selftest --controls                   also prove that the detectors can fire (root)
  belljar selftest --repeat 20 --controls --write docs/scorecard.md

Safe on a production machine: every program is bounded, and what it attacks are canaries in a
private temporary directory. Exits 1 if a claimed case is breached or cannot be judged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("what is examined")
    which.add_argument(
        "--backend", metavar="NAME", action="append", default=[], help="may be given again"
    )
    which.add_argument(
        "--group", metavar="GROUP", action="append", default=[], help="only this group of cases"
    )
    which.add_argument("--case", metavar="ID", action="append", default=[], help="only this case")
    which.add_argument("--cases", metavar="FILE", help="a case file of your own")
    which.add_argument(
        "--tier", choices=("fast", "slow", "soak"), default="fast", help="up to this tier"
    )
    which.add_argument(
        "--claimed-only", action="store_true", help="leave out what a backend does not promise"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--repeat", metavar="N", type=int, default=1, help="a case is held if held N times"
    )
    how.add_argument(
        "--controls", action="store_true", help="also run the cases without a sandbox, as nobody"
    )
    how.add_argument(
        "--ablation", action="store_true", help="also switch every protection off, one by one"
    )
    how.add_argument(
        "--write", metavar="FILE.md", help="write the scorecard there, and FILE.json beside it"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    from ..testing import hostile
    from ..testing.hostile import control

    if args.repeat < 1:
        raise UsageError("--repeat is at least 1")
    if args.write and not args.write.endswith(".md"):
        raise UsageError(f"--write {args.write!r} does not end in .md")
    if args.controls and (problem := control.possible()):
        raise UsageError(problem, fix="run as root, or leave --controls out")
    suite = hostile.load(args.cases)
    with closing(running.open_engine(args)) as engine:
        settings = engine.settings
        names = args.backend or [
            name
            for name in engine.backend_names()
            if engine.backend(name).isolation is not Isolation.NONE
            and engine.backend(name).probe().available
        ]
    progress = _Progress()
    cards = []
    for name in names:
        with progress.about(name):
            cards.append(
                hostile.examine(
                    name,
                    suite=suite,
                    settings=settings,
                    groups=tuple(args.group),
                    ids=tuple(args.case),
                    tier=args.tier,
                    repeat=args.repeat,
                    claimed_only=args.claimed_only,
                    controls=args.controls,
                    ablation=args.ablation,
                    progress=progress,
                )
            )
    _tell(cards, args)
    return 1 if any(card.failed for card in cards) else 0


def _tell(cards: list[Card], args: argparse.Namespace) -> None:
    from ..testing.hostile import scorecard

    told = {
        "host": scorecard.host_facts(),
        "failed": any(card.failed for card in cards),
        "backends": [card.to_dict() for card in cards],
    }
    if args.json:
        print_json(told)
    else:
        for card in cards:
            show(visible(card.text()) + "\n")
            if card.klass == "inproc":
                complain(f"{card.backend}: {scorecard.NO_ISOLATION}", colour="yellow")
    if args.write:
        import json

        command = "belljar selftest " + " ".join(_flags(args))
        with open(args.write, "w", encoding="utf-8") as file:
            file.write(scorecard.page(cards, command))
        with open(args.write.removesuffix(".md") + ".json", "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1, sort_keys=True)
            file.write("\n")


def _flags(args: argparse.Namespace) -> list[str]:
    """The flags that make this scorecard again."""
    words = [f"--backend {name}" for name in args.backend]
    words += [f"--group {name}" for name in args.group]
    words += ["--tier " + args.tier] if args.tier != "fast" else []
    words += [f"--repeat {args.repeat}"] if args.repeat > 1 else []
    words += [f"--{name}" for name in ("controls", "ablation") if getattr(args, name)]
    return [*words, f"--write {os.path.relpath(args.write)}"]


class _Progress:
    """One line on a terminal, rewritten; nothing where stderr is not one."""

    def __init__(self) -> None:
        self._on = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._backend = ""

    def about(self, backend: str) -> _Progress:
        self._backend = backend
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        self._write("")

    def __call__(self, text: str) -> None:
        self._write(f"{self._backend} {visible(text)}"[:79])

    def _write(self, text: str) -> None:
        if self._on:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

"""`belljar selftest`: attack the sandboxes of this host with hostile programs, and report."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..policy import Isolation
from . import running
from .arguments import UsageError, add_common
from .failures import print_json
from .terminal import complain, is_terminal, say, show, visible

if TYPE_CHECKING:
    from ..testing.hostile import Card

EPILOG = """\
examples:
  belljar selftest                              every backend here that promises isolation
  belljar selftest --backend subprocess --group memory
  belljar selftest --controls                   also prove that the detectors can fire (root)
  belljar selftest --repeat 20 --controls --ablation --write docs/scorecard.md
  belljar selftest --merge elsewhere.json --write docs/scorecard.md

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
        "--write",
        metavar="FILE.md",
        help="put each scorecard there and in FILE.json once it is known; other backends stay",
    )
    how.add_argument(
        "--merge",
        metavar="FILE.json",
        action="append",
        default=[],
        help="examine nothing, put the scorecards of these files into that of --write",
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    from ..testing.hostile import control
    from ..testing.hostile.private import private_directory
    from ..testing.hostile.snapshot import no_survivors

    if args.repeat < 1:
        raise UsageError("--repeat is at least 1")
    if args.write and not args.write.endswith(".md"):
        raise UsageError(f"--write {args.write!r} does not end in .md")
    if args.merge:
        return _merge(args)
    if args.controls and (problem := control.possible()):
        raise UsageError(problem, fix="run as root, or leave --controls out")
    cards: list[Card] = []
    with _Interruption() as interruption:
        # Whatever it was doing when a signal came: these two put everything right afterwards.
        with private_directory(), no_survivors(), interruption.allowed():
            cards = _examine(args)
        if interruption.received is not None:
            return 128 + interruption.received
    _tell(cards, args)
    return 1 if any(card.failed for card in cards) else 0


def _merge(args: argparse.Namespace) -> int:
    from ..testing.hostile import published

    if not args.write:
        raise UsageError("--merge needs a file to --write")
    cards = [card for name in args.merge for card in published.read(Path(name))]
    published.merge(Path(args.write), cards)
    return 0


def _examine(args: argparse.Namespace) -> list[Card]:
    from ..testing import hostile
    from ..testing.hostile import published

    suite = hostile.load(args.cases)
    if args.write and (there := Path(args.write).with_suffix(".json")).exists():
        published.read(there)  # better now than after an hour
    with closing(running.open_engine(args)) as engine:
        settings = engine.settings
        names = args.backend or [
            name
            for name in engine.backend_names()
            if engine.backend(name).isolation is not Isolation.NONE
            and engine.backend(name).probe().available
        ]

    def write(card: Card) -> None:
        if args.write:
            published.write(Path(args.write), [card])

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
                    command=_command(name, args),
                    progress=progress,
                    so_far=write,
                )
            )
        write(cards[-1])
    return cards


def _tell(cards: list[Card], args: argparse.Namespace) -> None:
    from ..testing.hostile import render

    if args.json:
        told = [card.to_dict() for card in cards]
        print_json({"failed": any(card.failed for card in cards), "backends": told})
    else:
        for card in cards:
            show(visible(card.text()) + "\n")
            if card.klass == "inproc":
                complain(f"{card.backend}: {render.NO_ISOLATION}", colour="yellow")


def _command(backend: str, args: argparse.Namespace) -> str:
    """The command that makes this card again."""
    words = [f"belljar selftest --backend {backend}"]
    words += [f"--group {name}" for name in args.group]
    words += [f"--case {name}" for name in args.case]
    words += [f"--cases {os.path.basename(args.cases)}"] if args.cases else []
    words += ["--tier " + args.tier] if args.tier != "fast" else []
    words += [f"--repeat {args.repeat}"] if args.repeat > 1 else []
    flags = ("claimed-only", "controls", "ablation")
    words += [f"--{name}" for name in flags if getattr(args, name.replace("-", "_"))]
    return " ".join(words)


class _Interrupted(BaseException):
    """A signal asks us to end. Not an Exception: no case may take it for its own failure."""


class _Interruption:
    """SIGINT, SIGTERM and SIGHUP as an exception, at most one, and only where that is `allowed`:
    what cleans up afterwards is not interrupted by the next one. `received` is the signal."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._allowed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interruption:
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
            for number in filter(None, numbers):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if self._allowed:
                raise _Interrupted

    @contextmanager
    def allowed(self) -> Iterator[None]:
        try:
            self._allowed = True
            if self.received is None:
                yield
            else:
                raise _Interrupted
        except _Interrupted:
            complain(f"ended by {signal.Signals(self.received or 0).name}: cleaning up")
        finally:
            self._allowed = False


class _Progress:
    """One line on a terminal, rewritten; elsewhere a line every few seconds."""

    _EVERY = 10.0

    def __init__(self) -> None:
        self._rewrites = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._backend = ""
        self._next = 0.0
        self._start = 0.0

    def about(self, backend: str) -> _Progress:
        self._backend = backend
        self._start = time.monotonic()
        self._next = 0.0
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        if self._rewrites:
            self._rewrite("")

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        line = f"{self._backend} {visible(text)}"
        if self._rewrites:
            self._rewrite(line[:79])
        elif now >= self._next:
            self._next = now + self._EVERY
            say(f"{now - self._start:6.0f} s  {line}")

    def _rewrite(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()

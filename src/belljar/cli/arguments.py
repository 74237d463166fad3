"""The argument parser of every command: errors in our words, and `--` before the guest's own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from ..errors import BelljarError


class UsageError(BelljarError):
    """The command line itself is wrong: exit code 125, like every failure of our own."""

    code = "usage_invalid"


class _Help(argparse.RawDescriptionHelpFormatter):
    """Knows its width. Else `argparse` asks `shutil`, with every compressor, for each argument."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    """As `shutil.get_terminal_size` finds out."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:  # not a terminal
        return 80


class Parser(argparse.ArgumentParser):
    """`belljar NAME`. With `guest_words`, options may stand anywhere before `--`, and what follows
    `--` is the guest's: it ends up untouched in `args.rest`."""

    def __init__(self, name: str, summary: str, *, epilog: str | None = None) -> None:
        super().__init__(
            prog=f"belljar {name}",
            description=summary[:1].upper() + summary[1:] + ".",
            epilog=epilog,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self.guest_words = False

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        if not self.guest_words:
            return self.parse_args(words)
        end = words.index("--") if "--" in words else len(words)
        args = self.parse_intermixed_args(words[:end])
        args.rest = tuple(words[end + 1 :])
        return args

    def error(self, message: str) -> NoReturn:
        fix = f"see `{self.prog} --help`"
        if self.guest_words and message.startswith("unrecognized arguments"):
            fix = f"flags of the guest's own go after --; ours are in `{self.prog} --help`"
            if near := self._near(message.partition(": ")[2].split(" ")[0].partition("=")[0]):
                fix = f"did you mean {' or '.join(near)}? {fix}"
        raise UsageError(message, fix=fix)

    def _near(self, unknown: str) -> list[str]:
        """Our own options that `unknown` begins with, or that look like it."""
        import difflib  # late: a command that is understood needs none of it

        ours = [flag for flag in self._option_string_actions if flag.startswith("--")]
        shorter = [flag for flag in ours if unknown.startswith(flag)]
        return list(dict.fromkeys([*shorter, *difflib.get_close_matches(unknown, ours)]))


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--config", metavar="FILE", help="read this file instead of ./belljar.toml")


def add_log(parser: argparse.ArgumentParser, *, standard: str) -> None:
    """The options of a server's log."""
    log = parser.add_argument_group(
        "its log: which caller asked, what ran under which limits, how it ended"
    )
    log.add_argument(
        "--log", metavar="FILE", help=f"append to this file (default: {standard}); no programs"
    )
    log.add_argument(
        "-q", "--quiet", action="store_true", help="only limits that were hit, and failures"
    )

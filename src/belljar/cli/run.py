"""`belljar run`: a program from a file, from standard input or from the command line itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from .. import languages
from ..api import build_request
from ..config import Settings
from ..errors import LanguageUnknown
from ..types import Request
from . import request, running
from .arguments import Parser, UsageError

EPILOG = """\
examples:
  belljar run -c 'print(6 * 7)'
  belljar run job.py --timeout 5s --memory 256M
  belljar run job.py -- --verbose input.csv       words after -- go to the program
  belljar run job.py --file data.csv --out '*.png'
  belljar run tool.js --mount ./project:/project:ro
  echo 'print(input())' | belljar run - --stdin answers.txt
  belljar run job.py --level strict --explain     show what would hold, run nothing
  belljar run job.py --json | jq .value

The exit code is the program's own; 124 timeout, 125 Belljar failed, 126 refused,
127 language or backend not found, 137 out of memory or killed."""


def add_arguments(parser: Parser) -> None:
    parser.usage = "belljar run [options] (FILE | - | -c CODE) [ARG...] [-- ARG...]"
    parser.add_argument(
        "words",
        metavar="FILE",
        nargs="*",
        help="the program (- is standard input), then words for it",
    )
    parser.add_argument("-c", dest="code", metavar="CODE", help="the program itself")
    parser.add_argument(
        "--lang", metavar="NAME", help="its language (default: by FILE's suffix or #! line)"
    )
    parser.add_argument("--arg", action="append", default=[], help="one word for the program")
    parser.add_argument("--python", metavar="PATH", help="the interpreter to use, as python3.12")
    parser.add_argument(
        "--modules", metavar="LIST", help="import lint: any, level, safe, or NAME,NAME"
    )
    request.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return running.execute(args, reader(args))


def reader(args: argparse.Namespace) -> Callable[[Settings], Request]:
    """What makes the Request of these words, once the settings are known."""
    words = [*args.words, *args.rest] if args.code is not None else args.words
    file = None
    if args.code is None:
        if not words:
            raise UsageError(
                "there is no program to run", fix="name a FILE, - for standard input, or -c CODE"
            )
        file, words = words[0], [*words[1:], *args.rest]

    def build(settings: Settings) -> Request:
        code = _code(file, args.code)
        return build_request(
            code=code,
            language=args.lang or _language(file, code, settings),
            args=(*args.arg, *words),
            python=args.python,
            filename=file if file != "-" else None,
            settings=settings,
            **request.common_fields(args, code_from_stdin=file == "-"),
        )

    return build


def _language(file: str | None, code: str, settings: Settings) -> str:
    """By the file's extension, else by the `#!` line; a program that tells nothing is Python."""
    if file is None:
        return "python"
    found = languages.of_file("" if file == "-" else file, code, settings)
    if found is not None:
        return found.name
    if os.path.splitext(file)[1] or code.startswith("#!"):
        known = ", ".join(sorted(languages.known(settings)))
        raise LanguageUnknown(
            "language",
            f"{file!r} does not tell its language; known: {known}",
            fix="name it with --lang",
        )
    return "python"


def _code(file: str | None, code: str | None) -> str:
    if file is None:
        data = os.fsencode(code or "")
    elif file == "-":
        data = request.read_own_stdin()
    else:
        data = request.read_file(file, "the program")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the program {file or '-c'!r} is not UTF-8: {error}") from None

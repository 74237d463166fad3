"""`belljar exec`: a command of the sandbox's own file system, such as `ls` or a compiler."""

from __future__ import annotations

import argparse

from ..api import build_request
from . import request, running
from .arguments import Parser, UsageError

EPILOG = """\
examples:
  belljar exec -- ls -la
  belljar exec --timeout 10s --file main.c -- cc -o main main.c
  belljar exec --mount .:/src:ro --network off -- make -n -C /src
  seq 10 | belljar exec -- sort -r

The exit code is the command's own, 127 if there is no such command; else as in `belljar run`."""


def add_arguments(parser: Parser) -> None:
    parser.usage = "belljar exec [options] -- CMD [ARG...]"
    parser.add_argument("words", metavar="CMD", nargs="*", help="the command and its arguments")
    request.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    command = (*args.words, *args.rest)
    if not command:
        raise UsageError("there is no command to run", fix="write belljar exec -- CMD ARG...")
    wanted = build_request(command=command, **request.common_fields(args))
    return running.execute(args, lambda _settings: wanted)

"""From flags to a Request and the policy wishes: the part that `run` and `exec` share."""

from __future__ import annotations

import argparse
import os
import select
import stat
from collections.abc import Callable, Iterable
from typing import Any

from .. import policy_fields
from ..config_keys import from_text
from ..files.names import checked_name
from . import terminal
from .arguments import Parser, UsageError, add_common

LIMIT_FLAGS = tuple(policy_fields.LIMITS)
_MOST_INPUT = 256 << 20
_LIMIT_HELP = {
    "timeout": ("TIME", "wall time, as 5, 1.5s, 2m"),
    "memory": ("SIZE", "memory of all processes together, as 256M, 1G"),
    "cpus": ("N", "processors, fractions allowed"),
    "processes": ("N", "processes and threads"),
    "disk": ("SIZE", "bytes in the work directory"),
    "output": (
        "SIZE",
        "bytes of stdout and of stderr that --json and a terminal show; a pipe or file gets all",
    ),
    "value": ("SIZE", "memory for the value that comes back, at most 64M"),
    "displays": ("SIZE", "memory for all displays together"),
    "open_files": ("N", "open files of a process"),
    "fuel": ("N", "instructions, where the backend counts them"),
}


def add_policy_arguments(parser: Parser, **texts: str) -> argparse._ArgumentGroup:
    """Where programs run and what they may use, also for a server's; returns the first group.

    `texts` are other words for the help of limits.
    """
    where = parser.add_argument_group("where it runs")
    where.add_argument("--backend", metavar="NAME", help="see `belljar backends` (default: auto)")
    where.add_argument("--level", metavar="LEVEL", help="permissive, standard or strict")
    where.add_argument(
        "--min-isolation", metavar="RUNG", help="refuse weaker backends: process, jail, wasm, vm..."
    )
    where.add_argument(
        "--no-fallback",
        action="store_true",
        help="refuse to run if the backend that is named is missing",
    )
    where.add_argument(
        "--image", metavar="IMAGE", help="container image, for backends that use one"
    )
    where.add_argument(
        "--prefer",
        metavar="WHAT",
        help="speed (default), or isolation: the strongest backend that can run the program",
    )

    limits = parser.add_argument_group("limits")
    for name in LIMIT_FLAGS:
        metavar, text = _LIMIT_HELP[name]
        limits.add_argument(_flag(name), dest=name, metavar=metavar, help=texts.get(name, text))
    limits.add_argument(
        "--network", metavar="NET", help="off (default), any, or HOST,HOST:PORT,*.DOMAIN"
    )
    return where


def add_arguments(parser: Parser) -> None:
    """Everything that `run` and `exec` have in common."""
    parser.guest_words = True
    where = add_policy_arguments(parser)
    where.add_argument(
        "--require", metavar="NAME,NAME", help="Python libraries that must be there to import"
    )
    where.add_argument(
        "--retry",
        action="store_true",
        help="on a missing module, before any effect, try once more on another backend",
    )

    data = parser.add_argument_group("what goes in and out")
    data.add_argument("--stdin", metavar="FILE", help="standard input: a file, or - for our own")
    data.add_argument(
        "--env", metavar="K=V", action="append", default=[], help="set K, or pass our own K through"
    )
    data.add_argument(
        "--file",
        metavar="SRC[:DST]",
        action="append",
        default=[],
        help="copy a file or a directory in",
    )
    data.add_argument(
        "--mount",
        metavar="SRC:DST[:ro|rw]",
        action="append",
        default=[],
        help="show a host path (rw,unprotected: also .git/hooks and the like are writable)",
    )
    data.add_argument(
        "--workdir", metavar="DIR", help="start the program in DIR, a directory in a --mount"
    )
    data.add_argument(
        "--out", metavar="GLOB", action="append", default=[], help="bring changed files out"
    )
    data.add_argument("--out-dir", metavar="DIR", help="where --out files go (default: here)")
    data.add_argument(
        "--outputs-to",
        metavar="DIR",
        help="write changed files (those of --out, or all) below DIR, however large they are",
    )
    data.add_argument("--outputs-each", metavar="SIZE", help="bytes of one file that comes out")
    data.add_argument("--outputs-total", metavar="SIZE", help="bytes of all files that come out")
    data.add_argument("--force", action="store_true", help="let --out files overwrite")

    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--explain", action="store_true", help="show backend, policy and enforcement; start nothing"
    )
    shown.add_argument(
        "-q", "--quiet", action="store_true", help="no lines of our own but failures"
    )
    shown.add_argument(
        "--raw", action="store_true", help="let the guest's escape sequences reach the terminal"
    )
    add_common(parser)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def wishes(args: argparse.Namespace) -> dict[str, Any]:
    """The policy fields that the flags name, as resolve() takes them."""
    asked: dict[str, Any] = {name: getattr(args, name) for name in LIMIT_FLAGS}
    asked["min_isolation"] = args.min_isolation
    for name in ("network", "modules"):
        text = getattr(args, name, None)
        asked[name] = None if text is None else from_text(f"defaults.{name}", text)
    return {name: wish for name, wish in asked.items() if wish is not None}


def common_fields(args: argparse.Namespace, *, code_from_stdin: bool = False) -> dict[str, Any]:
    """The fields of a Request that both commands fill in the same way."""
    return {
        "stdin": _stdin(args, code_from_stdin=code_from_stdin),
        "env": _environment(args.env),
        "files": _files(args.file),
        "mounts": args.mount,
        "workdir": args.workdir,
        "outputs": args.out,
        "outputs_to": args.outputs_to and os.path.abspath(args.outputs_to),
        "outputs_each": args.outputs_each,
        "outputs_total": args.outputs_total,
        "image": args.image,
        "require_libraries": [name for name in (args.require or "").split(",") if name],
        "retry": args.retry,
        "fallback": not args.no_fallback,
        "prefer": args.prefer or "",
    }


def _environment(given: Iterable[str]) -> dict[str, str]:
    environment: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name:
            raise UsageError(f"--env {item!r} has no name", fix="write --env NAME=VALUE")
        if not equals:
            if name not in os.environ:
                raise UsageError(
                    f"--env {name}: our own environment has no {name}",
                    fix=f"write --env {name}=VALUE, or --env {name}= for an empty one",
                )
            value = os.environ[name]
        environment[name] = value
    return environment


def _files(given: Iterable[str]) -> dict[str, bytes | os.PathLike[str]]:
    """Name in the work directory -> content of a file, or a directory's path."""
    files: dict[str, bytes | os.PathLike[str]] = {}
    for item in given:
        source, _, target = item.rpartition(":")
        if not source or os.path.exists(item):
            source, target = item, os.path.basename(os.path.abspath(item))
        name = checked_name("file", target or os.path.basename(os.path.abspath(source)))
        if name in files:
            raise UsageError(f"--file: two files would be called {name!r}", fix="write SRC:DST")
        if os.path.isdir(source):
            from pathlib import Path

            files[name] = Path(source)
        else:
            files[name] = read_file(source, "--file")
    return files


def read_file(path: str, what: str) -> bytes:
    """A file that the user named, whole."""
    try:
        with open(path, "rb") as file:
            return read_bounded(file.read, path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{what}: cannot read {path!r}: {why}") from None


def read_bounded(read: Callable[[int], bytes], name: str) -> bytes:
    data = bytearray()
    while piece := read(1 << 20):
        data += piece
        if len(data) > _MOST_INPUT:
            raise UsageError(
                f"{name} is larger than {_MOST_INPUT >> 20} MiB", fix="show it with --mount SRC:DST"
            )
    return bytes(data)


def _stdin(args: argparse.Namespace, *, code_from_stdin: bool) -> bytes:
    """The guest's input: the file that --stdin names, else our own unless a person sits at it."""
    if args.stdin is not None and args.stdin != "-":
        return read_file(args.stdin, "--stdin")
    if code_from_stdin:
        if args.stdin == "-":
            raise UsageError(
                "the program itself comes from standard input", fix="give --stdin a file"
            )
        return b""
    if args.explain or (args.stdin is None and os.isatty(0)):
        return b""
    return read_own_stdin(quiet=args.quiet)


def read_own_stdin(*, quiet: bool = False) -> bytes:
    """Our standard input until its end. A pipe that stays silent gets a word about the wait."""
    is_pipe = not stat.S_ISREG(os.fstat(0).st_mode)
    if is_pipe and not os.isatty(0) and not quiet and not _readable(0, seconds=3):
        terminal.complain(
            "waiting for the end of standard input, which is passed to the program",
            "give it none with --stdin /dev/null",
            colour="yellow",
        )
    try:
        return read_bounded(lambda size: os.read(0, size), "standard input")
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror}") from None


def _readable(descriptor: int, *, seconds: float) -> bool:
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    except (OSError, ValueError):  # not something that can be waited for
        return True

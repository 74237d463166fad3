"""The directory that a program starts in, where a request names one (`Request.workdir`).

The program's own file and its inputs stay in the run's work directory. So its file is named by an
absolute path, and the work directory is searched for modules after the one that was asked for.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping

from ..errors import RequestError
from ..policy import Policy
from ..types import Request


def check(policy: Policy, request: Request) -> None:
    """RequestError unless `workdir` is a directory in a mount, in a listed path, or of `files`."""
    asked = request.workdir
    if not asked:
        return
    files = policy.filesystem
    shown = [(mount.dst, mount.src) for mount in request.mounts]
    shown += [(path, path) for path in (*files.read_only, *files.read_write)]
    covers = [(at, source) for at, source in shown if asked == at or asked.startswith(at + "/")]
    # The innermost mount is the one that the program sees.
    for at, source in sorted(covers, reverse=True)[:1]:
        if os.path.isdir(os.path.join(source, asked[len(at) :].lstrip("/"))):
            return
        raise RequestError("workdir", f"{asked!r}: there is no such directory in {source!r}")
    if any(name.startswith(asked + "/") for name in request.files):
        return
    raise RequestError(
        "workdir",
        f"{asked!r} is neither in a mount nor a directory of files",
        fix=f"mount a directory there: mounts=[Mount(SRC, {asked!r})] or --mount SRC:{asked}",
    )


def start_in(request: Request, work: str) -> str:
    """Where the program starts, in a sandbox whose work directory is `work`."""
    return posixpath.join(work, request.workdir) if request.workdir else work


def program_file(request: Request, file: str, work: str) -> str:
    """What the program's file is called from where it starts."""
    return posixpath.join(work, file) if request.workdir and file else file


def command_line(
    argv: tuple[str, ...], request: Request, file: str | None, work: str
) -> tuple[str, ...]:
    """`argv` with the program's file, which stands before its arguments, by that name."""
    place = len(argv) - len(request.args) - 1
    if not request.workdir or not file or place < 0 or argv[place] != file:
        return argv
    return (*argv[:place], program_file(request, file, work), *argv[place + 1 :])


def environment(request: Request, work: str) -> Mapping[str, str]:
    """The request's variables; Python also looks for modules beside the program's file."""
    if not request.workdir:
        return request.env
    paths = (request.env.get("PYTHONPATH", ""), work)
    return {**request.env, "PYTHONPATH": ":".join(filter(None, paths))}

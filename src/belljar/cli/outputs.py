"""Files that a guest made, written below a directory of the user's: names and links are hostile.

The guest chose the names. None may leave the directory, follow a link, hide (a dot file is code to
many programs, as in `.git/hooks`), or replace what is there unless the user said so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ..errors import RequestError
from ..files.collect import checked_name
from ..types import File

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


class Written:
    """The names that were written, and for each that was not, why."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.problems: dict[str, str] = {}


def write(
    files: Mapping[str, File], directory: str, *, globs: Iterable[str], force: bool = False
) -> Written:
    """Write every collected file below `directory`, which is made if it is missing."""
    done = Written()
    hidden_wanted = any(part.startswith(".") for glob in globs for part in glob.split("/"))
    os.makedirs(directory, exist_ok=True)
    # The directory itself is the user's choice and may be a link; everything below may not.
    top = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        for name, file in files.items():
            if file.data is None:
                continue
            try:
                parts = checked_name("out", name).split("/")
                if any(part.startswith(".") for part in parts) and not hidden_wanted:
                    done.problems[name] = "is hidden; name it with a glob that starts with a dot"
                    continue
                _write_below(top, parts, file.data, force=force)
                done.names.append(name)
            except RequestError as error:
                done.problems[name] = error.message
            except FileExistsError:
                done.problems[name] = "exists; overwrite with --force, or choose another --out-dir"
            except OSError as error:
                done.problems[name] = error.strerror or str(error)
    finally:
        os.close(top)
    return done


def _write_below(top: int, parts: list[str], data: bytes, *, force: bool) -> None:
    opened: list[int] = []
    parent = top
    try:
        for part in parts[:-1]:
            try:
                os.mkdir(part, dir_fd=parent)
            except FileExistsError:
                pass  # opened below, without following it if it is a link
            parent = os.open(part, _DIRECTORY, dir_fd=parent)
            opened.append(parent)
        if not force:
            _write_new(parts[-1], parent, data)
            return
        # A rename replaces a link instead of writing through it, and never leaves half a file.
        fresh = f".belljar-{os.urandom(8).hex()}"
        _write_new(fresh, parent, data)
        try:
            os.replace(fresh, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            os.unlink(fresh, dir_fd=parent)
            raise
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _write_new(name: str, parent: int, data: bytes) -> None:
    with open(os.open(name, _NEW, 0o666, dir_fd=parent), "wb") as file:
        file.write(data)

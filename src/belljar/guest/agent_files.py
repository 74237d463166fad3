"""What a program left in its work directory, sent to the host piece by piece, within bounds.

Nobody else is alive when this runs, so nothing changes under our feet; but the names, the modes and
the depth of what is there are a hostile program's work. Links are never followed, and what is
mounted inside the work directory is not looked into: it is the host's own.
"""

from __future__ import annotations

import fnmatch
import os
import stat
import time

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Say = Callable[[int, bytes], None]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECE = 1 << 18
# All warnings go in one packet, and names in them are as long and as many as a program likes.
_MOST_WARNINGS, _MOST_CHARACTERS = 20, 200


def send_changed(
    bounds: dict[str, Any],
    before: dict[bytes, tuple[int, int]],
    say: Say,
    listed: int,
    data: int,
) -> list[str]:
    """Say every regular file that is new, gone or not as in `before` (mtime, size); returns
    warnings. What no glob asks for is sent for its hash, if it is small: the host makes those,
    because a program may have replaced the modules that this process would make them with."""
    warnings: list[str] = []
    unseen: list[str] = []  # why files may be there that were not looked at
    budget, hashable = bounds["bytes"], bounds["hash"]
    gone = dict.fromkeys(before)
    found = 0
    for path, parent, name, info in _walk(bounds, unseen):
        gone.pop(path, None)
        if before.get(path) == (info.st_mtime_ns, info.st_size):
            continue
        if found >= bounds["files"]:
            unseen.insert(0, f"only the first {found} changed files are listed")
            break
        found += 1
        wanted = any(_matches(os.fsdecode(path), glob) for glob in bounds["outputs"])
        fd, problem = -1, ""
        if wanted or info.st_size <= hashable:
            if not wanted:
                hashable -= info.st_size
            if info.st_nlink > 1:
                problem = "has a second hard link and was not read"
            elif (fd := _open(name, parent, _REGULAR)) < 0:
                problem = "could not be read"
        if wanted and problem:
            warnings.append(f"{_shown(path)} {problem}")
        told = {"path": path.hex(), "size": info.st_size, "data": fd >= 0}
        say(listed, protocol.dumps(told))
        if fd >= 0:
            room = min(bounds["each"], budget) if wanted else info.st_size
            sent = _send(fd, room, say, data)
            budget -= sent if wanted else 0
    if not unseen:  # else what seems to be gone may be there
        for path in gone:
            say(listed, protocol.dumps({"path": path.hex(), "deleted": True}))
    return unseen + warnings


def few(warnings: list[str]) -> list[str]:
    """The first of them, each cut, and how many there were besides."""
    most = _MOST_CHARACTERS
    shown = [each if len(each) <= most else f"{each[: most - 3]}..." for each in warnings]
    if len(shown) > _MOST_WARNINGS:
        shown[_MOST_WARNINGS:] = [f"and {len(shown) - _MOST_WARNINGS} more warnings about files"]
    return shown


def _send(fd: int, budget: int, say: Say, data: int) -> int:
    sent = 0
    try:
        while sent < budget and (piece := os.read(fd, min(_PIECE, budget - sent))):
            say(data, piece)
            sent += len(piece)
    finally:
        os.close(fd)
    return sent


def _matches(path: str, glob: str) -> bool:
    # "*.csv" means anywhere below, as in a .gitignore; a glob with a slash is anchored.
    return fnmatch.fnmatchcase(path if "/" in glob else path.rsplit("/", 1)[-1], glob)


def _shown(path: bytes) -> str:
    name = protocol.clean(os.fsdecode(path))
    # Its middle is left out rather than what is the matter with it.
    return repr(name if len(name) <= 120 else f"{name[:50]}...{name[-60:]}")


def _open(name: bytes, parent: int | None, flags: int) -> int:
    """Also what its owner took all rights from: the owner is us. -1 if it cannot be opened."""
    try:
        try:
            return os.open(name, flags, dir_fd=parent)
        except PermissionError:
            os.chmod(name, 0o700, dir_fd=parent)
            return os.open(name, flags, dir_fd=parent)
    except OSError:
        return -1


def _walk(
    bounds: dict[str, Any], warnings: list[str]
) -> Iterator[tuple[bytes, int, bytes, os.stat_result]]:
    """(path, parent descriptor, name, stat) of every regular file of the work directory."""
    deadline = time.monotonic() + bounds["seconds"]

    def warn(text: str) -> None:
        if text not in warnings:
            warnings.append(text)

    def below(
        parent: int, prefix: bytes, depth: int
    ) -> Iterator[tuple[bytes, int, bytes, os.stat_result]]:
        with os.scandir(parent) as entries:
            for entry in entries:
                if time.monotonic() > deadline:
                    late = f"listing files stopped after {bounds['seconds']:.0f} s"
                    if late not in warnings:
                        warnings.insert(0, late)
                    return
                name = os.fsencode(entry.name)
                try:
                    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
                except OSError:
                    continue
                if info.st_dev != device:
                    continue
                if stat.S_ISREG(info.st_mode):
                    yield prefix + name, parent, name, info
                elif stat.S_ISDIR(info.st_mode):
                    child = -1 if depth >= bounds["depth"] else _open(name, parent, _DIRECTORY)
                    if child < 0:
                        warn(f"{_shown(prefix + name)} could not be listed")
                        continue
                    try:
                        yield from below(child, prefix + name + b"/", depth + 1)
                    finally:
                        os.close(child)

    top = _open(os.fsencode(bounds["work"]), None, _DIRECTORY)
    if top < 0:
        warn("the work directory could not be opened")
        return
    try:
        device = os.fstat(top).st_dev
        yield from below(top, b"", 0)
    finally:
        os.close(top)

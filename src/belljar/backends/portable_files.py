"""Files out of a work directory, and its removal, by path: Windows has no directory descriptors.

The same three calls as in `collect`, for when the run's processes are gone, so that a path stays
what it was when it was looked at. No link and no junction is followed. Tested on Linux only.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from ..files import collect
from ..files.collect import Collected, Stamp
from ..files.copying import Copy, Wanted, kind_of


def snapshot(workdir: str) -> dict[str, Stamp]:
    """As `collect.snapshot`."""
    return {path: collect._stamp(info) for path, _, info in _files(workdir, Collected())}


def changed_files(workdir: str, before: Mapping[str, Stamp], wanted: Wanted) -> Collected:
    """As `collect.changed_files`; the run's processes are gone, so a path stays what it is."""
    found = Collected(wanted)
    gone = dict.fromkeys(before)
    for path, full, info in _files(workdir, found):
        gone.pop(path, None)
        if collect._unchanged(before.get(path), info):
            continue
        if not found.has_room(path):
            break
        kind = kind_of(path, before)
        copy = found.copy(path, info.st_size, kind)
        if copy is None or not _copied(copy, full, info.st_nlink, found):
            found.add_unread(path, info.st_size, kind)
    if found.complete:
        for path in gone:
            found.deleted(path)
    return found.finish()


def _copied(copy: Copy, full: str, links: int, found: Collected) -> bool:
    problem = "has a second hard link and was not read"
    if links <= 1:
        try:
            fd = os.open(full, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError:
            problem = "could not be read"
        else:
            collect.copied(fd, copy, found)
            return True
    if copy.collected:
        found.complain(copy.path, problem)
    return False


def remove_tree(path: str) -> None:
    """Delete a directory that a guest wrote; a link in it is deleted, not followed."""
    if not os.path.lexists(path):
        return
    waiting, directories = [_long(path)], []
    while waiting:
        directory = waiting.pop()
        directories.append(directory)
        os.chmod(directory, 0o700)
        with os.scandir(directory) as entries:
            for entry in entries:
                if _is_directory(os.lstat(entry.path)):
                    waiting.append(entry.path)
                else:
                    _patiently(os.unlink, entry.path)
    for directory in reversed(directories):
        _patiently(os.rmdir, directory)


def _files(top: str, found: Collected) -> Iterator[tuple[str, str, os.stat_result]]:
    """(path with slashes, full path, stat) of every regular file below `top`. Bounded."""
    deadline = time.monotonic() + collect.MAX_SECONDS
    waiting = [("", _long(top), 0)]
    while waiting:
        prefix, directory, depth = waiting.pop()
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            found.complain(prefix, "could not be opened")
            found.complete = False
            continue
        for name in names:
            if time.monotonic() > deadline:
                found.warnings.append(f"listing files stopped after {collect.MAX_SECONDS:.0f} s")
                found.complete = False
                return
            full = os.path.join(directory, name)
            info = os.lstat(full)  # scandir's own stat leaves out links and ids on Windows
            if stat.S_ISREG(info.st_mode) and not _is_link(info):
                yield prefix + name, full, info
            elif _is_directory(info) and depth < collect.MAX_DEPTH:
                waiting.append((f"{prefix}{name}/", full, depth + 1))
            elif _is_directory(info):
                found.complete = False
                deeper = f"directories deeper than {collect.MAX_DEPTH} were not listed"
                if deeper not in found.warnings:
                    found.warnings.append(deeper)


def _long(path: str) -> str:
    """`path` in the form that Windows does not cut at 260 characters."""
    return f"\\\\?\\{os.path.abspath(path)}" if sys.platform == "win32" else path


def _is_link(info: os.stat_result) -> bool:
    """A symbolic link, a junction, or any other name that leads elsewhere."""
    reparse = getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 0)
    return stat.S_ISLNK(info.st_mode) or bool(getattr(info, "st_file_attributes", 0) & reparse)


def _is_directory(info: os.stat_result) -> bool:
    return stat.S_ISDIR(info.st_mode) and not _is_link(info)


def _patiently(remove: Callable[[str], None], path: str) -> None:
    """Remove a read-only entry, or one that a process which just ended still holds."""
    for attempt in range(20):
        try:
            return remove(path)
        except PermissionError:
            os.chmod(path, stat.S_IWRITE | stat.S_IREAD, follow_symlinks=sys.platform == "win32")
            time.sleep(0.01 * attempt)
    remove(path)

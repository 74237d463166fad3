"""Files into a work directory before a run, out of it afterwards, and its certain removal.

After a run the directory is whatever a hostile program made of it. Everything here works by
directory descriptors, never follows a link, opens only regular files, and is bounded in files,
bytes and time. A file with a second hard link is listed but not read: its other name may be ours.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from ..types import Change, File
from ..units import human_size
from .copying import MAX_HASHED, NOTHING, Copy, Wanted, kind_of
from .names import checked_name, matches, name_in_guest, name_on_disk

MAX_FILES = 1000
MAX_BYTES = 64 << 20
MAX_SECONDS = 10.0
MAX_DEPTH = 64
# A path may have kilobytes for each of its directories: all names together, and one in a warning.
MAX_NAMES = 1 << 20
_PIECE = 1 << 20
_MAX_SHOWN = 200
_MAX_ALIKE = 20
_MAX_WARNINGS = 100
_MAX_WARNING = 1000
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_REGULAR = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

Stamp = tuple[int, ...]  # time of modification, size, inode, time of change


def write_inputs(workdir: str, files: Mapping[str, bytes]) -> None:
    """Write `files` below `workdir`, which nobody else can write to yet."""
    for name, data in files.items():
        path = os.path.join(workdir, name_on_disk(checked_name("files", name)))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(data)


class Collected:
    """What was found, and what had to be left out.

    `truncated` if names were too long to list; `complete` if every file was looked at, without
    which nothing can be called deleted.
    """

    def __init__(self, wanted: Wanted = NOTHING) -> None:
        self.files: dict[str, File] = {}
        self.changes: list[Change] = []
        self.warnings: list[str] = []
        self.truncated = False
        self.complete = True
        self._wanted = wanted
        self._each = wanted.each
        self._total = self._left = MAX_BYTES if wanted.total is None else wanted.total
        self._cut: set[str] = set()
        self._hashable = MAX_HASHED
        self._names = MAX_NAMES
        self._alike: dict[str, int] = {}

    def has_room(self, path: str) -> bool:
        """Whether another file, at `path`, may be listed; a warning says so where it may not."""
        if len(self.files) >= MAX_FILES:
            self.warnings.append(f"only the first {MAX_FILES} changed files are listed")
            self.complete = False
            return False
        self._names -= len(path.encode("utf-8", "surrogateescape"))
        if self._names < 0:
            size = f"{MAX_NAMES >> 20} MiB" if MAX_NAMES >> 20 else f"{MAX_NAMES} bytes"
            self.warnings.append(
                f"only the first {len(self.files)} changed files are listed: names take at most "
                f"{size}"
            )
            self.truncated = True
            self.complete = False
            return False
        return True

    def copy(self, path: str, size: int, kind: Literal["created", "changed"]) -> Copy | None:
        """What takes the content of a changed file; None if it is listed without content.

        Give it to `add` when all has come.
        """
        wanted = self._wanted
        if wanted.has(path):
            room = self._left if self._each is None else min(self._each, self._left)
            return Copy(path, size, kind, collected=True, room=room, destination=wanted.destination)
        if size > self._hashable:
            return None
        self._hashable -= size
        return Copy(path, size, kind, collected=False, room=size, destination=None)

    def add(self, copy: Copy, *, whole: bool = True) -> None:
        """List a file whose content has come; `whole` is false if it broke off."""
        file, change = copy.close(whole=whole)
        if copy.collected:
            self._left -= copy.count
        if file.truncated and whole:
            each = self._each is not None and copy.count >= self._each
            self._cut.add(f"{human_size(self._each or 0)} each" if each else self._all)
        if copy.problem:
            self.complain(copy.path, f"was not written: {copy.problem}")
        self.files[copy.path] = file
        self.changes.append(change)

    def add_unread(self, path: str, size: int, kind: Literal["created", "changed"]) -> None:
        """List a changed file of which no content is read."""
        self.files[path] = File(path=path, size=size)
        self.changes.append(Change(path=path, kind=kind, size=size))

    def deleted(self, path: str) -> None:
        """List a file that was given and is gone."""
        self.changes.append(Change(path=path, kind="deleted"))

    @property
    def _all(self) -> str:
        return f"{human_size(self._total)} in all"

    def complain(self, path: str, problem: str) -> None:
        """Warn of what is wrong with the file at `path`; of the same problem a few times only."""
        count = self._alike[problem] = self._alike.get(problem, 0) + 1
        if count <= _MAX_ALIKE:
            self.warnings.append(f"{shown(path)} {problem}")

    def finish(self) -> Collected:
        """Add what is to be said of all files together, and sort the manifest; call it once."""
        self.changes.sort(key=lambda change: change.path)
        for problem, count in self._alike.items():
            if count > _MAX_ALIKE:
                self.warnings.append(f"and {count - _MAX_ALIKE} more: {problem}")
        self.warnings += [f"collected files were cut at {cap}" for cap in sorted(self._cut)]
        return self


def shown(path: str) -> str:
    """`path` as a warning names it: quoted, and of a long one the head and the tail."""
    if len(path) > _MAX_SHOWN:
        path = f"{path[: _MAX_SHOWN // 2]}...{path[-_MAX_SHOWN // 2 :]}"
    text = repr(path)
    return text if len(text) <= _MAX_SHOWN + 5 else f"{text[: _MAX_SHOWN // 2]}...'"


def bounded(warnings: list[str]) -> list[str]:
    """The warnings, from whatever collector: each cut, and the first ones only."""
    kept = [text if len(text) <= _MAX_WARNING else f"{text[:_MAX_WARNING]}..." for text in warnings]
    if len(kept) > _MAX_WARNINGS:
        kept[_MAX_WARNINGS:] = [f"and {len(kept) - _MAX_WARNINGS} more warnings"]
    return kept


def snapshot(workdir: str) -> dict[str, Stamp]:
    """The state of `workdir` before the run, to tell changed files from given ones."""
    with _Walk(workdir, Collected()) as walk:
        return {path: _stamp(entry) for path, _, _, entry in walk}


def changed_files(workdir: str | int, before: Mapping[str, Stamp], wanted: Wanted) -> Collected:
    """The regular files that are new, different or gone since `before`, with what is `wanted`.

    `workdir` is a path or a directory's descriptor. In `before` an inode of 0 stands for any; the
    last part of a stamp, which no program can forge, may be missing.
    """
    found = Collected(wanted)
    gone = dict.fromkeys(before)
    with _Walk(workdir, found) as walk:
        for path, parent, name, entry in walk:
            gone.pop(path, None)
            if _unchanged(before.get(path), entry):
                continue
            if not found.has_room(path):
                break
            kind = kind_of(path, before)
            copy = found.copy(path, entry.st_size, kind)
            began = time.monotonic()
            if copy is None or not _copied(copy, parent, name, entry.st_nlink, found):
                found.add_unread(path, entry.st_size, kind)
            # The bytes are bounded by their own cap: the time is for names.
            walk.extend(time.monotonic() - began)
    if found.complete:
        for path in gone:
            found.deleted(path)
    return found.finish()


def _copied(copy: Copy, parent: int, name: str, links: int, found: Collected) -> bool:
    """Give the content of a regular file to `copy` and list it; False if it cannot be read."""
    if links > 1:
        problem = "has a second hard link and was not read"
    elif (fd := _open_regular(parent, name)) < 0:
        problem = "could not be read"
    else:
        copied(fd, copy, found)
        return True
    if copy.collected:
        found.complain(copy.path, problem)
    return False


def copied(fd: int, copy: Copy, found: Collected) -> None:
    """Give what the descriptor has to `copy`, list the file in `found`, and close the descriptor.

    At most `copy.room` bytes are read, whatever size the file claims.
    """
    try:
        with open(fd, "rb", buffering=0) as file:
            copy.open()
            while copy.room and not copy.problem and (piece := file.read(min(_PIECE, copy.room))):
                copy.write(piece)
    except BaseException:
        copy.abandon()
        raise
    found.add(copy)


def unmatched(outputs: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    """The globs that none of the collected files matches."""
    names = tuple(files)
    return tuple(glob for glob in outputs if not any(matches(name, glob) for name in names))


def _stamp(entry: os.stat_result) -> Stamp:
    return entry.st_mtime_ns, entry.st_size, entry.st_ino, entry.st_ctime_ns


def _unchanged(before: Stamp | None, entry: os.stat_result) -> bool:
    if before is None:
        return False
    now = _stamp(entry)
    return before[2] in (0, now[2]) and before[:2] + before[3:] == now[:2] + now[3 : len(before)]


def _open_regular(parent: int, name: str) -> int:
    """The descriptor of a regular file, following no link; -1 if there is none or we cannot."""
    try:
        fd = os.open(name, _REGULAR, dir_fd=parent)
    except OSError:
        fd = _open_unreadable(name, parent, _REGULAR)
    if fd >= 0 and not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return -1
    return fd


def _open_unreadable(name: str, parent: int | None, flags: int) -> int:
    """Open an entry that its owner took all rights from, following no link; -1 if we cannot."""
    if not hasattr(os, "O_PATH"):  # macOS can change the mode of the link itself instead
        try:
            os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
            return os.open(name, flags, dir_fd=parent)
        except (OSError, NotImplementedError):
            return -1
    try:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
    except OSError:
        return -1
    try:
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return -1
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(name, flags, dir_fd=parent)
    except OSError:
        return -1
    finally:
        os.close(handle)


def _reopened(directory: int) -> int:
    try:
        return os.open(".", _DIRECTORY, dir_fd=directory)
    except PermissionError:  # a program may take all rights from its own work directory
        os.fchmod(directory, 0o700)
        return os.open(".", _DIRECTORY, dir_fd=directory)


class _Walk:
    """Every regular file below a directory: (path, parent descriptor, name, stat). Bounded."""

    def __init__(self, top: str | int, found: Collected) -> None:
        self._found = found
        self._fds: list[int] = []
        self._deadline = time.monotonic() + MAX_SECONDS
        self._top = top
        self._device = 0

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def extend(self, seconds: float) -> None:
        """Allow the listing that much more time."""
        self._deadline += seconds

    def __iter__(self) -> Iterator[tuple[str, int, str, os.stat_result]]:
        if isinstance(self._top, int):
            top = _reopened(self._top)
        else:
            try:
                top = _open_directory(self._top)
            except OSError as error:  # without Landlock a program can move its own directory away
                self._warn(f"the work directory could not be opened: {error.strerror}")
                self._found.complete = False
                return
        self._fds.append(top)
        self._device = os.fstat(top).st_dev
        yield from self._below(top, "", 0)

    def _below(
        self, parent: int, prefix: str, depth: int
    ) -> Iterator[tuple[str, int, str, os.stat_result]]:
        # scandir streams: a directory with a million names is never held as a list.
        with os.scandir(parent) as entries:
            for entry in entries:
                if time.monotonic() > self._deadline:
                    self._warn(f"listing files stopped after {MAX_SECONDS:.0f} s")
                    self._found.complete = False
                    return
                name = entry.name
                path = prefix + name_in_guest(name)
                try:
                    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if self._is_mounted(info):
                    continue
                if stat.S_ISREG(info.st_mode):
                    yield path, parent, name, info
                elif stat.S_ISDIR(info.st_mode):
                    if depth >= MAX_DEPTH:
                        self._warn(f"directories deeper than {MAX_DEPTH} were not listed")
                        self._found.complete = False
                        continue
                    try:
                        child = os.open(name, _DIRECTORY, dir_fd=parent)
                    except OSError:
                        child = _open_unreadable(name, parent, _DIRECTORY)
                    if child < 0:
                        self._found.complain(path, "could not be opened")
                        self._found.complete = False
                        continue
                    self._fds.append(child)
                    yield from self._below(child, path + "/", depth + 1)
                    self._fds.remove(child)
                    os.close(child)

    def _is_mounted(self, info: os.stat_result) -> bool:
        """Whether it is a mount's: its files are the host's, and so are their modes.

        A descriptor is a memory file system's, in which all has one device. Elsewhere an overlay
        may give its files another one, so that only directories tell.
        """
        told = stat.S_ISDIR(info.st_mode) or isinstance(self._top, int)
        return told and info.st_dev != self._device

    def _warn(self, text: str) -> None:
        if text not in self._found.warnings:
            self._found.warnings.append(text)


def remove_tree(path: str) -> None:
    """Delete a directory that a guest wrote: any modes, any depth, never through a link.

    Subdirectories are first moved side by side to the top, so that neither depth nor path length
    ever matters. A process that is still dying may write meanwhile: what it leaves is deleted, too.
    """
    try:
        top = _open_directory(path)
    except FileNotFoundError:
        return
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(path)


def remove_entry(name: str, parent: int) -> None:
    """Delete one name in a directory, and all below it, in the same way."""
    if not _is_directory(name, parent):
        os.unlink(name, dir_fd=parent)
        return
    top = _open_directory(name, parent)
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _empty(top: int) -> None:
    # Names that no guest can have guessed: what carries one is on our list already.
    mark = f"gone-{os.urandom(8).hex()}-"
    numbers = itertools.count()
    pending: list[str] = []
    deadline = time.monotonic() + MAX_SECONDS
    _clear(top, top, mark, numbers, pending)
    while pending:
        name = pending.pop()
        directory = _open_directory(name, top)
        try:
            _clear(directory, top, mark, numbers, pending)
        finally:
            os.close(directory)
        try:
            os.rmdir(name, dir_fd=top)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline:
                raise
            pending.append(name)


def _clear(directory: int, top: int, mark: str, numbers: Iterator[int], pending: list[str]) -> None:
    """Delete the files of `directory`; its subdirectories go to `top`, their names to `pending`."""
    os.fchmod(directory, 0o700)
    while names := _some_names(directory, mark):
        for name in names:
            try:
                if not _is_directory(name, directory):
                    os.unlink(name, dir_fd=directory)
                    continue
                # A move rewrites "..", which needs write permission on the directory.
                os.close(_open_directory(name, directory, writable=True))
                place = f"{mark}{next(numbers)}"
                os.rename(name, place, src_dir_fd=directory, dst_dir_fd=top)
                pending.append(place)
            except FileNotFoundError:
                continue


def _is_directory(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _open_directory(name: str, parent: int | None = None, *, writable: bool = False) -> int:
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        fd = _open_unreadable(name, parent, _DIRECTORY)
        if fd < 0:
            raise
    if writable:
        os.fchmod(fd, 0o700)
    return fd


def _some_names(directory: int, mark: str) -> list[str]:
    with os.scandir(directory) as entries:
        names = (entry.name for entry in entries if not entry.name.startswith(mark))
        return list(itertools.islice(names, 10_000))

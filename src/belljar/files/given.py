"""A directory of the host's, read to be given to a program: regular files only, within bounds."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ..errors import RequestError

MAX_FILES = 10_000
MAX_BYTES = 256 << 20
MAX_DEPTH = 64
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_REGULAR = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def tree(name: str, path: str) -> Iterator[tuple[str, bytes]]:
    """(name below the work directory, content) of every file below `path`, in order.

    The directory itself may be a link. A link inside is refused, because it may lead to a file that
    the caller did not mean to give away. Raises RequestError.
    """
    reader = _Reader(path)
    try:
        top = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as error:
        raise reader.problem(path, f"cannot be read: {error.strerror}") from None
    yield from reader.below(top, name, path, 0)


class _Reader:
    def __init__(self, path: str) -> None:
        self._top = path
        self._files = 0
        self._bytes = 0

    def problem(self, path: str, text: str) -> RequestError:
        return RequestError(
            "files",
            f"{path!r} {text}",
            fix=f"show the directory instead: mounts=['{self._top}:NAME']",
        )

    def below(
        self, directory: int, prefix: str, path: str, depth: int
    ) -> Iterator[tuple[str, bytes]]:
        """What is below an open directory, which is closed."""
        try:
            if depth > MAX_DEPTH:
                raise self.problem(path, f"is more than {MAX_DEPTH} directories deep")
            for entry in sorted(os.listdir(directory)):
                inner, full = f"{prefix}/{entry}", os.path.join(path, entry)
                try:
                    mode = os.stat(entry, dir_fd=directory, follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode):
                        child = os.open(entry, _DIRECTORY, dir_fd=directory)
                    elif stat.S_ISREG(mode):
                        yield inner, self._content(entry, directory, full)
                        continue
                    elif stat.S_ISLNK(mode):
                        raise self.problem(full, "is a link, which is not followed")
                    else:
                        raise self.problem(full, "is neither a file nor a directory")
                except OSError as error:
                    raise self.problem(full, f"cannot be read: {error.strerror}") from None
                yield from self.below(child, inner, full, depth + 1)
        finally:
            os.close(directory)

    def _content(self, name: str, directory: int, path: str) -> bytes:
        self._files += 1
        if self._files > MAX_FILES:
            raise self.problem(self._top, f"has more than {MAX_FILES:,} files")
        with open(os.open(name, _REGULAR, dir_fd=directory), "rb") as file:
            data = file.read(MAX_BYTES - self._bytes + 1)
        self._bytes += len(data)
        if self._bytes > MAX_BYTES:
            raise self.problem(self._top, f"holds more than {MAX_BYTES >> 20} MiB")
        return data

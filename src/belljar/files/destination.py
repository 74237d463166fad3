"""A directory of the host's that a run's files are written into, under names that a guest chose.

No name may leave the directory, follow a link, hide (a dot file is code to many programs, as in
`.git/hooks`), or replace what is there unless the caller said so. The directory is opened once,
before the program starts: a program that can write beside it cannot put a link in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..errors import RequestError
from ..records import replace
from ..types import Result
from .names import checked_name

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


class NotWritten(Exception):
    """A file that the destination does not take; the text says why. `exists`: its name is taken."""

    def __init__(self, why: str | OSError) -> None:
        self.exists = isinstance(why, FileExistsError)
        if isinstance(why, OSError):
            why = "exists" if self.exists else why.strerror or str(why)
        super().__init__(why)


class Destination:
    """`path`, made if it is missing; raises OSError. Close it, or use it in `with`.

    The directory itself is the caller's choice and may be a link; everything below may not. Hidden
    names are taken if one of the `globs` that select files names hidden ones. `replace` lets files
    that are there be replaced.
    """

    def __init__(self, path: str, globs: Iterable[str], *, replace: bool = False) -> None:
        os.makedirs(path, exist_ok=True)
        self.path = os.path.abspath(path)
        self._top = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        self._hidden = any(part.startswith(".") for glob in globs for part in glob.split("/"))
        self._replace = replace

    def create(self, name: str) -> NewFile:
        """A file to write to, at `name`. Raises NotWritten."""
        try:
            parts = checked_name("files", name).split("/")
            if any(part.startswith(".") for part in parts) and not self._hidden:
                raise NotWritten("is hidden; name it with a glob that starts with a dot")
            parent = self._parent(parts[:-1])
            try:
                return NewFile(parent, parts[-1], replace=self._replace)
            except BaseException:
                os.close(parent)
                raise
        except RequestError as error:
            raise NotWritten(error.message) from None
        except OSError as error:
            raise NotWritten(error) from None

    def write(self, name: str, data: bytes) -> None:
        """A whole file at `name`. Raises NotWritten."""
        new = self.create(name)
        new.write(data)
        new.finish()

    def place(self, name: str) -> str:
        """Where the file called `name` is on the host."""
        return os.path.join(self.path, name)

    def with_rest(self, result: Result) -> Result:
        """`result` with the files that a backend left in memory written here instead."""
        if all(file.data is None for file in result.files.values()):
            return result
        files, problems = dict(result.files), []
        for name, file in result.files.items():
            if file.data is not None:
                try:
                    self.write(name, file.data)
                    saved = self.place(name)
                except NotWritten as error:
                    problems.append(f"{name!r:.200} was not written: {error}")
                    saved = None
                files[name] = replace(file, data=None, saved=saved)
        return replace(result, files=files, warnings=(*result.warnings, *problems))

    def _parent(self, parts: list[str]) -> int:
        """The descriptor of the directory below the top that `parts` lead to, made if missing."""
        parent = os.dup(self._top)
        for part in parts:
            try:
                try:
                    os.mkdir(part, dir_fd=parent)
                except FileExistsError:
                    pass  # opened next, without following it if it is a link
                child = os.open(part, _DIRECTORY, dir_fd=parent)
            finally:
                os.close(parent)
            parent = child
        return parent

    def close(self) -> None:
        if self._top >= 0:
            os.close(self._top)
            self._top = -1

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class NewFile:
    """A file of the destination while it is written. End it with `finish` or `abandon`."""

    def __init__(self, parent: int, name: str, *, replace: bool) -> None:
        self._parent, self._name = parent, name
        # A rename replaces a link instead of writing through it, and never leaves half a file.
        self._written = f".belljar-{os.urandom(8).hex()}" if replace else name
        self._fd = os.open(self._written, _NEW, 0o666, dir_fd=parent)

    def write(self, piece: bytes) -> None:
        """Raises NotWritten, as when the disk is full; the file is then gone."""
        view = memoryview(piece)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self.abandon()
            raise NotWritten(error) from None

    def finish(self) -> None:
        """Raises NotWritten; the file is then gone."""
        try:
            fd, self._fd = self._fd, -1
            os.close(fd)
            if self._written != self._name:
                parent = self._parent
                os.replace(self._written, self._name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            self.abandon()
            raise NotWritten(error) from None
        os.close(self._parent)

    def abandon(self) -> None:
        """Remove what was written."""
        if self._fd >= 0:
            os.close(self._fd)
        try:
            os.unlink(self._written, dir_fd=self._parent)
        except OSError:
            pass  # nothing more can be done; the caller is told that the file was not written
        os.close(self._parent)

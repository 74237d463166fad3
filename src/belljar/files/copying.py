"""A changed file's content on its way out: into memory, into a directory, or through a hash only.

The content comes in pieces, from a descriptor or from a container's agent, so that a file which is
written to a directory is never held in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..records import record
from ..types import Change, File
from .destination import Destination, NewFile, NotWritten
from .names import matches

if TYPE_CHECKING:
    from collections.abc import Mapping

# Bytes of files that no glob asks for, which are read for the manifest's hashes only. Hashing takes
# a millisecond or two for each MiB; larger files are listed without a hash.
MAX_HASHED = 16 << 20


@record
class Wanted:
    """Which changed files are brought out, how many bytes of them, and where to.

    `each` bounds one file and `total` all of them, in bytes; a `total` of None is what a host keeps
    in memory (`collect.MAX_BYTES`).
    """

    globs: tuple[str, ...] = ()
    each: int | None = None
    total: int | None = None
    destination: Destination | None = None

    def has(self, path: str) -> bool:
        return any(matches(path, glob) for glob in self.globs)


NOTHING = Wanted()


def kind_of(path: str, before: Mapping[str, Any]) -> Literal["created", "changed"]:
    """What happened to a file that is there and not as in `before`."""
    return "changed" if path in before else "created"


class Copy:
    """One changed file. `room` is how many bytes of its content may still come.

    `collected`: a glob asks for it. Call `open` before the content; without it there is none.
    """

    def __init__(
        self,
        path: str,
        size: int,
        kind: Literal["created", "changed"],
        *,
        collected: bool,
        room: int,
        destination: Destination | None,
    ) -> None:
        self.path, self.size, self.kind = path, size, kind
        self.collected, self.room = collected, room
        self.problem = ""  # why it could not be written
        self.count = 0
        self._destination = destination
        self._data: bytearray | None = None
        self._file: NewFile | None = None
        self._hash: Any = None

    def open(self) -> None:
        import hashlib  # late: most runs change no file

        self._hash = hashlib.sha256()
        if not self.collected:
            return
        if self._destination is None:
            self._data = bytearray()
            return
        try:
            self._file = self._destination.create(self.path)
        except NotWritten as error:
            self.problem = str(error)

    def write(self, piece: bytes) -> None:
        self.count += len(piece)
        self.room -= len(piece)
        self._hash.update(piece)
        if self._data is not None:
            self._data += piece
        elif self._file is not None:
            try:
                self._file.write(piece)
            except NotWritten as error:
                self._file, self.problem = None, str(error)

    def close(self, *, whole: bool = True) -> tuple[File, Change]:
        """The file and its line of the manifest; `whole` is false if the content broke off."""
        whole = whole and self.count >= self.size
        saved = None
        if self._file is not None and self._destination is not None:
            try:
                self._file.finish()
                saved = self._destination.place(self.path)
            except NotWritten as error:
                self.problem = str(error)
            self._file = None
        file = File(
            path=self.path,
            size=self.size,
            data=None if self._data is None else bytes(self._data),
            truncated=not whole and (self._data is not None or saved is not None),
            saved=saved,
        )
        digest = self._hash.hexdigest() if self._hash is not None and whole else None
        return file, Change(path=self.path, kind=self.kind, size=self.size, sha256=digest)

    def abandon(self) -> None:
        """Leave nothing of it behind."""
        if self._file is not None:
            self._file.abandon()
            self._file = None

"""The files of an image as a value: what lies at which path, before anything is packed.

Everything in an image belongs to root, has one of two modes and no time of its own, so that equal
files make equal bytes; a setuid bit on the host never reaches an image.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..records import record

# On a merged /usr these are links; the image is merged too, wherever its files come from.
MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}


@record
class Entry:
    """One path of an image: a copy of `source`, the bytes `data`, a link to `target`, or, with
    none of them, a directory."""

    mode: int
    source: str | None = None
    data: bytes | None = None
    target: str | None = None

    def content(self) -> bytes:
        """The bytes of a regular file."""
        if self.data is not None:
            return self.data
        assert self.source is not None
        with open(self.source, "rb") as file:
            return file.read()

    @property
    def is_directory(self) -> bool:
        return self.source is None and self.data is None and self.target is None


@dataclass(slots=True)
class Tree:
    """Paths without a leading slash, and what lies there. The first to claim a path keeps it."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def copy(self, source: str, path: str) -> None:
        """A copy of the host's file `source`, whatever links lead to it, at `path`."""
        mode = 0o755 if os.stat(source).st_mode & 0o111 else 0o644
        self._put(path, Entry(mode=mode, source=os.path.realpath(source)))

    def write(self, path: str, data: bytes) -> None:
        self._put(path, Entry(mode=0o644, data=data))

    def link(self, path: str, target: str) -> None:
        self._put(path, Entry(mode=0o777, target=target))

    def directory(self, path: str, mode: int = 0o755) -> None:
        self._put(path, Entry(mode=mode))

    def __contains__(self, path: str) -> bool:
        return normal(path) in self.entries

    def _put(self, path: str, entry: Entry) -> None:
        path = normal(path)
        parent = posixpath.dirname(path)
        if parent and parent not in self.entries:
            self._put(parent, Entry(mode=0o755))
        self.entries.setdefault(path, entry)

    def without(self, lower: Tree) -> Tree:
        """What this tree adds to `lower`: the layer to put on top of it."""
        kept = {
            path: entry
            for path, entry in self.entries.items()
            if entry.is_directory or lower.entries.get(path) != entry
        }
        return Tree(kept)

    def files(self, *, below: str = "", suffix: str = "") -> Iterator[tuple[str, Entry]]:
        """Regular files in the order of their paths."""
        for path in sorted(self.entries):
            entry = self.entries[path]
            regular = entry.source is not None or entry.data is not None
            if regular and path.startswith(below) and path.endswith(suffix):
                yield path, entry


def normal(path: str) -> str:
    """`path` as the image spells it: relative, and below `usr` where /usr is merged."""
    path = posixpath.normpath(path).lstrip("/")
    first, slash, rest = path.partition("/")
    return MERGED[first] + slash + rest if first in MERGED and rest else path

"""Which submodules a git index names: a reader for files that a hostile program has written.

It must find every entry that git would find, so it accepts only what git itself writes: where git
is lenient (names that are not normal, lengths that disagree, unused bits of a mode, offsets for
threads) the index is refused. Memory and time are bounded by the constants below.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
from array import array

try:  # `hashlib` loads OpenSSL: that takes as long as starting a run
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

NAME = re.compile(r"index|sharedindex\.[0-9a-f]+")
# Of all index files of one repository: two million entries, which take about two seconds.
MAX_BYTES = 128 << 20
MAX_LINKS = 10_000
_MAX_NAME = 4096  # PATH_MAX: git cannot enter a longer one
_MAX_CONFIG = 1 << 20
_SHA256 = re.compile(rb"objectformat\s*=\s*\"?sha256", re.IGNORECASE)
_TYPE, _LINK = 0o170000, 0o160000
_LENGTH, _EXTENDED = 0xFFF, 0x4000
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_LINK
_FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_LINK

# By a hash of the content: most runs leave an index as it was, and reading 100,000 entries takes
# some 100 ms. Emptied when it is full.
_known: dict[bytes, frozenset[str]] = {}
_MAX_KNOWN = 64
_lock = threading.Lock()


def names(git: int) -> list[str] | None:
    """The names of the index and its shared parts; None if the directory cannot be listed."""
    try:
        fd = os.open(".", _DIRECTORY, dir_fd=git)
    except OSError:
        return None
    try:
        return [name for name in os.listdir(fd) if NAME.fullmatch(name)]
    finally:
        os.close(fd)


def links(git: int) -> tuple[frozenset[str], str]:
    """The submodules that the index of a git directory names, or why they cannot be known."""
    found: frozenset[str] = frozenset()
    listed = names(git)
    if listed is None:
        return found, "the index cannot be reached:"
    config = _content("config", git, _MAX_CONFIG) or b""
    hash_size = 32 if _SHA256.search(config) else 20
    room = MAX_BYTES
    for name in listed:
        data = _content(name, git, room + 1)
        if data is None:
            continue
        room -= len(data)
        if room < 0:
            return frozenset(), "the index is too large to be examined:"
        try:
            found |= _links(data, hash_size)
        except (ValueError, IndexError):
            return frozenset(), "the index cannot be read:"
        if len(found) > MAX_LINKS:
            return frozenset(), "the index names too many submodules to be examined:"
    return found, ""


def _content(name: str, parent: int, size: int) -> bytes | None:
    """The beginning of a regular file; None if it is no such file."""
    try:
        fd = os.open(name, _FILE, dir_fd=parent)
    except OSError:
        return None
    with open(fd, "rb", buffering=0) as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return None
        if info.st_size >= size:  # no need to read what is refused
            return bytes(size)
        return file.read(size) or b""


def _links(data: bytes, hash_size: int) -> frozenset[str]:
    key = blake2b(data, digest_size=32, salt=b"%d" % hash_size).digest()
    with _lock:
        if key in _known:
            return _known[key]
    found = frozenset(_entries(data, hash_size))
    with _lock:
        if len(found) <= 1000:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[key] = found
    return found


def _entries(data: bytes, hash_size: int) -> set[str]:
    """The gitlinks of an index file, versions 2 to 4 of gitformat-index, else ValueError."""
    version, count = int.from_bytes(data[4:8], "big"), int.from_bytes(data[8:12], "big")
    if data[:4] != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("no index of a known version")
    found: set[str] = set()
    # Where git may begin to read in another thread; 0 for an entry that needs the one before it.
    starts = array("Q")
    head = struct.Struct(f">24xI{12 + hash_size}xH")
    read, find, size, end = head.unpack_from, data.find, head.size, len(data) - hash_size
    at, name, kept = 12, b"", 0
    for _ in range(count):
        if at + size > end:
            raise ValueError("cut short")
        mode, flags = read(data, at)
        first = at + (size + 2 if flags & _EXTENDED else size)
        length = flags & _LENGTH
        if version == 4:
            kept, first = _prefix(data, first, len(name))
        # Git believes the length, which may lead it to other entries than a search for the end.
        if length < _LENGTH:
            stop = first + length - kept
            if stop >= end or stop < first or find(0, first, stop + 1) != stop:
                raise ValueError("a name of another length")
        else:
            stop = find(0, first, first + _MAX_NAME + 1)
            if stop < 0 or not _LENGTH <= kept + stop - first <= _MAX_NAME:
                raise ValueError("a name of another length")
        starts.append(0 if kept else at)
        if version == 4:
            name = name[:kept] + data[first:stop]
            at = stop + 1
        else:
            at += (stop - at + 8) & ~7
        if mode & _TYPE == _LINK:
            found.add(_link(name if version == 4 else data[first:stop]))
            if len(found) > MAX_LINKS:
                return found
    _check_extensions(data, at, end, starts)
    return found


def _prefix(data: bytes, at: int, length: int) -> tuple[int, int]:
    """(how much of the last name is kept, where the rest of this one begins), in version 4."""
    strip = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        strip = ((strip + 1) << 7) | (data[at] & 0x7F)
        if strip > length:
            break
    if strip > length:
        raise ValueError("no such prefix")
    return length - strip, at + 1


def _link(name: bytes) -> str:
    """The path of a submodule; ValueError if git would not write it, though it may obey it.

    An empty one replaces an entry of a shared index, whose name stands there.
    """
    for part in name.lower().split(b"/"):
        if part in (b"", b".", b"..", b".git"):
            raise ValueError("not a normal path")
    return os.fsdecode(name)


def _check_extensions(data: bytes, at: int, end: int, starts: array[int]) -> None:
    """ValueError unless git finds the same entries when it reads in several threads, from where
    an extension says that they begin."""
    tail = end - 8 - 4 - (len(data) - end)
    if data[tail : tail + 4] == b"EOIE" and int.from_bytes(data[tail + 8 : tail + 12], "big") != at:
        raise ValueError("the entries end elsewhere")
    while at < end:
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "big")
        at += 8
        if kind == b"IEOT":
            _check_blocks(data[at : at + size], starts)
        at += size
    if at != end:
        raise ValueError("more than an index")


def _check_blocks(table: bytes, starts: array[int]) -> None:
    number = 0
    for at in range(4, len(table) - 7, 8):
        offset = int.from_bytes(table[at : at + 4], "big")
        if number >= len(starts) or starts[number] != offset:
            raise ValueError("a block of entries begins elsewhere")
        number += int.from_bytes(table[at + 4 : at + 8], "big")
    if number != len(starts):
        raise ValueError("blocks of other entries")

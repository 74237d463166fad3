"""Where file systems are mounted for this process, and which of them are writable."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# As the kernel writes them in a path. The backslash is last: it is in all of them.
_ESCAPED = ((rb"\040", b" "), (rb"\011", b"\t"), (rb"\012", b"\n"), (rb"\134", b"\\"))


def points() -> tuple[str, ...]:
    """Every mount point, parents before what is mounted inside them."""
    with open("/proc/self/mountinfo", "rb") as file:
        found = {line.split(b" ", 5)[4] for line in file}
    for escaped, plain in _ESCAPED:
        found = {point.replace(escaped, plain) for point in found}
    return tuple(sorted(map(os.fsdecode, found)))


def writable_below(places: Iterable[tuple[str, bool]]) -> list[str]:
    """The mount points at or below a read-only place, and not at or below a writable one inside
    it, that can be written to. `places` are (path, whether it is to be read-only)."""
    closed = {os.path.realpath(path): read_only for path, read_only in places}
    found = []
    for point in points():
        above = point
        while above not in closed and above != "/":
            above = os.path.dirname(above)
        if closed.get(above) and _is_writable(point):
            found.append(point)
    return found


def _is_writable(point: str) -> bool:
    """Of the mount that the path leads to: others at the same point, or below one, are covered."""
    try:
        return not os.statvfs(point).f_flag & os.ST_RDONLY
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False  # covered, or a file system that does not let this user in

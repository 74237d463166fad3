"""Paths of the host's in which no name may be a symbolic link.

A path is resolved and checked when a run is planned, and used a little later. A program that can
write to a directory on the way could put a link there meanwhile, and the run would be shown another
part of the host. So what was resolved is opened name by name, a link is an error, and everything
after that goes by the descriptor.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Of Linux; this module is imported elsewhere, too, and not used there.
_NAME = getattr(os, "O_PATH", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = _NAME | getattr(os, "O_DIRECTORY", 0)
_MOST_LINKS = 40


def open_path(path: str, root: str = "/") -> int:
    """A descriptor (O_PATH) of `path`, an absolute one below the directory `root`.

    OSError (ELOOP) if a name of it is a symbolic link.
    """
    return _resolved(path, root, _open, lambda link, top: False)


def open_inside(path: str, root: str) -> int:
    """The same with links as a process has them for which the directory `root` is /."""
    return _resolved(path, root, _open, lambda link, top: True)


def make_place(path: str, *, directory: bool, root: str = "/") -> int:
    """The same for a place to mount on. What is missing is made: at last a directory, or an empty
    file.

    Links in the file system of `root` are followed, because those are our own. OSError (ELOOP) for
    any other: a program could have made it in a mount that is there already, and we would make
    files where that leads.
    """

    def made(name: str, parent: int, last: bool) -> int:
        try:
            return _open(name, parent, last)
        except FileNotFoundError:
            if directory or not last:
                os.mkdir(name, 0o755, dir_fd=parent)
            else:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                os.close(os.open(name, flags, 0o644, dir_fd=parent))
            return _open(name, parent, last)

    return _resolved(path, root, made, lambda link, top: link.st_dev == top.st_dev)


def _open(name: str, parent: int, _last: bool) -> int:
    return os.open(name, _NAME, dir_fd=parent)


def _resolved(
    path: str,
    root: str,
    step: Callable[[str, int, bool], int],
    follow: Callable[[os.stat_result, os.stat_result], bool],
) -> int:
    names = _names(path)
    for _ in range(_MOST_LINKS):
        place, names = _walked(path, names, root, step, follow)
        if place >= 0:
            return place
    raise _astray(path, names[-1])


def _walked(
    path: str,
    names: list[str],
    root: str,
    step: Callable[[str, int, bool], int],
    follow: Callable[[os.stat_result, os.stat_result], bool],
) -> tuple[int, list[str]]:
    """A descriptor of what is at the end of `names`; or -1, and the names where a link leads."""
    place = os.open(os.path.join(root, "."), _DIRECTORY)
    top = os.fstat(place)
    try:
        for number, name in enumerate(names):
            inner = step(name, place, number == len(names) - 1)
            found = os.fstat(inner)
            if not stat.S_ISLNK(found.st_mode):
                os.close(place)
                place = inner
                continue
            os.close(inner)
            if not follow(found, top):
                raise _astray(path, name)
            above = "/" + "/".join(names[:number])
            target = os.path.join(above, os.readlink(name, dir_fd=place))
            return -1, [*_names(os.path.normpath(target)), *names[number + 1 :]]
        reached, place = place, -1
        return reached, names
    finally:
        if place >= 0:
            os.close(place)


def _astray(path: str, name: str) -> OSError:
    return OSError(errno.ELOOP, f"{name!r} in it is a symbolic link by now", path)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]

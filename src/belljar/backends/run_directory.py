"""The directory of one run on this host: made, filled, locked while it is in use, and removed.

    belljar-PID-xxxxxxxx/      ours: the guest may not write here
        work/                  the guest's: the program, its inputs, its results
        tmp/                   the guest's: shown as /tmp where there is a mount namespace

The name says which process made it, and a lock on it lives exactly as long as that process: `sweep`
removes only what nobody holds. The number alone would not do: two containers may share /tmp and
have the same numbers.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ..errors import BackendFailed
from ..files import collect
from ..files.names import checked_name

_NAME = re.compile(r"belljar-(\d+)-\w+")


HOME = "home"  # of the guest, in its private tmp/


@contextmanager
def made(base: str | None = None) -> Iterator[str]:
    """A new run directory, gone when the context ends, whatever the guest did to it."""
    root = tempfile.mkdtemp(prefix=f"belljar-{os.getpid()}-", dir=base)
    with ExitStack() as cleanup:
        cleanup.callback(_remove, root)
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        cleanup.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Kept for the end: to delete takes three, and the run may fail for want of descriptors.
        for _ in range(2):
            cleanup.callback(os.close, os.dup(lock))
        yield root


def _remove(root: str) -> None:
    try:
        if os.path.isdir(os.path.join(root, "work")):
            collect.remove_tree(root)
        else:
            os.rmdir(root)  # nothing was made in it yet; this takes no descriptor
    except OSError as error:
        raise BackendFailed(f"{root} cannot be removed: {error}") from error


def fill(
    root: str,
    files: Mapping[str, bytes],
    links: tuple[tuple[str, str], ...],
    user: tuple[int, int] | None,
) -> str:
    """Make work/ with these files and links, and tmp/ with a home; returns the path of work."""
    work = os.path.join(root, "work")
    private = os.path.join(root, "tmp")
    for path in (work, private, os.path.join(private, HOME)):
        os.mkdir(path, 0o700)
    collect.write_inputs(work, files)
    for name, target in links:
        link = os.path.join(work, checked_name("mounts.dst", name))
        os.makedirs(os.path.dirname(link), exist_ok=True)
        os.symlink(target, link)
    if user is not None:
        os.chmod(root, 0o711)
        for directory, names, plain in os.walk(root):
            for name in (*names, *plain):
                os.chown(os.path.join(directory, name), *user, follow_symlinks=False)
    return work


def sweep(base: str | None = None) -> None:
    """Remove the directories of processes of ours that crashed. What cannot be removed stays."""
    base = base or tempfile.gettempdir()
    try:
        found = [match for name in os.listdir(base) if (match := _NAME.fullmatch(name))]
    except OSError:
        return
    for match in found:
        if os.path.exists(f"/proc/{match[1]}"):
            continue
        path = os.path.join(base, match[0])
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # somebody else's, not a directory, or gone
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                collect.remove_tree(path)
        except OSError:  # in use after all, or not ours to remove
            continue
        finally:
            os.close(lock)

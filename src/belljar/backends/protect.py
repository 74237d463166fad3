"""Project files that tools execute, kept read-only inside a writable mount, there or not.

A program that may write to a project must not leave something there that runs later, outside, when
somebody opens the project: a hook, a task, a shell start-up file, unless the caller asks for just
that (`Mount.protect`, `Filesystem.protect`; the report tells). What exists is mounted read-only
over itself. What does not exist yet gets an empty placeholder for the time of the run, because only
an existing name can be mounted on; the placeholders are removed afterwards. A host process that is
killed leaves them behind, empty. Only the top of a mount is protected, not projects inside it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from ..policy import Policy
from ..types import Request

DIRECTORIES = (".git/hooks", ".vscode", ".idea", ".claude", ".codex", ".cursor", ".devcontainer")
FILES = (
    ".git/config", ".gitmodules", ".gitconfig", ".mcp.json", ".envrc", ".bashrc", ".bash_profile",
    ".profile", ".zshrc", ".zshenv", ".zprofile",
)  # fmt: skip

_STRIP_SECONDS = 10.0

_users: Counter[str] = Counter()
_made: dict[str, bool] = {}
_lock = threading.Lock()


def unprotected(policy: Policy, request: Request) -> frozenset[str]:
    """The writable sources that the caller wants unprotected, and nowhere else protected."""
    files = policy.filesystem
    asked = [(mount.src, mount.protect) for mount in request.mounts if mount.mode == "rw"]
    asked += [(path, files.protect) for path in files.read_write]
    real = [(os.path.realpath(path), protected) for path, protected in asked]
    return frozenset(path for path, _ in real) - {path for path, protected in real if protected}


def promise(policy: Policy, request: Request) -> str:
    """What a report says about the metadata in writable mounts."""
    bare = unprotected(policy, request)
    places = [m.dst for m in request.mounts if m.mode == "rw" and os.path.realpath(m.src) in bare]
    if not places:
        return "a project's metadata stays read-only"
    return f"a project's metadata is not protected, as asked, in {', '.join(map(repr, places))}"


def given_up(policy: Policy) -> tuple[str, ...]:
    """The same about the policy's own writable paths; nothing, as long as it is the default."""
    if policy.filesystem.protect or not policy.filesystem.read_write:
        return ()
    return ("a project's metadata in writable paths is not protected, as asked",)


def inside(source: str) -> tuple[tuple[str, str], ...]:
    """What to close inside a writable mount of `source`: see `linux/root.py`."""
    if not os.path.isdir(source):
        return ()
    names = [*DIRECTORIES, *FILES]
    git = os.path.join(source, ".git")
    if os.path.isdir(git):
        # Nailed down, or it could be moved away and another one put in its place.
        return ((".git", "rw"), *((name, "ro") for name in names))
    return ((".git", "ro"), *((name, "ro") for name in names if not name.startswith(".git/")))


def links(source: str) -> list[str]:
    """Protected names that are symbolic links, on which nothing can be mounted."""
    return [name for name, _ in inside(source) if os.path.islink(os.path.join(source, name))]


@contextlib.contextmanager
def placeholders(sources: Iterable[str]) -> Iterator[None]:
    """While it is open, every protected name in `sources` exists."""
    held: list[str] = []
    try:
        for source in sources:
            for name, _ in inside(source):
                path = os.path.join(source, name)
                if _hold(path, directory=name == ".git" or name in DIRECTORIES):
                    held.append(path)
        yield
    finally:
        for path in reversed(held):
            _let_go(path)


def _hold(path: str, *, directory: bool) -> bool:
    """Make `path` if it is missing; True if it is a placeholder, whoever made it."""
    with _lock:
        if path not in _made:
            if os.path.lexists(path):
                return False
            try:
                if directory:
                    os.mkdir(path, 0o755)
                else:
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except (PermissionError, FileNotFoundError):
                return False  # where we cannot write, or nothing is, the guest cannot either
            _made[path] = directory
        _users[path] += 1
        return True


def _let_go(path: str) -> None:
    with _lock:
        _users[path] -= 1
        if _users[path]:
            return
        del _users[path]
        directory = _made.pop(path)
        # Somebody outside may have put something real there meanwhile: that stays.
        with contextlib.suppress(OSError):
            if directory:
                os.rmdir(path)
            elif os.lstat(path).st_size == 0:
                os.unlink(path)


def strip_set_id(sources: Iterable[str], since: float) -> list[str]:
    """Take the set-id bits from what was changed in `sources` since a time; warnings.

    For sandboxes without a filter for system calls: what they leave must not run as its owner.
    """
    warnings: list[str] = []
    deadline = time.monotonic() + _STRIP_SECONDS
    for source in sources:
        for directory, _, files, handle in os.fwalk(source):
            if time.monotonic() > deadline:
                warnings.append(f"{source!r} is too large to look for set-id files in all of it")
                break
            for name in (".", *files):
                try:
                    info = os.stat(name, dir_fd=handle, follow_symlinks=False)
                    if info.st_mode & 0o6000 and info.st_ctime >= since and _ordinary(info):
                        os.chmod(name, info.st_mode & 0o1777, dir_fd=handle)
                        warnings.append(f"set-id bits taken from {os.path.join(directory, name)!r}")
                except OSError as error:
                    warnings.append(f"{os.path.join(directory, name)!r}: {error.strerror}")
    return warnings


def _ordinary(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)

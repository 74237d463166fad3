"""Project files that tools execute, kept read-only inside a writable mount, there or not.

A program that may write to a project must not leave something there that runs later, outside, when
somebody opens the project: a hook, a task, a shell start-up file, unless the caller asks for just
that (`Mount.protect`, `Filesystem.protect`; the report tells). What exists is mounted read-only
over itself. What does not exist yet gets a placeholder for the time of the run, because only an
existing name can be mounted on; the placeholders are removed afterwards. A host process that is
killed leaves them behind, empty (`commondir` with a dot). Only the top of a mount is protected, not
projects inside it. What no mount can close for git, `git_metadata.Guard` removes at the end.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from ..files import collect
from ..policy import Policy
from ..types import Request

DIRECTORIES = (
    ".vscode",
    ".idea",
    ".claude",
    ".codex",
    ".cursor",
    ".devcontainer",
    ".husky",
    ".cargo",
    ".mise",
    ".config/fish",
    ".config/git",
    ".config/mise",
)
FILES = (
    ".gitmodules", ".gitconfig", ".mcp.json", ".envrc", ".devcontainer.json", ".mise.toml",
    "mise.toml", ".exrc", ".vimrc", ".nvim.lua", ".bashrc", ".bash_profile", ".bash_login",
    ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile", ".zlogin",
    ".zlogout", ".kshrc", ".mkshrc", ".cshrc", ".tcshrc", ".login", ".logout", ".xprofile",
    ".xsessionrc",
)  # fmt: skip
# In a repository of Mercurial's: it executes the hooks and extensions of these.
_HG_FILES, _HG_IF_THERE = (".hg/hgrc", ".hg/hgrc-not-shared"), (".hg/requires", ".hg/sharedpath")

# In the directory of the worker's files: what git in a run is to ignore.
_IGNORED = "git-ignore"

_STRIP_SECONDS = 10.0
_STRIP_DEPTH = 64
_STRIPPED = "had set-id bits, which were taken away"
# Opens a file without the right to read it; only Linux has it.
_HANDLE = getattr(os, "O_PATH", 0)

_users: Counter[str] = Counter()
_made: dict[str, bytes | None] = {}
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


def exposed(policy: Policy, request: Request) -> Iterator[str]:
    """Warnings for a backend that cannot keep a repository's metadata read-only in a mount."""
    bare = unprotected(policy, request)
    for mount in request.mounts:
        source = os.path.realpath(mount.src)
        found = [name for name in (".git", ".hg") if os.path.isdir(os.path.join(source, name))]
        if mount.mode == "rw" and source not in bare and found:
            yield (
                f"the program could write to {found[0]} in {mount.dst!r}, whose hooks and"
                " configuration are executed later: look at them first, or use a jail, where they"
                " are read-only"
            )


def given_up(policy: Policy) -> tuple[str, ...]:
    """The same about the policy's own writable paths; nothing, as long as it is the default."""
    if policy.filesystem.protect or not policy.filesystem.read_write:
        return ()
    return ("a project's metadata in writable paths is not protected, as asked",)


def inside(source: str) -> tuple[tuple[str, str], ...]:
    """What to close inside a writable mount of `source`: see `linux/root.py`."""
    if not os.path.isdir(source):
        return ()
    from . import git_metadata  # late: only runs with writable mounts need it

    found = dict.fromkeys((*DIRECTORIES, *FILES), "ro")
    # Nailed down, or it could be moved away and another one put in its place.
    found.update({os.path.dirname(name): "rw" for name in DIRECTORIES if "/" in name})
    if os.path.isdir(os.path.join(source, ".hg")):
        found[".hg"] = "rw"
        found.update(dict.fromkeys(_HG_FILES, "ro"))
        there = (name for name in _HG_IF_THERE if os.path.lexists(os.path.join(source, name)))
        found.update(dict.fromkeys(there, "ro"))
    else:
        found[".hg"] = "ro"
    found[".git"] = "ro"
    found.update(git_metadata.inside(source))
    return tuple(sorted(found.items()))


def environment(guest_dir: str) -> dict[str, str]:
    """What a run with protected mounts gets, or its `git add -A` would add the placeholders.

    `guest_dir` is where the run sees the worker's files.
    """
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.excludesFile",
        "GIT_CONFIG_VALUE_0": os.path.join(guest_dir, _IGNORED),
    }


def links(source: str) -> list[str]:
    """Protected names that are symbolic links, on which nothing can be mounted."""
    return [name for name, _ in inside(source) if os.path.islink(os.path.join(source, name))]


@contextlib.contextmanager
def placeholders(sources: Iterable[str]) -> Iterator[list[str]]:
    """While it is open, every protected name in `sources` exists.

    Leaving it fills the list with warnings: what the run had left for git to execute.
    """
    from . import git_metadata  # late: only runs with writable mounts need it

    held: list[tuple[str, str]] = []
    warnings: list[str] = []
    sources = tuple(dict.fromkeys(sources))
    # First, because it notes which names were there already.
    guards = [git_metadata.Guard(source) for source in sources if os.path.isdir(source)]
    try:
        for source in sources:
            for name, how in inside(source):
                if _hold(source, name, _placeholder(name, how)):
                    held.append((source, name))
        yield warnings
    finally:
        for source, name in reversed(held):
            _let_go(source, name)
        for guard in guards:
            warnings += guard.clean(_is_held)


def _placeholder(name: str, how: str) -> bytes | None:
    """What stands in for a missing name: the content of a file, or None for a directory."""
    if how == "rw" or name in (".git", ".hg", *DIRECTORIES):
        return None
    if name in FILES:
        return b""
    from . import git_metadata

    return git_metadata.placeholder(name)


def _is_held(path: str) -> bool:
    with _lock:
        return path in _made


def _hold(source: str, name: str, content: bytes | None) -> bool:
    """Make a name in a mount if it is missing; True if it is a placeholder, of whatever run."""
    path = os.path.join(source, name)
    with _lock:
        if path not in _made:
            try:
                with _directory_of(path) as (parent, last):
                    if _exists(last, parent):
                        return False
                    if content is None:
                        os.mkdir(last, 0o755, dir_fd=parent)
                    else:
                        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
                        fd = os.open(last, flags, 0o644, dir_fd=parent)
                        with open(fd, "wb", buffering=0) as file:
                            file.write(content)
            except (PermissionError, FileNotFoundError, NotADirectoryError):
                return False  # where we cannot write, or nothing is, the guest cannot either
            _made[path] = content
        _users[path] += 1
        return True


def _let_go(source: str, name: str) -> None:
    path = os.path.join(source, name)
    with _lock:
        _users[path] -= 1
        if _users[path]:
            return
        del _users[path]
        content = _made.pop(path)
        # A host program may have put something real there meanwhile: that stays.
        with contextlib.suppress(OSError), _directory_of(path) as (parent, last):
            if content is None:
                os.rmdir(last, dir_fd=parent)
            elif _is_still(last, parent, content):
                os.unlink(last, dir_fd=parent)


@contextlib.contextmanager
def _directory_of(path: str) -> Iterator[tuple[int, str]]:
    """The directory that a path is in, and its name there. No part of it may be a link: another
    run may write to a directory above, and what we make would be where its link leads."""
    from . import git_metadata

    above, last = os.path.split(path)
    with contextlib.ExitStack() as cleanup:
        top = git_metadata.opened("/", cleanup)
        yield git_metadata.opened(above.lstrip("/") or ".", cleanup, top), last


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_still(name: str, parent: int, content: bytes) -> bool:
    if os.stat(name, dir_fd=parent, follow_symlinks=False).st_size != len(content):
        return False
    if not content:
        return True
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    with open(fd, "rb") as file:
        return file.read(len(content) + 1) == content


def strip_set_id(sources: Iterable[str], since: float) -> list[str]:
    """Take the set-id bits from what was changed in `sources` since a time; warnings.

    For sandboxes without a filter for system calls: what they leave must not run as its owner.
    Other runs may change the same directories meanwhile, so everything goes by descriptors.
    """
    from . import git_metadata

    found = collect.Collected()
    deadline = time.monotonic() + _STRIP_SECONDS
    for source in sources:
        with contextlib.ExitStack() as cleanup:
            try:
                _strip_below(git_metadata.opened(source, cleanup), source, since, deadline, found)
            except TimeoutError:
                found.complain(source, "is too large to look for set-id files in all of it")
            except OSError as error:
                found.complain(source, error.strerror or "could not be opened")
    return found.finish().warnings


def _strip_below(
    top: int, shown: str, since: float, deadline: float, found: collect.Collected
) -> None:
    from . import git_metadata

    pending = [""]
    while pending:
        if time.monotonic() > deadline:
            raise TimeoutError
        place = pending.pop()
        path = os.path.join(shown, place)
        try:
            if place.count("/") < _STRIP_DEPTH:
                pending += _strip_directory(top, place, path, since, found)
                continue
            # From here on by a descriptor of its own: from the top every step costs the depth.
            with contextlib.ExitStack() as cleanup:
                inner = git_metadata.opened(place, cleanup, top)
                _strip_below(inner, path, since, deadline, found)
        except TimeoutError:
            raise
        except OSError as error:
            found.complain(path, error.strerror or "was not examined")


def _strip_directory(
    top: int, place: str, shown: str, since: float, found: collect.Collected
) -> list[str]:
    """The same for one directory and the files in it; the directories in it, below `top`."""
    from . import git_metadata

    inner = []
    with contextlib.ExitStack() as cleanup:
        directory = git_metadata.opened(os.path.join(place, "."), cleanup, top)
        listed = os.open(".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0), dir_fd=directory)
        cleanup.callback(os.close, listed)
        names = ["."]
        with os.scandir(listed) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    inner.append(os.path.join(place, entry.name))
                else:
                    names.append(entry.name)
        for name in names:
            try:
                if _strip(name, listed, since):
                    found.complain(os.path.normpath(os.path.join(shown, name)), _STRIPPED)
            except OSError as error:
                found.complain(os.path.join(shown, name), error.strerror or "was not examined")
    return inner


def _strip(name: str, parent: int, since: float) -> bool:
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not (info.st_mode & 0o6000 and info.st_ctime >= since and _ordinary(info)):
        return False
    # It may be another file by now, or a link to one of the host's.
    fd = os.open(name, _HANDLE | getattr(os, "O_NOFOLLOW", 0), dir_fd=parent)
    try:
        info = os.fstat(fd)
        if not (info.st_mode & 0o6000 and _ordinary(info)):
            return False
        os.chmod(f"/proc/self/fd/{fd}" if _HANDLE else fd, info.st_mode & 0o1777)
        return True
    finally:
        os.close(fd)


def _ordinary(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)

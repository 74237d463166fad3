"""What makes git execute something in a writable mount, and its removal when a run has ended.

Git obeys `config` and `hooks` of the directory it finds first, so a run must change neither these
nor the names that lead git to other ones: `commondir`, `config.worktree`, submodules, worktrees.
`inside` names what is closed while the program runs; `protect.py` closes it. Three ways in cannot
be closed, because `git add`, `commit` and `stash` write there too; `Guard` looks when the run ends:

- new names directly in the git directory: what git does not need for these commands is removed,
  and so is every new symbolic link, because git would write through it;
- a submodule in the index whose `.git` the run made or changed: it is renamed;
- `HEAD`, `objects` and `refs` at the top of the mount, a bare repository: its `HEAD` is renamed.

Everything goes by directory descriptors and follows no link. Directories are renamed, not deleted:
they may be the user's, and may be of any size. Each removal is a warning, but for the many of one
kind. What cannot be examined in a few seconds git is kept from using.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from ..files import collect
from . import git_index

# Empty, or `.` in `commondir`, they change nothing for git 2.39; see `placeholder`.
_CLOSED_DIRECTORIES = ("hooks", "modules", "worktrees")
_CLOSED_FILES = ("config", "config.worktree", "commondir")
# An empty one would change what git does. `git rebase --continue` runs commands from these, `git
# cherry-pick --continue` a strategy's program, and `git bisect view` hands the names to a shell.
_CLOSED_IF_THERE = (
    "gitdir", "rebase-merge", "rebase-apply", "sequencer", "BISECT_NAMES", "remotes", "branches",
)  # fmt: skip
_NEEDED = re.compile(
    r"HEAD|index|packed-refs|shallow|description|objects|refs|logs|info|lfs|rr-cache"
    r"|gc\.(pid|log)|sharedindex\.[0-9a-f]+|[A-Z][A-Z_]*_(HEAD|MSG|MODE|RR|EDITMSG|AUTOSTASH)"
    r"|AUTO_MERGE|[A-Za-z_.-]+\.lock"
)
# Git writes to files in these that the caller never names.
_WRITTEN_TO = ("logs", "rr-cache", "info")
_MAX_DEPTH = 16
_MAX_HOOKS = 1000
_MAX_SECONDS = 10.0
_MAX_WARNINGS = 20
# There is nothing at a path, or nothing that git could enter.
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES)
# Containers are started from other systems too, which lack some of these.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_LINK
_PASSED = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | _NO_LINK
_FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_LINK


_active: weakref.WeakSet[Guard] = weakref.WeakSet()
_lock = threading.Lock()


def directories(source: str) -> tuple[str, ...]:
    """Git's directories in `source`, as relative paths; "." if it is one itself."""
    found = ["."] if _is_git_directory(source) else []
    git = os.path.join(source, ".git")
    if os.path.isdir(git):
        if not os.path.islink(git):
            found.append(".git")
    elif (led := _led_to(git)) is not None:
        found += [led] if os.path.isdir(led) else []
        common = _line(os.path.join(led, "commondir"))
        found += [os.path.join(led, common)] if common else []
    inner = (
        os.path.relpath(os.path.realpath(os.path.join(source, path)), source) for path in found
    )
    return tuple(dict.fromkeys(path for path in inner if path.split("/")[0] != ".."))


def inside(source: str) -> Iterator[tuple[str, str]]:
    """(relative path, "ro" or "rw") of what git obeys in `source`: see `protect.inside`."""
    for directory in directories(source):
        parts = () if directory == "." else tuple(directory.split("/"))
        # Nailed down, or it could be moved away and another one put in its place.
        for length in range(1, len(parts) + 1):
            yield "/".join(parts[:length]), "rw"
        for name in (*_CLOSED_DIRECTORIES, *_CLOSED_FILES):
            yield "/".join((*parts, name)), "ro"
        for name in _CLOSED_IF_THERE:
            if os.path.lexists(os.path.join(source, directory, name)):
                yield "/".join((*parts, name)), "ro"


def placeholder(path: str) -> bytes | None:
    """What stands in for a missing `path` that `inside` named; None for a directory."""
    name = os.path.basename(path)
    if name in _CLOSED_DIRECTORIES:
        return None
    # Git dies of an empty one.
    return b".\n" if name == "commondir" else b""


def _is_git_directory(path: str) -> bool:
    """Whether git would take it for one: its own rule, without a look into the files."""

    def there(name: str) -> bool:
        return os.path.lexists(os.path.join(path, name))

    return there("HEAD") and (there("commondir") or (there("objects") and there("refs")))


def _line(path: str, parent: int | None = None) -> str:
    """The beginning of a file such as `commondir`, without its last newline; or nothing."""
    try:
        fd = os.open(path, _FILE, dir_fd=parent)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return os.fsdecode(file.read(4096).rstrip(b"\r\n")).replace("\0", "")


def _led_to(file: str) -> str | None:
    """The directory that a `.git` file names."""
    text = _line(file)
    if not text.startswith("gitdir: "):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(file), text.removeprefix("gitdir: ")))


class Guard:
    """One writable mount: made before its run starts, `clean` is called when the run has ended."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._directories = directories(source)
        self._was_bare = "." in self._directories
        self._names = {path: self._listed(path) for path in self._directories}
        self._links = {path: self._linked(path) for path in self._directories}
        self._common = {path: self._print_of_common(path) for path in self._directories}
        self._modules: dict[str, object] = {}
        for path in self._directories:
            try:
                self._modules |= self._known_modules(path) if path != "." else {}
            except OSError:
                continue  # not ours to read: it is examined at the end, and a problem is reported
        with _lock:
            self._real = os.path.realpath(source)
            # What a run that still goes on has left must not count as there before.
            for other in (guard for guard in _active if guard._real == self._real):
                self._inherit(other)
            _active.add(self)

    def _inherit(self, other: Guard) -> None:
        for path in self._directories:
            if path in other._names:
                self._names[path] &= other._names[path]
                self._links[path] &= other._links[path]
        self._modules = {
            place: state
            for place, state in self._modules.items()
            if place in other._modules and other._modules[place] == state
        }

    def clean(self, ours: Callable[[str], bool]) -> list[str]:
        """Remove what the run has left for git to execute; warnings. `ours` says whether a path is
        a placeholder that another run still needs."""
        warnings: list[str] = []
        deadline = time.monotonic() + _MAX_SECONDS
        with _lock:
            _active.discard(self)
        for directory in self._directories:
            try:
                _keep_few(warnings, self._clean(directory, ours, deadline))
            except TimeoutError:
                why = "it is too large or too deep to be examined:"
                warnings.append(self._set_aside(self._path(directory), "HEAD", why))
            except OSError as error:
                warnings.append(
                    f"{self._path(directory)!r} could not be examined ({error.strerror}): "
                    "look at it before you use git there"
                )
        if not self._was_bare and _is_git_directory(self._source):
            warnings.append(self._set_aside(self._source, "HEAD", "it made a bare repository of"))
        return warnings

    def _path(self, directory: str, *names: str) -> str:
        return os.path.normpath(os.path.join(self._source, directory, *names))

    def _listed(self, directory: str) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._path(directory)))
        except OSError:
            return frozenset()

    def _print_of_common(self, directory: str) -> tuple[int, ...]:
        try:
            info = os.lstat(self._path(directory, "commondir"))
        except OSError:
            return ()
        return info.st_ino, info.st_ctime_ns

    def _linked(self, directory: str) -> frozenset[str]:
        """The symbolic links where git writes, as paths in `directory`."""
        with ExitStack() as cleanup:
            try:
                git = opened(directory, cleanup, opened(self._source, cleanup))
                return frozenset(_symbolic_links(git, time.monotonic() + _MAX_SECONDS))
            except OSError:
                return frozenset()

    def _clean(self, directory: str, ours: Callable[[str], bool], deadline: float) -> Iterator[str]:
        with ExitStack() as cleanup:
            top = opened(self._source, cleanup)
            git = _readable(opened(directory, cleanup, top), cleanup)
            for name in sorted(os.listdir(git)):
                if time.monotonic() > deadline:
                    raise TimeoutError
                full = self._path(directory, name)
                try:
                    if ours(full) or not self._is_left(directory, name, git):
                        continue
                    aside = _take_away(name, git)
                except FileNotFoundError:  # git's own temporary file, or another run's
                    continue
                else:
                    why = "git does not need it and may execute what it names"
                    became = f"renamed {full!r} to {aside!r}" if aside else f"removed {full!r}"
                    yield f"{became}: {why}"
            if directory != ".":
                for link in sorted(_symbolic_links(git, deadline) - self._links[directory]):
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    with ExitStack() as inner:
                        parent = opened(os.path.dirname(link) or ".", inner, git)
                        os.unlink(os.path.basename(link), dir_fd=parent)
                    full = self._path(directory, link)
                    yield f"removed the symbolic link {full!r}: git writes to what it leads to"
                yield from self._disarm(top, git, deadline)

    def _is_left(self, directory: str, name: str, git: int) -> bool:
        """Whether the run has left `name`, and git may execute something because of it."""
        if self._is_placeholder(directory, name):
            return False  # another Belljar process's, or as harmless
        if name == "commondir":
            # Another Belljar process may have removed its placeholder under our mount.
            return self._common[directory] != self._print_of_common(directory)
        if git_index.NAME.fullmatch(name) and directory != ".":
            return not stat.S_ISREG(os.stat(name, dir_fd=git, follow_symlinks=False).st_mode)
        if name in self._names[directory]:
            return False
        if directory == ".":  # a bare repository that is the mount: other names are anything
            return name in (*_CLOSED_DIRECTORIES, *_CLOSED_FILES, *_CLOSED_IF_THERE)
        return _NEEDED.fullmatch(name) is None

    def _is_placeholder(self, directory: str, name: str) -> bool:
        path = self._path(directory, name)
        if name in _CLOSED_DIRECTORIES:
            return not os.path.islink(path) and os.path.isdir(path) and not os.listdir(path)
        if name not in _CLOSED_FILES or not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(os.open(path, _FILE), "rb") as file:
            return file.read(4) == placeholder(name)

    def _disarm(self, tree: int, git: int, deadline: float) -> Iterator[str]:
        """Close the submodules in the index of `git`, whose work tree is `tree`, that the run has
        made or changed: `git status` obeys their config, at any depth."""
        warnings: list[str] = []

        def distrusted(place: str, module: int) -> bool:
            if place in self._modules and self._modules[place] == _print(place, module):
                return False
            why = "the run made or changed this submodule:"
            warnings.append(self._set_aside(place, ".git", why, module))
            return True

        def unreadable(place: str, git: int, why: str) -> None:
            for name in git_index.names(git) or ("index",):
                warnings.append(self._set_aside(place, name, why, git))

        _visit(tree, self._source, git, distrusted, unreadable, deadline)
        yield from warnings

    def _known_modules(self, directory: str) -> dict[str, object]:
        """The state of each submodule in an index, by its path."""
        found: dict[str, object] = {}

        def noted(place: str, module: int) -> bool:
            found[place] = _print(place, module)
            return False

        with ExitStack() as cleanup:
            top = opened(self._source, cleanup)
            git = opened(directory, cleanup, top)
            deadline = time.monotonic() + _MAX_SECONDS
            _visit(top, self._source, git, noted, lambda place, git, why: None, deadline)
        return found

    def _set_aside(self, path: str, name: str, why: str, parent: int | None = None) -> str:
        """Rename `name` in `path`, because it may hold work of the program's; a warning."""
        aside = _other_name(name)
        full = os.path.join(path, name)
        try:
            if parent is None:
                os.rename(full, os.path.join(path, aside))
            else:
                os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            return f"{why} {full!r} could not be renamed ({error.strerror}): do not use git there"
        return f"{why} {full!r} is now {aside!r}, because git would execute what its config names"


def opened(path: str, cleanup: ExitStack, parent: int | None = None) -> int:
    """A directory's descriptor to go on from, which needs no right to read it: git needs none.

    Below `parent` no part of `path` may be a link.
    """
    if parent is not None and ".." in path.split("/"):
        raise NotADirectoryError(errno.ENOTDIR, "leads out", path)
    fd = os.open(path if parent is None else ".", _PASSED, dir_fd=parent)
    for part in path.split("/") if parent is not None else ():
        outer = fd  # closed at once: a path may be longer than descriptors can be open
        try:
            fd = os.open(part, _PASSED, dir_fd=outer)
        finally:
            os.close(outer)
    cleanup.callback(os.close, fd)
    return fd


def _take_away(name: str, git: int) -> str:
    """Remove a name, but rename a directory: the new name, or nothing."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=git, follow_symlinks=False).st_mode):
        collect.remove_entry(name, git)
        return ""
    aside = _other_name(name)
    os.rename(name, aside, src_dir_fd=git, dst_dir_fd=git)
    return aside


def _other_name(name: str) -> str:
    return f"{name[:100]}.set-aside-{os.urandom(4).hex()}"


def _keep_few(warnings: list[str], more: Iterator[str]) -> None:
    """Add the first and the last warnings of any number; what yields them is always run."""
    count, last = 0, deque[str](maxlen=_MAX_WARNINGS)
    try:
        for count, warning in enumerate(more, 1):
            if count <= _MAX_WARNINGS:
                warnings.append(warning)
            else:
                last.append(warning)
    finally:
        if count > 2 * _MAX_WARNINGS:
            warnings.append(f"and {count - 2 * _MAX_WARNINGS} more warnings")
        warnings += last


def _symbolic_links(git: int, deadline: float) -> set[str]:
    """Paths in a git directory that are symbolic links, where git writes to what they lead to."""
    found: set[str] = set()
    pending = [""]
    while pending:
        place = pending.pop()
        if time.monotonic() > deadline or place.count("/") > _MAX_DEPTH:
            raise TimeoutError
        with ExitStack() as cleanup:
            directory = _readable(opened(place or ".", cleanup, git), cleanup)
            with os.scandir(directory) as entries:
                for entry in entries:
                    path = os.path.join(place, entry.name)
                    if entry.is_symlink():
                        found.add(path)
                    elif (place or path in _WRITTEN_TO) and entry.is_dir(follow_symlinks=False):
                        pending.append(path)
    return found


def _readable(directory: int, cleanup: ExitStack) -> int:
    """The same directory to be listed, whatever rights a run took from it."""
    try:
        fd = os.open(".", _DIRECTORY, dir_fd=directory)
    except PermissionError:
        mode = stat.S_IMODE(os.fstat(directory).st_mode)
        os.chmod(f"/proc/self/fd/{directory}", mode | 0o700)
        fd = os.open(".", _DIRECTORY, dir_fd=directory)
    cleanup.callback(os.close, fd)
    return fd


def _visit(
    tree: int,
    path: str,
    git: int,
    prune: Callable[[str, int], bool],
    unreadable: Callable[[str, int, str], None],
    deadline: float,
    depth: int = 0,
) -> None:
    """Call `prune` with path and descriptor of each submodule in the index of `git` that has a
    repository, and go into those for which it returns False."""
    links, problem = git_index.links(git)
    if depth > _MAX_DEPTH:
        problem = "submodules are too deep to be examined:"
    if problem:
        unreadable(path, git, problem)
        return
    for link in sorted(links):
        if time.monotonic() > deadline:
            unreadable(path, git, "its submodules take too long to be examined:")
            return
        with ExitStack() as cleanup:
            place = os.path.join(path, link)
            try:
                module = opened(link, cleanup, tree)
                os.stat(".git", dir_fd=module, follow_symlinks=False)
            except OSError as error:
                if error.errno in _NOTHING:
                    continue  # no repository there, or none that git could enter
                unreadable(path, git, f"a submodule could not be examined ({error.strerror}):")
                return
            if prune(place, module):
                continue
            try:
                inner = os.open(_module_directory(place), _PASSED & ~getattr(os, "O_NOFOLLOW", 0))
            except OSError:
                continue
            cleanup.callback(os.close, inner)
            _visit(module, place, inner, prune, unreadable, deadline, depth + 1)


def _module_directory(place: str) -> str:
    git = os.path.join(place, ".git")
    return git if os.path.isdir(git) else _led_to(git) or git


def _print(place: str, module: int) -> object:
    """What changes if a program changes anything that git obeys in a submodule; never equal to
    anything if it cannot be known, because git may get in where we cannot list.

    Identities and change times, which no program can set: not contents, because a repository that
    lay under another name in an earlier run must not count as known.
    """
    try:
        return _found_in(place, module)
    except OSError:
        return object()


def _found_in(place: str, module: int) -> object:
    own = os.stat(".git", dir_fd=module, follow_symlinks=False)
    found: list[object] = [(own.st_ino, stat.S_IFMT(own.st_mode))]
    if not stat.S_ISDIR(own.st_mode):  # a directory's time changes with every lock file in it
        found.append(own.st_ctime_ns)
    git = _module_directory(place)
    hooks = os.path.join(git, "hooks")
    paths = [os.path.join(git, name) for name in (*_CLOSED_FILES, "hooks")]
    if os.path.isdir(hooks):
        with os.scandir(hooks) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, _MAX_HOOKS + 1))
        if len(names) > _MAX_HOOKS:
            raise OSError(errno.E2BIG, "too many hooks", hooks)
        paths += [os.path.join(hooks, name) for name in names]
    for path in paths:
        if os.path.lexists(path):
            info = os.lstat(path)
            found.append((path, info.st_ino, info.st_ctime_ns))
    return found

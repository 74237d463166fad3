"""What exists on the host before a run and after it: everything that a run could leave behind."""

from __future__ import annotations

import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

PATIENCE = 5.0
_END_SECONDS = 45.0  # longer than any case runs by itself
_OURS = "belljar"
_SHARED_PLACES = ("/dev/shm", "/var/tmp", "/run")
_makers: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Sets of names by kind. `leftovers` says what one has that an earlier one had not."""

    kinds: Mapping[str, frozenset[str]]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            kinds={
                "process": frozenset(map(_describe, descendants())),
                "cgroup": frozenset(_cgroups()),
                "mount": frozenset(_mounts()),
                "network namespace": frozenset(_names("/run/netns")),
                "unix socket": frozenset(_unix_sockets()),
                "temporary file": frozenset(_temporary_files()),
                "loop device": frozenset(_loop_devices()),
                "descriptor": frozenset(_descriptors()),
            }
        )

    def leftovers(self, before: Snapshot) -> list[str]:
        """What is here now and was not here before, in words."""
        found = []
        for kind, names in self.kinds.items():
            found += [f"{kind} {name}" for name in sorted(names - before.kinds[kind])]
        return found


def leftovers(before: Snapshot, patience: float = PATIENCE) -> list[str]:
    """What is still left after at most `patience` seconds; returns as soon as nothing is."""
    deadline = time.monotonic() + patience
    _reap()  # those that died with the run
    while True:
        left = Snapshot.take().leftovers(before)
        # A process that forks and ends faster than we can look is seen by the corpses it leaves us.
        if ended := _reap():
            left.append(f"process {ended} of several that keep coming and going")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def end_survivors(before: Snapshot) -> None:
    """Kill the descendants of this process that were not there before: a breach must not stay."""
    known = before.kinds["process"]
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        alive = [pid for pid in descendants() if _describe(pid) not in known]
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not _reap() and not alive:
            return


@contextmanager
def no_survivors() -> Iterator[None]:
    """Whatever was started meanwhile is over at the end, however that came."""
    before = Snapshot(kinds={"process": frozenset(map(_describe, descendants()))})
    try:
        yield
    finally:
        end_survivors(before)


def descendants() -> list[int]:
    """Every living process below this one. As a subreaper we are the parent of all orphans."""
    children: dict[int, list[int]] = {}
    for pid, parent, state in _processes():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def processes_of(uid: int) -> list[int]:
    """Every living process that runs as `uid`."""
    found = []
    for pid, _, state in _processes():
        try:
            if state != "Z" and os.stat(f"/proc/{pid}").st_uid == uid:
                found.append(pid)
        except OSError:  # it ended while we looked
            continue
    return found


def _processes() -> Iterable[tuple[int, int, str]]:
    """(pid, parent, state) of every process that we can see."""
    for name in _names("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):  # it ended while we looked
            continue
        yield int(name), int(fields[1]), fields[0].decode()


def _reap() -> int:
    """Collect the orphans that became our children and died; one of them, or 0.

    No run goes on while we look, so nobody else waits for them.
    """
    found = 0
    for pid, parent, state in _processes():
        if parent == os.getpid() and state == "Z":
            try:
                found = os.waitpid(pid, os.WNOHANG)[0] or found
            except ChildProcessError:
                continue
    return found


def _describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            name, rest = file.read().split(b"(", 1)[1].rsplit(b")", 1)
        started = rest.split()[19].decode()
    except (OSError, IndexError):
        return f"{pid} (gone)"
    return f"{pid} {name.decode('utf-8', 'replace')} started {started}"


def ours_too(pid: int) -> None:
    """Another process that uses Belljar for us: what it leaves behind counts as ours."""
    _makers.add(pid)


def _cgroups() -> Iterable[str]:
    """Our control groups: their names say whose they are."""
    for where, directories, _ in os.walk("/sys/fs/cgroup"):
        if where.count("/") > 8:
            directories.clear()
        for name in directories:
            if _OURS in name and _is_ours(name):
                yield os.path.join(where, name)


def _is_ours(name: str) -> bool:
    numbers = {int(number) for number in re.findall(r"-(\d+)-", name)}
    return bool(numbers & {os.getpid(), *_makers})


def _mounts() -> Iterable[str]:
    """Mounts in our directory or with our name, and those on a directory that everybody knows.

    The kernel does not say who mounted something, and container engines mount all the time, deep in
    directories of their own. What the programs of the suite mount, they mount where they are.
    """
    here = tempfile.gettempdir() + os.sep
    for line in _lines("/proc/self/mountinfo"):
        number, _, _, _, where, *_ = line.split()
        if where.startswith(here) or _OURS in line or where.count(os.sep) <= 2:
            yield f"{where} ({number})"


def may_be_others(left: Iterable[str]) -> bool:
    """Whether another program of this host could have made all of this: then it is looked at again.
    What a guest makes has a new number each time, and is there again."""
    here = tempfile.gettempdir()
    return all(
        thing.startswith(("mount ", "loop device ")) and here not in thing and _OURS not in thing
        for thing in left
    )


def _unix_sockets() -> Iterable[str]:
    here = tempfile.gettempdir()
    for line in _lines("/proc/net/unix"):
        path = line.split()[7:]
        if path and (_names_us(path[0]) or path[0].startswith(here + os.sep)):
            yield path[0]


def _temporary_files() -> Iterable[str]:
    here = tempfile.gettempdir()
    yield from (os.path.join(here, name) for name in _names(here))
    for place in _SHARED_PLACES:
        yield from (os.path.join(place, name) for name in _names(place) if _names_us(name))


def _names_us(name: str) -> bool:
    """Whether a name says that this very process made it: others may use Belljar here, too."""
    return re.search(rf"{_OURS}.*\b{os.getpid()}\b", name) is not None


def _loop_devices() -> Iterable[str]:
    for name in _names("/sys/block"):
        if os.path.exists(f"/sys/block/{name}/loop/backing_file"):
            yield name


def _descriptors() -> Iterable[str]:
    for name in _names("/proc/self/fd"):
        try:
            mode = os.fstat(int(name)).st_mode
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        yield f"{name} {target} {stat.filemode(mode)[0]}"


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return (
                file.read().splitlines()[1:] if path.endswith("unix") else file.read().splitlines()
            )
    except OSError:
        return []

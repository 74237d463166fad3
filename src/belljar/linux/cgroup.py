"""Control groups: one group a run, made where this process may make one, version 1 or 2.

A run joins its group by writing to descriptors that were opened beforehand, so that the process
which joins needs no rights on the cgroup file system. Names carry our process id, and a lock on the
group lives as long as its maker: `sweep` removes the groups of processes that are no longer there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time

from ..errors import BackendFailed
from ..records import positional_record

_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD = 100_000  # microseconds, for which a quota of processor time is given
_NOT_EVERYWHERE = ("memory.peak",)  # it came with Linux 5.19
SOCKETS_FILE = "memory.kmem.tcp.limit_in_bytes"
# Beside the memory limit, in version 1: its memory controller counts TCP and UDP buffers apart.
SOCKETS_PART = 4
# What a group may hold when its run is over and still be used for another: a run's peak counts it.
_LEFTOVERS = 8 << 20
_LOST = (
    "a control group has lost a controller, and with it a limit: the owner of the hierarchy took "
    "it back; start again, in a unit with Delegate=yes"
)
_NAME = re.compile(r"belljar-(\d+)-[0-9a-f]+")


@positional_record
class Home:
    """Where groups can be made: version 1 has a directory a controller, version 2 has one.

    `uncounted` names the kinds of memory that this kernel's memory controller leaves out.
    """

    version: int
    directories: tuple[str, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def sockets(self) -> str:
        """Where buffers of TCP and UDP are counted, in words that end an enforcement report's."""
        return "; TCP and UDP buffers: a quarter of it beside" if self.version == 1 else ""


def find() -> Home | None:
    """A place where we can make groups with memory, pids and cpu; None if there is none."""
    own = _own_paths()
    mounts = _mounts()
    if all(name in mounts for name in _CONTROLLERS):
        homes = []
        for name in _CONTROLLERS:
            home = _first_writable(mounts[name], own.get(name, "/"), ())
            if home is None:
                break
            homes.append(home)
        else:
            return Home(1, tuple(homes), _uncounted(1, homes[0]))
    if "2" in mounts and _is_given(mounts["2"], own.get("", "/")):
        home = _first_writable(mounts["2"], own.get("", "/"), ("memory.max", "pids.max", "cpu.max"))
        if home is not None:
            return Home(2, (home,), _uncounted(2, home))
    return None


def _uncounted(version: int, memory: str) -> tuple[str, ...]:
    """Kinds of memory that the kernel was started, or built, not to count."""
    with open("/proc/cmdline") as file:
        words = file.read().split()
    off = {
        word
        for option in words
        if option.startswith("cgroup.memory=")
        for word in option.partition("=")[2].split(",")
    }
    kernel = ("kernel memory",) if "nokmem" in off else ()
    if version == 1:
        there = os.access(os.path.join(memory, SOCKETS_FILE), os.F_OK)
    else:
        there = "nosocket" not in off
    return kernel if there else (*kernel, "socket buffers")


def _own_paths() -> dict[str, str]:
    """Controller name (empty for version 2) to this process's group."""
    paths = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for name in controllers.split(","):
                paths[name] = path
    return paths


def _mounts() -> dict[str, str]:
    """Controller name, or "2" for the unified hierarchy, to its mount point."""
    found = {}
    with open("/proc/self/mounts") as file:
        for line in file:
            _, where, kind, options, *_ = line.split()
            if kind == "cgroup2":
                found["2"] = where
            elif kind == "cgroup":
                found |= {name: where for name in options.split(",") if name in _CONTROLLERS}
    return found


def _is_given(mount: str, own: str) -> bool:
    """Whether our own group has the controllers of version 2.

    Those that only a group above us has were given to others, and systemd takes them back when the
    others end, with the limits that we had set by them: it leaves root's services without cpu, but
    the root group has it while somebody is logged in.
    """
    try:
        with open(os.path.join(mount, own.lstrip("/"), "cgroup.controllers")) as file:
            return set(_CONTROLLERS) <= set(file.read().split())
    except OSError:  # our own is not in sight: a container's root is beside it
        return True


def _first_writable(mount: str, own: str, needed: tuple[str, ...]) -> str | None:
    """The nearest of our own group and its ancestors where a new group has the `needed` files."""
    parts = [part for part in own.split("/") if part and part != ".."]
    while True:
        directory = os.path.join(mount, *parts)
        trial = os.path.join(directory, f"belljar-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            os.mkdir(trial)
        except OSError:
            usable = False
        else:
            usable = all(os.access(os.path.join(trial, name), os.W_OK) for name in needed)
            usable = usable and os.access(os.path.join(trial, "cgroup.procs"), os.W_OK)
            os.rmdir(trial)
        if usable:
            return directory
        if not parts:
            return None
        parts.pop()


def own_door() -> int:
    """A descriptor for joining the group that we are in already, which changes nothing; or -1."""
    own, mounts = _own_paths(), _mounts()
    for mount, path in ((mounts.get("pids"), own.get("pids")), (mounts.get("2"), own.get(""))):
        if mount and path:
            try:
                return os.open(f"{mount}{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            except OSError:  # not ours to write, or seen from elsewhere
                continue
    return -1


class Group:
    """The control group of one run. Use `procs` to join it; `remove` when all members are gone."""

    def __init__(
        self,
        home: Home,
        run: str,
        *,
        memory: int,
        processes: int,
        cpus: float,
        die_together: bool = True,
    ) -> None:
        name = f"belljar-{os.getpid()}-{run}"
        self._version = home.version
        self._paths = [os.path.join(directory, name) for directory in home.directories]
        self._memory, self._pids, self._cpu = self._paths if home.version == 1 else self._paths * 3
        self._released, self._processes = False, processes
        self._quota = max(1000, int(cpus * _PERIOD))
        self._peak_is_ours, self._peak_file_writes = True, False
        self._earlier = {"oom_kill": 0, "max": 0}
        self._lock = -1
        self._files: dict[str, int] = {}
        made: list[str] = []
        try:
            for path in self._paths:
                os.mkdir(path)
                made.append(path)
            self._lock = os.open(self._paths[0], os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._write(self._pids, "pids.max", str(processes))
            if home.version == 1:
                self._write(self._memory, "memory.limit_in_bytes", str(memory))
                self._write_if_there(self._memory, "memory.memsw.limit_in_bytes", str(memory))
                # Only sockets that are made after this are counted: no member is in there yet.
                if "socket buffers" not in home.uncounted:
                    self._write(self._memory, SOCKETS_FILE, str(memory // SOCKETS_PART))
            else:
                self._write(self._memory, "memory.max", str(memory))
                self._write_if_there(self._memory, "memory.swap.max", "0")
                self._write_if_there(self._memory, "memory.oom.group", str(int(die_together)))
            self._limit_cpu()
        except OSError as error:
            self._paths = made  # and nobody else's of the same name
            self.remove()
            raise BackendFailed(f"cannot make a control group: {error}", retryable=True) from error

    @property
    def procs(self) -> tuple[str, ...]:
        """The files to which a joining process writes "0"."""
        return tuple(os.path.join(path, "cgroup.procs") for path in self._paths)

    def confirm(self) -> None:
        """BackendFailed if a limit did not hold until now.

        In version 2 a group above takes a controller away from all below, and their limits are
        gone; if it comes again they are not. Without the others' files the counters say so.
        """
        if self._version == 2 and not self._released:
            told = self._read(self._cpu, "cpu.max")
            if told.split() != [str(self._quota), str(_PERIOD)]:
                raise BackendFailed(f"{_LOST} (cpu.max is {told.strip()!r})")

    def oom_kills(self) -> int:
        """How often the kernel killed a member for want of memory."""
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        return self._counter(self._memory, name, "oom_kill")

    def forks_refused(self) -> int:
        return self._counter(self._pids, "pids.events", "max")

    def peak_memory(self) -> int | None:
        """None where the kernel does not count it, or not since this run began."""
        if not self._peak_is_ours:
            return None
        name = "memory.max_usage_in_bytes" if self._version == 1 else "memory.peak"
        try:
            return int(self._read(self._memory, name))
        except FileNotFoundError:
            return None

    def holds_leftovers(self) -> bool:
        """Whether the next run's peak would be this one's: its page cache stays with the group.

        Asked when all members of the run are gone. A group that does is removed, and another made:
        emptying it takes the kernel as long, and a lock that other runs need.
        """
        name = "memory.usage_in_bytes" if self._version == 1 else "memory.current"
        try:
            return int(self._read(self._memory, name)) > _LEFTOVERS
        except (OSError, BackendFailed):  # a controller was taken away: not to be used again
            return True

    def renew(self, processes: int) -> None:
        """For the next run, with `processes` and otherwise the same limits.

        All members are gone, counting starts again.
        """
        try:
            if self._released or processes != self._processes:
                self._write(self._pids, "pids.max", str(processes))
                self._processes = processes
            if self._released:
                self._limit_cpu()
        except OSError as error:
            raise BackendFailed(f"{_LOST} ({error})") from error
        self._released = False
        self._earlier["oom_kill"] += self.oom_kills()
        self._earlier["max"] += self.forks_refused()
        if self._version == 1:
            self._write(self._memory, "memory.max_usage_in_bytes", "0")
        else:
            self._peak_is_ours = self._forget_peak()

    def _forget_peak(self) -> bool:
        """Since Linux 6.12 whoever writes to memory.peak reads there what came after that."""
        name = "memory.peak"
        try:
            if not self._peak_file_writes:
                # The one that was opened for the first run's peak can only read.
                fd = os.open(os.path.join(self._memory, name), os.O_RDWR)
                self._close(name)
                self._files[name], self._peak_file_writes = fd, True
            os.write(self._files[name], b"reset")
        except OSError:
            return False
        return True

    def _limit_cpu(self) -> None:
        if self._version == 1:
            self._write(self._cpu, "cpu.cfs_period_us", str(_PERIOD))
            # Refused where a group above has less: then that quota is the one that holds.
            self._write_if_there(self._cpu, "cpu.cfs_quota_us", str(self._quota))
        else:
            self._write(self._cpu, "cpu.max", f"{self._quota} {_PERIOD}")

    def release(self) -> None:
        """Before a kill: no more forks, and no throttling that would slow the dying down."""
        self._released = True
        self._write_if_there(self._pids, "pids.max", "0")
        if self._version == 1:
            self._write_if_there(self._cpu, "cpu.cfs_quota_us", "-1")
        else:
            self._write_if_there(self._cpu, "cpu.max", "max 100000")

    def kill(self) -> None:
        """End every member. The kernel's own switch where there is one."""
        self.release()
        if self._version == 2 and self._write_if_there(self._paths[0], "cgroup.kill", "1"):
            return
        for pid in self.members():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue

    def members(self) -> list[int]:
        return _members(self._pids)

    def remove(self) -> None:
        """Delete the group; a member that is still dying is waited for, briefly."""
        for name in tuple(self._files):
            self._close(name)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for path in reversed(self._paths):  # the one that `sweep` looks for goes last
            _remove(path)

    def _counter(self, path: str, name: str, key: str) -> int:
        for line in self._read(path, name).splitlines():
            word, _, number = line.partition(" ")
            if word == key:
                return int(number) - self._earlier[key]
        return 0

    def _read(self, path: str, name: str) -> str:
        # Kept open: a group that is used again and again is asked the same after every run.
        try:
            fd = self._files.get(name)
            if fd is None:
                fd = self._files[name] = os.open(os.path.join(path, name), os.O_RDONLY)
            return os.pread(fd, 4096, 0).decode()
        except OSError as error:
            gone = error.errno in (errno.ENODEV, errno.ENOENT)
            if not gone or name in _NOT_EVERYWHERE:
                raise
            raise BackendFailed(f"{_LOST} ({name} is gone)") from error

    def _close(self, name: str) -> None:
        if name in self._files:
            os.close(self._files.pop(name))

    @staticmethod
    def _write(path: str, name: str, text: str) -> None:
        fd = os.open(os.path.join(path, name), os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def _write_if_there(self, path: str, name: str, text: str) -> bool:
        """Write to a file that not every kernel has (swap accounting, for one)."""
        try:
            self._write(path, name, text)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return False
        return True


def _remove(path: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise BackendFailed(f"control group {path} cannot be removed: {error}") from error
            time.sleep(0.002)
        else:
            return


def _members(path: str) -> list[int]:
    with open(os.path.join(path, "cgroup.procs")) as file:
        # One that is not in our pid namespace is listed as 0, which to kill() means ourselves.
        return [pid for pid in map(int, file.read().split()) if pid > 0]


def sweep(home: Home) -> None:
    """Kill and remove the groups that crashed processes of ours left behind.

    The lock is on the first directory only, and its answer goes for the others of that name.
    """
    for name in os.listdir(home.directories[0]):
        match = _NAME.fullmatch(name)
        if not match or os.path.exists(f"/proc/{match[1]}"):
            continue
        paths = [os.path.join(directory, name) for directory in home.directories]
        try:
            lock = os.open(paths[0], os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in reversed(paths):
                _sweep_one(path)
        except BlockingIOError:  # its maker lives, in a pid namespace that we do not see
            continue
        finally:
            os.close(lock)


def _sweep_one(path: str) -> None:
    try:
        for pid in _members(path):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
    except FileNotFoundError:  # another sweep was here
        return
    _remove(path)

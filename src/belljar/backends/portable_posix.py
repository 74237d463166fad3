"""A process tree on any POSIX system, found with `ps` and ended with SIGKILL.

There is no namespace, cgroup or subreaper here, so who belongs to a run is a matter of looking:
- the process group of the first process, which starts a session of its own;
- every descendant of a member by parent id, and every process in a group that a member is in;
- whoever was a member when we last looked, though its parent is gone since;
- at the end, whoever carries the run's token in the environment it was started with.
A daemon that forks twice, leaves the group between two looks *and* starts again with another
environment is not found. The first process stays a zombie until everything else is dead, so that
neither its id nor its group's can be given to somebody else meanwhile.

Tested on Linux. What only macOS does (`ps -E`, kqueue where there is no waitid) is not tested.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ..errors import BackendFailed
from ..guest import protocol
from ..records import positional_record
from .portable_tree import Launch, Load, Reaped

_SHELL = "/bin/sh"
_COLUMNS = ("pgid", "pid", "ppid", "stat", "rss", "time")
_LOOK_SECONDS = 10.0
_KILL_SECONDS = 5.0
_MOST = 1 << 62  # what shells still read as a number, in bytes
TOKEN = "BELLJAR_TREE"


def worker_code(read_fd: int, write_fd: int) -> str:
    """The program that starts the guest's worker on these two pipes."""
    return protocol.boot_code(protocol.GUEST_DIR, read_fd, write_fd)


@positional_record
class _Row:
    group: int
    pid: int
    parent: int
    dead: bool
    memory: int
    cpu: float
    command: bytes


@dataclass(slots=True)
class _Seen:
    """What is known of the tree since the last look."""

    members: set[int]
    groups: set[int]
    cpu: dict[int, float] = field(default_factory=dict)
    peak: int = 0


class PosixTree:
    """One run's processes. `look` may be called from another thread than the rest."""

    def __init__(self, launch: Launch) -> None:
        self._token = f"{TOKEN}={launch.token}"
        self._ps = launch.ps
        self._whole_tree = launch.descendants
        self._lock = threading.Lock()
        uid, gid = launch.user or (None, None)
        self._process = subprocess.Popen(
            _with_limits(launch.argv, launch.ulimits),
            stdin=launch.stdin,
            stdout=launch.stdout,
            stderr=launch.stderr,
            pass_fds=launch.frames,
            # First, so that a long environment does not push it out of what ps prints.
            env={TOKEN: launch.token, **launch.env},
            cwd=launch.cwd,
            start_new_session=True,
            umask=0o077,
            user=uid,
            group=gid,
            extra_groups=[] if launch.user else None,
        )
        self.pid = self._process.pid
        self._seen = _Seen(members={self.pid}, groups={self.pid})

    def wait_for_end(self) -> None:
        """Until the first process has ended; it stays a zombie."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        elif sys.platform != "linux":
            _wait_with_kqueue(self.pid)

    def look(self) -> Load:
        """What the living members use now. BackendFailed if ps does not answer."""
        with self._lock:
            living = self._living(environments=False)
            seen = self._seen
            for row in living:
                seen.cpu[row.pid] = max(row.cpu, seen.cpu.get(row.pid, 0.0))
            memory = sum(row.memory for row in living)
            seen.peak = max(seen.peak, memory)
            return Load(memory=memory, processes=len(living), cpu=sum(seen.cpu.values()))

    def kill(self) -> int:
        """SIGKILL to all of them until ps shows none; the number that would not go."""
        deadline = time.monotonic() + _KILL_SECONDS
        _kill(-self.pid)
        with self._lock:
            while living := self._living(environments=True):
                if time.monotonic() > deadline:
                    return len(living)
                # Groups first: that is one step for the kernel, which no chain of forks outruns.
                for group in {row.group for row in living} - {os.getpgrp()}:
                    _kill(-group)
                for row in living:
                    _kill(row.pid)
        return 0

    def reap(self) -> Reaped:
        """Collect the first process, which has ended, with what the kernel counted."""
        _, status, usage = os.wait4(self.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        seen = self._seen
        return Reaped(
            wait_status=status,
            cpu=max(usage.ru_utime + usage.ru_stime, sum(seen.cpu.values())),
            # Not ru_maxrss: where exec follows vfork that includes our own size.
            peak_memory=seen.peak or None,
        )

    def close(self) -> None:
        """Nothing is kept: the zombie is gone with `reap`."""

    def _living(self, *, environments: bool) -> list[_Row]:
        """The members that are not dead, from a fresh look."""
        rows = _processes(self._ps, environments=environments and self._whole_tree)
        if self._whole_tree:
            members = self._members(rows)
        else:
            members = {row.pid for row in rows if row.group == self.pid}
        mine = [row for row in rows if row.pid in members]
        self._seen.members, self._seen.groups = members, {row.group for row in mine}
        return [row for row in mine if not row.dead]

    def _members(self, rows: list[_Row]) -> set[int]:
        token = self._token.encode()
        known = self._seen
        found = {
            row.pid
            for row in rows
            if row.pid in known.members or row.group in known.groups or token in row.command
        } - {os.getpid()}
        children: dict[int, list[int]] = {}
        for row in rows:
            children.setdefault(row.parent, []).append(row.pid)
        waiting = list(found)
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in found:
                    found.add(child)
                    waiting.append(child)
        return found


def _with_limits(argv: tuple[str, ...], ulimits: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """`argv` behind a shell that sets the limits and then becomes it.

    Not preexec_fn, which runs Python between fork and exec of a process that has threads.
    """
    if not ulimits:
        return argv
    script = " && ".join(f"ulimit -{option} {value}" for option, value in _settable(ulimits))
    _try_limits(script)
    return (_SHELL, "-c", f'{script} && exec "$@"', "sh", *argv)


@lru_cache(maxsize=64)
def _try_limits(script: str) -> None:
    """Once for each set of limits: else a shell that refuses them would look like the guest."""
    tried = subprocess.run([_SHELL, "-c", script], capture_output=True, env={}, timeout=30)
    if tried.returncode != 0:
        told = tried.stderr.decode("utf-8", "replace").strip()[-200:]
        raise BackendFailed(f"the shell cannot set the limits: {told}", fix="ask for lower ones")


def _settable(ulimits: tuple[tuple[str, int], ...]) -> Iterator[tuple[str, int]]:
    """The limits, none of them past what we are held to ourselves, which the shell would refuse."""
    import resource

    units = {"c": 512, "n": 1, "f": 512, "d": 1024, "t": 1}
    numbers = {
        "c": resource.RLIMIT_CORE,
        "n": resource.RLIMIT_NOFILE,
        "f": resource.RLIMIT_FSIZE,
        "d": resource.RLIMIT_DATA,
        "t": resource.RLIMIT_CPU,
    }
    for option, value in ulimits:
        _, hard = resource.getrlimit(numbers[option])
        most = _MOST if hard == resource.RLIM_INFINITY else hard
        yield option, min(value, most // units[option])


def _processes(ps: str, *, environments: bool) -> list[_Row]:
    """Every process of this machine; with the environments it was started with, if asked."""
    command, columns = [ps, "-A"], list(_COLUMNS)
    if environments:
        command.append("-E" if sys.platform == "darwin" else "e")
        columns.append("args")
    command.append("-ww")
    for column in columns:  # one at a time: after `=` FreeBSD's ps takes all the rest as a heading
        command += ["-o", f"{column}="]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"LC_ALL": "C"},
            timeout=_LOOK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendFailed(f"ps does not answer: {error}", retryable=True) from error
    if done.returncode != 0:
        told = done.stderr.decode("utf-8", "replace").strip()[-200:]
        raise BackendFailed(f"ps ended with {done.returncode}: {told}", retryable=True)
    rows = [row for line in done.stdout.splitlines() if (row := _row(line)) is not None]
    if not any(row.pid == os.getpid() for row in rows):
        # An empty machine would look like a run that is over, and within all its limits.
        told = done.stdout[:80].decode("utf-8", "replace")
        raise BackendFailed(f"{ps} does not list this process; it printed {told!r}")
    return rows


def _row(line: bytes) -> _Row | None:
    words = line.split(None, 6)
    if len(words) < 6:
        return None
    try:
        group, pid, parent = map(int, words[:3])
        memory, clock = int(words[4]) * 1024, seconds(words[5].decode("ascii", "replace"))
    except ValueError:
        return None
    return _Row(
        group=group,
        pid=pid,
        parent=parent,
        dead=words[3].startswith(b"Z"),
        memory=memory,
        cpu=clock,
        command=words[6] if len(words) > 6 else b"",
    )


def seconds(clock: str) -> float:
    """What ps prints as time: `1-02:03:04` and `03:04` on Linux, `123:04.56` on macOS."""
    days, _, rest = clock.rpartition("-")
    total = 0.0
    for part in rest.split(":"):
        total = total * 60 + float(part)
    return total + int(days or 0) * 86400.0


def _kill(target: int) -> None:
    """SIGKILL to a process, or to the group `-target`. The next look says what came of it."""
    try:
        os.kill(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # gone meanwhile, a group of zombies (macOS), or another user's since


if sys.platform != "linux":

    def _wait_with_kqueue(pid: int) -> None:
        """Until the child `pid` has ended, without collecting it. Untested."""
        import select

        queue = select.kqueue()
        try:
            event = select.kevent(
                pid,
                filter=select.KQ_FILTER_PROC,
                flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT,
                fflags=select.KQ_NOTE_EXIT,
            )
            queue.control([event], 1)
        except ProcessLookupError:
            return  # it had ended before we asked
        finally:
            queue.close()

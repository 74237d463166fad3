"""Measures a program that shares our process, and says which limit it has passed.

What it reads (resident memory, descriptors) is counted for the whole process, so growth that is
ours during a run is taken for the program's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..policy import Limits

if TYPE_CHECKING:
    from .inprocess_guard import Guard

_ROOM = 1 << 30  # address space beyond the limit: libraries reserve far more than they use


def resident_memory() -> int | None:
    """Bytes of memory this process has, its peak where only that is told, None where nothing is."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def open_descriptors() -> int | None:
    """How many descriptors this process holds, or None where the platform does not say."""
    for listing in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(listing))
        except OSError:
            continue
    return None


class Watchdog:
    """Looks at one run, as often as it is asked to."""

    def __init__(self, limits: Limits, guard: Guard, root: str) -> None:
        self._limits = limits
        self._guard = guard
        self._root = root
        self._memory_before = resident_memory()
        self._descriptors_before = open_descriptors()
        self._next_disk = 0.0
        self.started = time.monotonic()
        self.peak_memory = 0

    def look(self) -> str:
        """The reason to end the run now, in the words of `verdict`; "" if there is none."""
        limits = self._limits
        if time.monotonic() - self.started >= limits.timeout:
            return "timeout"
        if self._memory_growth() > limits.memory:
            return "oom"
        if self._guard.cpu() >= limits.cpus * limits.timeout:
            return "cpu"
        if self._too_many_descriptors():
            return "fds"
        began = time.monotonic()
        if began >= self._next_disk:
            full = self.disk_full()
            # Counting many files takes long: spend a twentieth of the time on it at most.
            now = time.monotonic()
            self._next_disk = now + max(0.05, 20 * (now - began))
            if full:
                return "disk"
        return ""

    def _memory_growth(self) -> int:
        now = resident_memory()
        if now is None or self._memory_before is None:
            return 0
        self.peak_memory = max(self.peak_memory, now - self._memory_before)
        return now - self._memory_before

    def _too_many_descriptors(self) -> bool:
        now = open_descriptors()
        if now is None or self._descriptors_before is None:
            return False
        return now - self._descriptors_before > self._limits.open_files

    def disk_full(self) -> bool:
        used = 0
        for size in _file_sizes(self._root):
            used += size
            if used > self._limits.disk:
                return True
        return False


def _file_sizes(top: str) -> Iterator[int]:
    pending = [top]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        yield entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue  # it was deleted, or closed to us, while we looked


@contextmanager
def bounded_address_space(memory: int) -> Iterator[None]:
    """Linux: one allocation far past the limit fails at once, before any watchdog could see it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    bound = now + memory + _ROOM
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

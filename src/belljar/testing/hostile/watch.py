"""Looks at the host while a run goes on: memory, disk and inodes in use, helpers started."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_EVERY = 0.02


class Level(NamedTuple):
    """What the host has in use at one moment."""

    memory: int
    disk: int
    inodes: int


class Watch:
    """A thread that samples until it is left. `start` is the level before, `peak` the highest."""

    def __init__(self, where: Path, *, connect_to: int | None = None) -> None:
        self._where = where
        self._connect_to = connect_to
        self._handler = _core_handler()
        self._stop = threading.Event()
        self.start = self.peak = level(where)
        self.port_answered = False
        self.handler_seen = False
        self._thread = threading.Thread(target=self._look, name="selftest-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_EVERY):
            now = level(self._where)
            self.peak = Level(*map(max, self.peak, now))
            if self._connect_to is not None and _answers(self._connect_to):
                self.port_answered = True
            if self._handler and self._handler in set(_programs()):
                self.handler_seen = True


def level(where: Path) -> Level:
    """The present level of the host, and of the file system of `where`."""
    files = os.statvfs(where)
    return Level(
        memory=_memory_in_use(),
        disk=(files.f_blocks - files.f_bfree) * files.f_frsize,
        inodes=files.f_files - files.f_ffree,
    )


def _memory_in_use() -> int:
    """What the kernel could not give to a new program, without caches."""
    numbers = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                name, value, *_ = line.split()
                numbers[name] = int(value) * 1024
    except OSError:  # not Linux: nothing to compare, and nothing is claimed from it
        return 0
    return numbers.get("MemTotal:", 0) - numbers.get("MemAvailable:", 0)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.05)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def core_pattern() -> str:
    """Where the kernel puts core files; `|program` if it hands them to a program of the host."""
    try:
        return Path("/proc/sys/kernel/core_pattern").read_text().strip()
    except OSError:
        return ""


def _core_handler() -> str:
    pattern = core_pattern()
    return pattern[1:].split()[0] if pattern.startswith("|") and len(pattern) > 1 else ""


def _programs() -> Iterable[str]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield os.readlink(f"/proc/{name}/exe")
            except OSError:  # it ended while we looked, or it is not ours to see
                continue

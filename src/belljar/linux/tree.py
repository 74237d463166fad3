"""A process tree and what it uses, as /proc and the file system tell it.

Everything here looks at things that change while it looks: what is gone counts nothing.
"""

from __future__ import annotations

import os
import resource

_MOST_ENTRIES = 200_000


def descendants() -> list[int]:
    """Every living descendant of this process."""
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        pid = pending.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:  # it ended while we looked
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            pending += children
    return found


def first_number(path: str, index: int) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[index])
    except (OSError, IndexError):  # the process ended while we looked
        return 0


def resident(pid: int) -> int:
    """Bytes of a process and its children that are in memory, shared ones too; 0 if it has ended.

    Not of their children: those of a fork server are its runs.
    """
    members = [pid]
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            members += map(int, file.read().split())
    except OSError:
        return 0
    pages = sum(first_number(f"/proc/{each}/statm", 1) for each in members)
    return pages * resource.getpagesize()


def proportional_size(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        # A program may close this file to us (PR_SET_DUMPABLE); its resident size stays open.
        return first_number(f"/proc/{pid}/statm", 1) * resource.getpagesize()
    return 0


def cpu_seconds(members: list[int]) -> float:
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in members:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            continue
        total += sum(int(fields[index]) for index in (11, 12, 13, 14))
    return total / ticks


def disk_use(paths: list[str], enough: int) -> int:
    """Bytes allocated below `paths`; stops looking once it is past `enough`.

    More entries than we are ready to count are too many, whatever their size: somebody has to
    delete them afterwards.
    """
    total, pending, looked = 0, list(paths), 0
    while pending and total <= enough:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    looked += 1
                    if looked > _MOST_ENTRIES:
                        return enough + 1
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:  # gone while we looked
                        continue
                    total += info.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            continue
    return total

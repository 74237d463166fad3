"""The cage as the kernel describes it from inside: limits, privileges, and what was used up."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CONTROLS = "/sys/fs/cgroup"
_CAPABILITIES = ("CapEff", "CapPrm", "CapInh", "CapBnd")


def facts() -> dict[str, Any]:
    """The cage of this process as the kernel describes it; the host compares it with its order."""
    status = dict(
        line.split(":\t", 1) for line in _text("/proc/self/status").splitlines() if ":\t" in line
    )
    net = [line.split(":")[0].strip() for line in _text("/proc/net/dev").splitlines()[2:]]
    return {
        "python": sys.version.split()[0],
        "uid": os.getuid(),
        "capabilities": max(int(status.get(name, "0"), 16) for name in _CAPABILITIES),
        "no_new_privileges": status.get("NoNewPrivs") == "1",
        "seccomp": status.get("Seccomp") == "2",
        "read_only": _read_only(),
        "interfaces": [name for name in net if name != "lo"],
        **Group().limits(),
    }


def _read_only() -> bool:
    if os.statvfs("/").f_flag & os.ST_RDONLY:
        return True
    # gVisor says it here only.
    mounts = [line.split() for line in _text("/proc/mounts").splitlines()]
    return any(
        words[1] == "/" and "ro" in words[3].split(",") for words in mounts if len(words) > 3
    )


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def disk_full(work: str) -> bool:
    """Whether one of the memory file systems that a program can write to is used up."""
    for directory in (work, "/tmp", "/dev/shm"):
        try:
            room = os.statvfs(directory)
        except OSError:
            continue
        bytes_gone = room.f_blocks and room.f_bfree <= room.f_blocks // 16
        if bytes_gone or (room.f_files and room.f_ffree <= room.f_files // 64):
            return True
    return False


class Group:
    """Our control group as it is shown in here, version 1 or 2; and what was spent since."""

    def __init__(self) -> None:
        self._two = os.path.exists(f"{_CONTROLS}/cgroup.controllers")
        self._start = self._counters()

    def limits(self) -> dict[str, Any]:
        if self._two:
            quota, period = [*self._words("cpu.max"), "", ""][:2]
            memory, pids = self._number("memory.max"), self._number("pids.max")
            swap = self._number("memory.swap.max")
        else:
            quota = [*self._words("cpu/cpu.cfs_quota_us"), ""][0]
            period = [*self._words("cpu/cpu.cfs_period_us"), ""][0]
            memory = self._number("memory/memory.limit_in_bytes")
            pids = self._number("pids/pids.max")
            both = self._number("memory/memory.memsw.limit_in_bytes")
            swap = None if both is None or memory is None else both - memory
        cpus = None
        if quota.isdigit() and period.isdigit() and int(period):
            cpus = int(quota) / int(period)
        found = {"memory": memory, "swap": swap, "pids": pids, "cpus": cpus}
        if not self._two:  # version 2 counts them as memory
            found["sockets"] = self._number("memory/memory.kmem.tcp.limit_in_bytes")
        return found

    def spent(self) -> dict[str, Any]:
        """What the kernel counted since this object was made; nothing where it does not count."""
        now = self._counters()
        told: dict[str, Any] = {}
        for name, before in self._start.items():
            after = now[name]
            if before is not None and after is not None:
                told[name] = after - before
        peak = self._number("memory.peak" if self._two else "memory/memory.max_usage_in_bytes")
        if peak is not None:
            told["peak"] = peak
        if "cpu" in told:
            told["cpu"] /= 1e6 if self._two else 1e9
        return told

    def _counters(self) -> dict[str, int | None]:
        if self._two:
            return {
                "cpu": self._line("cpu.stat", "usage_usec"),
                "oom_kills": self._line("memory.events", "oom_kill"),
                "forks_refused": self._line("pids.events", "max"),
            }
        return {
            "cpu": self._number("cpuacct/cpuacct.usage"),
            "oom_kills": self._line("memory/memory.oom_control", "oom_kill"),
            "forks_refused": self._line("pids/pids.events", "max"),
        }

    def _words(self, name: str) -> list[str]:
        return _text(f"{_CONTROLS}/{name}").split()

    def _number(self, name: str) -> int | None:
        words = self._words(name)
        return int(words[0]) if words and words[0].isdigit() else None

    def _line(self, name: str, key: str) -> int | None:
        for line in _text(f"{_CONTROLS}/{name}").splitlines():
            word, _, value = line.partition(" ")
            if word == key and value.strip().isdigit():
                return int(value)
        return None

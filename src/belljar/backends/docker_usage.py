"""What a container used up, read on the host from its control group: for what cannot see it inside.

gVisor's own counts are of its guest's tasks, not of what the host spent on them.
"""

from __future__ import annotations

import contextlib
import os

from ..linux.cgroup import SOCKETS_FILE

_ROOT = "/sys/fs/cgroup"
_CPU = ("cpuacct/{}/cpuacct.usage", "cpu,cpuacct/{}/cpuacct.usage")
_PEAK = ("memory/{}/memory.max_usage_in_bytes",)


# Of the machine's first group: a process that may write to it may write to those below.
SOCKET_LIMIT = f"{_ROOT}/memory/{SOCKETS_FILE}"


def limit_sockets(container: str, pid: int, size: int) -> None:
    """Limit the buffers of TCP and UDP sockets in the container of process `pid`, version 1 only.

    The container's agent reads the limit back, so nothing is raised here. A pid that is another
    machine's, or another namespace's, is known by its group: it does not name the container.
    """
    for line in _text(f"/proc/{pid}/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if "memory" in names.split(",") and container in path:
            place = os.path.join(_ROOT, "memory", path.strip("/"), SOCKETS_FILE)
            with contextlib.suppress(OSError), open(place, "w") as file:
                file.write(str(size))


def is_container(container: str, pid: int) -> bool:
    """Whether process `pid` of this machine is in the container: its groups name it."""
    return container in _text(f"/proc/{pid}/cgroup")


class HostGroup:
    """The control group of process `pid`; reads None where this host cannot see it."""

    def __init__(self, pid: int) -> None:
        groups: dict[str, str] = {}
        for line in _text(f"/proc/{pid}/cgroup").splitlines():
            _, names, path = line.split(":", 2)
            groups |= {name: path.strip("/") for name in names.split(",")}
        # Version 2 has one group for everything, without a name; beside version 1 it is empty.
        only = groups.get("") if "memory" not in groups else None
        self._unified = os.path.join(_ROOT, only) if only else ""
        self._paths = groups
        self._event = -1
        self._listen()

    def _listen(self) -> None:
        """Have the kernel remember an end for want of memory: the group is gone soon after it, and
        an engine may miss it. Version 1 only, and only for who may write there."""
        directory = f"{_ROOT}/memory/{self._paths.get('memory', '')}"
        if self._unified or "memory" not in self._paths:
            return
        try:
            with open(f"{directory}/memory.oom_control") as control:
                event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                try:
                    with open(f"{directory}/cgroup.event_control", "w") as register:
                        register.write(f"{event} {control.fileno()}")
                except OSError:
                    os.close(event)
                    raise
        except OSError:
            return
        self._event = event

    def close(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def cpu(self) -> float | None:
        """Seconds of processor time since the container began."""
        if self._unified:
            spent = _line(f"{self._unified}/cpu.stat", "usage_usec")
            return spent / 1e6 if spent else None
        used = self._first(_CPU, "cpuacct")
        return None if used is None else used / 1e9

    def oom_kills(self) -> int:
        """How often the kernel killed a member for want of memory: ask once, after the end."""
        if self._unified:
            return _line(f"{self._unified}/memory.events", "oom_kill")
        group = self._paths.get("memory", "")
        told = _line(f"{_ROOT}/memory/{group}/memory.oom_control", "oom_kill")
        if told or self._event < 0:
            return told
        try:
            # The end of the group itself is one event, too.
            return max(0, os.eventfd_read(self._event) - 1)
        except BlockingIOError:
            return 0

    def peak_memory(self) -> int | None:
        if self._unified:
            text = _text(f"{self._unified}/memory.peak").strip()
            return int(text) if text.isdigit() else None
        return self._first(_PEAK, "memory")

    def _first(self, patterns: tuple[str, ...], controller: str) -> int | None:
        group = self._paths.get(controller)
        for pattern in patterns if group else ():
            text = _text(os.path.join(_ROOT, pattern.format(group))).strip()
            if text.isdigit():
                return int(text)
        return None


def _line(path: str, key: str) -> int:
    for line in _text(path).splitlines():
        word, _, value = line.partition(" ")
        if word == key:
            return int(value)
    return 0


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""

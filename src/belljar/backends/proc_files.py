"""What a run in a jail reads in /proc about its machine: files that agree with the run's limits.

Programs size their pools and caches by these. They say nothing of the host but its kernel version,
its kind of processor and when it was started.
"""

from __future__ import annotations

import os
import time
from functools import cache

_CHANGING = ("cpu MHz", "microcode", "apicid", "initial apicid", "bugs")


def texts(cores: int, memory: int) -> dict[str, str]:
    """The files of /proc, by name, for a run with so many cores and so much memory."""
    since = time.clock_gettime(time.CLOCK_BOOTTIME)
    kib = memory >> 10
    kernel = os.uname()
    times = " 0 0 0 0 0 0 0 0 0 0\n"
    return {
        "cpuinfo": _cpuinfo(cores),
        "loadavg": "0.00 0.00 0.00 1/1 2\n",
        "meminfo": "".join(f"{name + ':':<16}{size:>8} kB\n" for name, size in (
            ("MemTotal", kib), ("MemFree", kib), ("MemAvailable", kib), ("Buffers", 0),
            ("Cached", 0), ("SwapCached", 0), ("Active", 0), ("Inactive", 0), ("SwapTotal", 0),
            ("SwapFree", 0), ("Dirty", 0), ("Mapped", 0), ("Shmem", 0), ("Slab", 0),
            ("SReclaimable", 0), ("SUnreclaim", 0),
        )),
        "stat": "".join((
            f"cpu {times}", *(f"cpu{number}{times}" for number in range(cores)),
            f"intr 0\nctxt 0\nbtime {int(time.time() - since)}\n",
            "processes 2\nprocs_running 1\nprocs_blocked 0\nsoftirq 0\n",
        )),
        "swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
        "uptime": f"{since:.2f} 0.00\n",
        "version": f"{kernel.sysname} version {kernel.release} {kernel.version}\n",
        "vmstat": "pgpgin 0\npgpgout 0\npswpin 0\npswpout 0\n",
    }  # fmt: skip


@cache
def _cpuinfo(cores: int) -> str:
    """The host's first processor, so many times."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        block = file.read().partition("\n\n")[0].splitlines()
    shown = []
    for number in range(cores):
        for line in block:
            name = line.partition(":")[0].rstrip()
            if name == "physical id":
                line = f"{line.partition(':')[0]}: 0"
            elif name in ("processor", "core id"):
                line = f"{line.partition(':')[0]}: {number}"
            elif name in ("siblings", "cpu cores"):
                line = f"{line.partition(':')[0]}: {cores}"
            if name not in _CHANGING:
                shown.append(line)
        shown.append("")
    return "\n".join((*shown, ""))

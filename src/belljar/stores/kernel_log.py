"""What the kernel's log says of seccomp and AppArmor denials while runs go on, as lines of ours.

For servers whose process may read the kernel's log (root, or `kernel.dmesg_restrict` off). The
kernel names processes, not runs: a line tells which runs were going on. A system call that a filter
answers with an error is in no log; one that ends its process, and a denial of AppArmor's, is.
"""

from __future__ import annotations

import os
import re
import threading

from .. import log
from ..events import Event, RunFailed, RunFinished, RunStarted

_DENIAL = re.compile(rb'apparmor="DENIED"|audit: type=1326 ')
_MOST_LINES = 100  # of one reading: another program may write there without end
_MOST_TEXT = 500


class KernelLog:
    """A sink: reads what is new whenever a run ends. Thread-safe. Where the log cannot be read it
    does nothing, and `readable` says so."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._lock = threading.Lock()
        self._going: list[str] = []
        try:
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except (OSError, AttributeError):
            self._file = None

    @property
    def readable(self) -> bool:
        return self._file is not None

    def __call__(self, event: Event) -> None:
        if self._file is None:
            return
        if isinstance(event, RunStarted):
            with self._lock:
                self._going.append(event.request.id)
        elif isinstance(event, RunFinished | RunFailed):
            run = event.result.id if isinstance(event, RunFinished) else event.id
            with self._lock:
                lines, going = self._new(self._file), sorted({run, *self._going})
                self._going = [each for each in self._going if each != run]
            for line in lines:
                log.warning(f"kernel, during run {', '.join(going)}: {line}")

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _new(self, file: int) -> list[str]:
        found = []
        for _ in range(_MOST_LINES):
            try:
                record = os.read(file, 8192)  # one record, or an error
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if _DENIAL.search(record):
                text = record.partition(b";")[2].partition(b"\n")[0]
                found.append(log.printable(text.decode("utf-8", "replace"), _MOST_TEXT))
        return found

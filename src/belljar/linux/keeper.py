"""The keeper of a guest's memory, as the slot sees it: found before the program, ended after it.

Why a keeper: the kernel announces a process's end when it has taken its memory apart, which for an
interpreter takes longer than many a program. With the keeper as another owner of that memory, the
guest's end is announced at once, and the taking apart goes on while the host gets its answer.

The keeper (`run_guest.py` makes it) is a process of the guest's, and confined like it; a program
can make it run, fork, exec and more. When the guest has ended we kill it: from then on it makes no
children, and it does not come back from the kernel to a program. That it is there, or on its way,
the kernel says: either the keeper had no processor since before the program came, when it slept; or
it is exiting (PF_EXITING) with no other threads, and has let go of its memory, into which the
kernel writes on its way out. Then its children are looked at, and by the slot the anchor's. The
rest is the kernel's business, and the slot waits for that before its next run.

That rest takes longest of all. So the keeper ends on the processor that the slot is about to leave,
and not on the one that the host wakes up on.

Nothing here may import: the files of this package are not in the jail.
"""

from __future__ import annotations

import os
import time

from . import syscalls
from .bare import signal

LOOKS = 50
_PF_EXITING = 0x4


class Keeper:
    """`process` is a guest's only child; the program is not there yet, and soon it sleeps.

    `fds` are descriptors of it, for somebody else to close: itself, its state, its children and its
    processor times. They were opened in time, so they are of this very process.
    """

    def __init__(self, process: int, fds: list[int]) -> None:
        self._number = process
        self.name = b"%d " % process  # as a list of children has it
        fds.append(os.pidfd_open(process))
        for name in ("stat", f"task/{process}/children", "schedstat"):
            fds.append(os.open(f"/proc/{process}/{name}", os.O_RDONLY))
        self._process, self._stat, self._children, self._times = fds[-4:]
        self._asleep: bytes | None = None
        for _ in range(LOOKS):
            if self._state()[0] == b"S":
                told = os.pread(self._times, 100, 0)
                # It has run once, to where it sleeps: a kernel that does not count says never.
                self._asleep = None if told.endswith(b" 0\n") else told
                return
            time.sleep(0.0001)

    def rehearse(self) -> None:
        """Touch what `end` will touch."""
        self._come_here()
        try:
            self._is_ended(0)
        except OSError:
            return  # it is gone, and with it the guest, as the slot will find

    def end(self, looks: int = LOOKS) -> bool:
        """Whether the kernel says that it does not run again, and leaves nobody behind."""
        self._come_here()
        try:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
            return self._is_ended(looks)
        except ProcessLookupError:
            return True  # not even that is left of it: its children are the anchor's
        except OSError:
            return False  # no memory to tell: then everybody is ended, and waited for

    def check_number(self) -> None:
        """OSError unless its number is still its own."""
        os.pread(self._stat, 1024, 0)

    def _come_here(self) -> None:
        try:
            self.check_number()
            os.sched_setaffinity(self._number, (syscalls.current_cpu(),))
        except OSError:
            return  # it is gone, or not ours to move: then it ends where it likes

    def _is_ended(self, looks: int) -> bool:
        while os.pread(self._times, 100, 0) != self._asleep:
            fields = self._state()
            flags, threads, size = int(fields[6]), fields[17], fields[20]
            if flags & _PF_EXITING and threads == b"1" and size == b"0":
                break
            looks -= 1
            if looks < 0:
                return False
            os.sched_yield()
        return not os.pread(self._children, 4096, 0)

    def _state(self) -> list[bytes]:
        """What /proc/PID/stat says after the name, which is the process's own."""
        text = os.pread(self._stat, 1024, 0)
        return text[text.rindex(b")") + 2 :].split()

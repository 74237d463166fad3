"""The supervisor of one run in somebody else's sandbox: bubblewrap, firejail or nsjail.

Theory of operation

    host ──exec──> supervisor (a `launch.Run`: subreaper, no secrets, empty environment)
                     └─fork─> control groups, then exec of the tool, which makes its namespaces
                                └─> stage (`stage.py`, ours): first process in there
                                      └─fork─> guest

The tool's own standard streams are a pipe to us: what it says is the reason when it fails, and is
never mixed with what the program says. The streams of the guest, the frame socket and one end of
the `tell` socket pass through the tool by number, to the stage.

On `tell` the stage says `ready` or `failed WHY`, with descriptors of the places the guest can
write to, so that we can count them; and at the end the guest's wait status, as the kernel told it:
a tool's exit code could not tell exit(137) from a kill. The guest never has that socket.

Who kills whom: we kill every descendant until the kernel says that there is none left. What the
tool put into a pid namespace dies with the first of it, and as we are a subreaper all of it becomes
our child: that `wait` finds nobody is the proof. If we die, bubblewrap and nsjail die with us, and
firejail's sandbox dies with firejail.
"""

from __future__ import annotations

import array
import os
import select

from . import launch, namespaces
from .bare import signal, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_GRACE = 1.0  # seconds for a tool to clear up after the guest's end
_WORDS = 2000


class ToolRun(launch.Run):
    """One run of a tool, from fork to proven end."""

    def __init__(self, control: int, spec: dict[str, Any]) -> None:
        super().__init__(control, spec)
        self.tell = socket.socket(fileno=spec["tell"])
        self.words, words_writer = os.pipe()
        self.theirs = [*spec["theirs"], words_writer]
        self.told_by = spec["tell"]
        self.scratch: list[int] = []

    def _become_guest(self) -> NoReturn:
        os.setsid()
        os.chdir("/")
        os.set_inheritable(self.told_by, False)
        for fd in (1, 2):
            os.dup2(self.theirs[-1], fd)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if os.geteuid() == 0:
            try:
                namespaces.own_mounts()  # what others mount meanwhile would trip the tool up
            except PermissionError:
                pass  # a root without rights: the tool sees the host's mounts come and go
        os.execve(self.spec["argv"][0], self.spec["argv"], self.spec["env"])

    def _not_ready(self) -> bytes:
        poll = select.poll()
        poll.register(self.told_by, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        if self.told_by not in dict(poll.poll()):
            return b""  # the host wants it dead, or is: `_wait_for_end` sees that, too
        try:
            word, passed, _, _ = self.tell.recvmsg(5, socket.CMSG_SPACE(4 * 4))
        except ConnectionResetError:
            word, passed = b"", []
        if word == b"ready":
            numbers = array.array("i")
            for _, _, data in passed:
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            self.scratch = list(numbers)
            return b""
        if word:
            return b"in the sandbox: " + self.tell.recv(_WORDS)[2:]
        os.set_blocking(self.words, False)
        try:
            said = os.read(self.words, _WORDS)
        except BlockingIOError:
            said = b""
        tool = os.path.basename(self.spec["argv"][0]).encode()
        return said.strip() or tool + b" ended without a word"

    def _files(self) -> int:
        return sum(used for used, _ in map(_in_use, self.scratch))

    def _disk_is_full(self, watch: dict[str, Any]) -> bool:
        found = [_in_use(fd) for fd in self.scratch]
        return bool(
            sum(used for used, _ in found) > watch["disk"]
            or sum(inodes for _, inodes in found) > watch["inodes"]
        )

    def _settle(self, statuses: int) -> tuple[int, int]:
        status = 9  # nobody in there lived to say otherwise
        if not self.reason:
            status = self._told_status(status)
            pidfd = os.pidfd_open(self.child)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self.control, select.POLLIN)
            poll.poll(_GRACE * 1000)
            os.close(pidfd)
        return status, super()._settle(statuses)[1]

    def _told_status(self, otherwise: int) -> int:
        text = b""
        self.tell.settimeout(_GRACE)
        try:
            while not text.endswith(b"\n"):
                piece = self.tell.recv(20)
                if not piece:
                    return otherwise
                text += piece
        except (ConnectionResetError, TimeoutError):
            return otherwise
        number, left = text.split()
        self.left = int(left)
        return int(number)


def _in_use(directory: int) -> tuple[int, int]:
    """(bytes, inodes) used in the file system of a directory, which is the run's own."""
    room = os.fstatvfs(directory)
    return (room.f_blocks - room.f_bfree) * room.f_frsize, room.f_files - room.f_ffree


def main(control: int) -> None:
    launch.main(control, ToolRun)

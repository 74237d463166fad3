"""What a zygote's jails are to the host: kept on shelves, taken from them, and given back.

For every `Shape` that runs ask for there is a `Shelf`: a socket on which the `Slot` of each new
jail announces it, with the run's descriptors in the same message. A parked jail is therefore a
message that nobody has read yet, and costs this process nothing; but the next one is fetched while
nobody waits, and is at hand when somebody asks.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import threading
from typing import TYPE_CHECKING

from ..errors import BackendFailed, SetupFailed
from ..linux.bare import socket
from .jail_plan import Shape
from .pieces import Pieces

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from .zygotes import Zygote

_END_SECONDS = 2.0  # to take apart the memory of a run that is over
_STREAM = socket.AF_UNIX, socket.SOCK_STREAM, 0
_FDS = 7  # of a jail
_at_hand: set[Jail] = set()  # of all shelves

Message = tuple[bytes, list[int]]


class Jail:
    """A ready jail: our ends of its pipes and sockets. `release` gives everything back."""

    def __init__(self, shelf: Shelf, slot: Slot, fds: list[int]) -> None:
        run, frames, self.stdin, self.stdout, self.stderr, self.work, self.pidfd = fds
        # All is said of them: else Python asks the kernel of what kind each is.
        self.run = socket.socket(*_STREAM, fileno=run)
        self.frames = socket.socket(*_STREAM, fileno=frames)
        self.group = slot.group
        self._shelf, self._slot = shelf, slot
        self._open = {self.work, self.pidfd}
        self.over = False  # set when the kernel's word has come that nobody is left
        self.patience = _END_SECONDS  # until its memory is given back, too

    def replenish(self, most: int) -> None:
        """Have the next ones made, so that at most `most` are parked."""
        self._shelf.zygote.replenish(self._shelf, most)

    def fetch_next(self) -> None:
        """Have the next one of its kind at hand, if there is one."""
        self._shelf.zygote.fetch(self._shelf)

    @property
    def alone(self) -> bool:
        """Whether no other run of its kind is going on."""
        return self._shelf.busy == 1

    def alive(self) -> bool:
        """Whether nobody killed it, or its slot, while it was parked."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.register(self.run, select.POLLIN)
        return not poll.poll(0)

    def send(self, message: Pieces) -> None:
        """Send as much of the start message as there is room for; the rest stays in it."""
        self.frames.setblocking(False)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [message.passed]))]
        rights = passed if message.passed >= 0 else ()
        try:
            message.sent(self.frames.sendmsg(message.first(), rights, socket.MSG_NOSIGNAL))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return  # whoever listens to the jail will know more
        finally:
            message.close()

    def kill(self) -> None:
        """End everybody in it, by its anchor."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def is_empty(self, seconds: float) -> bool:
        """Wait for the anchor's end, the last of all: what is counted then is not this run's."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def drop(self) -> None:
        """Close everything, unused; its taker gives it back."""
        for fd in (self.stdin, self.stdout, self.stderr, self.work, self.pidfd):
            os.close(fd)
        self.run.close()
        self.frames.close()

    def release(self, *, keep: bool) -> None:
        """The run is over and everything read. The pipes and sockets are closed by their reader.

        Unless `keep`, nothing that was made for this kind of run is kept for the next.
        """
        if not self.over:
            self.kill()
        empty = self.over and self.is_empty(self.patience)
        # Before the group is asked: they keep the run's files, which it counts.
        for fd in self._open:
            os.close(fd)
        self._open.clear()
        clean = empty and not (self.group is not None and self.group.holds_leftovers())
        self._shelf.zygote.released(self._shelf, self._slot, reuse=clean)
        if not keep:
            self._shelf.zygote.discard_idle(self._shelf)


class Shelf:
    """Jails of one shape: ordered, and as messages on `socket` ready to be taken."""

    def __init__(self, zygote: Zygote, shape: Shape, number: int) -> None:
        self.zygote, self.shape, self.number = zygote, shape, number
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.available = 0  # ordered, and not claimed by anybody
        self.at_hand: Jail | None = None  # one of those
        self.waiting = 0  # callers, for messages
        self.uses = 0
        self.busy = 0
        self.slots: dict[int, Slot] = {}
        self.free: list[Slot] = []

    def message(self) -> Message:
        """The next one, and the descriptors that came with it; BlockingIOError if there is none."""
        space, flags = socket.CMSG_SPACE(4 * 8), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        words, ancillary = self.socket.recvmsg(1 << 13, space, flags)[:2]
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        return words, list(fds)

    def read(self, message: Message) -> Jail:
        """The jail that it announces; ZygoteDied or BackendFailed if it does not."""
        words, fds = message
        word, number, *why = words.decode("utf-8", "replace").split(" ", 2) if words else ("", "0")
        slot = self.slots.get(int(number))
        if slot is not None and word == "ready" and len(fds) == _FDS:
            return Jail(self, slot, fds)
        for fd in fds:
            os.close(fd)
        if slot is None:
            raise ZygoteDied("the jail's zygote died", retryable=True)
        if word != "ready":
            self.free.append(slot)
            raise SetupFailed(f"the jail could not be set up: {' '.join(why)}")
        try:
            self.drop(slot)
        except OSError:  # there is no descriptor for that either: its group goes with the shelf
            self.slots[slot.number] = slot
        raise BackendFailed(
            "this process has too many files open to take a jail's (ulimit -n)", retryable=True
        )

    def keep_at_hand(self, jail: Jail) -> None:
        self.at_hand = jail
        _at_hand.add(jail)

    def take_from_hand(self) -> Jail | None:
        jail, self.at_hand = self.at_hand, None
        _at_hand.discard(jail)
        return jail

    def drop(self, slot: Slot) -> None:
        """It is not used again, and whoever is in it ends."""
        self.slots.pop(slot.number, None)
        slot.close()
        slot.remove_group()

    def remove_groups(self) -> None:
        for slot in list(self.slots.values()):
            slot.remove_group()
        self.slots.clear()

    def close(self) -> None:
        """End its slots and with them the parked jails; the runs are over."""
        jail = self.take_from_hand()
        if jail is not None:
            jail.drop()
        self.socket.close()
        self.theirs.close()
        for slot in list(self.slots.values()):
            slot.close()


class Slot:
    """A process of the zygote's that makes jails, one at a time: see `linux/slot.py`.

    Its first word, on the socket for its orders, is a descriptor of itself: that the socket is
    still open says nothing, because the anchor of a run has a copy of it.
    """

    def __init__(self, number: int, group: Group | None, orders: socket.socket) -> None:
        self.number, self.group, self.orders = number, group, orders
        self._process = -1
        self._lock = threading.Lock()

    def watch(self, poll: select.poll) -> None:
        """Have `poll` wake up for its end, or for its first word."""
        with self._lock:
            if self.orders.fileno() < 0:
                return  # it has been closed meanwhile
            poll.register(self.orders, select.POLLIN if self._process < 0 else 0)
            if self._process >= 0:
                poll.register(self._process, select.POLLIN)

    def is_dead(self, events: dict[int, int]) -> bool:
        """Whether that is what `events` of that poll say."""
        with self._lock:
            told = events.get(self.orders.fileno(), 0)
            if self._process >= 0:
                # Its first word may be what woke us, and another thread may have taken it.
                return self._process in events or bool(told & (select.POLLHUP | select.POLLERR))
            if not told:
                return False
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            try:
                words, ancillary = self.orders.recvmsg(16, socket.CMSG_SPACE(4), flags)[:2]
            except BlockingIOError:
                return False  # another thread has taken it
            if not ancillary:
                # With words it lives: this process has too many files open to take the descriptor,
                # and the jail that it announces says so.
                return not words
            self._process = array.array("i", ancillary[0][2])[0]
            return False

    def close(self) -> None:
        with self._lock:
            self.orders.close()
            if self._process >= 0:
                os.close(self._process)
                self._process = -1

    def remove_group(self) -> None:
        """Once, whoever comes first: a backend may be closed while its runs end."""
        with self._lock:
            group, self.group = self.group, None
        if group is None:
            return
        try:
            try:
                group.kill()
            finally:
                group.remove()
        except OSError:
            self.group = group  # for the next attempt
            raise


class ZygoteDied(SetupFailed):
    """The warm process is gone; another one can be started."""


def _after_fork() -> None:
    """A fork has none of its parent's jails, and must not keep their streams open."""
    while _at_hand:
        _at_hand.pop().drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

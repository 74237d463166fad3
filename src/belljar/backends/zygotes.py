"""The host's side of a warm fork server: starting it, taking ready jails from it, ending it.

A `Zygote` is one process of `linux/zygote.py`. For every `Shape` that runs ask for it has a shelf:
a socket on which the slot of each new jail announces it, with the run's descriptors in the same
message. A parked jail is therefore a message that nobody has read yet, and costs this process
nothing; but the next one is fetched while nobody waits, and is at hand when somebody asks.
Everything here is called from many threads.
"""

from __future__ import annotations

import _socket as socket  # the bare one: what else `socket` has takes milliseconds to import
import array
import contextlib
import itertools
import marshal
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

from ..errors import BackendFailed
from . import blank
from .jail_plan import GUEST_ENV, Outer, Shape

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from ..linux.probe import HostFacts

_START_SECONDS = 60.0
_END_SECONDS = 2.0  # to take apart the memory of a run that is over
_SHELVES_A_ZYGOTE = 4
_STREAM = socket.AF_UNIX, socket.SOCK_STREAM, 0
_PARKED_LEAST = 2
_FIRST_ID, _IDS = 1_900_000_000, 65_536
_turns = itertools.count()
_at_hand: set[Jail] = set()  # of all shelves

Ancillary = list[tuple[int, int, bytes]]


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

    def send(self, message: bytes) -> bytes:
        """As much of the start message as there is room for; the rest of it."""
        self.frames.setblocking(False)
        try:
            return message[self.frames.send(message, socket.MSG_NOSIGNAL) :]
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return message  # whoever listens to the jail will know more

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
        for fd in self._open:
            os.close(fd)
        self._open.clear()
        self._shelf.zygote.released(self._shelf, self._slot, reuse=empty)
        if not keep:
            self._shelf.zygote.discard_idle(self._shelf)


class Shelf:
    """Jails of one shape: ordered, and as messages on `socket` ready to be taken."""

    def __init__(self, zygote: Zygote, shape: Shape, number: int) -> None:
        self.zygote, self.shape, self.number = zygote, shape, number
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.available = 0  # ordered, and not claimed by anybody
        self.at_hand: Jail | None = None  # one of those
        self.uses = 0
        self.busy = 0
        self.slots: dict[int, Slot] = {}
        self.free: list[Slot] = []

    def keep_at_hand(self, jail: Jail) -> None:
        self.at_hand = jail
        _at_hand.add(jail)

    def take_from_hand(self) -> Jail | None:
        jail, self.at_hand = self.at_hand, None
        _at_hand.discard(jail)
        return jail

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
                ancillary = self.orders.recvmsg(16, socket.CMSG_SPACE(4), flags)[1]
            except BlockingIOError:
                return False  # another thread has taken it
            if not ancillary:
                return True
            self._process = array.array("i", ancillary[0][2])[0]
            return False

    def close(self) -> None:
        with self._lock:
            self.orders.close()
            if self._process >= 0:
                os.close(self._process)
                self._process = -1


class Zygote:
    """One warm process. `take` a jail from it, `close` it when `busy` is 0."""

    def __init__(self, outer: Outer, facts: HostFacts) -> None:
        self.outer, self.facts = outer, facts
        self.busy = 0
        self.runs = 0
        self.retired = False
        self._closed = False
        self._lock = threading.Lock()
        self._shelves: dict[Shape, Shelf] = {}
        self._numbers = itertools.count(1)
        self._core = itertools.count()
        self._blank = blank.take(worker=outer.worker)
        self.process, self._control = self._blank.process, self._blank.control
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        from ..linux import syscalls
        from ..linux.root import FIRST_UID

        outer = self.outer
        view = outer.view
        ids = id_range(self.facts.root)
        spec = {
            "view": {
                "show": view.show,
                "links": view.links,
                "hide": view.hide,
                "waiting": view.waiting,
                "probe": "landlock" in outer.layers,
                "mapped": view.mapped,
                "owner": ids[0] + FIRST_UID if ids else None,
            },
            "layers": outer.layers,
            "worker": outer.worker,
            "preload": outer.preload,
            "writable": outer.writable,
            "open_network": outer.open_network,
            "env": GUEST_ENV,
            "ids": ids,
            "last_capability": syscalls.last_capability(),
        }
        self._control.settimeout(_START_SECONDS)
        try:
            self._control.sendall(marshal.dumps(spec))
            word, _, rest = self._control.recv(1 << 16).decode().partition(" ")
        except OSError as error:
            raise BackendFailed(f"the jail's zygote did not start: {error}") from error
        if word != "ready":
            raise BackendFailed(f"the jail could not be set up: {rest or 'its zygote died'}")

    def take(self, shape: Shape) -> Jail:
        """A ready jail, at once if one is parked. BackendFailed if it cannot be made."""
        with self._lock:
            self._refuse_if_closed()
            shelf = self._shelf(shape)
            shelf.uses += 1
            shelf.busy += 1
            self.busy += 1
            self.runs += 1
        try:
            with self._lock:
                if shelf.available == 0:
                    self._order(shelf, parked=False)
                shelf.available -= 1
                jail = shelf.take_from_hand()
            return self._checked(jail) if jail is not None else self._receive(shelf)
        except BaseException:
            with self._lock:
                shelf.busy -= 1
                self.busy -= 1
                self._refuse_if_closed()  # whatever that looked like from here
            raise

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BackendFailed("this backend is closed")

    def fetch(self, shelf: Shelf) -> None:
        """Have a jail that is parked at hand."""
        with self._lock:
            known = not self._closed and self._shelves.get(shelf.shape) is shelf
            if not known or shelf.at_hand is not None or not shelf.available:
                return
            try:
                message = _message(shelf)
            except BlockingIOError:
                return  # it is still being made
            try:
                shelf.keep_at_hand(self._read(shelf, *message))
            except BackendFailed:
                shelf.available -= 1  # the next caller has his own made, and hears why

    def _receive(self, shelf: Shelf) -> Jail:
        return self._checked(self._read(shelf, *self._next_message(shelf)))

    def _read(self, shelf: Shelf, words: bytes, ancillary: Ancillary) -> Jail:
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        word, number, *why = words.decode("utf-8", "replace").split(" ", 2) if words else ("", "0")
        slot = shelf.slots.get(int(number))
        if slot is None:
            for fd in fds:
                os.close(fd)
            raise ZygoteDied("the jail's zygote died", retryable=True)
        if word != "ready":
            shelf.free.append(slot)
            raise BackendFailed(f"the jail could not be set up: {' '.join(why)}")
        return Jail(shelf, slot, list(fds))

    @staticmethod
    def _checked(jail: Jail) -> Jail:
        if not jail.alive():
            jail.drop()
            raise ZygoteDied("a parked jail was killed", retryable=True)
        return jail

    def _next_message(self, shelf: Shelf) -> tuple[bytes, Ancillary]:
        """What the shelf holds, as soon as it holds something; ZygoteDied if nobody is left."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return _message(shelf)
            except BlockingIOError:
                pass  # it is still being made: wait, and see whether its makers live
            poll = select.poll()
            poll.register(shelf.socket, select.POLLIN)
            poll.register(self._control, 0)  # only its end is news
            with self._lock:
                slots = list(shelf.slots.values())
            for slot in slots:
                slot.watch(poll)
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                raise ZygoteDied("no jail became ready in time", retryable=True)
            if shelf.socket.fileno() in ready:
                continue
            if self._control.fileno() in ready or any(slot.is_dead(ready) for slot in slots):
                raise ZygoteDied("the jail's zygote died", retryable=True)

    def replenish(self, shelf: Shelf, most: int) -> None:
        """Park as many as demand suggests; a shape that was used once may never be used again."""
        with self._lock:
            if self.retired or shelf.uses < 2 or shelf.number not in self._known():
                return
            while shelf.available < min(max(_PARKED_LEAST, shelf.busy), most):
                self._order(shelf)

    def released(self, shelf: Shelf, slot: Slot, *, reuse: bool) -> None:
        """A slot whose run did not come to its end is not used again."""
        with self._lock:
            shelf.busy -= 1
            self.busy -= 1
            if reuse:
                shelf.free.append(slot)
                return
            slot.close()
            shelf.slots.pop(slot.number, None)
        if slot.group is not None:
            slot.group.kill()
            slot.group.remove()

    def close(self) -> None:
        """End it and everything in it; returns when the kernel has."""
        from ..linux import probe

        with self._lock:
            self._closed = self.retired = True
            shelves = list(self._shelves.values())
        self._control.close()
        for shelf in shelves:
            shelf.close()
        probe.let_go()  # at the same time
        self._blank.end()
        for shelf in shelves:
            _remove_groups(shelf)

    def _known(self) -> set[int]:
        return {shelf.number for shelf in self._shelves.values()}

    def _shelf(self, shape: Shape) -> Shelf:
        shelf = self._shelves.get(shape)
        if shelf is not None:
            return shelf
        idle = [each for each in self._shelves.values() if not each.busy]
        if len(self._shelves) >= _SHELVES_A_ZYGOTE and idle:
            self._discard(min(idle, key=lambda each: each.uses))
        shelf = self._shelves[shape] = Shelf(self, shape, next(self._numbers))
        return shelf

    def discard_idle(self, shelf: Shelf) -> None:
        with self._lock:
            if not shelf.busy and self._shelves.get(shelf.shape) is shelf:
                self._discard(shelf)

    def _discard(self, shelf: Shelf) -> None:
        """Its slots end when we close their sockets, and their parked jails end with them."""
        del self._shelves[shelf.shape]
        shelf.close()
        _remove_groups(shelf)

    def _order(self, shelf: Shelf, *, parked: bool = True) -> None:
        """Have one made. One that is not to be parked need not warm up: somebody waits for it."""
        shape, cpus = shelf.shape, self.facts.cpus
        first = next(self._core)
        cores = tuple(cpus[(first + i) % len(cpus)] for i in range(shape.cores))
        slot = self._slot(shelf)
        # With more callers than processors it would not wait for long enough to warm up.
        parked = parked and shelf.busy <= len(cpus)
        order = {"slot": slot.number, "parked": parked, **shape.message(cores)}
        # What it saves a caller at the end takes as long to make, and others wait for processors.
        order["keeper"] = shape.keeper and parked
        try:
            slot.orders.sendall(marshal.dumps(order))
        except OSError as error:
            raise ZygoteDied(f"the jail's zygote died: {error}", retryable=True) from error
        shelf.available += 1

    def _slot(self, shelf: Shelf) -> Slot:
        """A slot with the limits of the shelf's shape: the one that rested longest, or a new one.

        What the last run had mounted is then gone.
        """
        if shelf.free:
            slot = shelf.free.pop(0)
            if slot.group is not None:
                slot.group.renew()
            return slot
        grouped = "cgroup" in self.outer.layers and self.facts.cgroup is not None
        group = self._group(shelf.shape) if grouped else None
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [os.open(path, os.O_WRONLY) for path in (group.procs if group is not None else ())]
        slot = Slot(next(self._numbers), group, orders)
        shelf.slots[slot.number] = slot
        passed = array.array("i", [theirs.fileno(), shelf.theirs.fileno(), *fds])
        try:
            self._control.sendmsg([b"slot"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        except OSError as error:
            raise ZygoteDied(f"the jail's zygote died: {error}", retryable=True) from error
        finally:
            theirs.close()
            for fd in fds:
                os.close(fd)
        return slot

    def _group(self, shape: Shape) -> Group:
        from ..linux.cgroup import Group

        assert self.facts.cgroup is not None
        return Group(
            self.facts.cgroup,
            os.urandom(8).hex(),
            memory=shape.memory,
            processes=shape.processes + 2 + shape.keeper,  # slot, anchor and keeper are ours
            cpus=shape.cpus,
            die_together=False,
        )


def _message(shelf: Shelf) -> tuple[bytes, Ancillary]:
    """BlockingIOError if there is none."""
    space, flags = socket.CMSG_SPACE(4 * 8), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    return shelf.socket.recvmsg(1 << 13, space, flags)[:2]


def _after_fork() -> None:
    """A fork has none of its parent's jails, and must not keep their streams open."""
    while _at_hand:
        _at_hand.pop().drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _remove_groups(shelf: Shelf) -> None:
    for slot in shelf.slots.values():
        if slot.group is not None:
            slot.group.kill()
            slot.group.remove()
    shelf.slots.clear()


class ZygoteDied(BackendFailed):
    """The warm process is gone; another one can be started."""


def id_range(root: bool) -> tuple[int, int] | None:
    """(first, count) of host ids for a zygote's user namespace; None if only our own id is ours."""
    if not root:
        return None
    turn = (os.getpid() * 7 + next(_turns)) % 3000
    first = _FIRST_ID + turn * _IDS
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            extents = [tuple(map(int, line.split())) for line in file]
        if not any(low <= first and first + _IDS <= low + count for low, _, count in extents):
            return None
    return first, _IDS

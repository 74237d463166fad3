"""The host's side of a warm fork server: starting it, taking ready jails from it, ending it.

A `Zygote` is one process of `linux/zygote.py`, with a shelf (`shelves.py`) for every `Shape` that
runs ask for. Everything here is called from many threads.
"""

from __future__ import annotations

import itertools
import marshal
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from ..errors import BackendFailed, SetupFailed
from ..linux.bare import socket
from . import blank
from .jail_plan import GUEST_ENV, Outer, Shape
from .shelves import Jail, Message, Shelf, Slot, ZygoteDied

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from ..linux.probe import HostFacts

_START_SECONDS = 60.0
_SHELVES_A_ZYGOTE = 4
_PARKED_LEAST = 2
_FIRST_ID, _IDS = 1_900_000_000, 65_536
_turns = itertools.count()


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
                "resolved": view.resolved,
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
            raise SetupFailed(f"the jail's zygote did not start: {error}") from error
        if word != "ready":
            raise SetupFailed(f"the jail could not be set up: {rest or 'its zygote died'}")

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
                self._refuse_if_closed()
                if shelf.available == 0:
                    self._order(shelf, parked=False)
                shelf.available -= 1
                jail = shelf.take_from_hand()
                shelf.waiting += jail is None
            return self._checked(jail if jail is not None else self._receive(shelf))
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
            # What there is when somebody waits is his.
            if not known or shelf.at_hand is not None or shelf.waiting or not shelf.available:
                return
            try:
                message = shelf.message()
            except BlockingIOError:
                return  # it is still being made
            try:
                shelf.keep_at_hand(shelf.read(message))
            except BaseException as error:
                shelf.available -= 1
                if not isinstance(error, BackendFailed):
                    raise
                # The next caller has his own made, and hears why.

    def _receive(self, shelf: Shelf) -> Jail:
        try:
            return shelf.read(self._next_message(shelf))
        finally:
            with self._lock:
                shelf.waiting -= 1

    @staticmethod
    def _checked(jail: Jail) -> Jail:
        if not jail.alive():
            jail.drop()
            raise ZygoteDied("a parked jail was killed", retryable=True)
        return jail

    def _next_message(self, shelf: Shelf) -> Message:
        """What the shelf holds, as soon as it holds something; ZygoteDied if nobody is left."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return shelf.message()
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

    @property
    def parked(self) -> int:
        """Jails that are ordered and not taken."""
        with self._lock:
            return sum(shelf.available for shelf in self._shelves.values())

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
            shelf.slots.pop(slot.number, None)
        shelf.drop(slot)

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
            shelf.remove_groups()

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
        shelf.remove_groups()

    def _order(self, shelf: Shelf, *, parked: bool = True) -> None:
        """Have one made. One that is not to be parked need not warm up: somebody waits for it."""
        shape, cpus = shelf.shape, self.facts.cpus
        first = next(self._core)
        cores = tuple(cpus[(first + i) % len(cpus)] for i in range(shape.cores))
        # With more callers than processors it would not wait for long enough to warm up.
        parked = parked and shelf.busy <= len(cpus)
        # What it saves a caller at the end takes as long to make, and others wait for processors.
        keeper = shape.keeper and parked
        slot = self._slot(shelf, shape.processes + 2 + keeper)  # slot, anchor and keeper are ours
        order = {"slot": slot.number, "parked": parked, **shape.message(cores), "keeper": keeper}
        try:
            slot.orders.sendall(marshal.dumps(order))
        except OSError as error:
            raise ZygoteDied(f"the jail's zygote died: {error}", retryable=True) from error
        shelf.available += 1

    def _slot(self, shelf: Shelf, processes: int) -> Slot:
        """A slot with the limits of the shelf's shape: the one that rested longest, or a new one.

        What the last run had mounted is then gone.
        """
        if shelf.free:
            slot = shelf.free.pop(0)
            if slot.group is not None:
                slot.group.renew(processes)
            return slot
        from ..linux import in_flight

        grouped = "cgroup" in self.outer.layers and self.facts.cgroup is not None
        group = self._group(shelf.shape, processes) if grouped else None
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [os.open(path, os.O_WRONLY) for path in (group.procs if group is not None else ())]
        slot = Slot(next(self._numbers), group, orders)
        shelf.slots[slot.number] = slot
        try:
            in_flight.send(self._control, b"slot", [theirs.fileno(), shelf.theirs.fileno(), *fds])
        except OSError as error:
            raise ZygoteDied(f"the jail's zygote died: {error}", retryable=True) from error
        finally:
            theirs.close()
            for fd in fds:
                os.close(fd)
        return slot

    def _group(self, shape: Shape, processes: int) -> Group:
        from ..linux.cgroup import Group

        assert self.facts.cgroup is not None
        return Group(
            self.facts.cgroup,
            os.urandom(8).hex(),
            memory=shape.memory,
            processes=processes,
            cpus=shape.cpus,
            die_together=False,
        )


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

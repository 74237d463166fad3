"""The host's side of the warm fork servers: starting them, taking ready jails from them, ending
them.

A `Zygote` is one process of `linux/zygote.py`. For every `Shape` that runs ask for it has a shelf:
a socket on which the init of each new jail announces itself, with the run's descriptors in the same
message. A parked jail is therefore a message that nobody has read yet, and costs this process
nothing. `Fleet` keeps one zygote for every `Outer`, retires it after so many runs, and replaces one
that died. Everything here is called from many threads.
"""

from __future__ import annotations

import array
import itertools
import marshal
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from ..errors import BackendFailed
from .jail_plan import GUEST_DIR, Outer, Shape

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from ..linux.probe import HostFacts

_LINUX_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "linux")
_BOOT = (
    "import sys;p=type(sys)('belljar_jail');p.__path__=[{directory!r}];"
    "sys.modules['belljar_jail']=p;from belljar_jail.zygote import main;main({fd})"
)
# Libraries that would start threads, and a locale in which Python speaks UTF-8.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_START_SECONDS = 60.0
_RUNS_A_ZYGOTE = 2000  # its children share address layout and hash seed: not for ever
_SHELVES_A_ZYGOTE = 4
_PARKED_LEAST = 2
_FIRST_ID, _IDS = 1_900_000_000, 65_536
_turns = itertools.count()


class Jail:
    """A ready jail: our ends of its pipes and sockets. `release` gives everything back."""

    def __init__(self, shelf: Shelf, group: Group | None, fds: list[int]) -> None:
        run, frames, self.stdin, self.stdout, self.stderr, self.work, self.pidfd = fds
        self.run = socket.socket(fileno=run)
        self.frames = socket.socket(fileno=frames)
        self.group = group
        self._shelf = shelf
        self._open = {self.work, self.pidfd}

    def replenish(self, most: int) -> None:
        """Have the next ones made, so that at most `most` are parked."""
        self._shelf.zygote.replenish(self._shelf, most)

    def alive(self) -> bool:
        """Whether nobody killed it while it was parked."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

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
        for fd in self._open:
            os.close(fd)
        self._open.clear()
        self._shelf.zygote.released(self._shelf, self.group)
        if not keep:
            self._shelf.zygote.discard_idle(self._shelf)


class Shelf:
    """Jails of one shape: ordered, and as messages on `socket` ready to be taken."""

    def __init__(self, zygote: Zygote, shape: Shape, number: int) -> None:
        self.zygote, self.shape, self.number = zygote, shape, number
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(_START_SECONDS)
        self.available = 0  # ordered, and not claimed by anybody
        self.uses = 0
        self.busy = 0
        self.groups: dict[str, Group] = {}
        self.free: list[str] = []


class Zygote:
    """One warm process. `take` a jail from it, `close` it when `busy` is 0."""

    def __init__(self, outer: Outer, facts: HostFacts) -> None:
        self.outer, self.facts = outer, facts
        self.busy = 0
        self.runs = 0
        self.retired = False
        self._lock = threading.Lock()
        self._shelves: dict[Shape, Shelf] = {}
        self._numbers = itertools.count(1)
        self._core = itertools.count()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = ["-I", "-B"] if outer.worker else ["-I", "-S", "-B"]
        boot = _BOOT.format(directory=_LINUX_DIR, fd=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", boot],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        from ..linux import syscalls

        outer = self.outer
        view = outer.view
        spec = {
            "view": {
                "show": view.show,
                "links": view.links,
                "hide": view.hide,
                "waiting": view.waiting,
                "probe": "landlock" in outer.layers,
            },
            "layers": outer.layers,
            "worker": outer.worker,
            "preload": outer.preload,
            "writable": outer.writable,
            "open_network": outer.open_network,
            "guest": GUEST_DIR,
            "ids": id_range(self.facts.root),
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
            shelf = self._shelf(shape)
            shelf.uses += 1
            shelf.busy += 1
            self.busy += 1
            self.runs += 1
            if shelf.available == 0:
                self._order(shelf)
            shelf.available -= 1
        try:
            return self._receive(shelf)
        except BaseException:
            self.released(shelf, None)
            raise

    def _receive(self, shelf: Shelf) -> Jail:
        try:
            words, ancillary, _, _ = shelf.socket.recvmsg(1 << 13, socket.CMSG_SPACE(4 * 8))
        except OSError as error:
            raise BackendFailed(f"no jail became ready: {error}", retryable=True) from error
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        word, _, rest = words.decode("utf-8", "replace").partition(" ")
        if word == "ready":
            jail = Jail(shelf, shelf.groups.get(rest), list(fds))
            if not jail.alive():
                jail.drop()
                raise ZygoteDied("a parked jail was killed", retryable=True)
            return jail
        if word == "failed":
            group, _, why = rest.partition(" ")
            self._give_back(shelf, shelf.groups.get(group))
            raise BackendFailed(f"the jail could not be set up: {why}")
        raise ZygoteDied("the jail's zygote died", retryable=True)

    def replenish(self, shelf: Shelf, most: int) -> None:
        """Park as many as demand suggests; a shape that was used once may never be used again."""
        with self._lock:
            if self.retired or shelf.uses < 2 or shelf.number not in self._known():
                return
            while shelf.available < min(max(_PARKED_LEAST, shelf.busy), most):
                self._order(shelf)

    def released(self, shelf: Shelf, group: Group | None) -> None:
        with self._lock:
            shelf.busy -= 1
            self.busy -= 1
        self._give_back(shelf, group)

    def close(self) -> None:
        """End it and everything in it; returns when the kernel has."""
        self._control.close()
        for shelf in self._shelves.values():
            shelf.socket.close()
        try:
            self._process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for shelf in self._shelves.values():
            for group in shelf.groups.values():
                group.remove()
            shelf.groups.clear()

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
        self._send({"do": "shelf", "shelf": shelf.number}, [shelf.theirs.fileno()])
        shelf.theirs.close()
        return shelf

    def discard_idle(self, shelf: Shelf) -> None:
        with self._lock:
            if not shelf.busy and self._shelves.get(shelf.shape) is shelf:
                self._discard(shelf)

    def _discard(self, shelf: Shelf) -> None:
        """Its parked jails end when nobody holds their descriptors any more."""
        del self._shelves[shelf.shape]
        shelf.socket.close()
        self._send({"do": "forget shelf", "shelf": shelf.number}, [])
        for name, group in shelf.groups.items():
            self._send({"do": "forget group", "group": name}, [])
            group.remove()

    def _order(self, shelf: Shelf) -> None:
        shape = shelf.shape
        cpus = self.facts.cpus
        first = next(self._core)
        cores = tuple(cpus[(first + i) % len(cpus)] for i in range(shape.cores))
        order = {
            "do": "jail",
            "shelf": shelf.number,
            "group": self._group(shelf),
            "shape": shape.message(cores),
        }
        self._send(order, [])
        shelf.available += 1

    def _group(self, shelf: Shelf) -> str:
        """The name of a control group with the limits of the shape; empty without cgroups."""
        if "cgroup" not in self.outer.layers or self.facts.cgroup is None:
            return ""
        if shelf.free:
            # The one that rested longest: what its last run had mounted is gone by now.
            name = shelf.free.pop(0)
            shelf.groups[name].renew()
            return name
        from ..linux.cgroup import Group

        name, shape = secrets.token_hex(8), shelf.shape
        group = Group(
            self.facts.cgroup,
            name,
            memory=shape.memory,
            processes=shape.processes,
            cpus=shape.cpus,
        )
        shelf.groups[name] = group
        fds = [os.open(path, os.O_WRONLY) for path in group.procs]
        try:
            self._send({"do": "group", "group": name}, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return name

    def _give_back(self, shelf: Shelf, group: Group | None) -> None:
        if group is None:
            return
        name = next((name for name, each in shelf.groups.items() if each is group), None)
        if name is None:
            return  # the shelf is gone, and the group with it
        if group.reusable:
            with self._lock:
                shelf.free.append(name)
            return
        with self._lock:
            del shelf.groups[name]
            self._send({"do": "forget group", "group": name}, [])
        group.remove()

    def _send(self, order: dict[str, Any], fds: list[int]) -> None:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._control.sendmsg([marshal.dumps(order)], passed)
        except OSError as error:
            raise ZygoteDied(f"the jail's zygote died: {error}", retryable=True) from error


class ZygoteDied(BackendFailed):
    """The warm process is gone; another one can be started."""


class Fleet:
    """Zygotes by what they are. A run takes a jail; nobody else needs to know where from."""

    def __init__(self, facts: HostFacts) -> None:
        self.facts = facts
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._starting: dict[Outer, threading.Lock] = {}
        self._zygotes: dict[Outer, Zygote] = {}
        self._retired: list[Zygote] = []
        self._closed = False

    def take(self, outer: Outer, shape: Shape) -> Jail:
        """From a warm zygote, which is started if there is none; one that died is replaced once."""
        for attempt in (1, 2):
            zygote = self._zygote(outer)
            try:
                return zygote.take(shape)
            except ZygoteDied:
                self._retire(zygote)
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _zygote(self, outer: Outer) -> Zygote:
        with self._lock:
            self._sweep()
            zygote = self._zygotes.get(outer)
            if zygote is not None and zygote.runs < _RUNS_A_ZYGOTE:
                return zygote
            starting = self._starting.setdefault(outer, threading.Lock())
        with starting:
            with self._lock:
                current = self._zygotes.get(outer)
                if current is not None and current is not zygote:
                    return current  # somebody else has started it meanwhile
            fresh = Zygote(outer, self.facts)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._zygotes[outer] = fresh
            if closed:
                fresh.close()
                raise BackendFailed("this backend is closed")
        if zygote is not None:
            self._retire(zygote)
        return fresh

    def _retire(self, zygote: Zygote) -> None:
        with self._lock:
            if zygote.retired:
                return
            zygote.retired = True
            if self._zygotes.get(zygote.outer) is zygote:
                del self._zygotes[zygote.outer]
            self._retired.append(zygote)
            self._sweep()

    def _sweep(self) -> None:
        """Close retired zygotes whose last run is over."""
        for zygote in [each for each in self._retired if each.busy == 0]:
            self._retired.remove(zygote)
            zygote.close()

    def close(self) -> None:
        if os.getpid() != self.process:
            return  # a fork of the process that owns them
        with self._lock:
            self._closed = True
            zygotes = [*self._zygotes.values(), *self._retired]
            self._zygotes.clear()
            self._retired.clear()
        for zygote in zygotes:
            zygote.close()


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

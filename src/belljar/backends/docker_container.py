"""One container of ours: made, started, checked, and removed; and the orphans of dead hosts."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from typing import Any

from .. import log
from ..docker_api import Api, ApiError
from ..errors import BackendFailed, BackendUnavailable
from ..guest import agent, protocol
from ..images import names
from ..linux import no_links, remap
from . import agent_link
from .docker_facts import EngineFacts
from .docker_plan import Shape, container
from .docker_usage import HostGroup, is_container, limit_sockets
from .jail_plan import inside_any

OWNER, DEADLINE, RUNTIME = "dev.belljar.owner", "dev.belljar.deadline", "dev.belljar.runtime"
_START_SECONDS = 60.0
_REMOVE_TRIES = 5
_OOM_TRIES = 6
_Source = tuple[str, tuple[int, int]]
# No run of a container that waited may take longer: its deadline is written before it is known.
LONGEST_RUN = 3600.0


class Container:
    """A started container whose agent waits for a program. Used once, then removed."""

    def __init__(
        self,
        api: Api,
        facts: EngineFacts,
        shape: Shape,
        seccomp: str,
        *,
        empty: str = "",
        idle: float,
        longest: float = LONGEST_RUN,
    ) -> None:
        self.api, self.shape = api, shape
        self.born = time.monotonic()
        self.stuck = False  # its engine takes no orders at present
        labels = {
            OWNER: owner(),
            DEADLINE: str(int(time.time() + idle + longest + 120)),
            RUNTIME: shape.runtime or "",
        }
        command = agent_link.command(idle)
        body = container(shape, facts, labels, command, seccomp=seccomp, empty=empty)
        with contextlib.ExitStack() as held:
            # The engine opens paths by name: what it has opened is compared with these.
            sources = _identities(shape, held) if facts.here else {}
            self.id = self._create(body, facts)
            if log.informs():
                image = f"{log.printable(shape.image, 200)} ({shape.image_id})"
                log.info(f"container {self.id[:12]} created: image={image}")
            self._begin(body["User"], sources)

    def _begin(self, user: str, sources: dict[str, _Source]) -> None:
        self.socket: socket.socket | None = None
        self.incoming = agent_link.Incoming()
        self.group: HostGroup | None = None
        self.python: tuple[int, ...] = ()
        shape = self.shape
        try:
            attached = self.api.attach(self.id)
            self.socket = attached.socket
            self._start()
            if shape.runtime is not None:
                self.group = HostGroup(self._pid())
            if shape.sockets:
                limit_sockets(self.id, self._pid(), shape.sockets)
            self._compare(sources)
            self._remap(user)
            self.socket.settimeout(_START_SECONDS)
            self._greet(attached.early)
            self.socket.settimeout(None)
        except BaseException:
            self.close()
            with contextlib.suppress(BackendFailed, BackendUnavailable):  # the first one is told
                self.remove()
            raise

    def _create(self, body: dict[str, Any], facts: EngineFacts) -> str:
        try:
            return str(self.api.json("POST", "/containers/create", body=body)["Id"])
        except ApiError as error:
            if error.status == 404 or "No such image" in error.message:
                engine = f"{facts.name} at {self.api.path}"
                raise names.missing(self.shape.image, engine) from error
            raise

    def _start(self) -> None:
        try:
            self.api.json("POST", f"/containers/{self.id}/start", timeout=_START_SECONDS)
        except ApiError as error:
            if "executable file not found" in error.message or "no such file" in error.message:
                raise BackendUnavailable(
                    f"image {self.shape.image!r} has no python3, which our agent in it needs",
                    fix="add Python 3.9 or later to the image, or `belljar images build python`",
                ) from error
            raise

    def _remap(self, user: str) -> None:
        """Before there is a program: show it as its own what it is to write to and others own."""
        for target, owner in self.shape.remapped:
            uid, gid = map(int, user.split(":"))
            places = [
                place
                for _, place, how in self.shape.binds
                if how != "hide" and inside_any(place, (target,))
            ]
            pid = self._pid()
            why = "its processes are not in sight here"
            if is_container(self.id, pid):
                why = remap.apply(pid, sorted(places), owner, (uid, gid))
            if why:
                raise BackendFailed(
                    f"{target!r} cannot be shown as the program's own to write to: {why}",
                    fix="give its source to an ordinary user (chown -R 1000:1000), or mount it ro",
                )

    def _compare(self, sources: dict[str, _Source]) -> None:
        """BackendFailed where the engine shows another file than the one that was checked.

        In gVisor, whose tree is in no process's sight, and where this user may not look into a
        container, only the path is looked at again: it could have led elsewhere for a moment.
        """
        pid = self._pid() if sources and self.shape.runtime is None else 0
        seen = pid and is_container(self.id, pid)
        for target, (source, identity) in sources.items():
            try:
                if seen:
                    fd = no_links.open_inside(target, f"/proc/{pid}/root")
                else:
                    fd = no_links.open_path(source)
            except PermissionError:
                fd, seen = no_links.open_path(source), False
            found = os.fstat(fd)
            os.close(fd)
            if (found.st_dev, found.st_ino) != identity:
                raise BackendFailed(f"{target!r} shows another file than was asked for")

    def _pid(self) -> int:
        return int(self.api.json("GET", f"/containers/{self.id}/json")["State"]["Pid"])

    def _greet(self, early: bytes) -> None:
        """Send the agent in, and see that its cage is the one that was ordered."""
        assert self.socket is not None
        try:
            self.socket.sendall(agent_link.boot())
            packets = self.incoming.feed(early)
            while not packets:
                piece = self.socket.recv(1 << 16)
                if not piece:
                    raise self._broken("ended before it was ready")
                packets = self.incoming.feed(piece)
            if packets[0].kind != agent.READY:
                raise self._broken("did not greet")
            facts = protocol.loads(packets[0].payload)
        except (OSError, protocol.ProtocolError) as error:
            raise self._broken(str(error)) from error
        version = str(facts.get("python")) if isinstance(facts, dict) else ""
        self.python = tuple(int(part) for part in version.split(".") if part.isdigit())
        if wrong := amiss(self.shape, facts):
            raise BackendFailed(
                f"these protections are not on in the container: {', '.join(wrong)}",
                fix="see `belljar doctor`: this engine does not do what it was asked to",
            )

    def _broken(self, what: str) -> BackendFailed:
        said = self.incoming.complaint.decode("utf-8", "replace").strip()
        return BackendFailed(
            f"the agent in the container {what}{': ' + said if said else ''}", retryable=True
        )

    def alive(self) -> bool:
        """Whether it still waits: nothing was said, and nobody hung up."""
        if self.socket is None:
            return False
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        return not poll.poll(0)

    def kill(self, timeout: float = 60.0) -> None:
        path = f"/containers/{self.id}/kill"
        with contextlib.suppress(ApiError):  # it has just ended by itself
            self.api.json("POST", path, {"signal": "SIGKILL"}, timeout=timeout)

    def ended(self, timeout: float = 30.0) -> tuple[int, bool]:
        """(exit code, killed for want of memory), in the engine's words, once it has ended."""
        # What became of it the engine may learn later than that it ended, or never.
        self.api.json("POST", f"/containers/{self.id}/wait", timeout=timeout)
        oom = self.group is not None and self.group.oom_kills() > 0
        for attempt in range(_OOM_TRIES):
            state = self.api.json("GET", f"/containers/{self.id}/json")["State"]
            code, oom = int(state.get("ExitCode", 0)), oom or bool(state.get("OOMKilled"))
            if oom or code != 137:
                break
            time.sleep(0.05 * attempt)
        return code, oom

    def close(self) -> None:
        """Hang up; the agent ends when it notices."""
        if self.socket is not None:
            self.socket.close()
        if self.group is not None:
            self.group.close()

    def remove(self) -> None:
        remove(self.api, self.id)


def _identities(shape: Shape, held: contextlib.ExitStack) -> dict[str, _Source]:
    """What is to be shown at each target, with (device, inode), held so that they stay the same."""
    found = {}
    for source, target, how in shape.binds:
        if how == "hide":
            continue
        try:
            fd = no_links.open_path(source)
        except OSError as error:
            if error.errno != errno.ELOOP:
                continue  # the engine says what is wrong
            raise BackendFailed(f"the run could not be set up: {error}") from error
        held.callback(os.close, fd)
        status = os.fstat(fd)
        found[target] = source, (status.st_dev, status.st_ino)
    return found


def remove(api: Api, id: str) -> None:
    """Kill and remove; returns when the engine no longer knows it."""
    for attempt in range(_REMOVE_TRIES):
        try:
            api.json("DELETE", f"/containers/{id}", {"force": "1", "v": "1"})
            log.info(f"container {id[:12]} removed")
            return
        except ApiError as error:
            if error.status == 404:
                return
            # 409: somebody removes it already, or it is just starting. 500: busy file systems.
            if attempt == _REMOVE_TRIES - 1:
                raise
            time.sleep(0.1 * 2**attempt)


def amiss(shape: Shape, facts: Any) -> list[str]:
    """What the agent found that is not as it was ordered. The kernel's word, not the engine's."""
    if not isinstance(facts, dict):
        return ["everything"]
    on = frozenset(shape.layers)
    gvisor = shape.runtime is not None
    told = facts.get("reached")
    reached = set(told) if isinstance(told, list) else {"streams", "limits"}
    # Signals reach Linux's pid 1 only if it handles them. gVisor keeps priorities and cores of its
    # tasks as numbers that change nothing, and shows what the guest has anyway, the environment.
    guard = "user" if gvisor else ""
    closed = {"streams", "memory", "signals" if gvisor else "environment"}
    changed = {"limits"} if gvisor else {"limits", "priority", "cores"}
    expected: dict[str, tuple[str, bool]] = {
        "pid namespace": ("", facts.get("pid") == 1),
        "an agent that is not dumpable": ("", facts.get("sealed") is True),
        "a user other than root": ("user", facts.get("uid") != 0),
        "no capabilities": ("capabilities", facts.get("capabilities") == 0),
        "no new privileges": ("capabilities", facts.get("no_new_privileges") is True or gvisor),
        "seccomp": ("seccomp", facts.get("seccomp") is True),
        "a read-only root": ("read_only_root", facts.get("read_only") is True),
        "no network": (
            "network",
            facts.get("interfaces") == [] or shape.network != "none",
        ),
        "an agent that the guest cannot reach": (guard, not reached & closed),
        "an agent whose limits the guest cannot change": (
            "user" if gvisor else "seccomp",
            not reached & changed,
        ),
    }
    if not gvisor:  # a sentry's guest does not see the control group that holds it
        expected |= {
            "memory": ("cgroup", _at_most(facts.get("memory"), shape.memory)),
            "no swap": ("cgroup", facts.get("swap") in (0, None)),
            "processes": ("cgroup", _at_most(facts.get("pids"), shape.processes)),
            "socket buffers": (
                "cgroup",
                not shape.sockets or _at_most(facts.get("sockets"), shape.sockets),
            ),
            "processor time": ("cgroup", _at_most(facts.get("cpus"), shape.cpus + 0.01)),
        }
    return [name for name, (layer, good) in expected.items() if not good and layer in ("", *on)]


def _at_most(found: object, wanted: float) -> bool:
    return isinstance(found, int | float) and found <= wanted


def owner() -> str:
    """This very process, in words that outlive it: host, pid namespace, pid, time of start."""
    return f"{_host()}:{_namespace()}:{os.getpid()}:{_started(os.getpid())}"


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _started(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[19].decode()
    except (OSError, IndexError):
        return "0"


def orphaned(labels: dict[str, str], now: float) -> bool:
    """Whether whoever made a container is gone: seen for ourselves, or else by its deadline."""
    parts = labels.get(OWNER, "").split(":")
    if len(parts) == 4 and parts[2].isdigit():
        host, namespace, pid, started = parts
        if (host, namespace) == (_host(), _namespace()):
            return _started(int(pid)) != started
    try:
        return now > float(labels.get(DEADLINE, ""))
    except ValueError:
        return False


def sweep(api: Api) -> int:
    """Remove the containers of hosts that crashed; how many those were."""
    found = api.json("GET", "/containers/json", {"all": "1", "filters": f'{{"label":["{OWNER}"]}}'})
    gone = 0
    for each in found:
        if orphaned(each.get("Labels") or {}, time.time()):
            remove(api, each["Id"])
            gone += 1
    return gone

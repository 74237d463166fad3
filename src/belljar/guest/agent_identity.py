"""The user that the guest runs as, and a trial of what such a process can reach of the agent.

Where the engine gave the agent the right to change its user (gVisor), the agent is the sandbox's
root without its rights over files, and the guest a user without any. Elsewhere both are the same
user, and what keeps them apart is the kernel: pid 1 that is not dumpable. The trial asks the kernel
itself, because some keep the dumpable bit and do not act on it.
"""

from __future__ import annotations

import os

from . import agent_facts, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PR_SET_DUMPABLE, _PR_GET_DUMPABLE = 4, 3
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITIES = 64
_AGENT = 1


class Identity:
    """`with` it, files and pipes are made and opened as the guest's user. `ids` None: our own."""

    def __init__(self, ids: tuple[int, int] | None) -> None:
        self._ids = ids
        if ids is not None:
            os.setgroups([])

    def __enter__(self) -> None:
        if self._ids is not None:
            os.setegid(self._ids[1])
            os.seteuid(self._ids[0])

    def __exit__(self, *exc: object) -> None:
        if self._ids is not None:
            os.seteuid(0)
            os.setegid(0)

    def assume(self) -> None:
        """In a child of the agent: be the guest's user for good, without any capability."""
        if self._ids is not None:
            uid, gid = self._ids
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
            for number in range(_CAPABILITIES):
                if _prctl(_PR_CAPBSET_DROP, number) != 0:
                    break  # past the last one; what stays is seen in the trial's facts
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        seal(True)


def seal(dumpable: bool) -> bool:
    """Whether the kernel keeps this bit of ours; /proc/<us> is closed to our user without it."""
    try:
        _prctl(_PR_SET_DUMPABLE, int(dumpable))
        return _prctl(_PR_GET_DUMPABLE, 0) == int(dumpable)
    except (ImportError, OSError, AttributeError):
        return False


def _prctl(option: int, argument: int) -> int:
    import ctypes

    return int(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0))


def trial(identity: Identity, sealed: bool) -> dict[str, Any]:
    """The cage as a process with the guest's identity finds it, and what of ours it reached."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            identity.assume()
            found = {**agent_facts.facts(), "reached": _reached()}
            os.write(writer, protocol.dumps(found))  # far less than a pipe holds
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read()
    os.waitpid(child, 0)
    found = protocol.loads(text) if text else {}
    return {**found, "pid": os.getpid(), "sealed": sealed}


def _reached() -> list[str]:
    """What a process of the guest's can do to the agent; each changes nothing where it works."""
    import resource

    def opened(path: str, flags: int) -> Callable[[], None]:
        return lambda: os.close(os.open(f"/proc/{_AGENT}/{path}", flags | os.O_NONBLOCK))

    def limited() -> None:
        resource.prlimit(_AGENT, resource.RLIMIT_NOFILE)

    def reniced() -> None:
        os.setpriority(os.PRIO_PROCESS, _AGENT, os.getpriority(os.PRIO_PROCESS, _AGENT))

    def pinned() -> None:
        os.sched_setaffinity(_AGENT, os.sched_getaffinity(_AGENT))

    attempts: tuple[tuple[str, Callable[[], None]], ...] = (
        ("streams", opened("fd/0", os.O_RDONLY)),
        ("streams", opened("fd/1", os.O_WRONLY)),
        ("streams", opened("fd/2", os.O_WRONLY)),
        ("memory", opened("mem", os.O_RDONLY)),
        ("memory", opened("mem", os.O_RDWR)),
        ("environment", opened("environ", os.O_RDONLY)),
        ("signals", lambda: os.kill(_AGENT, 0)),
        ("limits", limited),
        ("priority", reniced),
        ("cores", pinned),
    )
    found: dict[str, None] = {}
    for kind, attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        found[kind] = None
    return list(found)

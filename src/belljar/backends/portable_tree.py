"""What `portable.py` asks of a platform: start a process, look at its tree, end it, collect it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..records import record


@record
class Launch:
    """Everything to start a run with. Descriptors are numbers and stay the caller's to close.

    `frames` are the guest's ends of the two pipes to its worker, or empty.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stdin: int
    stdout: int
    stderr: int
    frames: tuple[int, ...]
    token: str
    ps: str = ""
    descendants: bool = True
    user: tuple[int, int] | None = None
    ulimits: tuple[tuple[str, int], ...] = ()
    job: tuple[tuple[str, float], ...] = ()


@record
class Load:
    """What a tree uses at one moment; `cpu` includes members that have ended since we saw them."""

    memory: int = 0
    processes: int = 0
    cpu: float = 0.0


@record
class Reaped:
    """The kernel's account of a run that is over."""

    wait_status: int
    cpu: float
    peak_memory: int | None


class Tree(Protocol):
    """A started run. `kill`, then `reap`, then `close`, whatever happened before."""

    def wait_for_end(self) -> None: ...

    def look(self) -> Load: ...

    def kill(self) -> int: ...

    def reap(self) -> Reaped: ...

    def close(self) -> None: ...

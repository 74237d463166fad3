"""What is put to the test: a backend behind the engine, asked for one program at a time."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ... import config
from ... import engine as engines
from ...backends.base import Backend, Cancel
from ...errors import BelljarError
from ...events import Event, Output
from ...policy import Ceiling, Isolation
from ...types import Mount, Request, Result, Status
from .snapshot import ours_too

# After the time limit a backend has this long to kill, collect and answer, or it hangs.
_PATIENCE = 30.0


NO_ANSWER = "the backend did not come back"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program with its limits, before anybody decides where it runs."""

    code: str
    timeout: float
    limits: Mapping[str, int]
    language: str = "python"
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    outputs: tuple[str, ...] = ()
    network: Mapping[str, Any] | None = None
    on_output: Callable[[bytes], None] | None = None

    def wishes(self) -> dict[str, Any]:
        """The policy that the case file suggests. The lint is off: it is not the boundary."""
        mebi = 1 << 20
        network = {} if self.network is None else {"network": self.network}
        return network | {
            "timeout": self.timeout,
            "memory": self.limits["MEM_MB"] * mebi,
            "disk": self.limits["DISK_MB"] * mebi,
            **dict.fromkeys(("output", "value", "displays"), self.limits["OUT_MB"] * mebi),
            "processes": self.limits["PIDS"],
            "open_files": self.limits["FDS"],
            "cpus": 1,
            "modules": "any",
        }


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that a run let us see.

    `failure` is the host's own failure, in words; then there is no result. `wire` is the JSON text
    that a client receives. `host_growth` is by how many bytes the host process grew at its largest.
    """

    wall: float
    result: Result | None = None
    failure: str = ""
    wire: bytes = b""
    host_growth: int = 0
    stopped: bool = False

    @property
    def everything(self) -> bytes:
        """Every byte that came back, for a search."""
        if self.result is None:
            return self.wire + self.failure.encode("utf-8", "replace")
        texts = [self.result.stdout, self.result.stderr]
        if self.result.error is not None:
            texts += [self.result.error.message, self.result.error.traceback]
        data = [file.data or b"" for file in self.result.files.values()]
        return b"\n".join([self.wire, *(text.encode("utf-8", "replace") for text in texts), *data])


class Subject(Protocol):
    """Runs jobs. `klass` is the isolation class in the words of the case file."""

    name: str
    klass: str

    def run(self, job: Job) -> Seen: ...

    def terminal(self, job: Job) -> bytes:
        """What a person sees who runs the job on a terminal."""

    def clean(self) -> None:
        """End what the last case left running, after it was counted."""

    def cancel(self) -> None:
        """End every run that goes on and begin no more: somebody wants to stop the suite."""


def class_of(isolation: Isolation) -> str:
    """The case file's word for a rung of the ladder."""
    return {"none": "inproc"}.get(isolation.value, isolation.value)


def level_for(isolation: Isolation) -> str:
    """The strictest level whose floor this rung meets."""
    if isolation.at_least(Isolation.JAIL):
        return "strict"
    return "standard" if isolation.at_least(Isolation.PROCESS) else "permissive"


class EngineSubject:
    """A backend, by name or as an object, through the same engine that everybody uses."""

    def __init__(self, backend: str | Backend, settings: config.Settings | None = None) -> None:
        # The operator's host, but not the operator's ceiling: the limits are part of the cases.
        settings = replace(
            settings or config.load(),
            defaults={},
            ceiling=Ceiling(),
            block_dangerous_imports=False,
        )
        if isinstance(backend, str):
            self._engine = engines.Engine(settings)
            backend = self._engine.backend(backend)
        else:
            self._engine = engines.Engine(settings, backends={backend.name: backend})
        if hasattr(backend, "tidy"):
            backend.tidy = True  # what a backend keeps warm would be counted as left behind
        self.backend = backend
        self.name = backend.name
        self.klass = class_of(backend.isolation)
        self._level = level_for(backend.isolation)
        # What a backend cannot limit is not asked of it: it would refuse, and test nothing.
        self._unheld: frozenset[str] = getattr(backend, "unheld", frozenset())
        self._stopped = False
        self._going: dict[Cancel, threading.Thread] = {}

    def run(self, job: Job) -> Seen:
        request = Request(
            code=job.code,
            language=job.language,
            stdin=job.stdin,
            files=job.files,
            mounts=job.mounts,
            outputs=job.outputs,
        )
        answer: list[Seen] = []
        with Cancel() as cancel:
            start = time.monotonic()
            thread = threading.Thread(
                target=lambda: answer.append(self._ask(request, job, cancel)), daemon=True
            )
            self._going[cancel] = thread
            try:
                if self._stopped:
                    return Seen(wall=0.0, failure="the suite was stopped")
                thread.start()
                thread.join(job.timeout + _PATIENCE)
            finally:  # also when somebody lost patience and pressed Ctrl-C
                if thread.is_alive():
                    cancel.set()
                    thread.join(_PATIENCE)
                del self._going[cancel]
            wall = time.monotonic() - start
            if not answer:
                return Seen(wall=wall, failure=NO_ANSWER, stopped=True)
        return answer[0]

    def _ask(self, request: Request, job: Job, cancel: Cancel) -> Seen:
        def emit(event: Event) -> None:
            if job.on_output is not None and isinstance(event, Output):
                job.on_output(event.data)

        peak = PeakMemory()
        start = time.monotonic()
        try:
            result = self._engine.run(
                request,
                level=self._level,
                wishes=self._wishes(job),
                backend=self.name,
                emit=emit,
                cancel=cancel,
            )
        except BelljarError as error:
            return Seen(
                wall=time.monotonic() - start,
                failure=f"{error.code}: {error.message}",
                host_growth=peak.growth(),
            )
        except Exception as error:  # noqa: BLE001 - an untyped failure is what we look for
            return Seen(
                wall=time.monotonic() - start,
                failure=f"untyped {type(error).__name__}: {error}",
                host_growth=peak.growth(),
            )
        seen = Seen(wall=time.monotonic() - start, result=result, host_growth=peak.growth())
        if result.backend not in ("", self.name):
            return replace(seen, result=None, failure=f"it ran on {result.backend} instead")
        try:
            wire = json.dumps(result.to_dict(), allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            return replace(seen, failure=f"the result is not JSON: {error}")
        return replace(seen, wire=wire)

    def _wishes(self, job: Job) -> dict[str, Any]:
        return {name: wish for name, wish in job.wishes().items() if name not in self._unheld}

    def terminal(self, job: Job) -> bytes:
        wishes = self._wishes(job)
        words = [sys.executable, "-m", "belljar", "run", "--backend", self.name]
        words += ["--level", self._level, "--lang", job.language]
        for name in ("timeout", "memory", "disk", "output", "value", "displays", "processes"):
            words += [f"--{name}", str(wishes[name])] if name in wishes else []
        return on_terminal([*words, "-c", job.code], timeout=job.timeout + _PATIENCE)

    def clean(self) -> None:
        """The engine's own backends leave nothing; what they left is ended by the snapshot."""

    def cancel(self) -> None:
        self._stopped = True
        going = dict(self._going)
        for cancel in going:
            cancel.set()
        for thread in going.values():
            if thread.is_alive():
                thread.join(_PATIENCE)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> EngineSubject:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PeakMemory:
    """By how much this process grows at its largest, as the kernel counts it."""

    def __init__(self) -> None:
        self._resettable = True
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the high-water mark
        except OSError:
            self._resettable = False
        self._start = self._read("VmRSS:")

    def growth(self) -> int:
        if not self._resettable:
            return max(0, self._read("VmRSS:") - self._start)
        return max(0, self._read("VmHWM:") - self._start)

    @staticmethod
    def _read(field_name: str) -> int:
        try:
            with open("/proc/self/status") as file:
                for line in file:
                    if line.startswith(field_name):
                        return int(line.split()[1]) * 1024
        except OSError:  # no /proc on this platform: growth is then not measured
            return 0
        return 0


def on_terminal(words: list[str], *, timeout: float, **how: Any) -> bytes:
    """Run a command with a terminal as its three descriptors; every byte that the terminal got."""
    master, slave = pty.openpty()
    # Colours of our own would be escape sequences too: ask for none.
    environment = os.environ | {"NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
    process = None
    try:
        process = subprocess.Popen(
            words,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
            **how,
        )
        ours_too(process.pid)
        os.close(slave)
        slave = -1
        shown = bytearray()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and len(shown) < 256 << 20:
            ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
            try:
                piece = os.read(master, 1 << 16) if ready else b""
            except OSError:  # EIO: the last writer is gone
                piece = b""
            if not piece:
                break
            shown += piece
        return bytes(shown)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        os.close(master)
        if slave >= 0:
            os.close(slave)


def refused(seen: Seen) -> bool:
    """Whether the program never started."""
    if seen.result is None:
        return seen.failure.startswith(("policy_", "request_", "backend_unavailable"))
    return seen.result.status is Status.REFUSED

"""Assertions about a neighbour: a second sandbox beside the hostile one, which must not notice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ....types import Mount
from ..scene import Noise, Scene
from ..subject import Job, Seen
from . import check, companion

_RATIO = 2.0
# Below this a ratio says more about the scheduler than about the sandbox.
_FLOOR_SECONDS = 0.02
_START_SECONDS = 20.0

# Does a millisecond of work a hundred times a second, until the bell rings or its time is up, and
# says how long the slow ones took.
_NEIGHBOUR = """
import os, signal, time
got = []
for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: got.append(number))
print('N:READY', flush=True)
laps, end = [], time.monotonic() + SECONDS
while time.monotonic() < end and not (len(laps) >= 100 and os.path.exists('bell/rung')):
    start = time.perf_counter()
    sum(range(20000))
    laps.append(time.perf_counter() - start)
    time.sleep(0.005)
laps.sort()
print('N:SIGNALS', len(got))
print('N:P95', laps[int(len(laps) * 0.95)])
"""

_INOTIFY = """
import ctypes
libc = ctypes.CDLL(None)
print('N:WATCH', libc.inotify_add_watch(libc.inotify_init(), b'.', 0x100))
"""


@dataclass(frozen=True)
class Neighbour:
    """What the second sandbox says that it noticed."""

    seen: Seen

    @property
    def problem(self) -> str | None:
        if self.seen.result is None:
            return f"the neighbour failed: {self.seen.failure}"
        if self._said("N:P95") is None:
            return f"the neighbour ended {self.seen.result.status.value} before its time"
        return None

    @property
    def signals(self) -> int:
        return int(self._said("N:SIGNALS") or 0)

    @property
    def slow(self) -> float:
        return float(self._said("N:P95") or 0.0)

    def _said(self, what: str) -> str | None:
        stdout = self.seen.result.stdout if self.seen.result else ""
        lines = [line for line in stdout.splitlines() if line.startswith(what)]
        return lines[-1].split()[1] if lines else None


def _job(scene: Scene, seconds: float, ready: threading.Event, bell: Path) -> Job:
    said = bytearray()

    def listen(data: bytes) -> None:
        said.extend(data[:64])
        if b"N:READY" in said:
            ready.set()

    return Job(
        code=_NEIGHBOUR.replace("SECONDS", str(seconds)),
        timeout=seconds + _START_SECONDS,
        limits=scene.job.limits,
        mounts=(Mount(str(bell), "bell", "ro"),),
        on_output=listen,
    )


@companion("neighbour_unaffected")
@contextmanager
def beside(scene: Scene) -> Iterator[None]:
    """Run a neighbour alone, then one beside the case."""
    bell = scene.stage.root / "bell"
    bell.mkdir()
    alone = Neighbour(scene.subject.run(_job(scene, 0.5, threading.Event(), bell)))
    found: list[Neighbour] = []
    ready = threading.Event()
    seconds = 2.0 if not scene.case.mentions("TIMEOUT_S") else scene.job.timeout
    # At most: it ends with the case. On a slow backend the case takes longer to begin.
    seconds = max(seconds, 6.0 if scene.case.pair else 0.0, 5 * scene.latency.usual)
    job = _job(scene, seconds, ready, bell)
    thread = threading.Thread(target=lambda: found.append(Neighbour(scene.subject.run(job))))
    thread.start()
    ready.wait(_START_SECONDS)
    try:
        yield
    finally:
        (bell / "rung").touch()
        thread.join()
        scene.notes["neighbours"] = (alone, found[0])


companion("neighbour_latency_le")(beside)


@check("neighbour_latency_le")
def neighbour_latency_le(scene: Scene, _: str) -> str | None:
    alone, beside_it = scene.notes["neighbours"]
    if problem := alone.problem or beside_it.problem:
        return str(problem)
    most = max(_RATIO * alone.slow, alone.slow + _FLOOR_SECONDS)
    if beside_it.slow > most:
        slower = f"from {alone.slow * 1e3:.1f} to {beside_it.slow * 1e3:.1f} ms"
        return Noise(f"the neighbour slowed {slower}")
    return None


@check("neighbour_unaffected")
def neighbour_unaffected(scene: Scene, _: str) -> str | None:
    _, beside_it = scene.notes["neighbours"]
    if beside_it.signals:
        return f"the neighbour got {beside_it.signals} signals"
    return neighbour_latency_le(scene, "")


@companion("neighbour_can_inotify")
@contextmanager
def with_inotify(scene: Scene) -> Iterator[None]:
    """A second sandbox asks for a file watch while the case holds as many as it could get; before,
    when nobody holds any, it asked too: where there are none, none can be taken away."""
    scene.notes["inotify before"] = scene.run(_INOTIFY.strip())
    found: list[Seen] = []

    def ask() -> None:
        found.append(scene.run("import time; time.sleep(1)" + _INOTIFY))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        scene.notes["inotify"] = found[0]


@check("neighbour_can_inotify")
def neighbour_can_inotify(scene: Scene, _: str) -> str | None:
    said = []
    for when in ("inotify before", "inotify"):
        result = scene.notes[when].result
        if result is None:
            return f"the neighbour did not run: {scene.notes[when].failure}"
        said.append(result.stdout)
    if "N:WATCH 1" in said[0] and "N:WATCH 1" not in said[1]:
        return f"the neighbour got no file watch: {said[1][-40:]!r}"
    return None

"""Assertions about how a run ended, and about the run that comes after it."""

from __future__ import annotations

import math
import re
import time

from ....types import Status
from ..judge import allowance, breach_lines, is_absent
from ..scene import Noise, Scene
from . import check

_SLOWER = 3.0
# Below this a ratio says more about the scheduler than about the sandbox.
_FLOOR_SECONDS = 0.15
# So many times as long as a run's remains may take to go, runs may be slow after it.
_BURST = 6


@check("no_breach")
def no_breach(scene: Scene, _: str) -> str | None:
    if allowance(scene.case, scene.klass).breach_lines:
        return None
    lines = breach_lines(scene.seen)
    return lines[0][:120] if lines else None


@check("status_truthful")
def status_truthful(scene: Scene, _: str) -> str | None:
    """The result must not contradict itself: nothing but an exit with 0 is a success."""
    result = scene.seen.result
    if result is None:
        return f"no result: {scene.seen.failure}"
    if result.status is Status.SUCCESS:
        if result.exit_code != 0 or result.signal is not None or result.error is not None:
            return f"success with exit code {result.exit_code}, signal {result.signal}"
        return None
    if result.exit_code == 0:
        return f"{result.status.value} with exit code 0"
    if result.status is Status.ERROR and (result.exit_code is None) == (result.signal is None):
        return f"error with exit code {result.exit_code} and signal {result.signal}"
    return None


@check("exit_code_is")
def exit_code_is(scene: Scene, expected: str) -> str | None:
    code = scene.seen.result.exit_code if scene.seen.result else None
    if is_absent(scene.case, scene.klass, scene.seen):
        return None
    return None if code == int(expected) else f"the exit code is {code}, not {expected}"


@check("exit_code_truthful")
def exit_code_truthful(scene: Scene, _: str) -> str | None:
    """The code that the program leaves with is written in it."""
    written = re.findall(r"os\._exit\((\d+)\)", scene.case.code)
    return exit_code_is(scene, written[-1])


@check("cpu_time_le")
def cpu_time_le(scene: Scene, _: str) -> str | None:
    """The job has one core: all its processes together get a second of CPU a second."""
    result = scene.seen.result
    if result is None or result.usage.cpu is None:
        return "nobody counted the CPU time"
    most = 1.25 * result.usage.wall + 0.5
    if result.usage.cpu > most:
        return Noise(f"{result.usage.cpu:.1f} s of CPU, not {most:.1f}")
    return None


@check("count_le")
def count_le(scene: Scene, most: str) -> str | None:
    """The program says how many it could make of something."""
    counts = _counts(scene)
    if not counts:
        return _unless_stopped(scene, "the program did not say how many it could make")
    return None if max(counts) <= int(most) else f"it made {max(counts)}, not at most {most}"


@check("open_files_le")
def open_files_le(scene: Scene, _: str) -> str | None:
    """The program says how many it could open; a pair of sockets is two."""
    counts = _counts(scene)
    if not counts and is_absent(scene.case, scene.klass, scene.seen):
        return None
    if not counts:
        return "the program did not say how many it could open"
    opened = max(counts) * (2 if "socketpair" in scene.case.code else 1)
    most = scene.job.limits["FDS"]
    return None if opened <= most else f"{opened} descriptors were open, not at most {most}"


def _counts(scene: Scene) -> list[int]:
    stdout = scene.seen.result.stdout if scene.seen.result else ""
    return [int(number) for number in re.findall(r"^R:HELD (\d+)", stdout, re.MULTILINE)]


def _unless_stopped(scene: Scene, why: str) -> str | None:
    """A limit, or a missing interface, ended the program before it could say anything."""
    result = scene.seen.result
    ended = result is not None and result.status not in (Status.SUCCESS, Status.ERROR)
    return None if ended or is_absent(scene.case, scene.klass, scene.seen) else why


@check("next_run_ok")
def next_run_ok(scene: Scene, _: str) -> str | None:
    """The next plain run works, and takes as long as usual.

    Because a busy machine slows down the runs after the next one as well, they are looked at until
    one is as fast as usual: then it was a burst of something else, otherwise every attempt at the
    case would fall into the same burst. A case has slowed down its next run alone, or all of them.
    """
    usual = scene.latency.usual
    slow = max(_SLOWER * usual, usual + _FLOOR_SECONDS) if usual else math.inf
    deadline = time.monotonic() + _BURST * scene.patience
    first: float | None = None
    runs = 0
    while True:
        seen, seconds = scene.timed("print(2+2)")
        runs += 1
        if seen.result is None:
            return f"the next run failed: {seen.failure}"
        if seen.result.status is not Status.SUCCESS or seen.result.stdout != "4\n":
            return f"the next run ended {seen.result.status.value} with {seen.result.stdout[:40]!r}"
        if first is None:
            first = seconds
            scene.latency.add(seconds)
        if seconds <= slow and runs != 2:
            return None
        if seconds <= slow or time.monotonic() > deadline:
            return Noise(f"the next run took {first:.2f} s, usual are {usual:.2f} s")


@check("next_run_lacks")
def next_run_lacks(scene: Scene, poison: str) -> str | None:
    for program in ("print(1)", "import this"):
        if poison.encode() in scene.run(program).everything:
            return f"{poison} appears in a later run of {program!r}"
    return None


@check("late_output_not_in_next_result", urgent=True)
def late_output_not_in_next_result(scene: Scene, _: str) -> str | None:
    # The survivor, if there is one, writes a second after its parent's end.
    seen = scene.run("import time; time.sleep(1.5); print('next')")
    late = f"LATE {scene.stage.token}".encode()
    return "output of the last run is in the next one's result" if late in seen.everything else None

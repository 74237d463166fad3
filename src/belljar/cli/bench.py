"""`belljar bench`: how long a program takes in each sandbox, next to what it takes without one.

Contenders take turns, one run each a round, paced apart: a busy moment of the machine then hits all
of them. Read the ratios; milliseconds belong to the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .arguments import UsageError, add_common
from .failures import print_json
from .terminal import show

EPILOG = """\
examples:
  belljar bench
  belljar bench --program pandas --rounds 30
  belljar bench --throughput --callers 8 --runs 10000"""

PROGRAMS = {
    "print": "print(1)",
    "compute": "import time\nend = time.process_time() + 0.05\n"
    "while time.process_time() < end: pass",
    "pandas": "import pandas as pd\nprint(pd.DataFrame({'a': [1, 2, 3]})['a'].sum())",
}
_BWRAP = (
    "bwrap", "--unshare-all", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--proc", "/proc",
    "--dev", "/dev", "--cap-drop", "ALL", "--die-with-parent",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--program", choices=sorted(PROGRAMS), default="print")
    parser.add_argument("--rounds", metavar="N", type=int, default=100, help="runs of each")
    parser.add_argument("--pause", metavar="MS", type=float, default=10.0, help="between runs")
    parser.add_argument(
        "--throughput", action="store_true", help="runs a second instead, in the jail"
    )
    parser.add_argument("--callers", metavar="N", type=int, default=8, help="for --throughput")
    parser.add_argument("--runs", metavar="N", type=int, default=2000, help="for --throughput")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.rounds, args.callers, args.runs) < 1 or args.pause < 0:
        raise UsageError("--rounds, --callers and --runs are at least 1")
    if args.throughput:
        rate = throughput(PROGRAMS[args.program], args.callers, args.runs)
        if args.json:
            print_json(rate.to_dict())
        else:
            show(rate.text())
        return 0
    lines = measure(PROGRAMS[args.program], args.rounds, args.pause / 1000)
    if args.json:
        print_json({"program": args.program, "contenders": [line.to_dict() for line in lines]})
    else:
        show(table(lines))
    return 0


@dataclass(kw_only=True)
class Line:
    """One contender and its times in seconds."""

    name: str
    once: Callable[[], float | None]  # None: the caller's clock, else what it measured itself
    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "runs": len(self.seconds),
            "median_ms": round(self.median * 1000, 3),
            "min_ms": round(min(self.seconds) * 1000, 3),
            "p95_ms": round(sorted(self.seconds)[int(len(self.seconds) * 0.95)] * 1000, 3),
            "phases_ms": {
                name: round(statistics.median(times) * 1000, 3)
                for name, times in self.phases.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What many callers got together. The counts are (after a tenth of the runs, at the end)."""

    callers: int
    runs: int
    seconds: float
    errors: int
    memory_kib: tuple[int, int]
    descriptors: tuple[int, int]

    def to_dict(self) -> dict[str, object]:
        return {
            "callers": self.callers,
            "runs": self.runs,
            "runs_per_second": round(self.runs / self.seconds, 1),
            "errors": self.errors,
            "memory_kib": list(self.memory_kib),
            "descriptors": list(self.descriptors),
        }

    def text(self) -> str:
        return (
            f"{self.runs} runs, {self.callers} callers: {self.runs / self.seconds:.0f} a second, "
            f"{self.errors} errors; memory {self.memory_kib[0]} -> {self.memory_kib[1]} KiB, "
            f"descriptors {self.descriptors[0]} -> {self.descriptors[1]}"
        )


def measure(code: str, rounds: int, pause: float) -> list[Line]:
    """Every contender that this host has, `rounds` times each."""
    with ExitStack() as stack:
        lines = [line for line in _contenders(code, stack) if _can_run(line)]
        for line in lines:
            line.phases.clear()
        for _ in range(rounds):
            for line in lines:
                time.sleep(pause)
                began = time.perf_counter()
                own = line.once()
                taken = time.perf_counter() - began
                line.seconds.append(taken if own is None else own)
    return lines


def _can_run(line: Line) -> bool:
    """Whether it does; what is started once is then started, and not part of a run."""
    try:
        for _ in range(4):
            line.once()
    except (subprocess.CalledProcessError, RuntimeError) as error:
        print(f"{line.name} cannot run it here and is left out: {error}", file=sys.stderr)
        return False
    return True


def throughput(code: str, callers: int, runs: int) -> Rate:
    from ..api import create_runner
    from ..errors import BelljarError

    errors = 0
    before = 0, 0
    warm = runs // 10  # by then every caller has what is kept for it
    numbers = iter(range(runs))
    lock = threading.Lock()
    with create_runner(backend="jail", modules="any") as runner:

        def work() -> None:
            nonlocal errors, before
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                if number == warm:
                    before = _resident(), len(os.listdir("/proc/self/fd"))
                try:
                    failed = not runner.execute(code).success
                except BelljarError:
                    failed = True
                if failed:
                    with lock:
                        errors += 1

        threads = [threading.Thread(target=work) for _ in range(callers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        return Rate(
            callers=callers,
            runs=runs,
            seconds=seconds,
            errors=errors,
            memory_kib=(before[0], _resident()),
            descriptors=(before[1], len(os.listdir("/proc/self/fd"))),
        )


def _contenders(code: str, stack: ExitStack) -> Iterator[Line]:
    from ..backends.jail import JailBackend
    from ..backends.subprocess import SubprocessBackend

    if hasattr(os, "fork"):
        # The floor: what the smallest interpreter pays. A larger process pays more for its fork,
        # and whoever calls us has at least us loaded.
        yield Line(name="bare fork+exit, small python", once=stack.enter_context(Forker()))
        loaded = "import belljar.api, belljar.engine, belljar.backends.jail"
        yield Line(name="bare fork+exit, our caller", once=stack.enter_context(Forker(loaded)))
    plain = [sys.executable, "-I", "-c", code]
    yield Line(name="plain subprocess", once=lambda: _command(plain))
    if shutil.which("bwrap"):
        wrapped = [*_BWRAP, *plain]
        yield Line(name="bubblewrap and python", once=lambda: _command(wrapped))
    if (peer := _sandlock(plain)) is not None:
        yield Line(name="sandlock and python", once=peer)
    for name, backend, settle in (
        ("belljar subprocess", SubprocessBackend(), "now"),
        ("belljar jail, nothing parked", JailBackend(parked=0), "now"),
        ("belljar jail, settled later", JailBackend(), "later"),
        ("belljar jail", JailBackend(), "now"),
    ):
        if backend.probe().available:
            yield _sandboxed(name, backend, code, stack, settle)


def _sandlock(words: list[str]) -> Callable[[], None] | None:
    """A peer from PyPI, where it is installed: Landlock and seccomp around a fresh process."""
    try:
        import sandlock  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    readable = [
        path
        for path in ("/usr", "/lib", "/lib64", "/bin", "/etc", sys.prefix, sys.base_prefix)
        if os.path.exists(path)
    ]
    sandbox = sandlock.Sandbox(fs_readable=readable, fs_writable=["/tmp"])

    def once() -> None:
        result = sandbox.run(words)
        if not result.success:
            raise RuntimeError(f"sandlock: {result}")

    return once


def _sandboxed(
    name: str, backend: object, code: str, stack: ExitStack, settle: Any = "now"
) -> Line:
    from ..api import Runner
    from ..config import Settings
    from ..engine import Engine

    known = backend.name  # type: ignore[attr-defined]
    engine = Engine(Settings(backend=known), backends={known: backend})  # type: ignore[dict-item]
    runner = stack.enter_context(Runner(engine=engine, settle=settle, modules="any"))
    line = Line(name=name, once=lambda: None)

    def once() -> None:
        result = runner.execute(code)
        if not result.success:
            raise RuntimeError(f"{name}: {result.status} {result.stderr}")
        for phase, seconds in result.timings.items():
            line.phases.setdefault(phase, []).append(seconds)

    line.once = once
    return line


class Forker:
    """A clean interpreter that forks when told to, and says how long that took."""

    _PROGRAM = (
        "import os, time\n"
        "while os.read(0, 1):\n"
        "    began = time.perf_counter()\n"
        "    pid = os.fork()\n"
        "    if pid == 0: os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    os.write(1, b'%.9f\\n' % (time.perf_counter() - began))\n"
    )

    def __init__(self, loaded: str = "") -> None:
        self._loaded = loaded

    def __enter__(self) -> Forker:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", f"{self._loaded}\n{self._PROGRAM}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        return self

    def __call__(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"x")
        return float(self._process.stdout.readline())

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()


def _command(words: list[str]) -> None:
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4


def table(lines: list[Line]) -> str:
    floor = lines[0].median
    rows = [f"{'':32} {'median ms':>10} {'min ms':>8} {'ratio':>7}"]
    for line in lines:
        rows.append(
            f"{line.name:32} {line.median * 1000:10.2f} {min(line.seconds) * 1000:8.2f} "
            f"{line.median / floor:7.2f}"
        )
    phases = lines[-1].phases
    if phases:
        told = ", ".join(
            f"{name} {statistics.median(times) * 1000:.2f}" for name, times in phases.items()
        )
        rows.append(f"\nphases of {lines[-1].name}, median ms: {told}")
    return "\n".join(rows)

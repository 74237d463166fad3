"""Two installations of Belljar side by side: what a change costs, as ratios.

    python benchmarks/against.py BASE [CHANGED] [--pairs 200] [--only NAME]... [--json FILE]

BASE and CHANGED are interpreters that each have a Belljar installed; CHANGED is this one unless it
is given. Both, and a second process of BASE, take turns: one measurement of each in a turn, in an
order that changes with every turn, 10 ms apart. A busy moment of the machine then hits all three,
and BASE against itself says how much the ratios of this window are worth. A window where that is
off by more than 3 % does not count: it is reported as such and measured again, a few times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PANDAS = "import pandas as pd\nprint(pd.DataFrame({'a': [1, 2, 3]})['a'].sum())"
CALLERS, RUNS_A_CALLER = 8, 10


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is timed. `scale` is how many pairs are measured for one of a single short run."""

    what: str
    backend: str = "jail"
    code: str = "print(1)"
    kind: str = "run"
    scale: float = 1.0


WORKLOADS = {
    "jail-print": Workload(what="jail, print(1)"),
    "jail-socket": Workload(what="jail, import socket; print(1)", code="import socket\nprint(1)"),
    "jail-pandas": Workload(what="jail, pandas", code=PANDAS),
    "wasm-print": Workload(what="wasm, print(1)", backend="wasm"),
    "command": Workload(what="belljar run -c 'print(1)'", kind="command", scale=0.25),
    "callers": Workload(
        what=f"jail, print(1), {CALLERS} callers, {CALLERS * RUNS_A_CALLER} runs",
        kind="callers",
        scale=0.25,
    ),
}


class Installation:
    """A process of one installation, which times a workload as often as it is asked to."""

    def __init__(self, python: str, workload: str) -> None:
        # -P, or the directory of this file would come first among what it imports.
        self._process = subprocess.Popen(
            [python, "-P", __file__, "--serve", workload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.where = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise SystemExit(f"{self._process.args[0]!r} cannot run the workload: see above")
        return line.strip()

    def seconds(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("once\n")
        self._process.stdin.flush()
        return float(self._answer())

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()


def serve(name: str) -> None:
    """Time the workload for each line that is read; the first answer says which Belljar this is."""
    import belljar

    workload = WORKLOADS[name]
    with ExitStack() as stack:
        once = _prepared(workload, stack)
        for _ in range(4):  # what is started once is no part of a run
            once()
        print(Path(belljar.__file__).parent, flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            once()
            print(f"{time.perf_counter() - began:.9f}", flush=True)


def _prepared(workload: Workload, stack: ExitStack) -> Callable[[], None]:
    if workload.kind == "command":
        command = Path(sys.executable).with_name("belljar")
        words = [str(command)] if command.exists() else [sys.executable, "-P", "-m", "belljar"]
        words += ["run", "--backend", workload.backend, "-c", workload.code]
        return lambda: _command(words)
    import belljar

    runner = stack.enter_context(belljar.create_runner(backend=workload.backend, modules="any"))

    def once() -> None:
        result = runner.execute(workload.code)
        if not result.success:
            raise SystemExit(f"the program failed: {result.status} {result.stderr}")

    def several() -> None:
        for _ in range(RUNS_A_CALLER):
            once()

    def callers() -> None:
        threads = [threading.Thread(target=several) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return callers if workload.kind == "callers" else once


def _command(words: list[str]) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} failed: {done.stderr.decode('utf-8', 'replace')}")


@dataclass(frozen=True, kw_only=True)
class Window:
    """The seconds of one window, by contender: base, changed, and base once more."""

    base: list[float]
    changed: list[float]
    again: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.changed) / statistics.median(self.base)

    @property
    def itself(self) -> float:
        return statistics.median(self.again) / statistics.median(self.base)

    def counts(self, tolerance: float) -> bool:
        return abs(self.itself - 1) <= tolerance

    def to_dict(self) -> dict[str, Any]:
        times = {"base": self.base, "changed": self.changed, "again": self.again}
        found: dict[str, Any] = {
            name: {
                "median_ms": round(statistics.median(taken) * 1000, 3),
                "min_ms": round(min(taken) * 1000, 3),
            }
            for name, taken in times.items()
        }
        pairs = [new / old for old, new in zip(self.base, self.changed, strict=True)]
        return found | {
            "ratio": round(self.ratio, 4),
            "ratio_of_min": round(min(self.changed) / min(self.base), 4),
            "median_of_pairs": round(statistics.median(pairs), 4),
            "itself": round(self.itself, 4),
        }


def window(
    contenders: tuple[Installation, Installation, Installation], pairs: int, pause: float
) -> Window:
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for turn in range(pairs):
        order = [(turn + place) % 3 for place in range(3)]
        for place in order if turn % 2 else reversed(order):
            time.sleep(pause)
            times[place].append(contenders[place].seconds())
    return Window(base=times[0], changed=times[1], again=times[2])


def compare(name: str, base: str, changed: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The windows of one workload, the last of which counts if any does."""
    workload = WORKLOADS[name]
    pairs = max(2, round(asked.pairs * workload.scale))
    windows: list[Window] = []
    with ExitStack() as stack:
        contenders = tuple(
            stack.enter_context(Installation(python, name)) for python in (base, changed, base)
        )
        assert len(contenders) == 3
        if contenders[0].where == contenders[1].where:
            print(f"note: both are {contenders[0].where}", file=sys.stderr)
        while len(windows) < asked.windows:
            windows.append(window(contenders, pairs, asked.pause / 1000))
            if windows[-1].counts(asked.tolerance / 100):
                break
        where = {"base": contenders[0].where, "changed": contenders[1].where}
    for found in windows:
        print(_line(workload.what, found, asked.tolerance / 100), flush=True)
    return {
        "workload": name, "pairs": pairs, **where,
        "counts": windows[-1].counts(asked.tolerance / 100),
        "windows": [found.to_dict() for found in windows],
    }  # fmt: skip


def _line(what: str, found: Window, tolerance: float) -> str:
    base, changed = (statistics.median(times) * 1000 for times in (found.base, found.changed))
    least = min(found.base) * 1000, min(found.changed) * 1000
    verdict = "" if found.counts(tolerance) else "does not count"
    return (
        f"| {what} | {base:.2f} ({least[0]:.2f}) | {changed:.2f} ({least[1]:.2f}) "
        f"| {found.ratio:.3f} | {least[1] / least[0]:.3f} | {found.itself:.3f} | {verdict} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", nargs="?", help="interpreter of the installation compared with")
    parser.add_argument("changed", nargs="?", default=sys.executable, help="default: this one")
    parser.add_argument("--pairs", type=int, default=200, help="a quarter of it for long workloads")
    parser.add_argument("--pause", metavar="MS", type=float, default=10.0)
    parser.add_argument("--windows", type=int, default=4, help="at most, until one counts")
    parser.add_argument("--tolerance", metavar="PERCENT", type=float, default=3.0)
    parser.add_argument("--only", action="append", choices=sorted(WORKLOADS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", choices=sorted(WORKLOADS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    if asked.base is None:
        parser.error("name the interpreter of the installation to compare with")
    if min(asked.pairs, asked.windows) < 1 or asked.pause < 0:
        parser.error("--pairs and --windows are at least 1")
    print(f"Linux {os.uname().release}, {os.cpu_count()} processors, median (least) in ms\n")
    print("| workload | base | changed | ratio | of the least | base against itself | |")
    print("|---|---:|---:|---:|---:|---:|---|", flush=True)
    names = asked.only or list(WORKLOADS)
    found = [compare(name, asked.base, asked.changed, asked) for name in names]
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if lost := [each["workload"] for each in found if not each["counts"]]:
        raise SystemExit(f"no window counts for {', '.join(lost)}: the machine is too busy")


if __name__ == "__main__":
    main()

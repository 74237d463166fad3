"""The wasm backend beside a bare fork and a plain interpreter, and its workers without the engine.

    python benchmarks/wasm.py [--rounds N] [--runs N] [--callers N]

Interleaved: read the ratios. A fork takes the longer the larger the process is: one line is of a
process that has Belljar loaded, one of the smallest interpreter there is. Both are processes of
their own: one that has forked copies hundreds of pages as it goes on, and that would be our time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from belljar.api import Runner
from belljar.backends.base import Cancel
from belljar.backends.wasm import WasmBackend, _order
from belljar.capture import HeadTail
from belljar.cli.bench import Forker
from belljar.config import Settings
from belljar.engine import Engine
from belljar.report import Report
from belljar.types import Request

_TURNS = 10
LOADED = "import belljar.api, belljar.engine, belljar.backends.wasm"
CODE = {"python": "print(1)", "javascript": "console.log(1)"}


def plain_python() -> None:
    subprocess.run(["python3", "-I", "-c", "print(1)"], stdout=subprocess.DEVNULL, check=True)


def latency(backend: WasmBackend, language: str, rounds: int) -> None:
    engine = Engine(Settings(), backends={"wasm": backend})
    runner = Runner(engine=engine, backend="wasm", language=language)

    def through_a_runner() -> None:
        assert runner.execute(CODE[language]).stdout == "1\n"

    ours, fork, plain = f"wasm {language}, warm", "fork + exit, ours loaded", "python3 -I -c"
    small = "fork + exit, smallest"
    through_a_runner()
    through_a_runner()
    with Forker() as forker, Forker(LOADED) as loaded:
        # Who returns something has measured it itself.
        subjects: dict[str, Callable[[], float | None]] = {
            fork: loaded, small: forker, ours: through_a_runner, plain: plain_python,
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, subject in subjects.items():
                time.sleep(0.005)  # until what the last one left is done
                start = time.perf_counter()
                own = subject()
                taken = time.perf_counter() - start
                seconds[name].append(taken if own is None else own)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    for name, found in seconds.items():
        print(f"{name:<26} median {middle[name] * 1e3:6.2f} ms  min {min(found) * 1e3:6.2f} ms")
    print(f"{ours}, by medians: {middle[ours] / middle[fork]:.2f}x the fork of one like this, "
          f"{middle[ours] / middle[small]:.2f}x that of the smallest; the plain interpreter takes "
          f"{middle[plain] / middle[ours]:.2f}x as long (least: "
          f"{min(seconds[plain]) / min(seconds[ours]):.2f}x)")  # fmt: skip


def in_threads(callers: int, runs: int, one: Callable[[int], None]) -> float:
    """Runs a second."""
    left = iter(range(runs))
    lock = threading.Lock()

    def work(number: int) -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            one(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return runs / (time.perf_counter() - start)


def throughput(backend: WasmBackend, language: str, callers: int, runs: int) -> None:
    engine = Engine(Settings(), backends={"wasm": backend})
    request = Request(code=CODE[language], language=language)

    def through_a_runner(number: int) -> None:
        assert engine.run(request, backend="wasm").stdout == "1\n"

    plan = engine.plan(request, backend="wasm")
    order: dict[str, Any] = {**_order(plan, plan.spec)[0], "files": []}
    in_threads(callers, callers * 20, through_a_runner)

    def alone(count: int) -> float:
        with ExitStack() as given_back, Cancel() as cancel:
            workers = [backend._take(plan.spec, given_back) for _ in range(callers)]

            def bare(number: int) -> None:
                captured = {"stdout": HeadTail(1 << 10), "stderr": HeadTail(1 << 10)}
                workers[number].run(
                    order, timeout=30, captured=captured, report=Report(), run="",
                    emit=lambda event: None, cancel=cancel,
                )  # fmt: skip

            return in_threads(callers, count, bare)

    before = resident()
    each = max(callers, runs // _TURNS)
    # In turns, so that a busy moment of the machine hits both.
    turns = [(alone(each), in_threads(callers, each, through_a_runner)) for _ in range(_TURNS)]
    bare_rate, rate = (_TURNS / sum(1 / turn[which] for turn in turns) for which in (0, 1))
    print(f"{language}, {callers} callers: {rate:.0f} runs/s through a runner, {bare_rate:.0f} "
          f"from the same workers in a bare loop ({rate / bare_rate:.0%}); this process grew by "
          f"{(resident() - before) >> 10} KiB in {2 * each * _TURNS} runs")  # fmt: skip


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--callers", type=int, default=8)
    args = parser.parse_args()
    backend = WasmBackend()
    found = backend.probe()
    if not found.available:
        sys.exit(f"{found.reason}; fix: {found.fix}")
    from belljar.wasm import build

    for language, guest in build.GUESTS.items():
        if build.description(guest):
            latency(backend, language, args.rounds)
            throughput(backend, language, args.callers, args.runs)
    backend.close()


if __name__ == "__main__":
    main()

"""HumanEval: every canonical solution passes its tests on every backend, and how fast.

    python benchmarks/humaneval.py HumanEval.jsonl.gz [--backend NAME]...

The file is not part of this repository: https://github.com/openai/human-eval (MIT). Without
`--backend` it runs on those of subprocess, jail, docker and wasm that this host has, one solution
after the other on each of them in turn: read the ratios. The exit code is 1 if one fails anywhere.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from typing import NamedTuple

from belljar.config import load
from belljar.engine import Engine
from belljar.types import Request

BACKENDS = ("subprocess", "jail", "docker", "wasm")


class Task(NamedTuple):
    name: str
    program: str


def read(path: str) -> list[Task]:
    """Each problem as one program that fails unless its solution is right."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    return [
        Task(
            problem["task_id"],
            f"{problem['prompt']}{problem['canonical_solution']}\n{problem['test']}\n"
            f"check({problem['entry_point']})\nprint('passed')\n",
        )
        for problem in problems
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="HumanEval on the backends of this host.")
    parser.add_argument("path", help="HumanEval.jsonl.gz")
    parser.add_argument("--backend", action="append", help="one of them only; may be repeated")
    args = parser.parse_args()
    tasks = read(args.path)
    failed: list[str] = []
    with Engine(load()) as engine:
        seconds: dict[str, list[float]] = {}
        for name in args.backend or BACKENDS:
            found = engine.backend(name).probe()
            if found.available:
                engine.run(Request(code="1"), backend=name)  # what it keeps warm is warm
                seconds[name] = []
            elif args.backend:
                failed.append(f"{name}: {found.reason}; fix: {found.fix}")
            else:
                print(f"{name} is not available: {found.reason}", file=sys.stderr)
        passed = dict.fromkeys(seconds, 0)
        for task in tasks:
            for name, took in seconds.items():
                start = time.perf_counter()
                result = engine.run(Request(code=task.program), backend=name)
                took.append(time.perf_counter() - start)
                if result.success and result.stdout == "passed\n":
                    passed[name] += 1
                else:
                    end = f"{result.status}: {result.stderr[-300:]}"
                    failed.append(f"{name}: {task.name}: {end}")
    print("| backend | passed | total | runs/s | median |\n|---|---|---|---|---|")
    for name, took in seconds.items():
        total, middle = sum(took), statistics.median(took) * 1e3
        print(f"| `{name}` | {passed[name]}/{len(tasks)} | {total:.2f} s | {len(took) / total:.1f} "
              f"| {middle:.1f} ms |")  # fmt: skip
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

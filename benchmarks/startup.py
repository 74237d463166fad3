"""How long it takes to start: the bare interpreter, the import, the command, and a whole run.

    python benchmarks/startup.py [--rounds 21] [--json]

The commands take turns, so that a busy machine is busy for all of them; medians are compared, ratio
and difference are to the bare interpreter of the same rounds. Times are of whole processes, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
BELLJAR = (sys.executable, "-m", "belljar")
COMMANDS: dict[str, tuple[str, ...]] = {
    "python -I -c pass": (sys.executable, "-I", "-c", "pass"),
    "python -c 'import belljar'": (sys.executable, "-c", "import belljar"),
    "belljar --help": (*BELLJAR, "--help"),
    "belljar run -c 'print(1)'": (*BELLJAR, "run", "-c", "print(1)"),
    "belljar run --backend jail -c 'print(1)'": (
        *BELLJAR, "run", "--backend", "jail", "-c", "print(1)",
    ),
}  # fmt: skip


def milliseconds(command: tuple[str, ...]) -> float:
    """One process from start to end; a failing one is an error, not a fast result."""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    began = time.perf_counter()
    done = subprocess.run(command, env=environ, capture_output=True, stdin=subprocess.DEVNULL)
    took = (time.perf_counter() - began) * 1000
    if done.returncode != 0:
        told = done.stderr.decode("utf-8", "replace")
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{told}")
    return took


def measure(rounds: int) -> dict[str, list[float]]:
    """`rounds` times of every command, interleaved; the first turn of each warms up."""
    for command in COMMANDS.values():
        milliseconds(command)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            times[name].append(milliseconds(command))
    return times


def rows(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    bare = statistics.median(next(iter(times.values())))
    return [
        {
            "command": name,
            "median": round(statistics.median(took), 1),
            "min": round(min(took), 1),
            "max": round(max(took), 1),
            "more": round(statistics.median(took) - bare, 1),
            "ratio": round(statistics.median(took) / bare, 2),
        }
        for name, took in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error("--rounds is at least 1")
    found = rows(measure(asked.rounds))
    if asked.json:
        print(json.dumps({"python": sys.version.split()[0], "rounds": asked.rounds, "rows": found}))
        return
    print(f"Python {sys.version.split()[0]}, {asked.rounds} interleaved rounds, ms\n")
    columns = ("median", "min", "max", "more", "ratio")
    print(f"| command | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for row in found:
        print(f"| `{row['command']}` | {' | '.join(str(row[name]) for name in columns)} |")


if __name__ == "__main__":
    main()

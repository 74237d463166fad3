"""Which is the better default for a short pure-Python program: a warm jail, or wasm?

    python benchmarks/choice.py [--rounds N]

Both through one engine, in turn, so that a busy machine slows both alike: read the ratios. The
decision that rests on them is in docs/choosing.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request

PROGRAMS = {
    "print(1)": "print(1)",
    "a little text": "import json, re\n"
    "print(len(re.findall(r'\\d+', json.dumps({str(i): i for i in range(200)}))))",
    "10,000 additions": "print(sum(i * i % 7 for i in range(10_000)))",
    "1,000,000 additions": "print(sum(i * i % 7 for i in range(1_000_000)))",
}
PLACES = ("jail", "wasm")


def compare(name: str, rounds: int, ways: dict[str, Callable[[], object]]) -> None:
    seconds: dict[str, list[float]] = {place: [] for place in ways}
    for way in ways.values():
        way()
        way()
    for _ in range(rounds):
        for place, way in ways.items():
            time.sleep(0.003)  # until what the last one left is done
            start = time.perf_counter()
            way()
            seconds[place].append(time.perf_counter() - start)
    middle = {place: statistics.median(found) * 1e3 for place, found in seconds.items()}
    least = {place: min(found) * 1e3 for place, found in seconds.items()}
    cells = [f"{middle[place]:.2f} / {least[place]:.2f} ms" for place in PLACES]
    ratios = [each["wasm"] / each["jail"] for each in (middle, least)]
    print(f"| {name} | {' | '.join(cells)} | {ratios[0]:.2f} / {ratios[1]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A warm jail against wasm.")
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    print("| program | `jail` median / least | `wasm` median / least | wasm : jail |")
    print("|---|---|---|---|")
    with Engine(Settings()) as engine:
        for name, code in PROGRAMS.items():
            ways: dict[str, Callable[[], object]] = {
                place: partial(engine.run, Request(code=code), backend=place) for place in PLACES
            }
            compare(name, rounds // 10 if "000,000" in name else rounds, ways)
    words = [sys.executable, "-m", "belljar", "run", "-c", "print(1)", "--backend"]
    cold: dict[str, Callable[[], object]] = {
        place: partial(subprocess.run, [*words, place], capture_output=True, check=True)
        for place in PLACES
    }
    compare("`belljar run` from a cold shell", rounds // 15, cold)


if __name__ == "__main__":
    main()

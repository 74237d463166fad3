"""What a run in a container costs: `docker run`, a cold run of ours, and one from the pool.

    python benchmarks/containers.py [--runs N] [--runtime runc] [--callers N]

Needs an engine (DOCKER_HOST), its command line client and `belljar images build python`. The three
are measured in turns, so that a noisy machine is noisy for all of them. `docker run` is given the
same limits and closed doors, and starts nothing but the interpreter.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from belljar.backends.docker import DockerBackend
from belljar.backends.gvisor import GvisorBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.images.names import image_name
from belljar.types import Request


def docker_run(runtime: str) -> None:
    flags = (
        f"run --rm -i --runtime {runtime} --network none --read-only --cap-drop ALL "
        "--security-opt no-new-privileges --memory 256m --memory-swap 256m --cpus 1 "
        "--pids-limit 512 --log-driver none --user 65534:65534 --tmpfs /tmp:size=16m "
    )
    command = ["docker", *flags.split(), image_name("python"), "python3", "-I", "-c", "print(1)"]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=True)
    assert done.stdout == b"1\n"


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def rate(action: Callable[[], object], runs: int, callers: int) -> float:
    """How many a second, of `runs` by `callers` threads that do not pause."""
    began = time.perf_counter()
    with ThreadPoolExecutor(callers) as threads:
        for done in [threads.submit(action) for _ in range(runs)]:
            done.result()
    return runs / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--runtime", default="runc", help="of the engine; runsc is gVisor")
    parser.add_argument("--callers", type=int, help="back to back: runs a second with so many")
    args = parser.parse_args()
    runs, runtime = args.runs, args.runtime
    kind = GvisorBackend if runtime == "runsc" else DockerBackend
    cold, warm = kind(pool=0), kind(pool=2)
    engines = [Engine(Settings(), backends={each.name: each}) for each in (cold, warm)]

    def ours(engine: Engine) -> None:
        result = engine.run(Request(code="print(1)"), level="standard", backend=cold.name)
        assert result.stdout == "1\n", result

    for _ in range(3):  # so that the pool is full
        ours(engines[1])
    if args.callers:
        for _ in range(3):
            plain = rate(lambda: docker_run(runtime), runs, args.callers)
            pooled = rate(lambda: ours(engines[1]), runs, args.callers)
            print(f"docker run {plain:5.1f} runs/s, from the pool {pooled:5.1f} runs/s")
        for engine in engines:
            engine.close()
        return
    taken: dict[str, list[float]] = {"docker run": [], "cold": [], "warm": []}
    for _ in range(runs):
        taken["docker run"].append(timed(lambda: docker_run(runtime)))
        taken["cold"].append(timed(lambda: ours(engines[0])))
        assert warm._pool is not None
        warm._pool.settled(60)
        taken["warm"].append(timed(lambda: ours(engines[1])))
        warm._pool.settled(60)
    for engine in engines:
        engine.close()
    base = statistics.median(taken["docker run"])
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:12} median {median:7.1f} ms, min {min(times):7.1f} ms, {median / base:5.2f}x")
    print(warm.metrics())


if __name__ == "__main__":
    main()

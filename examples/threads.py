"""One runner, many threads: score generated programs without one touching another."""

from concurrent.futures import ThreadPoolExecutor

import belljar

CANDIDATES = [
    "def double(n): return n * 2",
    "def double(n): return n + n",
    "def double(n): return n ** 2",
    "def double(n): raise NotImplementedError",
    "def double(n):\n    while True: pass",
]
TEST = "\nassert all(double(n) == 2 * n for n in range(10))"

with (
    belljar.create_runner(level="standard", timeout="2s", memory="256M") as runner,
    ThreadPoolExecutor(4) as pool,
):
    results = pool.map(lambda code: runner.execute(code + TEST), CANDIDATES)
    for code, result in zip(CANDIDATES, results, strict=True):
        why = result.error.type if result.error else ""
        print(f"{result.status} {why}".ljust(30), code.splitlines()[-1].strip())

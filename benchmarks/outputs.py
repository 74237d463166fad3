"""What a large output costs the host with `outputs_to`: memory and time, on each backend.

    python benchmarks/outputs.py [--size 1024] [--backends jail,landlock,subprocess] [--into DIR]

The program writes one file of `--size` MiB; the host's memory is the growth of its peak (VmHWM)
over one small run before. Each backend has a process of its own, because a peak stays.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path

PROGRAM = """
piece = bytes(range(256)) * 4096
with open("large.bin", "wb") as file:
    for _ in range({size}):
        file.write(piece)
"""


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)


def measure(backend: str, size: int, into: str | None) -> None:
    """Print one line."""
    import belljar

    directory = Path(tempfile.mkdtemp(dir=into))
    limits = {"memory": f"{2 * size + 1024}M", "disk": f"{size + 64}M", "timeout": 600}
    options = {"backend": backend, "fallback": False, **limits}
    try:
        belljar.run("open('a', 'w').write('a')", outputs_to=directory, **options).check()
        before, began = peak(), time.perf_counter()
        result = belljar.run(PROGRAM.format(size=size), outputs_to=directory, **options).check()
        took, grown = time.perf_counter() - began, peak() - before
        written = (directory / "large.bin").stat().st_size
        assert written == size << 20, (written, result.warnings)
        ran = result.timings["run"]
        rate = size / (took - ran)
        print(
            f"{backend:12} {grown / (1 << 20):8.1f} MiB {ran:8.2f} s {took - ran:8.2f} s "
            f"{rate:8.0f} MiB/s",
            flush=True,
        )
    except belljar.BelljarError as error:
        print(f"{backend:12} {error.message}", flush=True)
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="MiB of the file")
    parser.add_argument("--backends", default="jail,landlock,subprocess,bubblewrap,firejail,wasm")
    parser.add_argument("--into", help="a directory of the file system to write to")
    args = parser.parse_args()
    print(f"{'backend':12} {'host memory':>12} {'program':>10} {'the rest':>10}")
    for backend in args.backends.split(","):
        given = (backend, args.size, args.into)
        process = multiprocessing.get_context("spawn").Process(target=measure, args=given)
        process.start()
        process.join()


if __name__ == "__main__":
    main()

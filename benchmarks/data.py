"""Data into a run and back, beside three other ways: time by size, on each backend.

    python benchmarks/data.py [--backends jail,subprocess] [--rounds N] [--write DIRECTORY]

The others are Arrow in one process (pandas -> IPC stream -> pandas), pickle through pipes to a
plain subprocess that already has pandas, and a Jupyter kernel where `ipykernel` and
`jupyter_client` are installed. Everything is warm and interleaved, one measurement of each per
round. Read the ratios.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import pickle
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import belljar

# 16 MB is a frame of a million rows and two columns.
SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 16_000_000, 100_000_000)
MOST_ROWS = MOST_FLOATS = 1_000_000
VALUE = "128M"
_PEER = r"""
import pickle, sys
import numpy
import pandas
stream_in, stream_out = sys.stdin.buffer, sys.stdout.buffer
while True:
    size = int.from_bytes(stream_in.read(8), "big")
    if not size:
        break
    names, code = pickle.loads(stream_in.read(size))
    data = pickle.dumps(eval(code, {"numpy": numpy, **names}), protocol=5)
    stream_out.write(len(data).to_bytes(8, "big"))
    stream_out.write(data)
    stream_out.flush()
"""


class Case:
    """One crossing: variables, and the expression whose value comes back. `size` is its bytes."""

    def __init__(self, name: str, given: dict[str, Any], code: str, size: int) -> None:
        self.name, self.given, self.code, self.size = name, given, code, size
        self.of_library = "df" in given or "numpy" in code


def cases(largest: int, wanted: str = "") -> Iterator[Case]:
    """Every kind of data from 10 kB to `largest` bytes; of frames, the given and the returned one
    are `size` bytes each."""
    import numpy
    import pandas

    yield Case("nothing", {}, "None", 0)
    sizes = [size for size in SIZES if size <= largest]
    for kind in ("frame in", "frame in and back", "bytes in", "bytes back", "array back",
                 "list of floats back"):  # fmt: skip
        if wanted not in kind:
            continue
        for size in sizes:
            rows, number = size // 16, size // 8
            match kind:
                case "bytes in":
                    yield Case(kind, {"b": bytes(size)}, "len(b)", size)
                case "bytes back":
                    yield Case(kind, {}, f"b'x' * {size}", size)
                case "array back":
                    yield Case(kind, {}, f"numpy.arange({number}) / 7", size)
                case "list of floats back" if size <= MOST_FLOATS * 8:
                    yield Case(kind, {}, f"[i / 7 for i in range({number})]", size)
                case "frame in" | "frame in and back" if size <= MOST_ROWS * 16:
                    column = numpy.random.default_rng(1).random(rows)
                    frame = pandas.DataFrame({"n": numpy.arange(rows), "x": column})
                    yield Case(kind, {"df": frame}, "len(df)" if kind[-2:] == "in" else "df", size)


class NotThisWay(Exception):
    """This way is not for such data."""


class Sandbox:
    """A backend of ours, warm."""

    def __init__(self, backend: str) -> None:
        self.name = backend
        self._level = "permissive" if backend == "inprocess" else "standard"

    def run(self, case: Case) -> Any:
        if self.name == "wasm" and case.of_library:
            raise NotThisWay("its guest has the standard library alone")
        result = belljar.run(
            f"import numpy, pandas\n{case.code}" if case.of_library else case.code,
            backend=self.name, level=self._level, context=case.given, memory="4G", timeout=120,
            value=VALUE,
        )  # fmt: skip
        if not result.success or (case.size and result.value is None):
            raise RuntimeError(f"{result.status}: {result.error or result.warnings}")
        return result.value

    def close(self) -> None:
        return None


class Arrow:
    """The same data through an Arrow stream, in this very process."""

    name = "Arrow, one process"

    def run(self, case: Case) -> Any:
        import pyarrow

        if "df" not in case.given:
            raise NotThisWay("no table")
        table = pyarrow.Table.from_pandas(case.given["df"])
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return pyarrow.ipc.open_stream(sink.getvalue()).read_all().to_pandas()

    def close(self) -> None:
        return None


class Pickle:
    """A plain subprocess that unpickles what it is given: no wall at all."""

    name = "pickle, pipes"

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, case: Case) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        data = pickle.dumps((case.given, case.code), protocol=5)
        process.stdin.write(len(data).to_bytes(8, "big"))
        process.stdin.write(data)
        process.stdin.flush()
        size = int.from_bytes(process.stdout.read(8), "big")
        return pickle.loads(process.stdout.read(size))  # noqa: S301 - our own

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Kernel:
    """A Jupyter kernel, which has no way for data but its messages: pickle as base64 in both."""

    name = "Jupyter kernel"

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel()
        self._client.execute_interactive("import base64, pickle, numpy, pandas", timeout=60)

    def run(self, case: Case) -> Any:
        names = base64.b64encode(pickle.dumps(case.given, protocol=5)).decode()
        found: list[str] = []

        def heard(message: dict[str, Any]) -> None:
            if message["msg_type"] == "execute_result":
                found.append(message["content"]["data"]["text/plain"])

        self._client.execute_interactive(
            f"globals().update(pickle.loads(base64.b64decode({names!r})))\n"
            f"base64.b64encode(pickle.dumps({case.code}, protocol=5)).decode()",
            timeout=120, output_hook=heard,
        )  # fmt: skip
        return pickle.loads(base64.b64decode(found[0].strip("'")))  # noqa: S301 - our own

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@contextmanager
def ways(backends: list[str]) -> Iterator[list[Any]]:
    with ExitStack() as cleanup:
        made: list[Any] = []
        factories: list[Callable[[], Any]] = [lambda name=each: Sandbox(name) for each in backends]
        factories += [Arrow, Pickle]
        if all(map(importlib.util.find_spec, ("ipykernel", "jupyter_client"))):
            factories.append(Kernel)
        for factory in factories:
            made.append(factory())
            cleanup.callback(made[-1].close)
        yield made


Found = dict[str, dict[int, dict[str, list[float]]]]


def measure(backends: list[str], rounds: int, largest: int, wanted: str = "") -> Found:
    """Seconds by kind, size and way, interleaved; a way that cannot do a case has no entry."""
    found: Found = {}
    with ways(backends) as made:
        for case in cases(largest, wanted):
            times: dict[str, list[float]] = {way.name: [] for way in made}
            found.setdefault(case.name, {})[case.size] = times
            for number in range(rounds + 2):  # the first two warm everything up
                for way in made:
                    if way.name not in times:
                        continue
                    began = time.perf_counter()
                    try:
                        value = way.run(case)
                    except Exception as problem:  # noqa: BLE001 - any library's
                        if not isinstance(problem, NotThisWay):
                            print(f"{way.name}, {case.name}: {problem}"[:300], file=sys.stderr)
                        del times[way.name]
                        continue
                    del value
                    if number >= 2:
                        times[way.name].append(time.perf_counter() - began)
    return found


def peak_growth(backend: str, size: int) -> float | None:
    """By how many times the value the host's peak memory grows for `size` bytes of one value."""
    code = (
        "import belljar\n"
        "from functools import partial\n"
        f"run = partial(belljar.run, backend={backend!r}, memory='4G', value='{VALUE}')\n"
        # Not what `getrusage` says, which begins with the peak of the process that forked this one.
        "import re\n"
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', status())[1]) << 10\n"
        "run('b\"x\" * 1000')\n"
        "before = peak()\n"
        f"value = run('b\"x\" * {size}').value\n"
        f"assert len(value) == {size}\n"
        f"print((peak() - before) / {size})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def table(found: Found) -> str:
    """For each kind a table: sizes down, ways across."""
    lines = []
    for kind, by_size in found.items():
        names = list(next(iter(by_size.values())))
        lines += [f"## {kind}, median ms", "", f"| bytes | {' | '.join(names)} |"]
        lines.append("|---" * (len(names) + 1) + "|")
        for size, times in by_size.items():
            cells = [
                f"{statistics.median(times[name]) * 1000:.1f}" if times.get(name) else ""
                for name in names
            ]
            lines.append(f"| {size:_} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def plot(found: Found, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    kinds = {kind: by_size for kind, by_size in found.items() if len(by_size) > 1}
    figure, places = pyplot.subplots(len(kinds), 1, figsize=(7, 4 * len(kinds)), squeeze=False)
    for (kind, by_size), place in zip(kinds.items(), places[:, 0], strict=True):
        for name in next(iter(by_size.values())):
            sizes = [size for size, times in by_size.items() if times.get(name)]
            medians = [statistics.median(by_size[size][name]) * 1000 for size in sizes]
            place.plot(sizes, medians, marker="o", label=name)
        place.set(title=kind, xlabel="bytes", ylabel="median ms", xscale="log", yscale="log")
        place.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="jail", help="comma-separated; the first is compared")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--largest", type=int, default=max(SIZES), help="bytes of a value")
    parser.add_argument("--case", default="", help="only kinds with this in their name")
    parser.add_argument("--write", type=Path, help="write data.md, data.json and data.png there")
    args = parser.parse_args()
    backends = args.backends.split(",")
    found = measure(backends, args.rounds, args.largest, args.case)
    text = f"Linux {platform.release()}, Python {platform.python_version()}\n\n{table(found)}"
    for backend in backends:
        grown = peak_growth(backend, args.largest)
        times = "unknown: the run failed" if grown is None else f"{grown:.2f}x"
        text += (
            f"\n- `{backend}`, {args.largest:_} bytes back: the host's peak memory grows by {times}"
        )
    print(text)
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "data.md").write_text(f"# Data benchmark\n\n{text}\n")
        (args.write / "data.json").write_text(json.dumps(found, indent=1) + "\n")
        if importlib.util.find_spec("matplotlib") is not None:
            plot(found, args.write / "data.png")


if __name__ == "__main__":
    main()

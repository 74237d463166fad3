"""The jail beside what others do, as one Markdown table a program, and a plot where matplotlib is.

    python benchmarks/jail.py [--rounds N] [--write DIRECTORY]

Interleaved and paced: read the ratios. See `belljar bench --help` for single measurements.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from pathlib import Path

from belljar.cli.bench import PROGRAMS, Line, measure, throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--runs", type=int, default=2000, help="for the throughput table")
    parser.add_argument("--write", type=Path, help="write jail.md, jail.json and jail.png there")
    args = parser.parse_args()
    text = [f"Linux {platform.release()}, Python {platform.python_version()}", ""]
    found: dict[str, object] = {}
    measured: dict[str, list[Line]] = {}
    for name, code in PROGRAMS.items():
        if name == "pandas" and importlib.util.find_spec("pandas") is None:
            continue
        rounds = args.rounds if name == "print" else max(5, args.rounds // 5)
        lines = measured[name] = measure(code, rounds, 0.01)
        found[name] = [line.to_dict() for line in lines]
        text += [
            f"## {name}",
            "",
            "| | median ms | min ms | ratio of medians |",
            "|---|---|---|---|",
        ]
        for line in lines:
            text.append(
                f"| {line.name} | {line.median * 1000:.2f} | {min(line.seconds) * 1000:.2f} "
                f"| {line.median / lines[0].median:.2f} |"
            )
        text.append("")
    text += ["## throughput, print", ""]
    rates = [throughput(PROGRAMS["print"], callers, args.runs) for callers in (1, 2, 8, 64)]
    found["throughput"] = [rate.to_dict() for rate in rates]
    text += [f"- {rate.text()}" for rate in rates]
    print("\n".join(text))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "jail.md").write_text("# Jail benchmark\n\n" + "\n".join(text) + "\n")
        (args.write / "jail.json").write_text(json.dumps(found, indent=1) + "\n")
        if importlib.util.find_spec("matplotlib") is not None:
            plot(measured, args.write / "jail.png")


def plot(measured: dict[str, list[Line]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(len(measured), 1, figsize=(8, 2.2 * len(measured)))
    for (name, lines), place in zip(measured.items(), places, strict=True):
        place.barh([line.name for line in lines], [line.median * 1000 for line in lines])
        place.set_xscale("log")
        place.set_title(f"{name}, median ms")
        place.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()

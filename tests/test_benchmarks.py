"""Benchmarks are run by hand; that each still starts is asked here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_starts_and_says_how_it_is_used(path: Path) -> None:
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: {path.name}" in done.stdout

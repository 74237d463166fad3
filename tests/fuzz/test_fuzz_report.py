"""The fuzz target itself works, and a short run of it finds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGET = Path(__file__).with_name("fuzz_report.py")
SEEDS = {
    "value": b'\x01\x05{"$":"tuple","v":[1,2.5,"x"]}',
    "error": b'{"type":"E","message":"m","traceback":"t","errno":28}',
    "display": b'{"text/plain":"x","image/png":"iVBO"}',
}


def test_a_short_fuzzing_of_the_report_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, seed in SEEDS.items():
        (corpus / name).write_bytes(seed)
    ended = subprocess.run(
        [sys.executable, TARGET, corpus, "-runs=3000", "-seed=1", "-max_len=2000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Done 3000 runs" in ended.stderr
    assert not list(tmp_path.glob("crash-*"))

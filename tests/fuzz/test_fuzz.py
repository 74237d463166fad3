"""The fuzz targets work, and find nothing in the time that they are given.

BELLJAR_FUZZ_SECONDS=3600 pytest tests/fuzz gives each of them an hour.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = int(os.environ.get("BELLJAR_FUZZ_SECONDS", "20"))
SEEDS = {
    "value": b'\x01\x05{"$":"tuple","v":[1,2.5,"x"]}',
    "error": b'{"type":"E","message":"m","traceback":"t","errno":28}',
    "display": b'{"text/plain":"x","image/png":"iVBO"}',
    # What a target decides by: enough of it to get everywhere from the start.
    **{f"decisions{n}": random.Random(n).randbytes(300) for n in range(40)},
}


@pytest.mark.timeout(2 * SECONDS + 200)
@pytest.mark.parametrize("target", ["fuzz_report", "fuzz_values"])
def test_fuzzing_finds_nothing(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, seed in SEEDS.items():
        (corpus / name).write_bytes(seed)
    program = Path(__file__).with_name(f"{target}.py")
    ended = subprocess.run(
        [sys.executable, program, corpus, f"-max_total_time={SECONDS}", "-max_len=2000",
         "-rss_limit_mb=2000", *(["-seed=1"] if SECONDS <= 20 else [])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=2 * SECONDS + 150,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    done = re.search(r"Done (\d+) runs", ended.stderr)
    assert done is not None
    assert int(done[1]) > 100
    assert not list(tmp_path.glob("crash-*"))

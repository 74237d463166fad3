"""Every example is run as a reader would run it, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import belljar

EXAMPLES = Path(__file__).parent.parent / "examples"

# A program to be run inside, with the command that README gives; the others use the library.
INSIDE = ("first.py",)

PROMISES = {
    "files.py": ["debug.log: 42 bytes, content not collected", '{"rows": 2, "total": 42}'],
    "first.py": [
        "2 ** 64 = 18446744073709551616",
        "reading the password file: ",
        "opening a connection: ",
    ],
    "hello.py": ["hello from the jar", "status=success exit_code=0"],
    "limits.py": [
        "an endless loop: timeout",
        "a huge list: oom",
        "an endless line: success, no exception, truncated=True",
        "a mistake: error, ZeroDivisionError",
        "timeout: enforced by ",
    ],
    "streaming.py": ["[live] ", "step 2", "cancelled, and the program is gone"],
    "threads.py": ["success", "error AssertionError", "error NotImplementedError", "timeout"],
    "values.py": ["mean: 20.33", "until: datetime.date(2028, 2, 29)", r"raw: b'\x00\x00\x00'"],
}


def test_every_example_has_its_promise() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PROMISES)


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_the_example_does_what_it_promises(name: str, tmp_path: Path) -> None:
    source = Path(belljar.__file__).parent.parent
    env = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    command = [sys.executable, *(["-m", "belljar", "run"] if name in INSIDE else [])]
    done = subprocess.run(
        [*command, str(EXAMPLES / name)],
        env={**env, "PYTHONPATH": str(source)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for promise in PROMISES[name]:
        assert promise in done.stdout, done.stdout
    assert list(tmp_path.iterdir()) == []

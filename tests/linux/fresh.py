"""A fresh interpreter for tests that change the process they run in for good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import belljar

SOURCE = str(Path(belljar.__file__).parents[1])


def ask(code: str, *arguments: object) -> Any:
    """`code` defines `answer(*arguments)`; what that returned, as JSON."""
    program = (
        f"import json, sys\nsys.path.insert(0, {SOURCE!r})\n{code}\n"
        "print(json.dumps(answer(*json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

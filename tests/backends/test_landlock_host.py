"""The landlock backend where user namespaces are really forbidden, as root and as nobody.

A process puts a filter on itself that refuses them (`no_namespaces_host.py`), and runs Belljar.
When the tests run as root, the package is also copied to where everybody can read it, and another
interpreter runs it as a user that does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

import belljar
from belljar.backends.landlock import LandlockBackend

_FOUND = LandlockBackend().probe()
pytestmark = [
    pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason),
    pytest.mark.slow,
]

NOBODY = 63995
SYSTEM_PYTHON = "/usr/bin/python3"
HOST = Path(__file__).with_name("no_namespaces_host.py")
# What a layer holds comes first, and what happens without it second: the control arm.
ANSWERS: dict[str, Any] = {
    "host": [False, "namespaces", True],
    "auto_standard": ["landlock", "landlock", 42],
    "auto_strict": ["min_isolation"],
    "floor": ["landlock", ["enforced"]],
    "read_canary": ["EACCES", "done"],
    "chmod_canary": [0o600, 0o644],
    "own_mode": [0o750, "ran\n"],
    "unix_socket": ["EAFNOSUPPORT", "done"],
    "network": ["EAFNOSUPPORT", "done"],
    "signal_scoped": ["EPERM", True, "done", False],
    "signal_filtered": ["EPERM", True, "done", False],
    "own_signal": ["error", True],
    "limits_of_others": ["EPERM", "done"],
    "watch_directory": [False, True],
    "attribute": ["ENOTSUP", "done"],
    "processes_in_sight": ["EACCES", "done"],
    "memory": ["oom", "memory", 0],
    "family": ["oom", "memory", 0],
    "forks": ["limit", "pids", 0],
    "forks_of_one": ["limit", "pids", 0],
    "threads_of_one": [["limit", "pids", 0], True],
    "unseen_files": [["limit", "disk", 0], True],
    "unreadable": ["limit", "disk", 0],
    "hoard": ["error", "PermissionError"],
    "processor": ["timeout", True],
    "timeout": ["timeout", "timeout", 0],
    "left": [],
}


def ask(python: str, source: Path, script: Path, before: list[str]) -> dict[str, Any]:
    questions = [name for name in ANSWERS if name != "left"]
    done = subprocess.run(
        [*before, python, "-B", str(script), *questions],
        capture_output=True,
        text=True,
        timeout=280,
        env={"PYTHONPATH": str(source), "PATH": os.environ.get("PATH", "")},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def as_myself() -> dict[str, Any]:
    return ask(sys.executable, Path(belljar.__file__).parents[1], HOST, [])


@pytest.fixture(scope="module")
def as_nobody() -> Iterator[dict[str, Any]]:
    if os.geteuid() != 0:
        pytest.skip("not root: `as_myself` is an ordinary user")
    if not os.path.exists(SYSTEM_PYTHON) or shutil.which("setpriv") is None:
        pytest.skip("no setpriv, or no interpreter that another user could run")
    directory = Path(tempfile.mkdtemp(prefix="belljar-unprivileged-", dir="/var/tmp"))
    try:
        directory.chmod(0o755)
        shutil.copytree(Path(belljar.__file__).parent, directory / "belljar")
        shutil.copy(HOST, directory)
        switch = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        yield ask(SYSTEM_PYTHON, directory, directory / HOST.name, switch)
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("question", ANSWERS)
def test_without_user_namespaces(as_myself: dict[str, Any], question: str) -> None:
    assert as_myself[question] == ANSWERS[question]


@pytest.mark.parametrize("question", ANSWERS)
def test_without_user_namespaces_as_nobody(as_nobody: dict[str, Any], question: str) -> None:
    assert as_nobody[question] == ANSWERS[question]

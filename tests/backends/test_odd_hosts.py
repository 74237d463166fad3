"""What `probe` calls available runs a program, also on hosts unlike the one it was built on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

from belljar.backends import registry

HOST = Path(__file__).with_name("odd_host.py")
BACKENDS = ("jail", "landlock", "subprocess", "bubblewrap", "firejail", "nsjail", "wasm")
_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to arrange")


def answers(peculiarity: str, backends: tuple[str, ...] = BACKENDS) -> dict[str, Any]:
    here = [name for name in backends if registry.load(name).probe().available]
    done = subprocess.run(
        [sys.executable, "-B", str(HOST), peculiarity, *here],
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert len(told) == len(here) + 1
    return told


@pytest.mark.parametrize(
    "peculiarity",
    [
        "umask",
        "umask_027",
        pytest.param("masked_proc", marks=_ROOT),
        pytest.param("no_capabilities", marks=_ROOT),
    ],
)
def test_available_backends_run_a_program(peculiarity: str) -> None:
    told = answers(peculiarity)
    assert told.pop("auto")[1] == 42
    for name, (available, *outcome) in told.items():
        assert outcome == [42] if available else outcome[0] == "backend_unavailable", (name, told)
    assert any(available for available, *_ in told.values())


@pytest.mark.skipif(not registry.load("jail").probe().available, reason="no jail here")
def test_auto_goes_on_to_the_next_backend_where_the_jail_cannot_be_set_up() -> None:
    told = answers("closed_after_probing", ("jail",))
    assert told["jail"][:2] == [True, "backend_failed"]  # the control arm: named
    backend, value, warnings = told["auto"]
    assert backend in ("landlock", "subprocess") and value == 42
    assert any("'jail' could not be used: " in warning for warning in warnings), warnings

"""Other kernels than this host's: Debian's 6.1 and 6.12, in a machine with cgroup version 2 only.

The image takes a minute to make and is kept; then each of these takes some minutes, because the
processor is emulated. What they run in there, tests/backends/test_jail_limits.py among them, is
part of every whole run on this host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "other-kernel"
TOOLS = ("qemu-system-x86_64", "mmdebstrap", "mke2fs", "debugfs", "git")


@pytest.mark.xdist_group("other-kernel")  # one machine at a time
@pytest.mark.timeout(7200)
@pytest.mark.soak  # emulated beside other tests it would be too slow for its own deadlines
@pytest.mark.parametrize("who", ["root", "user", "delegated"])
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_the_jail_and_its_control_groups_hold_there(suite: str, who: str) -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root can make the image")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--suite", suite, "--as", who], capture_output=True, text=True
    )
    if done.returncode == 3:
        pytest.skip("the image could not be made: no package mirror?")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

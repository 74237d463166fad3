"""What tests of process backends share: one backend to run on, and who is still alive."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.api import REQUEST_KEYS, build_request
from belljar.backends.subprocess import SubprocessBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.events import Emit
from belljar.linux import probe
from belljar.linux.probe import HostFacts
from belljar.types import Result


def facts(**lacking: Any) -> HostFacts:
    """This host, as if it had less."""
    return replace(probe.facts(), **lacking)


NO_NAMESPACES: dict[str, Any] = {"userns": False, "userns_problem": "test", "proc_mount": False}


def run(
    code: str | None = None,
    *,
    command: Iterable[str] = (),
    disable: Iterable[str] = (),
    lacking: dict[str, Any] | None = None,
    settings: Settings | None = None,
    emit: Emit | None = None,
    **options: Any,
) -> Result:
    """One run on the subprocess backend, with layers off or on a poorer host."""
    backend = SubprocessBackend(disable=frozenset(disable), facts=facts(**(lacking or {})))
    wishes = {key: options.pop(key) for key in list(options) if key not in REQUEST_KEYS}
    request = build_request(code=code, command=command, **options)
    with Engine(settings or Settings(), backends={"subprocess": backend}) as engine:
        return engine.run(request, wishes=wishes, emit=emit)


FACTS = facts()
needs_namespaces = pytest.mark.skipif(not FACTS.userns, reason=FACTS.userns_problem or "no userns")
needs_proc = pytest.mark.skipif(not FACTS.proc_mount, reason=FACTS.proc_mount_problem or "no proc")
needs_landlock = pytest.mark.skipif(not FACTS.landlock_abi, reason="no Landlock")
needs_seccomp = pytest.mark.skipif(not FACTS.seccomp, reason=FACTS.seccomp_problem or "no seccomp")
needs_cgroup = pytest.mark.skipif(FACTS.cgroup is None, reason="no control groups")

# The beginning of a guest that tries things and tells how each went.
ATTEMPT = """
import errno, os
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
"""


def mark() -> str:
    """A word that nothing else on this machine says."""
    return f"belljar-canary-{secrets.token_hex(8)}"


def marked(token: str) -> list[int]:
    """The living processes whose environment or command line has `token`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]
            told = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:  # gone, or not ours to read
            continue
        if token.encode() in told and state != b"Z":
            found.append(int(entry.name))
    return found


def gone(token: str, seconds: float = 10.0) -> bool:
    """Whether every marked process ends; waits for those that are dying."""
    deadline = time.monotonic() + seconds
    while marked(token):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def run_directories(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"belljar-{pid}-*"))


def control_groups(pid: int) -> list[Path]:
    home = probe.facts().cgroup
    if home is None:
        return []
    return [
        path for directory in home.directories for path in Path(directory).glob(f"belljar-{pid}-*")
    ]

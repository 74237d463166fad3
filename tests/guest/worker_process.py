"""A real worker in a real interpreter over a real socket, for the tests of the guest."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belljar.guest import protocol
from belljar.report import Report, run_frame
from belljar.types import Request

# Long enough for a busy machine; a worker that hangs is killed and fails its test.
DEADLINE = 60.0


@dataclass(frozen=True)
class Run:
    """What a worker left behind. `timed_out` means that we ended it, as a backend would have."""

    exit_code: int
    stdout: str
    stderr: str
    report: Report
    timed_out: bool = False

    @property
    def value(self) -> Any:
        return self.report.value

    @property
    def error_type(self) -> str | None:
        return None if self.report.error is None else self.report.error.type

    @property
    def traceback(self) -> str:
        assert self.report.error is not None
        return self.report.error.traceback


def run_program(
    code: str,
    *,
    python: str = sys.executable,
    stdin: bytes = b"",
    args: tuple[str, ...] = (),
    context: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    filename: str = "main.py",
    deadline: float = DEADLINE,
) -> Run:
    """Run `code` as a backend does, but for the sandbox around it."""
    frame = run_frame(Request(code=code, args=args, context=context or {}), filename)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        return _drive(python, frame, given.fileno(), cwd or Path(directory), env, deadline)


def _drive(
    python: str,
    frame: bytes,
    stdin: int,
    cwd: Path,
    env: Mapping[str, str] | None,
    deadline: float,
) -> Run:
    ours, theirs = socket.socketpair()
    report, end = Report(), time.monotonic() + deadline
    with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with theirs:
            process = subprocess.Popen(
                [python, "-I", "-c", protocol.boot_code(protocol.GUEST_DIR, theirs.fileno())],
                stdin=stdin,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(cwd), **(env or {})},
                pass_fds=[theirs.fileno()],
            )
        timed_out = False
        try:
            ours.settimeout(deadline)
            ours.sendall(frame)
            while data := ours.recv(65536):
                report.feed(data)
                ours.settimeout(max(0.01, end - time.monotonic()))
            process.wait(max(0.01, end - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            timed_out = True
        finally:
            process.kill()
            process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    return Run(process.returncode, texts[0], texts[1], report, timed_out)


@functools.cache
def interpreters() -> dict[str, str]:
    """Every CPython of this machine that a guest may be: version to path, our own first."""
    candidates = [Path(sys.executable)]
    for minor in range(9, 20):
        found = shutil.which(f"python3.{minor}")
        candidates += [Path(found)] if found else []
    candidates += sorted(_pyenv_root().glob("versions/3.*/bin/python"))
    known: dict[str, str] = {}
    for path in candidates:
        version = _version(path)
        if version and version not in known:
            known[version] = str(path)
    return known


def _pyenv_root() -> Path:
    return Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))


def _version(path: Path) -> str | None:
    """`3.12` if that interpreter really starts and is one that a guest may be."""
    ask = "import sys; print(*sys.version_info[:2], sys.implementation.name)"
    try:
        told = subprocess.run(
            [path, "-I", "-c", ask], capture_output=True, timeout=DEADLINE, text=True
        )
    except OSError:
        return None
    words = told.stdout.split()
    if told.returncode or len(words) != 3 or words[2] != "cpython":
        return None
    major, minor = int(words[0]), int(words[1])
    return f"{major}.{minor}" if (major, minor) >= (3, 9) else None

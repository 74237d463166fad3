"""A process of the host's own that a guest must neither see, signal nor read."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Records every signal that can be recorded. Its environment holds the secret, as a server's would.
_SOURCE = """
import os, signal, sys
out = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, lambda got, _: os.write(out, b"%d\\n" % got))
print("ready", flush=True)
os.read(0, 1)  # ends when whoever started it is gone, however that went
"""


class Sentinel:
    """Started on entry, ended by `close`. `signals` is what it has received so far."""

    def __init__(
        self, root: Path, python: str, environment: Mapping[str, str], uid: int | None = None
    ) -> None:
        self.name = "selftest-sentinel-" + secrets.token_hex(4)
        self._log = root / self.name
        self._log.touch()
        if uid is not None:
            os.chown(self._log, uid, uid)
        self._process = subprocess.Popen(
            [python, "-I", "-c", _SOURCE, str(self._log), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            cwd="/",
            start_new_session=True,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def signals(self) -> list[int]:
        return [int(line) for line in self._log.read_text().split()]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

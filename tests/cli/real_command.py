"""The real `belljar` command, in a process of its own and in a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import belljar

Environment = dict[str, str]
COMMAND = (sys.executable, "-m", "belljar")


def environment(**extra: str) -> Environment:
    """A plain user's environment: nothing of Belljar's own settings, a UTF-8 terminal."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    source = str(Path(belljar.__file__).parent.parent)
    return {**kept, "PYTHONPATH": source, "TERM": "xterm", "LANG": "C.UTF-8", **extra}


class Process:
    """Runs `belljar` to its end, in the test's own directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(
        self, *words: str, input: bytes = b"", **extra: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*COMMAND, *words],
            input=input,
            capture_output=True,
            env=environment(**extra),
            cwd=self.directory,
            timeout=100,
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """For tests that end it early; its standard input is empty."""
        return subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd=self.directory,
        )


class Terminal:
    """A `belljar` whose three streams are a pseudo-terminal, and what it showed there."""

    def __init__(self, words: tuple[str, ...], directory: Path, extra: Environment) -> None:
        self._master, slave = pty.openpty()
        # Show newlines as they were written, so that a carriage return on screen is the guest's.
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(slave, termios.TCSANOW, attributes)

        def take_the_terminal() -> None:
            os.setsid()
            os.close(os.open(os.ttyname(0), os.O_RDWR))

        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**extra),
            cwd=directory,
            preexec_fn=take_the_terminal,
        )
        os.close(slave)
        self.shown = b""

    def read_until(self, part: bytes, seconds: float = 100) -> None:
        deadline = time.monotonic() + seconds
        while part not in self.shown:
            assert self._read(deadline - time.monotonic()), f"{part!r} not in {self.shown!r}"

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self, seconds: float = 100) -> int:
        """Everything shown until the process is gone, and its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(max(1, deadline - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], max(0, seconds))[0]:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # EIO: nobody holds the other side any more
            return False
        self.shown += piece
        return bool(piece)

    def close(self) -> None:
        os.close(self._master)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

"""A command without any sandbox, for operators who allow that. Bounded in time and output only."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO

from .capture import HeadTail
from .records import record

_OUTPUT = 1 << 20
_SECONDS_FOR_REST = 1.0


@record
class Done:
    """How it ended; an exit code below zero is the signal that ended it."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    late: bool


def run(command: Sequence[str], timeout: float) -> Done:
    """Run `command` with the rights of this process; its process group is killed in the end."""
    began = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        kept = [HeadTail(_OUTPUT), HeadTail(_OUTPUT)]
        readers = [
            threading.Thread(target=_read, args=(stream, keep), daemon=True)
            for stream, keep in zip((process.stdout, process.stderr), kept, strict=True)
        ]
        for reader in readers:
            reader.start()
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            # The group outlives its leader while a member lives, so the number is still its own.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()
        for reader in readers:  # a process that left the group may hold the pipes open
            reader.join(_SECONDS_FOR_REST)
        out, err = (keep.text() for keep in kept)
    return Done(
        exit_code=process.returncode,
        stdout=out,
        stderr=err,
        seconds=time.monotonic() - began,
        late=late,
    )


def _read(stream: IO[bytes] | None, keep: HeadTail) -> None:
    while stream is not None and (data := os.read(stream.fileno(), 1 << 16)):
        keep.feed(data)

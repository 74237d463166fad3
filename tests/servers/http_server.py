"""A real `belljar serve` in a process of its own, and what tests ask it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import belljar

COMMAND = (sys.executable, "-m", "belljar")


def environment(state: Path) -> dict[str, str]:
    """A plain user's environment whose state and configuration are the test's own."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    source = str(Path(belljar.__file__).parent.parent)
    own = {"XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": str(state)}
    return {**kept, "PYTHONPATH": source, "LANG": "C.UTF-8", **own}


class Server:
    """A running server; `url` and `token` are what it printed."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory = directory
        self.log = directory / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--port", "0", "--json", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(directory),
                cwd=directory,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        told = json.loads(line)
        self.url: str = told["url"]
        self.token: str = told.get("token", "")
        self.port = int(self.url.rpartition(":")[2])

    def client(self, **rest: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=100, **rest)

    def run(self, code: str, **options: Any) -> dict[str, Any]:
        with self.client() as client:
            answer = client.post("/v1/run", json={"code": code, **options})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def metric(self, name: str) -> float:
        """The sum of all samples with that name."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.partition(" ")[0].partition("{")[0] == name]
        assert found, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextmanager
def serving(directory: Path, *words: str) -> Iterator[Server]:
    server = Server(directory, *words)
    try:
        yield server
    finally:
        server.stop()

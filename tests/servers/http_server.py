"""A real `belljar serve` in a process of its own, and what tests ask it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
        assert any(line.startswith(f"# TYPE {name} ") for line in lines), f"no metric {name}"
        found = [line for line in lines if line.partition(" ")[0].partition("{")[0] == name]
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


def lasting_program() -> tuple[str, str]:
    """A program that runs until it is killed, and a word in the command line of its child."""
    token = f"belljar-canary-{secrets.token_hex(8)}"
    return f"import subprocess; subprocess.run(['sh', '-c', 'sleep 250; : {token}'])", token


def marked(token: str) -> list[int]:
    """The living processes of this host with `token` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # gone meanwhile
            if entry.name.isdigit() and token.encode() in (entry / "cmdline").read_bytes():
                state = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]
                if state != b"Z":
                    found.append(int(entry.name))
    return found


def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait until `condition` holds; how long that took. Fails after `seconds`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come about"
        time.sleep(0.005)
    return time.monotonic() - began


class Raw:
    """A connection on which a test writes what it likes."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)

    def send(self, text: str | bytes) -> None:
        self.socket.sendall(text.encode() if isinstance(text, str) else text)

    def head(self, method: str = "POST", path: str = "/v1/run", **headers: str) -> str:
        """A request's head with the token; `Name_x="..."` adds or replaces `Name-x`."""
        lines = {
            "Host": f"127.0.0.1:{self.server.port}",
            "Authorization": f"Bearer {self.server.token}",
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        fields = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {path} HTTP/1.1\r\n{fields}\r\n"

    def post(self, code: str, **headers: str) -> None:
        body = json.dumps({"code": code})
        self.send(self.head(Content_Length=str(len(body)), **headers) + body)

    def read(self) -> bytes:
        """Everything until the server closes the connection."""
        found = b""
        while piece := self.socket.recv(65536):
            found += piece
        return found

    def read_until(self, part: bytes) -> bytes:
        found = b""
        while part not in found:
            piece = self.socket.recv(65536)
            assert piece, found
            found += piece
        return found

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""The subprocess backend where the host has no privilege at all: no root, no control groups.

When the tests run as root, the package is copied to where everybody can read it, and another
interpreter runs it as a user that does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import gone, mark, marked

import belljar
from belljar.linux import landlock, probe

NOBODY = 63993
SYSTEM_PYTHON = "/usr/bin/python3"
HOST = Path(__file__).with_name("unprivileged_host.py")

# What each question must be answered; see unprivileged_host.
COMMON: dict[str, Any] = {
    "hello": ["success", "hi\n", 42],
    "failure": ["error", 1, "ZeroDivisionError"],
    "files": [["a/b/result.txt", "found"]],
    "parallel": list(range(8)),
    "network_when_allowed": "b'welcome'",
    "daemon_socket": ["EAFNOSUPPORT", "done"],
    "own_files_when_shown": "canary",
    "root_files": ["EACCES", "EACCES"],
    "privileges": ["1", "1"],
    "timeout": ["timeout", 9, 0, "up\n"],
    "one_large_process": ["oom", "memory"],
    "many_processes": ["oom", "memory"],
    "within_memory": ["success", None],
    "hidden_memory": ["oom", "memory"],
    "uncounted_memory": ["EPERM", "EPERM"],
    "disk": ["limit", "disk"],
    "small_files": ["limit", "disk"],
    "processor": ["timeout", True],
    "affinity": ["EPERM"],
    "cancelled": ["killed", None],
    "broken_callback": "enough",
    "left": [],
}
ENFORCED = dict.fromkeys(
    (
        "timeout", "cpus", "processes", "output", "value", "displays", "open_files", "network",
        "filesystem", "mounts",
    ),
    "enforced",
)  # fmt: skip
WITH_NAMESPACES: dict[str, Any] = {
    **COMMON,
    "facts": [NOBODY, False, False, True],
    "report": {**ENFORCED, "memory": "best_effort", "disk": "best_effort"},
    "command": ["1000", 4],
    "network": "ConnectionRefusedError",
    "own_files": [["EACCES", "EROFS", "EROFS"], "0o600", 6],
    "signals": "ESRCH",
    # Itself and nineteen children; then the kernel refuses.
    "forks": ["success", None, [19, "EAGAIN"]],
    "forks_uncaught": ["limit", "pids"],
    "threads": 19,
}
WITHOUT_NAMESPACES: dict[str, Any] = {
    **COMMON,
    "facts": [NOBODY, False, False, True],
    "report": {
        **ENFORCED,
        **dict.fromkeys(("memory", "disk", "processes", "timeout"), "best_effort"),
    },
    "command": [str(NOBODY), 4],
    "network": "OSError",
    "own_files": [["EACCES", "EACCES", "EACCES"], "0o600", 6],
    "signals": "EPERM",
    # The watchdog counts, and ends the whole run.
    "forks": ["limit", "pids", None],
    "forks_uncaught": ["limit", "pids"],
}


@pytest.fixture(scope="module")
def copied() -> Iterator[str]:
    """A directory with the package and the host program that everybody can read."""
    if os.geteuid() != 0:
        yield str(Path(belljar.__file__).parents[1])
        return
    base = tempfile.mkdtemp(prefix="belljar-copy-", dir="/var/tmp")
    shutil.copytree(
        Path(belljar.__file__).parent,
        f"{base}/belljar",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(HOST, base)
    subprocess.run(["chmod", "-R", "a+rX", base], check=True)
    yield base
    shutil.rmtree(base)


def interpreter() -> str:
    """One that an ordinary user can run."""
    if os.geteuid() != 0:
        return sys.executable
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip(f"there is no {SYSTEM_PYTHON}")
    asked = [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"]
    if subprocess.run(asked, capture_output=True, text=True).stdout != "True\n":
        pytest.skip(f"{SYSTEM_PYTHON} is older than 3.11")
    return SYSTEM_PYTHON


class World:
    """What a guest might reach for: two listeners and a file of root's."""

    def __init__(self, base: str) -> None:
        self.path = f"{base}/belljar-listener-{os.urandom(4).hex()}"
        self.root_file = f"{self.path}-secret"
        Path(self.root_file).write_text("root's")
        os.chmod(self.root_file, 0)
        self._stops: list[socket.socket] = []
        self.port = self._serve(socket.AF_INET, ("127.0.0.1", 0))[1]
        self._serve(socket.AF_UNIX, self.path)
        os.chmod(self.path, 0o777)

    def _serve(self, family: int, address: Any) -> Any:
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        self._stops.append(listener)

        def serve() -> None:
            try:
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.sendall(b"welcome")
            except OSError:  # shut down, which ends the test
                return

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()

    def close(self) -> None:
        for listener in self._stops:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        os.unlink(self.path)
        os.unlink(self.root_file)


def answers(
    copied: str, ask: list[str], *, poorer: bool = False, user: str | None = None, drop: bool = True
) -> dict[str, Any]:
    python, token = interpreter(), mark()
    world = World("/var/tmp")
    arguments = {
        "ask": ask, "token": token, "port": world.port, "socket": world.path, "user": user,
        "root_file": world.root_file, "poorer": poorer,
    }  # fmt: skip
    identity: dict[str, Any] = {}
    if drop and os.geteuid() == 0:
        identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        done = subprocess.run(
            [python, f"{copied}/{HOST.name}" if os.geteuid() == 0 else str(HOST),
             json.dumps(arguments)],
            env={"PYTHONPATH": copied, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=110,
            **identity,
        )  # fmt: skip
    finally:
        world.close()
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert gone(token, 5.0), f"survivors: {marked(token)}"
    return told


needs_landlock = pytest.mark.skipif(landlock.abi() < 6, reason="the answers are those of ABI 6")


@pytest.fixture(scope="module")
def told_with_namespaces(copied: str) -> dict[str, Any]:
    return answers(copied, list(WITH_NAMESPACES))


@pytest.fixture(scope="module")
def told_without_namespaces(copied: str) -> dict[str, Any]:
    return answers(copied, list(WITHOUT_NAMESPACES), poorer=True)


def expected(table: dict[str, Any], name: str) -> Any:
    if name == "facts" and os.geteuid() != 0:
        return [os.geteuid(), *table[name][1:]]
    if name == "command" and os.geteuid() != 0 and table is WITHOUT_NAMESPACES:
        return [str(os.geteuid()), 4]
    return table[name]


@needs_landlock
@pytest.mark.skipif(not probe.facts().userns, reason="no user namespaces here")
@pytest.mark.parametrize("name", WITH_NAMESPACES)
def test_an_ordinary_user_with_namespaces(told_with_namespaces: dict[str, Any], name: str) -> None:
    assert told_with_namespaces[name] == expected(WITH_NAMESPACES, name)


@needs_landlock
@pytest.mark.parametrize("name", WITHOUT_NAMESPACES)
def test_an_ordinary_user_without_namespaces(
    told_without_namespaces: dict[str, Any], name: str
) -> None:
    assert told_without_namespaces[name] == expected(WITHOUT_NAMESPACES, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("poorer", [False, True], ids=["namespaces", "none"])
def test_root_may_run_its_guests_as_somebody_else(copied: str, poorer: bool) -> None:
    ask = ["hello", "files", "owner", "root_files", "network", "timeout", "forks_uncaught"]
    told = answers(copied, ask, poorer=poorer, user="63994:63994", drop=False)
    assert told["hello"] == ["success", "hi\n", 42]
    assert [name for name, _ in told["files"]] == ["a/b/result.txt"]
    assert told["owner"] == [["63994"], 63994]
    # Not even without Landlock: it is the user that is kept out.
    assert told["root_files"] == ["EACCES", "EACCES"]
    assert told["network"] in ("ConnectionRefusedError", "OSError")
    assert told["timeout"] == ["timeout", 9, 0, "up\n"]
    assert told["forks_uncaught"] == ["limit", "pids"]
    assert told["left"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="root's own guests")
def test_roots_own_guests_keep_its_uid(copied: str) -> None:
    """The control arm of the one above: unless told otherwise a guest is its host's user."""
    told = answers(copied, ["owner"], drop=False)
    assert told["owner"] == [["0"], 0]

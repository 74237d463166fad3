"""What the parts of the suite share: one backend behind a real engine, and what it claims."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ...api import build_request
from ...backends.base import Backend, Cancel, Plan
from ...config import Settings
from ...engine import Engine
from ...errors import PolicyUnenforceable
from ...events import Emit, Event, Output
from ...policy import Isolation
from ...resolve import POLICY_KEYS
from ...types import Enforcement, Request, Result

_REQUEST_KEYS = {field.name for field in fields(Request)}


class Jar:
    """One backend under test, used as everybody uses it: through an engine."""

    def __init__(self, backend: Backend, level: str) -> None:
        self.backend = backend
        self.level = level
        self.engine = Engine(Settings(), backends={backend.name: backend})

    def run(
        self, code: str, *, emit: Emit | None = None, cancel: Cancel | None = None, **wanted: Any
    ) -> Result:
        """Run `code`; other arguments are fields of the request or keys of the policy."""
        request, wishes = self._asked(code, wanted)
        return self.engine.run(
            request,
            level=wishes.pop("level", self.level),
            wishes=wishes,
            backend=self.backend.name,
            emit=emit,
            cancel=cancel,
        )

    def plan(self, code: str = "", **wanted: Any) -> Plan:
        request, wishes = self._asked(code, wanted)
        return self.engine.plan(
            request,
            level=wishes.pop("level", self.level),
            wishes=wishes,
            backend=self.backend.name,
        )

    def _asked(self, code: str, wanted: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
        asked = {key: wanted[key] for key in wanted if key in _REQUEST_KEYS}
        wishes = {key: wanted[key] for key in wanted if key not in _REQUEST_KEYS}
        assert set(wishes) <= {*POLICY_KEYS, "level"}, f"unknown arguments in {sorted(wishes)}"
        # The import lint is the engine's, not the backend's: off unless a test is about it.
        wishes.setdefault("modules", "any")
        if "command" not in asked:
            asked["code"] = textwrap.dedent(code) if code.startswith("\n") else code
        later = {key: asked.pop(key) for key in ("id", "stream_cap") if key in asked}
        return replace(build_request(**asked), **later), wishes

    def held(self, field: str) -> Enforcement:
        """What the backend says about one policy field."""
        return self.plan().enforcement[field]

    def needs(self, **asked: Any) -> None:
        """Skip the test where the backend refuses this policy, because it cannot hold it."""
        try:
            report = self.plan(**asked).enforcement
        except PolicyUnenforceable as refusal:
            assert set(refusal.fields) & set(asked), refusal
            pytest.skip(f"refused, as it should be: {refusal.message}")
        lacking = [name for name in asked if name in report and report[name].state == "absent"]
        assert not lacking, f"{lacking} absent, asked for, and not refused"

    @property
    def protects(self) -> bool:
        """Whether what tools execute stays read-only in a writable mount, unless it is asked so."""
        layers = getattr(self.backend, "layers", ())
        return self.backend.isolation.at_least(Isolation.JAIL) or "read_only_mounts" in layers

    def needs_own_process(self) -> None:
        if self.backend.isolation is Isolation.NONE:
            pytest.skip("rung none: the program shares the host's process")

    def needs_processes(self) -> None:
        """Skip where a program cannot start processes and threads, or get signals."""
        self.needs_own_process()
        if self.backend.isolation is Isolation.WASM:
            pytest.skip("rung wasm: there are no processes, threads and signals in there")

    def lacks_children(self) -> str:
        """Why a program can have no process but its own (landlock below Linux 6.12), or ""."""
        plan = self.plan("import subprocess")
        doubt = getattr(self.backend, "doubt", None)
        return str(doubt(plan.policy, plan.request)) if doubt is not None else ""

    def needs_children(self) -> None:
        """Skip where a program can have no process but its own."""
        self.needs_processes()
        if why := self.lacks_children():
            pytest.skip(f"{self.backend.name} {why}")

    def needs_packages(self) -> None:
        if self.backend.isolation is Isolation.WASM:
            pytest.skip("rung wasm: there is only the standard library in there")


class Backed:
    """The base of every part: subclasses of the whole suite say how to make a backend."""

    #: The level to test at; None means `permissive` on the rung none and `standard` above it.
    level: str | None = None

    def make_backend(self) -> Backend:
        raise NotImplementedError("define make_backend() in your Test class")

    def make_jar(self, backend: Backend) -> Jar:
        weak = backend.isolation is Isolation.NONE
        return Jar(backend, self.level or ("permissive" if weak else "standard"))

    @pytest.fixture
    def jar(self) -> Iterator[Jar]:
        backend = self.make_backend()
        found = backend.probe()
        if not found.available:
            fix = f"; fix: {found.fix}" if found.fix else ""
            pytest.skip(f"{backend.name} is not available: {found.reason}{fix}")
        jar = self.make_jar(backend)
        yield jar
        jar.engine.close()

    @pytest.fixture
    def open_dir(self) -> Iterator[Path]:
        """A host directory that any user may enter and write: only the sandbox can forbid it."""
        with writable_directory(None) as path:
            yield path


@contextmanager
def writable_directory(where: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="belljar-conformance-", dir=where))
    path.chmod(0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def directory_with_a_mount() -> Iterator[Path]:
    """A directory with a file system of its own below it, `inner`, that any user may write to."""
    with writable_directory(None) as path:
        inner = path / "inner"
        inner.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "mode=777", "none", str(inner)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here: that takes root")
        try:
            yield path
        finally:
            subprocess.run(["umount", str(inner)], check=True)


class Watch:
    """An emit that keeps the guest's output and calls back once, when a given text has come."""

    def __init__(self, text: bytes = b"", then: Any = None) -> None:
        self.events: list[Event] = []
        self._text, self._then = text, then

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self._then and isinstance(event, Output) and self._text in self.seen("stdout"):
            then, self._then = self._then, None
            then()

    def seen(self, stream: str) -> bytes:
        return b"".join(
            event.data
            for event in self.events
            if isinstance(event, Output) and event.stream == stream
        )


def marked_processes(token: str) -> list[int]:
    """Processes of this host, of any user, with `token` in their command line or environment."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        for source in ("cmdline", "environ"):
            try:
                if token.encode() in Path("/proc", entry, source).read_bytes():
                    found.append(int(entry))
                    break
            except OSError:
                continue  # gone meanwhile, or not ours to read
    return found

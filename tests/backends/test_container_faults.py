"""Engines that stop, hang and die: bounded in time, told truthfully, and nothing is left running.

A SIGSTOP of the engine is a hang; for a container it is the same as the engine's death: its input
stays open, nobody reads its output, and no order comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import container_engines
import pytest
import test_container_agent
from container_engines import TOGETHER, is_alive
from test_container_agent import KINDS, Make
from test_docker import Bench

from belljar.backends.docker import DockerBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed, BackendUnavailable
from belljar.events import Event, Output
from belljar.images import names
from belljar.testing.fake import FakeBackend
from belljar.types import Request

pytestmark = [pytest.mark.slow, TOGETHER]
PATIENCE = 60.0
kind, make = test_container_agent.kind, test_container_agent.make


def pid_of(bench: Bench) -> int:
    """The first process of the one container there is, as this machine counts."""
    (each,) = bench.containers()
    return int(bench.api.json("GET", f"/containers/{each['Id']}/json")["State"]["Pid"])


class Hang:
    """As an `emit`: the engine hangs from the program's first output on."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self.begun = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Output) and not self.begun:
            self.begun = True
            os.kill(self._engine, signal.SIGSTOP)

    def end(self) -> None:
        os.kill(self._engine, signal.SIGCONT)


@contextlib.contextmanager
def hanging(kind: str) -> Iterator[Hang]:
    process = container_engines.session(KINDS[kind][0]).process
    if process is None:
        pytest.skip("not an engine of this session's own")
    hang = Hang(process.pid)
    try:
        yield hang
    finally:
        hang.end()


def wait_for_end(pid: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while is_alive(pid):
        assert time.monotonic() < deadline, "the program outlives its engine"
        time.sleep(0.05)  # not our child: it has no event for us


def test_an_idle_container_does_not_hold_up_an_engine_that_stops(make: Make) -> None:
    bench = make(pool=1)
    for _ in range(2):
        assert bench.run("1").success
    assert bench.backend._pool is not None
    assert bench.backend._pool.settled(PATIENCE)
    (idle,) = bench.containers()
    # The engine gives it a minute, and we give the engine half of that.
    bench.api.json("POST", f"/containers/{idle['Id']}/stop", {"t": "60"}, timeout=30)


SILENT, NOISY = "while True: pass", "while True: print('x' * 9999)"


@pytest.mark.parametrize("code", [SILENT, NOISY])
def test_a_program_whose_engine_is_gone_ends_with_its_time(
    kind: str, make: Make, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code is SILENT and kind != "docker":
        pytest.skip("the other program is the harder one")
    for name in ("_KILL_SECONDS", "_ENGINE_SECONDS"):
        monkeypatch.setattr(f"belljar.backends.docker_watch.{name}", 0.5)
    bench, pids = make(), []
    with hanging(kind) as hang:

        def begin(event: Event) -> None:
            if not pids and isinstance(event, Output):
                pids.append(pid_of(bench))
            hang(event)

        with pytest.raises(BackendFailed, match="did not end a program") as failed:
            bench.run(f"print('up', flush=True)\n{code}", timeout=2, emit=begin)
        wait_for_end(pids[0], 20)
    assert failed.value.retryable
    assert failed.value.partial is not None
    assert failed.value.partial.stdout.startswith("up\n")
    assert bench.run("1 + 1").value == 2
    assert bench.containers() == []


# Podman may lose what its container said meanwhile.
END_KEPT_BACK = r"ended after 0\.\d s, but the engine|the engine lost the report"


def test_an_end_that_a_hung_engine_kept_back_is_no_timeout(kind: str, make: Make) -> None:
    bench = make()
    code = "import time; print('up', flush=True); time.sleep(0.3); 'value'"
    with hanging(kind) as hang:
        waker = threading.Timer(4, hang.end)

        def begin(event: Event) -> None:
            if isinstance(event, Output) and not hang.begun:
                waker.start()
            hang(event)

        with pytest.raises(BackendFailed, match=END_KEPT_BACK):
            bench.run(code, timeout=1.5, emit=begin)
        waker.join()
    assert bench.run(code, timeout=10).value == "value"  # the control arm


def test_a_container_is_made_of_the_image_that_was_chosen(
    kind: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is given to another image between the choice and the start, which is the race that
    a tag loses; the next run, and its pool, take the new one."""
    bench, name, engine = (
        make(pool=1),
        "belljar-test/moving:1",
        container_engines.session(KINDS[kind][0]),
    )
    engine.images("python", "bash")
    code = f"import json; json.load(open({names.RECORD!r}))['image']"

    def retag(which: str) -> None:
        path = f"/images/{names.image_name(which)}/tag"
        bench.api.json("POST", path, {"repo": name.partition(":")[0], "tag": "1"})

    compile_plan = bench.backend.compile

    def compile_and_retag(*asked: Any) -> Any:
        plan = compile_plan(*asked)
        retag("bash")
        return plan

    retag("python")
    try:
        with monkeypatch.context() as raced:
            raced.setattr(bench.backend, "compile", compile_and_retag)
            assert bench.run(code, image=name).value == "python"
        assert bench.run(code, image=name).value == "bash"
        retag("python")
        assert bench.run(code, image=name).value == "python"
    finally:
        bench.api.json("DELETE", f"/images/{name}")


def test_a_named_engine_that_goes_away_is_told_of_on_every_call(
    docker_engine: container_engines.Engine, tmp_path: Path
) -> None:
    path = tmp_path / "engine.sock"
    path.symlink_to(docker_engine.api.path)
    docker, jail = DockerBackend(docker_host=f"unix://{path}", pool=0), FakeBackend(name="jail")
    program = Request(code="1")
    with Engine(Settings(), backends={"docker": docker, "jail": jail}) as engine:
        assert engine.run(program, backend="docker").fallback is None  # the control arm
        path.unlink()
        for _ in range(2):
            result = engine.run(program, backend="docker")
            assert result.backend == "jail"
            assert result.fallback is not None
            assert "no socket" in result.fallback.why
            assert result.fallback.fix
            assert result.fallback.sentence in result.warnings
            with pytest.raises(BackendUnavailable, match="no socket") as missing:
                engine.run(replace(program, fallback=False), backend="docker")
            assert missing.value.fix
        path.symlink_to(docker_engine.api.path)
        assert engine.run(program, backend="docker").backend == "docker"

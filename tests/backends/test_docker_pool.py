"""Containers that wait: used once, replaced, removed when nobody comes; and many runs in a row."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from container_engines import TOGETHER
from container_engines import Engine as ContainerEngine
from test_docker import Bench, host_process

from belljar.backends.base import Cancel
from belljar.backends.docker_container import OWNER, Container
from belljar.backends.docker_plan import Shape
from belljar.errors import BackendFailed
from belljar.events import Output
from belljar.types import Status

pytestmark = [pytest.mark.slow, TOGETHER]
PATIENCE = 60.0


@pytest.fixture
def bench(docker_engine: ContainerEngine) -> Iterator[Bench]:
    made = Bench(docker_engine, pool=2)
    yield made
    made.engine.close()
    assert made.containers() == []


def settled(bench: Bench) -> dict[str, int]:
    pool = bench.backend._pool
    assert pool is not None
    assert pool.settled(PATIENCE)
    return bench.backend.metrics()


def test_the_pool_follows_demand(bench: Bench) -> None:
    assert bench.run("1").success
    assert settled(bench)["waiting"] == 0  # a single run leaves nothing waiting
    assert bench.run("1").success
    assert settled(bench)["waiting"] == 1
    assert bench.run("1").success
    assert settled(bench)["waiting"] == 2
    for _ in range(2):
        assert bench.run("1").success
        counts = settled(bench)
    assert counts["waiting"] == 2  # its size
    assert counts["cold"] == 2
    assert counts["taken"] == 3
    assert len(bench.containers()) == 2


def test_the_next_container_is_started_while_the_run_still_lasts(bench: Bench) -> None:
    for _ in range(3):
        assert bench.run("1").success
    before = settled(bench)
    began, cancel = threading.Event(), Cancel()
    with ThreadPoolExecutor(1) as threads, cancel:
        run = threads.submit(
            bench.run,
            "print(1, flush=True)\nimport time\ntime.sleep(100)",
            timeout=120,
            cancel=cancel,
            emit=lambda event: began.set() if isinstance(event, Output) else None,
        )
        assert began.wait(PATIENCE)
        after = settled(bench)
        assert not run.done()
        cancel.set()
        assert run.result(PATIENCE).status is Status.KILLED
    assert after["taken"] == before["taken"] + 1
    assert (after["started"], after["waiting"]) == (before["started"] + 1, 2)


def test_no_container_runs_two_programs(bench: Bench) -> None:
    code = """
import os, socket
left = [os.path.exists(f"{place}/mark") for place in ("/sandbox", "/tmp", "/dev/shm")]
for place in ("/sandbox", "/tmp", "/dev/shm"):
    open(f"{place}/mark", "w").write("x")
[left, os.getuid()]
"""
    values = []
    for _ in range(6):
        values.append(bench.run(code).value)
        settled(bench)
    assert all(left == [False] * 3 for left, _ in values)
    assert len({uid for _, uid in values}) == 6
    assert bench.backend.metrics()["taken"] >= 4


def test_runs_of_another_shape_do_not_share(bench: Bench) -> None:
    for _ in range(3):
        assert bench.run("1").success
    taken = settled(bench)["taken"]
    other = bench.run("1", memory="200M")
    assert other.success
    assert bench.backend.metrics()["taken"] == taken
    # But what the agent is told when the program comes needs no container of its own.
    for wanted in ({"timeout": 7}, {"open_files": 99}, {"output": "1K"}, {"env": {"A": "b"}}):
        settled(bench)
        assert bench.run("1", **wanted).success
    assert bench.backend.metrics()["taken"] == taken + 4


def test_who_died_waiting_is_passed_over(bench: Bench) -> None:
    for _ in range(3):
        assert bench.run("1").success
    settled(bench)
    for each in bench.containers():
        bench.api.json("POST", f"/containers/{each['Id']}/kill", {"signal": "SIGKILL"})
        bench.api.json("POST", f"/containers/{each['Id']}/wait")
    deadline = time.monotonic() + PATIENCE
    pool = bench.backend._pool
    assert pool is not None
    while any(each.alive() for shelf in pool._shelves.values() for each in shelf.waiting):
        assert time.monotonic() < deadline
    result = bench.run("'alive'")
    assert result.value == "alive"
    assert settled(bench)["died waiting"] == 2


def test_who_waits_in_vain_is_removed(docker_engine: ContainerEngine) -> None:
    bench = Bench(docker_engine, pool=1, idle=1.0)
    try:
        for _ in range(2):
            assert bench.run("1").success
        deadline = time.monotonic() + PATIENCE
        while not bench.backend.metrics()["expired"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # an idle time has no other event than its end
        settled(bench)
        assert bench.containers() == []
    finally:
        bench.engine.close()


def test_a_pool_survives_an_engine_that_refuses(bench: Bench) -> None:
    for _ in range(2):
        assert bench.run("1").success
    settled(bench)
    pool = bench.backend._pool
    assert pool is not None
    make, refused = pool._make, threading.Event()

    def refuse(shape: Shape) -> Container:
        refused.set()
        raise BackendFailed("no")

    pool._make = refuse
    assert bench.run("1").success  # what waited is used
    assert refused.wait(PATIENCE)
    assert bench.run("1").success  # and who finds nothing starts its own
    pool._make = make
    assert bench.backend.metrics()["failed"] >= 1


def test_a_child_of_the_process_leaves_the_pool_alone(bench: Bench) -> None:
    for _ in range(2):
        assert bench.run("1").success
    settled(bench)
    before = {each["Id"] for each in bench.containers()}
    pid = os.fork()
    if pid == 0:
        assert bench.backend._pool is not None
        os._exit(0 if bench.backend._pool.close() == [] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert {each["Id"] for each in bench.containers()} == before
    assert bench.run("2").value == 2


def many(session: ContainerEngine, runs: int, timeouts: int, killed_hosts: int) -> None:
    """So many runs, with so many timeouts among them and hosts killed; then nothing is left."""
    bench = Bench(session, pool=3)
    hosts = []
    try:
        every = max(1, runs // max(1, timeouts))

        def one(number: int) -> Status:
            if timeouts and number % every == 0:
                return bench.run("while True: pass", timeout=0.5).status
            return bench.run("print(1)").status

        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(one, number) for number in range(runs)]
            for number in range(killed_hosts):
                with host_process(session, number % 2) as (pid, label):
                    hosts.append(label)
                    os.kill(pid, signal.SIGKILL)
            found = [each.result() for each in running]
    finally:
        bench.engine.close()
    expected = [number % every == 0 if timeouts else False for number in range(runs)]
    assert [status is Status.TIMEOUT for status in found] == expected
    assert all(status in (Status.SUCCESS, Status.TIMEOUT) for status in found)
    bench.backend._closed = False
    bench.backend.sweep()
    left = session.api.json("GET", "/containers/json", {"all": "1"})
    ours = {*hosts}
    assert [each for each in left if (each["Labels"] or {}).get(OWNER) in ours] == []
    assert bench.containers() == []


def test_some_runs_timeouts_and_killed_hosts_leave_nothing(docker_engine: ContainerEngine) -> None:
    many(docker_engine, runs=12, timeouts=2, killed_hosts=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_runs_timeouts_and_killed_hosts_leave_nothing(docker_engine: ContainerEngine) -> None:
    many(docker_engine, runs=300, timeouts=30, killed_hosts=10)

"""Backends in containers for suites of many short tests: each test has its own, all share a pool.

A container takes a quarter of a second to start; a pool starts the next ones while a test runs.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import container_engines
import pytest

from belljar.backends.docker import DockerBackend
from belljar.backends.docker_pool import Pool
from belljar.backends.gvisor import GvisorBackend
from belljar.testing.conformance import (
    Files,
    Imports,
    Kills,
    Limits,
    Places,
    Policies,
    Programs,
    Projects,
    Reach,
    Results,
    Runs,
    Values,
)

KINDS: dict[str, type[DockerBackend]] = {"docker": DockerBackend, "gvisor": GvisorBackend}
_owners: dict[tuple[str, str], DockerBackend] = {}


def why_not(name: str, engine: str = "docker") -> str:
    """Why this machine cannot have the backend; empty if it can. Starts nothing."""
    lacking = "runsc is not installed" if name == "gvisor" and not shutil.which("runsc") else ""
    return container_engines.why_not(engine) or lacking


def owner(name: str) -> DockerBackend:
    """The one backend of $DOCKER_HOST whose pool the others use."""
    key = (name, os.environ["DOCKER_HOST"])
    if key not in _owners:
        _owners[key] = KINDS[name](docker_host=key[1], pool=3)
        container_engines.at_end(_owners[key].close)
    return _owners[key]


def close_all() -> None:
    """End the pools, for tests that count what there is."""
    while _owners:
        _owners.popitem()[1].close()


def lent(name: str) -> type[DockerBackend]:
    """The backend, without a pool of its own."""

    class Lent(KINDS[name]):  # type: ignore[misc]
        def _ready_pool(self) -> Pool | None:
            if self.disabled or self.pool_size < 1:
                return super()._ready_pool()
            return owner(name)._ready_pool()

    return Lent


@container_engines.TOGETHER
class InContainers:
    """What the suite's parts need to run on a backend of `KINDS`, on one of the session's engines.

    A class of tests is this and some of the parts: see `Cage` and `Rest`.
    """

    backend_name = "docker"
    engine_name = "docker"
    images: tuple[str, ...] = ()

    @pytest.fixture(autouse=True)
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = container_engines.session(self.engine_name)
        session.images(*self.images)
        monkeypatch.setenv("DOCKER_HOST", session.host)

    def make_backend(self) -> Any:
        return lent(self.backend_name)()


class Cage(InContainers, Limits, Reach, Projects, Kills):
    """The parts that are about the sandbox itself."""

    def test_nothing_of_a_run_stays_in_the_host_process(self, jar: Any) -> None:
        pool = owner(self.backend_name)._ready_pool()
        assert pool is not None
        assert pool.settled(60)
        jar.backend.pool_size = 0  # a pool holds a descriptor for each container that waits
        super().test_nothing_of_a_run_stays_in_the_host_process(jar)


class Rest(InContainers, Results, Values, Programs, Files, Places, Imports, Runs, Policies):
    """The parts that are mostly about the agent and the worker, which are everywhere the same."""

    images = ("node", "bash", "data")


class Whole(Cage, Rest):
    """The suite."""

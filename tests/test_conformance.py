"""The conformance suite over every registered backend: one class for each, made from its name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import container_engines
import pytest

from belljar.backends import registry
from belljar.backends.base import Backend
from belljar.backends.subprocess import SubprocessBackend
from belljar.linux import probe
from belljar.testing.conformance import BackendConformance

# These run on an engine that the session starts. What they keep warm has tests of its own: a test
# of the suite makes a new backend, and would only wait for containers that nobody uses.
IN_CONTAINERS = ("docker", "gvisor")


def suite_for(name: str) -> type[BackendConformance]:
    def make_backend(self: BackendConformance) -> Backend:
        return registry.load(name, pool=0)

    def engine(self: BackendConformance, monkeypatch: pytest.MonkeyPatch) -> None:
        session = container_engines.session("docker")
        session.images("node", "bash", "data")
        monkeypatch.setenv("DOCKER_HOST", session.host)

    title = f"Test{name.title().replace('_', '').replace('-', '')}"
    parts: dict[str, Any] = {"make_backend": make_backend}
    if name in IN_CONTAINERS:
        parts["engine"] = pytest.fixture(autouse=True)(engine)
    return type(title, (BackendConformance,), parts)


def absence(name: str) -> str:
    """Why the backend cannot run here; empty if it can."""
    if name in IN_CONTAINERS:
        lacking = "" if name == "docker" or shutil.which("runsc") else "runsc is not installed"
        return container_engines.why_not("docker") or lacking
    backend = registry.load(name)
    found = backend.probe()
    backend.close()
    return "" if found.available else f"{name}: {found.reason}; fix: {found.fix or 'none known'}"


ABSENT = {name: why for name in registry.names() if (why := absence(name))}

for _name in registry.names():
    if _name not in ABSENT:
        _suite = suite_for(_name)
        globals()[_suite.__name__] = _suite


# The same backend as it would be on poorer hosts: what it then claims has to hold as well.


def without(**lacking: Any) -> type[SubprocessBackend]:
    class Poorer(SubprocessBackend):
        def __init__(self, *, disable: frozenset[str] = frozenset()) -> None:
            super().__init__(disable=disable, facts=replace(probe.facts(), **lacking))

    return Poorer


NO_NAMESPACES = {"userns": False, "userns_problem": "test"}


@pytest.mark.slow
class TestSubprocessWithoutNamespaces(BackendConformance):
    def make_backend(self) -> Backend:
        return without(**NO_NAMESPACES)()


@pytest.mark.slow
class TestSubprocessWithoutCgroups(BackendConformance):
    def make_backend(self) -> Backend:
        return without(cgroup=None)()


@pytest.mark.slow
class TestSubprocessWithNeither(BackendConformance):
    def make_backend(self) -> Backend:
        return without(**NO_NAMESPACES, cgroup=None)()


@pytest.mark.parametrize("name", registry.names())
def test_every_registered_backend_is_under_conformance(name: str) -> None:
    if name in ABSENT:
        pytest.skip(ABSENT[name])
    assert suite_for(name).__name__ in globals()


def test_some_backend_is_under_conformance() -> None:
    assert set(registry.names()) - set(ABSENT)

"""The conformance suite over every registered backend: one class for each, made from its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import container_backends
import pytest

from belljar.backends import registry
from belljar.backends.base import Backend
from belljar.backends.subprocess import SubprocessBackend
from belljar.linux import probe
from belljar.testing.conformance import (
    BackendConformance,
    Files,
    Imports,
    Kills,
    Limits,
    Policies,
    Programs,
    Reach,
    Results,
    Runs,
    Values,
)


def suite_for(name: str) -> type[Any]:
    title = f"Test{name.title().replace('_', '').replace('-', '')}"
    if name in container_backends.KINDS:
        # A container takes its time. The whole of the suite is run in Docker's; see below.
        parts = container_backends.Whole if name == "docker" else container_backends.Cage
        return type(title, (parts,), {"backend_name": name})

    def make_backend(self: BackendConformance) -> Backend:
        return registry.load(name)

    return type(title, (BackendConformance,), {"make_backend": make_backend})


def absence(name: str) -> str:
    """Why the backend cannot run here; empty if it can."""
    if name in container_backends.KINDS:
        return container_backends.why_not(name)
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


if "gvisor" not in ABSENT:

    class TestGvisorRest(container_backends.Rest):
        backend_name = "gvisor"


if not container_backends.why_not("docker", "podman"):

    class TestPodman(container_backends.Cage):
        engine_name = "podman"

    class TestPodmanRest(container_backends.Rest):
        engine_name = "podman"


NO_NAMESPACES = {"userns": False, "userns_problem": "test"}


class WithoutNamespaces:
    def make_backend(self) -> Backend:
        return without(**NO_NAMESPACES)()


class WithoutCgroups:
    def make_backend(self) -> Backend:
        return without(cgroup=None)()


# What lacks one of the two runs the parts that are about the sandbox itself, and the others as a
# soak: they are run with both and with neither.
@pytest.mark.slow
class TestSubprocessWithoutNamespaces(WithoutNamespaces, Limits, Reach, Kills):
    pass


@pytest.mark.slow
class TestSubprocessWithoutCgroups(WithoutCgroups, Limits, Reach, Kills):
    pass


@pytest.mark.soak
class TestSubprocessWithoutNamespacesRest(
    WithoutNamespaces, Results, Values, Programs, Files, Imports, Runs, Policies
):
    pass


@pytest.mark.soak
class TestSubprocessWithoutCgroupsRest(
    WithoutCgroups, Results, Values, Programs, Files, Imports, Runs, Policies
):
    pass


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

"""The conformance suite over `landlock` as it is where it is needed: without user namespaces."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

from belljar.backends.base import Backend
from belljar.backends.landlock import LandlockBackend
from belljar.linux import probe
from belljar.testing.conformance import Jar
from belljar.testing.conformance.files import Files
from belljar.testing.conformance.kills import Kills
from belljar.testing.conformance.limits import Limits
from belljar.testing.conformance.policies import Policies
from belljar.testing.conformance.programs import Programs
from belljar.testing.conformance.reach import Reach
from belljar.testing.conformance.results import Results
from belljar.testing.conformance.runs import Runs
from belljar.testing.conformance.values import Values


def without(**lacking: Any) -> type[LandlockBackend]:
    class Poorer(LandlockBackend):
        def __init__(self, *, disable: frozenset[str] = frozenset()) -> None:
            facts = replace(probe.facts(), userns=False, userns_problem="test", **lacking)
            super().__init__(disable=disable, facts=facts)

    return Poorer


@pytest.mark.slow
class TestLandlockWithoutCgroups(Programs, Limits, Kills, Policies):
    """As in a default container: children are held by a subreaper and a watchdog.

    The parts of the suite that depend on that; `test_conformance` has all of them.
    """

    def make_backend(self) -> Backend:
        return without(cgroup=None)()


@pytest.mark.slow
class TestLandlockBelow612(Limits, Kills):
    """As on Debian 12 and Ubuntu 22.04: no children, so what is about them is skipped."""

    def make_backend(self) -> Backend:
        return without(landlock_abi=2)()


class FloorJar(Jar):
    def _asked(self, code: str, wanted: dict[str, Any]) -> Any:
        return super()._asked(code, {"min_isolation": "landlock", **wanted})


@pytest.mark.slow
class TestLandlockAsAFloor(Results, Values, Files, Reach, Runs, Policies):
    """What demands the rung gets one process, with every field enforced."""

    def make_backend(self) -> Backend:
        return without(cgroup=None)()

    def make_jar(self, backend: Backend) -> Jar:
        return FloorJar(backend, "standard")

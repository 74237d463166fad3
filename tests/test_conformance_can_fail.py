"""The control arm of the whole suite: a backend that claims what it does not hold fails it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.base import Backend, Plan, enforced
from belljar.backends.subprocess import SubprocessBackend
from belljar.policy import Policy
from belljar.testing.conformance import BackendConformance, Jar
from belljar.testing.conformance.harness import writable_directory
from belljar.types import Request


class Boaster(SubprocessBackend):
    """Has layers off, and reports every field as enforced all the same."""

    def compile(self, policy: Policy, request: Request) -> Plan:
        plan = super().compile(policy, request)
        return replace(plan, enforcement=dict.fromkeys(plan.enforcement, enforced("honestly")))


class Suite(BackendConformance):
    """Not named Test, so that only the lines below run it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def make_backend(self) -> Backend:
        return self._backend


CASES: list[tuple[str, set[str], str, dict[str, Any]]] = [
    (
        "a daemon survives",
        {"namespaces", "cgroup", "subreaper"},
        "test_a_daemon_that_ignores_signals_and_holds_stdout_is_gone",
        {"ending": "returns"},
    ),
    (
        "host files are open",
        {"landlock", "namespaces"},  # a private /tmp would hide the canary too
        "test_a_host_file_is_out_of_reach_unless_it_is_mounted",
        {"host_dir": None},
    ),
    (
        "the network is open",
        {"namespaces", "seccomp"},
        "test_the_network_is_closed_unless_it_is_asked_for",
        {},
    ),
    (
        "forks are unbounded",
        {"cgroup", "rlimits", "watchdog"},
        "test_a_fork_loop_is_stopped_at_its_number",
        {},
    ),
    (
        "files are unbounded",
        {"rlimits", "watchdog"},
        "test_a_file_past_the_disk_limit_is_refused",
        {},
    ),
    (
        "descriptors are unbounded",
        {"rlimits"},
        "test_descriptors_past_the_number_are_refused",
        {},
    ),
    (
        "output is unbounded",
        {"output_cap"},
        "test_big_output_keeps_its_head_and_tail_and_the_run_goes_on",
        {"stream": "stdout"},
    ),
    (
        "the report is a constant",
        set(),
        "test_a_disabled_layer_changes_the_report",
        {},
    ),
]


def attempt(backend: Backend, name: str, arguments: dict[str, Any], where: Path) -> None:
    suite = Suite(backend)
    jar: Jar = suite.make_jar(backend)
    given = {key: where if key.endswith("_dir") else value for key, value in arguments.items()}
    try:
        getattr(suite, name)(jar, **given)
    finally:
        jar.engine.close()


@pytest.mark.parametrize(
    ("layers", "name", "arguments"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_backend_that_boasts_is_found_out(
    layers: set[str], name: str, arguments: dict[str, Any]
) -> None:
    with writable_directory(None) as where:
        with pytest.raises(AssertionError):
            attempt(Boaster(disable=frozenset(layers)), name, arguments, where)
        attempt(SubprocessBackend(), name, arguments, where)  # and an honest one passes

"""The one path from a request to a result, over backends that answer from a script."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.api import build_request
from belljar.backends import registry
from belljar.backends.base import Availability, Backend, Cancel, Plan, absent, best_effort
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import (
    BackendFailed,
    BackendUnavailable,
    LimitValue,
    PolicyError,
    PolicyUnenforceable,
)
from belljar.events import Event, Output, RunFailed, RunFinished, RunStarted
from belljar.policy import Ceiling, Isolation, Policy
from belljar.testing import FakeBackend
from belljar.types import Fallback, Mount, Request, Result, Status

LADDER = ("none", "process", "landlock", "jail", "wasm", "vm")
MISSING = Availability(available=False, reason="not installed", fix="apt-get install it")


def fake(name: str = "fake", isolation: str = "jail", **rest: Any) -> FakeBackend:
    return FakeBackend(name=name, isolation=Isolation(isolation), **rest)


def engine(*backends: Backend, sinks: Any = (), **settings: Any) -> Engine:
    return Engine(
        Settings(**settings), sinks=sinks, backends={backend.name: backend for backend in backends}
    )


# -- selection


def test_auto_takes_the_first_that_can_hold_the_policy() -> None:
    weak, strong, stronger = fake("weak", "process"), fake("strong"), fake("stronger", "vm")
    jar = engine(weak, strong, stronger)
    result = jar.run(Request(code="1"), level="strict", wishes={"modules": "any"})
    assert (result.backend, result.isolation) == ("strong", "jail")
    assert "auto" in result.backend_reason
    assert not weak.plans
    assert jar.run(Request(code="1")).backend == "weak"  # the control arm: a lower floor


@given(
    floor=st.sampled_from(LADDER),
    ceiling=st.sampled_from(LADDER),
    level=st.sampled_from(("permissive", "standard", "strict")),
    rungs=st.lists(st.sampled_from(LADDER), min_size=1, max_size=4),
)
def test_auto_never_goes_below_the_floor(
    floor: str, ceiling: str, level: str, rungs: list[str]
) -> None:
    backends = [fake(f"b{number}", rung) for number, rung in enumerate(rungs)]
    jar = engine(*backends, ceiling=Ceiling(min_isolation=Isolation(ceiling)))
    of_level = {"permissive": "none", "standard": "process", "strict": "jail"}[level]
    least = max((floor, ceiling, of_level), key=lambda rung: Isolation(rung).rank)
    able = [rung for rung in rungs if Isolation(rung).at_least(Isolation(least))]
    wishes = {"min_isolation": floor, "modules": "any"}
    if able:
        assert jar.run(Request(code="1"), level=level, wishes=wishes).isolation == able[0]
    else:
        with pytest.raises(PolicyUnenforceable) as refusal:
            jar.run(Request(code="1"), level=level, wishes=wishes)
        assert "min_isolation" in refusal.value.fields
        assert not any(backend.plans for backend in backends)


class Boaster(FakeBackend):
    """A backend whose own check of the floor was forgotten."""

    def compile(self, policy: Policy, request: Request) -> Plan:
        return replace(
            super().compile(replace(policy, min_isolation=Isolation.NONE), request), policy=policy
        )


@pytest.mark.parametrize("name", ["auto", "boaster"])
def test_the_floor_holds_even_for_a_backend_that_does_not_check_it(name: str) -> None:
    boaster = Boaster(name="boaster", isolation=Isolation.PROCESS)
    jar = engine(boaster)
    with pytest.raises(PolicyUnenforceable) as refusal:
        jar.run(Request(code="1"), wishes={"min_isolation": "jail"}, backend=name)
    assert refusal.value.fields == ("min_isolation",)
    assert not boaster.plans
    assert jar.run(Request(code="1"), backend=name).success  # the control arm


def test_when_nobody_can_hold_it_all_refusals_are_told() -> None:
    jar = engine(
        fake("leaky", enforcement={"network": absent("nothing closes it")}),
        fake("missing", availability=MISSING),
        fake("soft", "process"),
    )
    with pytest.raises(PolicyUnenforceable) as refusal:
        jar.run(Request(code="1"), wishes={"min_isolation": "jail"})
    assert set(refusal.value.fields) == {"network", "min_isolation"}
    assert all(name in str(refusal.value) for name in ("leaky", "missing", "soft"))
    said, *rows = refusal.value.message.splitlines()
    assert said == "no backend here can enforce this policy"
    assert rows == [
        "  leaky    network: absent: nothing closes it",
        "  missing  not available: not installed",
        "  soft     min_isolation: needs jail, soft is process",
    ]
    assert refusal.value.fix == "ask for a lower min_isolation; or see `belljar doctor`"
    assert str(refusal.value).endswith(f"\nfix: {refusal.value.fix}")


def test_best_effort_is_enough_for_process_and_for_nothing_above() -> None:
    jar = engine(fake(enforcement={"disk": best_effort("a watchdog")}))
    assert jar.run(Request(code="1"), wishes={"min_isolation": "process"}).success
    with pytest.raises(PolicyUnenforceable) as refusal:
        jar.run(Request(code="1"), wishes={"min_isolation": "landlock"})
    assert refusal.value.fields == ("disk",)


def test_a_named_backend_is_used_and_its_refusal_is_final() -> None:
    weak, strong = fake("weak", "process"), fake("strong")
    jar = engine(weak, strong)
    assert jar.run(Request(code="1"), backend="strong").backend_reason == "named by the caller"
    with pytest.raises(PolicyUnenforceable):
        jar.run(Request(code="1"), backend="weak", wishes={"min_isolation": "jail"})
    assert len(strong.plans) == 1


def test_the_operators_backend_stands_where_the_caller_names_none() -> None:
    jar = engine(fake("one"), fake("two"), backend="two")
    assert jar.run(Request(code="1")).backend == "two"
    assert jar.run(Request(code="1"), backend="one").backend == "one"


def test_a_name_that_nobody_has_is_unavailable_and_lists_the_others() -> None:
    jar = engine(fake("one"), fake("two"), fallback_allow=("one",))
    with pytest.raises(BackendUnavailable) as refusal:
        jar.run(Request(code="1"), backend="three")
    assert "one, two" in str(refusal.value)
    with pytest.raises(BackendUnavailable):
        Engine(Settings()).backend("three")


# -- fallback (M12): equal or stronger, or allowed by the operator, and never silently


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def prefer(*names: str) -> None:
        monkeypatch.setattr(registry, "PREFERENCE", names)

    return prefer


@pytest.mark.parametrize(
    ("wanted", "other", "allow", "runs"),
    [
        ("jail", "jail", (), True),
        ("jail", "container", (), True),
        ("jail", "vm", (), True),
        ("jail", "process", (), False),
        ("vm", "jail", (), False),
        ("jail", "process", ("other",), True),
        ("jail", "none", ("other",), True),  # below the level's floor, as the operator allows
        ("jail", "process", ("somebody",), False),
    ],
)
def test_a_missing_backend_falls_back_only_as_far_as_it_may(
    preferred: Callable[..., None], wanted: str, other: str, allow: tuple[str, ...], runs: bool
) -> None:
    preferred("other")
    instead = fake("other", other)
    jar = engine(fake("wanted", wanted, availability=MISSING), instead, fallback_allow=allow)
    if not runs:
        with pytest.raises(BackendUnavailable) as refusal:
            jar.run(Request(code="1"), backend="wanted")
        assert "'wanted'" in str(refusal.value)
        assert refusal.value.fix == "apt-get install it"
        assert not instead.plans
        return
    result = jar.run(Request(code="1"), backend="wanted")
    assert result.backend == "other"
    assert result.backend_reason == "fallback from wanted"
    assert result.warnings == ("'wanted' could not be used: not installed; ran on 'other'",)
    assert result.fallback == Fallback(
        wanted="wanted", used="other", why="not installed", fix="apt-get install it"
    )


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"wishes": {"min_isolation": "process"}}, {}),
    ({}, {"ceiling": Ceiling(min_isolation=Isolation.PROCESS)}),
    ({}, {"defaults": {"min_isolation": "process"}}),
]


@pytest.mark.parametrize(("asked", "settings"), ASKED)
@pytest.mark.parametrize("backend", ["wanted", "auto"])
def test_fallback_allow_never_goes_below_an_explicit_floor(
    preferred: Callable[..., None], asked: dict[str, Any], settings: dict[str, Any], backend: str
) -> None:
    preferred("wanted")
    for floor, runs in (("none", False), ("process", True)):
        weak = fake("weak", floor)
        jar = engine(
            fake("wanted", availability=MISSING), weak, fallback_allow=("weak",), **settings
        )
        if runs:
            assert jar.run(Request(code="1"), level="strict", backend=backend, **asked).success
        else:
            with pytest.raises((BackendUnavailable, PolicyUnenforceable)):
                jar.run(Request(code="1"), level="strict", backend=backend, **asked)
            assert not weak.plans


def test_fallback_allow_lets_auto_run_a_strict_program_below_the_levels_floor() -> None:
    jar = engine(
        fake("jail", availability=MISSING), fake("subprocess", "process"),
        fallback_allow=("subprocess",),
    )  # fmt: skip
    result = jar.run(Request(code="1"), level="strict", backend="auto")
    assert (result.backend, result.fallback is not None) == ("subprocess", True)
    assert result.fallback is not None
    assert (result.fallback.wanted, result.fallback.used) == ("auto", "subprocess")
    assert "fallback.allow" in result.warnings[0]
    refusing = engine(fake("jail", availability=MISSING), fake("subprocess", "process"))
    with pytest.raises(PolicyUnenforceable, match=r'level "strict" needs isolation jail'):
        refusing.run(Request(code="1"), level="strict", backend="auto")


@pytest.mark.parametrize(
    ("asked", "settings"), [({"fallback": False}, {}), ({}, {"fallback_enabled": False})]
)
def test_a_fallback_can_be_forbidden_by_the_caller_and_by_the_operator(
    preferred: Callable[..., None], asked: dict[str, Any], settings: dict[str, Any]
) -> None:
    preferred("other")
    for refused in (True, False):
        other = fake("other")
        given, set_ = (asked, settings) if refused else ({}, {})
        jar = engine(fake("wanted", availability=MISSING), other, **set_)
        if not refused:
            assert jar.run(Request(code="1", **given), backend="wanted").backend == "other"
            continue
        with pytest.raises(BackendUnavailable):
            jar.run(Request(code="1", **given), backend="wanted")
        assert not other.plans


class InMemory(FakeBackend):
    """Refuses a disk that memory cannot hold, as backends do whose work directory is memory."""

    def compile(self, policy: Policy, request: Request) -> Plan:
        if policy.limits.disk > policy.limits.memory:
            raise PolicyUnenforceable("too large", fields=("disk",))
        return super().compile(policy, request)


def test_a_limits_value_does_not_lower_the_isolation() -> None:
    weak = fake("weak", "landlock")
    jar = engine(InMemory(name="strong", isolation=Isolation.JAIL), weak)
    with pytest.raises(LimitValue) as refused:
        jar.run(Request(code="1"), wishes={"disk": "2G"})
    assert refused.value.fits == {"memory": "2G"}
    assert "disk=2 GiB does not fit into memory=512 MiB" in refused.value.message
    assert str(refused.value.fix).startswith('memory="2G"')
    assert not weak.plans
    assert jar.run(Request(code="1"), wishes={"disk": "2G", "memory": "2G"}).backend == "strong"
    # Where memory may not be raised, the value that fits is the disk's.
    bounded = engine(
        InMemory(name="strong", isolation=Isolation.JAIL), weak, ceiling=Ceiling(memory=1 << 30)
    )
    with pytest.raises(LimitValue) as refused:
        bounded.run(Request(code="1"), wishes={"disk": "2G"})
    assert refused.value.fits == {"disk": "512M"}


def test_an_equally_strong_backend_takes_what_the_first_cannot_hold() -> None:
    jar = engine(InMemory(name="strong", isolation=Isolation.JAIL), fake("as strong", "container"))
    assert jar.run(Request(code="1"), wishes={"disk": "2G"}).backend == "as strong"


def test_another_reason_moves_down_to_the_floor_with_a_warning() -> None:
    jar = engine(
        fake("strong", enforcement={"network": absent("cannot")}), fake("weak", "landlock")
    )
    result = jar.run(Request(code="1"))
    assert result.backend == "weak"
    assert result.warnings == (
        "'weak' isolates less than 'strong' (landlock is below jail), which cannot hold network",
    )


def test_the_modules_of_strict_are_named_in_the_refusal_and_in_the_explanation() -> None:
    jar = engine(fake())
    result = jar.run(Request(code="import sys"), level="strict")
    assert result.error is not None
    assert 'level "strict", which allows only json, math, statistics' in result.error.message
    assert 'modules=["math", "statistics", "json", "sys"]' in result.error.message
    told = jar.explain(Request(code="import sys"), level="strict")
    assert (told.backend, told.refused) == (None, True)
    assert result.error.message.startswith(told.reason)
    assert jar.plan(Request(code="import sys"), level="strict").warnings == (result.error.message,)
    assert jar.explain(Request(code="import json"), level="strict").backend == "fake"


def test_a_fallback_that_is_missing_too_is_passed_over(preferred: Callable[..., None]) -> None:
    preferred("gone", "absent", "third")
    third = fake("third")
    jar = engine(fake("wanted", availability=MISSING), fake("gone", availability=MISSING), third)
    assert jar.run(Request(code="1"), backend="wanted").backend == "third"


def test_an_available_backend_does_not_fall_back(preferred: Callable[..., None]) -> None:
    preferred("other")
    other = fake("other", "vm")
    result = engine(fake("wanted"), other).run(Request(code="1"), backend="wanted")
    assert (result.backend, result.warnings, other.plans) == ("wanted", (), [])


# -- lint


def test_the_lint_refuses_before_anything_starts() -> None:
    backend, seen = fake(), list[Event]()
    jar = engine(backend, sinks=[seen.append])
    request = Request(code="import math\nimport socket\n")
    result = jar.run(request, wishes={"modules": ["math"]})
    assert result.status is Status.REFUSED
    assert result.id == request.id
    assert (result.exit_code, result.signal) == (None, None)
    assert result.error is not None
    assert "socket" in result.error.message
    assert "line 2" in result.error.message or "2:" in result.error.message
    assert not backend.plans
    assert [type(event) for event in seen] == [RunFinished]
    assert jar.run(request, wishes={"modules": ["math", "socket"]}).success  # the control arm


@pytest.mark.parametrize(
    "request_", [Request(command=("cat",)), Request(code="require('os')", language="javascript")]
)
def test_only_python_code_is_linted(request_: Request) -> None:
    assert engine(fake()).run(request_, wishes={"modules": ["math"]}).success


def test_the_operator_may_close_the_dangerous_imports() -> None:
    code = Request(code="import subprocess")
    closed = engine(fake(), block_dangerous_imports=True)
    assert closed.run(code).status is Status.REFUSED
    assert engine(fake()).run(code).success  # the control arm


# -- policy


def test_what_the_ceiling_lowers_is_told_and_handed_to_the_backend() -> None:
    backend = fake()
    jar = engine(backend, ceiling=Ceiling(timeout=5.0, memory=1 << 20))
    result = jar.run(Request(code="1"), wishes={"timeout": 60, "memory": "1G", "processes": 3})
    limits = backend.plans[0].policy.limits
    assert (limits.timeout, limits.memory, limits.processes) == (5.0, 1 << 20, 3)
    assert len(result.warnings) == 2
    assert all("ceiling" in warning for warning in result.warnings)
    assert jar.plan(Request(code="1"), wishes={"timeout": 60}).warnings == result.warnings[:1]
    assert jar.run(Request(code="1"), wishes={"timeout": 4}).warnings == ()  # the control arm


def test_the_operators_level_and_defaults_bind_a_plain_request() -> None:
    backend = fake(isolation="vm")
    jar = engine(backend, level="strict", defaults={"timeout": 3.0, "modules": "any"})
    jar.run(Request(code="1"))
    jar.run(Request(code="1"), level="standard", wishes={"timeout": 4})
    first, second = (plan.policy for plan in backend.plans)
    assert (first.level, first.limits.timeout) == ("strict", 3.0)
    assert (second.level, second.limits.timeout) == ("standard", 4.0)


@pytest.mark.parametrize(
    ("wishes", "field"),
    [({"colour": "blue"}, "colour"), ({"timeout": -1}, "timeout"), ({"network": "any"}, "network")],
)
def test_a_wrong_wish_is_refused_by_name_and_nothing_starts(
    wishes: dict[str, object], field: str
) -> None:
    backend = fake()
    jar = engine(backend, ceiling=Ceiling(network="off"))
    with pytest.raises(PolicyError) as refusal:
        jar.run(Request(code="1"), wishes=wishes)
    assert refusal.value.field == field
    assert not backend.plans


def test_what_was_resolved_for_one_wish_is_not_given_to_another_that_equals_it() -> None:
    """Resolved policies are remembered; True equals 1, and is no number of seconds."""
    backend = fake()
    jar = engine(backend)
    for _ in range(2):
        jar.run(Request(code="1"), wishes={"timeout": 1})
        jar.run(Request(code="1"), wishes={"timeout": 2})
        jar.run(Request(code="1"), level="permissive", wishes={"timeout": 1})
        with pytest.raises(PolicyError):
            jar.run(Request(code="1"), wishes={"timeout": True})
    found = [(plan.policy.level, plan.policy.limits.timeout) for plan in backend.plans]
    assert found == [("standard", 1.0), ("standard", 2.0), ("permissive", 1.0)] * 2
    backend.plans.clear()
    jar.settings = Settings(ceiling=Ceiling(timeout=0.5))
    jar.run(Request(code="1"), wishes={"timeout": 1})
    assert backend.plans[0].policy.limits.timeout == 0.5
    mounted = Request(code="1", mounts=(Mount("/usr/share", "share", "ro"),))
    jar = engine(fake(), ceiling=Ceiling(mounts="none"))
    jar.run(Request(code="1"))
    with pytest.raises(PolicyError):
        jar.run(mounted)


def test_mounts_are_held_to_the_ceiling() -> None:
    request = Request(code="1", mounts=(Mount("/usr/share", "share", "rw"),))
    assert engine(fake()).run(request).success
    with pytest.raises(PolicyError) as refusal:
        engine(fake(), ceiling=Ceiling(mounts="ro")).run(request)
    assert refusal.value.field == "mounts"


# -- events


def test_sinks_and_the_caller_get_every_event_in_order() -> None:
    first, second, own = list[Event](), list[Event](), list[Event]()
    chatty = fake(output=lambda request: [("stdout", b"a"), ("stderr", b"b"), ("stdout", b"c")])
    jar = engine(chatty, sinks=[first.append, second.append])
    result = jar.run(Request(code="1"), emit=own.append)
    assert [type(event) for event in own] == [RunStarted, Output, Output, Output, RunFinished]
    assert first == second == own
    started, finished = own[0], own[-1]
    assert isinstance(started, RunStarted) and started.backend == "fake"
    assert isinstance(finished, RunFinished) and finished.result == result
    pieces = [(e.stream, e.data) for e in own if isinstance(e, Output)]
    assert pieces == [("stdout", b"a"), ("stderr", b"b"), ("stdout", b"c")]


def test_the_result_says_why_this_backend_and_how_long_planning_took() -> None:
    result = engine(fake()).run(Request(code="1"))
    assert result.backend_reason
    assert result.timings["plan"] >= 0


def test_a_backend_that_breaks_is_an_exception_and_not_a_result() -> None:
    def breaks(request: Request) -> Result:
        raise BackendFailed("the daemon went away", retryable=True)

    seen, own = list[Event](), list[Event]()
    request = Request(code="1")
    with pytest.raises(BackendFailed) as failure:
        engine(fake(respond=breaks), sinks=[seen.append]).run(request, emit=own.append)
    assert failure.value.retryable
    assert seen == own
    started, failed = seen
    assert isinstance(started, RunStarted)
    assert failed == RunFailed(
        id=request.id,
        backend="fake",
        code="backend_failed",
        message="the daemon went away",
        retryable=True,
        request=started.request,
    )


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_run_that_its_caller_ended_is_told_to_the_sinks(error: BaseException) -> None:
    seen, calls = list[Event](), list[Event]()

    def emit(event: Event) -> None:
        calls.append(event)
        if isinstance(event, Output):
            raise error

    chatty = fake(output=lambda request: [("stdout", b"a")])
    with pytest.raises(type(error)) as raised:
        engine(chatty, sinks=[seen.append]).run(Request(code="1"), emit=emit)
    assert raised.value is error
    assert isinstance(seen[-1], RunFailed)
    assert (seen[-1].code, seen[-1].retryable) == ("aborted", False)
    assert type(error).__name__ in seen[-1].message
    assert [type(event) for event in calls] == [RunStarted, Output]  # and not called again


def test_what_never_started_has_no_end() -> None:
    seen = list[Event]()
    with pytest.raises(BackendUnavailable):
        engine(fake(availability=MISSING), sinks=[seen.append]).run(Request(code="1"))
    assert seen == []


def test_cancel_reaches_the_backend() -> None:
    slow = fake(delay=lambda request: 25.0)
    results: list[Result] = []
    with Cancel() as cancel:
        jar = engine(slow)
        run = threading.Thread(target=lambda: results.append(
            jar.run(Request(code="1"), cancel=cancel)
        ))  # fmt: skip
        run.start()
        assert slow.running.wait(10)
        cancel.set()
        run.join(20)
    assert results[0].status is Status.KILLED


# -- plan and close


def test_a_plan_starts_nothing_and_raises_what_a_run_would() -> None:
    backend = fake()
    jar = engine(backend)
    plan = jar.plan(build_request(code="1"), wishes={"timeout": 2})
    assert (plan.backend, plan.policy.limits.timeout) == ("fake", 2.0)
    assert not backend.plans
    with pytest.raises(PolicyUnenforceable):
        jar.plan(Request(code="1"), wishes={"min_isolation": "vm"})
    with pytest.raises(BackendUnavailable):
        jar.plan(Request(code="1"), backend="nobody")


def test_closing_the_engine_closes_its_backends() -> None:
    one, two = fake("one"), fake("two")
    with engine(one, two) as jar:
        assert jar.backend_names() == ("one", "two")
    assert one.closed and two.closed


def test_one_engine_loads_a_backend_once_for_all_threads() -> None:
    jar, found = Engine(Settings()), list[Backend]()
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait(10)
        found.append(jar.backend("inprocess"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(backend) for backend in found}) == 1
    assert set(registry.BUILT_IN) <= set(jar.backend_names())
    jar.close()


def test_an_image_is_asked_only_of_backends_that_run_images() -> None:
    """Never silently without it, be it that a backend is named, chosen, or stands in for one."""

    class Imaging(FakeBackend):
        takes_images = True

    plain, imaging = FakeBackend(name="plain"), Imaging(name="imaging")
    request = Request(code="1", image="ruby:3.3")
    with Engine(Settings(), backends={"plain": plain, "imaging": imaging}) as both:
        assert both.run(request, backend="auto").backend == "imaging"
        with pytest.raises(PolicyUnenforceable, match="'plain' runs no images") as refusal:
            both.run(request, backend="plain")
        assert refusal.value.fields == ("image",)
        assert both.run(Request(code="1"), backend="plain").success  # the control arm


def test_a_missing_image_is_no_reason_to_run_without_it() -> None:
    class Lacking(FakeBackend):
        takes_images = True

        def compile(self, policy: Policy, request: Request) -> Plan:
            raise BackendUnavailable("there is no image 'ruby:3.3'", fix="pull it")

    backends = {"jail": FakeBackend(name="jail"), "lacking": Lacking(name="lacking")}
    with Engine(Settings(), backends=backends) as engine:
        with pytest.raises(BackendUnavailable, match="no image"):
            engine.run(Request(code="1", image="ruby:3.3"), backend="lacking")
        assert engine.run(Request(code="1"), backend="lacking").backend == "jail"  # the control arm

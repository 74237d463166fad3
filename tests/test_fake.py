"""The fake backend keeps the contract that the edges rely on."""

from __future__ import annotations

import json
import threading

import pytest

from belljar.backends.base import FIELDS, Availability, Cancel, absent, best_effort
from belljar.engine import Engine
from belljar.errors import BackendUnavailable, PolicyUnenforceable
from belljar.events import Event, Output
from belljar.policy import Isolation
from belljar.resolve import resolve
from belljar.testing import FakeBackend
from belljar.types import Request, Result, Status


def ran(
    fake: FakeBackend, code: str = "", *, cancel: Cancel | None = None, **wishes: object
) -> tuple[Result, list[Event]]:
    events: list[Event] = []
    plan = fake.compile(resolve("standard", wishes).policy, Request(code=code))
    with cancel or Cancel() as switch:
        return fake.run(plan, events.append, switch), events


def test_it_succeeds_unless_told_otherwise() -> None:
    result, events = ran(FakeBackend())
    assert (result.status, result.backend, result.isolation) == (Status.SUCCESS, "fake", "jail")
    assert events == []
    assert set(result.enforcement) == set(FIELDS)
    json.dumps(result.to_dict(), allow_nan=False)


def test_it_answers_from_the_script_and_records_what_was_asked() -> None:
    fake = FakeBackend(
        lambda request: Result(status=Status.ERROR, exit_code=3, stdout=request.code or "")
    )
    result, _ = ran(fake, "first")
    assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 3, "first")
    ran(fake, "second")
    assert [request.code for request in fake.requests] == ["first", "second"]
    assert result.id == fake.requests[0].id


def test_its_output_streams_and_is_captured_within_the_cap() -> None:
    fake = FakeBackend(output=lambda request: [("stdout", b"a" * 600), ("stderr", b"b" * 3)])
    result, events = ran(fake, output=100)
    assert result.truncated
    assert len(result.stdout.encode()) <= 100
    assert result.stderr == "bbb"
    assert (result.usage.stdout_bytes, result.usage.stderr_bytes) == (600, 3)
    streams = [event.stream for event in events if isinstance(event, Output)]
    assert streams == ["stdout", "stderr"]


def test_a_delay_past_the_timeout_is_a_timeout() -> None:
    result, _ = ran(FakeBackend(delay=lambda request: 60), timeout=0.01)
    assert (result.status, result.signal) == (Status.TIMEOUT, 9)


def test_cancel_from_another_thread_ends_it() -> None:
    fake = FakeBackend(delay=lambda request: 60)
    cancel = Cancel()

    def pull() -> None:
        assert fake.running.wait(10)
        cancel.set()

    puller = threading.Thread(target=pull)
    puller.start()
    result, _ = ran(fake, cancel=cancel)
    puller.join()
    assert result.status is Status.KILLED
    assert result.usage.wall < 30


def test_it_refuses_what_its_report_does_not_hold() -> None:
    lacking = FakeBackend(enforcement={"network": absent("no way to close it")})
    with pytest.raises(PolicyUnenforceable) as refusal:
        ran(lacking)
    assert refusal.value.fields == ("network",)
    assert lacking.plans == []


def test_best_effort_is_enough_for_a_process_and_no_more() -> None:
    fake = FakeBackend(enforcement={"disk": best_effort("a poll")})
    assert ran(fake)[0].success
    with pytest.raises(PolicyUnenforceable) as refusal:
        ran(fake, min_isolation="jail")
    assert refusal.value.fields == ("disk",)


def test_its_isolation_and_availability_are_what_the_test_says() -> None:
    fake = FakeBackend(
        isolation=Isolation.VM, availability=Availability(available=False, reason="no host")
    )
    assert fake.probe().reason == "no host"
    assert ran(fake, min_isolation="vm")[0].isolation == "vm"
    with pytest.raises(PolicyUnenforceable):
        ran(FakeBackend(isolation=Isolation.PROCESS), min_isolation="vm")


def test_a_script_that_raises_is_a_backend_that_breaks() -> None:
    def breaks(request: Request) -> Result:
        raise BackendUnavailable("the daemon went away")

    with pytest.raises(BackendUnavailable, match="went away"):
        ran(FakeBackend(breaks))


def test_a_closed_one_refuses_to_run() -> None:
    fake = FakeBackend()
    fake.close()
    with pytest.raises(BackendUnavailable):
        ran(fake)


def test_it_serves_an_engine() -> None:
    fake = FakeBackend(lambda request: Result(status=Status.SUCCESS, value=42))
    engine = Engine(backends={"fake": fake})
    try:
        result = engine.run(Request(code="6 * 7"), backend="fake")
    finally:
        engine.close()
    assert (result.value, result.backend) == (42, "fake")
    assert fake.closed

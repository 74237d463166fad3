"""The least value of each limit: refused below it before anything starts, and enough to start."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from belljar import api, minima
from belljar.backends import registry
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BelljarError, LimitValue, PolicyError
from belljar.policy_fields import LIMITS
from belljar.testing import FakeBackend
from belljar.types import Request, Status


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory": 512}, ["memory: 512 bytes", "4 MiB", "did you mean 512M?", 'memory="4M"']),
        ({"memory": "512"}, ["did you mean 512M?"]),
        ({"memory": "1M"}, ["memory: 1 MiB is less than 4 MiB"]),
        ({"disk": 10}, ["disk: 10 bytes", "did you mean 10M?", 'disk="64K"']),
        ({"open_files": 3}, ["open_files: 3 is less than 16"]),
        ({"timeout": 1e-9}, ["timeout: 1e-09 s is less than 0.001 s"]),
        ({"cpus": 0.001}, ["cpus: 0.001 is less than 0.01"]),
    ],
)
def test_a_limit_below_the_least_is_refused_with_its_unit(
    given: dict[str, Any], words: list[str]
) -> None:
    fake = FakeBackend()
    runner = api.Runner(engine=Engine(Settings(), backends={"fake": fake}))
    with pytest.raises(PolicyError) as refused:
        runner.execute("1", **given)
    for word in words:
        assert word in str(refused.value)
    assert not fake.plans


def test_a_size_with_a_unit_gets_no_hint_of_another() -> None:
    with pytest.raises(PolicyError) as refused:
        LIMITS["memory"]("memory", "64K")
    assert "did you mean" not in str(refused.value)


def test_a_backend_with_needs_of_its_own_refuses_and_names_the_least_value() -> None:
    class Large(FakeBackend):
        least: ClassVar = {"memory": 48 << 20}

    large = Large()
    with Engine(Settings(), backends={"fake": large}) as engine:
        with pytest.raises(LimitValue) as refused:
            engine.run(Request(code="1"), backend="fake", wishes={"memory": "32M"})
        assert refused.value.fits == {"memory": "48M"}
        assert "memory=32 MiB" in refused.value.message
        assert refused.value.fix == 'memory="48M"'
        assert engine.run(Request(code="1"), backend="fake", wishes={"memory": "48M"}).success


PROGRAMS: dict[str, dict[str, Any]] = {
    "python": {"code": "print(1)"},
    "another python": {"code": "print(1)", "python": "python3"},
    "bash": {"code": "echo 1", "language": "bash"},
    "command": {"command": ["true"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in registry.names() if n not in ("docker", "gvisor")])
@pytest.mark.parametrize("field", [*minima.LEAST, "processes", "output"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_least_value_ends_in_a_result(name: str, field: str, program: str) -> None:
    backend = registry.load(name)
    if not backend.probe().available:
        pytest.skip(f"{name} is not available")
    least = {**minima.LEAST, **getattr(backend, "least", {})}.get(field, 1)
    request = api.build_request(**PROGRAMS[program])
    wishes = {field: least, "modules": "any", **({} if field == "timeout" else {"timeout": 60})}
    with Engine(Settings(), backends={name: backend}) as engine:
        try:
            engine.plan(request, backend=name, level="permissive", wishes=wishes)
        except BelljarError as refused:
            pytest.skip(f"refused: {refused}")
        result = engine.run(request, backend=name, level="permissive", wishes=wishes)
    assert result.status in (Status.SUCCESS, Status.OOM, Status.TIMEOUT, Status.LIMIT), result

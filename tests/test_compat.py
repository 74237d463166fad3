"""The design documents' names do what the engine does, and answer in the documents' shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar import BackendFailed, Engine, Request, Result, Settings, Status, Usage
from belljar.backends.base import Cancel, Plan
from belljar.compat import (
    DockerSandbox,
    HybridSandbox,
    SandboxConfig,
    SecurityLevel,
    WasmSandbox,
    get_sandbox,
)
from belljar.errors import BelljarError, Partial, PolicyUnenforceable
from belljar.events import Emit
from belljar.policy import Isolation
from belljar.testing.fake import FakeBackend
from belljar.types import GuestError, Mount

KEYS = {"status", "stdout", "stderr", "exit_code", "execution_time_ms", "fuel_consumed"}


def fake(respond: Any = None, name: str = "docker", **rest: Any) -> tuple[FakeBackend, Engine]:
    backend = FakeBackend(respond, name=name, **rest) if respond else FakeBackend(name=name, **rest)
    return backend, Engine(Settings(), backends={name: backend})


@pytest.mark.parametrize("level", list(SecurityLevel))
def test_a_level_reaches_the_policy(level: SecurityLevel) -> None:
    backend, engine = fake()
    assert get_sandbox(level, backend="docker", engine=engine).execute("1").success
    assert backend.plans[0].policy.level == level.value


def test_a_sandbox_without_a_level_takes_the_operator_s() -> None:
    backend = FakeBackend(name="docker")
    engine = Engine(Settings(level="strict"), backends={"docker": backend})
    get_sandbox(backend="docker", engine=engine).execute("1")
    DockerSandbox(engine=engine).execute_code("1")
    assert [plan.policy.level for plan in backend.plans] == ["strict", "strict"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="reckless"):
        SandboxConfig.for_level("reckless")


def test_a_configuration_changes_what_it_names_and_nothing_else() -> None:
    backend, engine = fake()
    config = SandboxConfig.for_level("strict", timeout="2s", memory="64M", backend="docker")
    get_sandbox(config=config, engine=engine).execute("1")
    policy = backend.plans[0].policy
    assert (policy.limits.timeout, policy.limits.memory) == (2.0, 64 << 20)
    assert policy.limits.cpus == 0.5
    assert policy.explicit == {"timeout", "memory"}


def test_context_and_options_go_through() -> None:
    backend, engine = fake()
    sandbox = get_sandbox(backend="docker", engine=engine)
    sandbox.execute("x", {"x": 1}, stdin=b"in", timeout=3)
    request = backend.requests[0]
    assert (dict(request.context), request.stdin) == ({"x": 1}, b"in")
    assert backend.plans[0].policy.limits.timeout == 3


def test_after_cleanup_it_refuses_to_run() -> None:
    backend, engine = fake()
    with get_sandbox(backend="docker", engine=engine) as sandbox:
        assert sandbox.execute("1").success
    assert backend.closed
    with pytest.raises(BelljarError):
        sandbox.execute("1")
    sandbox.cleanup()


def test_execute_raises_what_belljar_raises() -> None:
    _, engine = fake(isolation=Isolation.NONE)
    with pytest.raises(PolicyUnenforceable):
        get_sandbox(backend="docker", engine=engine).execute("1")


class Metered(FakeBackend):
    """A fake that also counts fuel, as wasm does."""

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        return replace(super().run(plan, emit, cancel), usage=Usage(wall=0.25, fuel=99))


def test_execute_code_answers_in_the_documents_shape() -> None:
    said = Result(status=Status.ERROR, exit_code=3, stdout="o", stderr="e")
    backend = Metered(lambda request: said, name="wasm")
    sandbox = WasmSandbox(engine=Engine(Settings(), backends={"wasm": backend}))
    assert sandbox.execute_code("1") == {
        "status": "error",
        "stdout": "o",
        "stderr": "e",
        "exit_code": 3,
        "execution_time_ms": 250,
        "fuel_consumed": 99,
    }


def test_a_configuration_does_not_move_a_sandbox_to_another_backend() -> None:
    wanted, other = FakeBackend(name="docker"), FakeBackend(name="other")
    engine = Engine(Settings(), backends={"other": other, "docker": wanted})
    DockerSandbox(SandboxConfig.for_level("strict"), engine=engine).execute_code("1")
    assert (len(wanted.plans), len(other.plans)) == (1, 0)
    assert wanted.plans[0].policy.level == "strict"


def test_the_project_is_mounted_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, engine = fake()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, str(tmp_path), "."):
        assert DockerSandbox(engine=engine).execute_code("1", path)["status"] == "success"
    assert DockerSandbox(engine=engine).execute_code("1")["status"] == "success"
    real = str(tmp_path.resolve())
    expected = (Mount(real, "project", "ro"),)
    assert [request.mounts for request in backend.requests] == [expected] * 3 + [()]


def test_the_timeout_is_the_run_s() -> None:
    backend, engine = fake()
    DockerSandbox(engine=engine).execute_code("1", timeout=7)
    assert backend.plans[0].policy.limits.timeout == 7


def test_required_libraries_must_be_names_and_are_asked_for_as_modules() -> None:
    backend, engine = fake()
    sandbox = DockerSandbox(engine=engine)
    good = sandbox.execute_code("1", require_libraries=["numpy", "scikit-learn", "zope.interface"])
    assert good["status"] == "success"
    asked, run = backend.plans
    assert asked.request.args == ("numpy", "sklearn", "zope.interface")
    assert run.request.code == "1"
    for bad in (["numpy; rm -rf /"], [""], [3], "numpy"):
        answer = sandbox.execute_code("1", require_libraries=bad)  # type: ignore[arg-type]
        assert answer["status"] == "system_failure"
        assert "require_libraries" in answer["stderr"]
    assert len(backend.plans) == 2


def test_a_failure_of_belljar_is_a_system_failure_with_what_came_so_far() -> None:
    def respond(request: Request) -> Result:
        raise BackendFailed("the daemon went away", partial=Partial(stdout="so", stderr="far\n"))

    _, engine = fake(respond)
    answer = DockerSandbox(engine=engine).execute_code("1")
    assert answer.keys() == KEYS
    assert answer["status"] == "system_failure"
    assert (answer["stdout"], answer["exit_code"]) == ("so", None)
    assert answer["stderr"] == "far\nthe daemon went away"


def test_a_project_that_is_not_there_is_a_system_failure(tmp_path: Path) -> None:
    _, engine = fake()
    answer = DockerSandbox(engine=engine).execute_code("1", tmp_path / "missing")
    assert answer["status"] == "system_failure"
    assert "does not exist" in answer["stderr"]


def test_a_refused_program_says_why() -> None:
    def respond(request: Request) -> Result:
        error = GuestError(type="ImportRefused", message="module 'os' is not allowed")
        return Result(status=Status.REFUSED, error=error)

    _, engine = fake(respond)
    answer = DockerSandbox(engine=engine).execute_code("import os")
    assert (answer["status"], answer["exit_code"]) == ("refused", None)
    assert "module 'os' is not allowed" in answer["stderr"]


@pytest.mark.parametrize(("sandbox", "name"), [(DockerSandbox, "docker"), (WasmSandbox, "wasm")])
def test_a_backend_that_is_not_there_is_a_system_failure_that_names_it(
    sandbox: type[HybridSandbox], name: str
) -> None:
    other = FakeBackend(name="other")
    answer = sandbox(engine=Engine(Settings(), backends={"other": other})).execute_code("1")
    assert answer["status"] == "system_failure"
    assert name in answer["stderr"]
    assert other.plans == []
    backend = FakeBackend(name=name)  # the control arm
    engine = Engine(Settings(), backends={name: backend})
    assert sandbox(engine=engine).execute_code("1")["status"] == "success"


def test_hybrid_runs_on_what_this_host_has(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("from the project")
    tmp_path.chmod(0o755)
    with HybridSandbox(settings=Settings()) as sandbox:
        code = "print(open('project/data.txt').read()); import sys; sys.exit(3)"
        answer = sandbox.execute_code(code, tmp_path, timeout=20, require_libraries=["json"])
    assert answer.keys() == KEYS
    assert (answer["status"], answer["exit_code"]) == ("error", 3), answer
    assert answer["stdout"] == "from the project\n"
    assert answer["execution_time_ms"] > 0

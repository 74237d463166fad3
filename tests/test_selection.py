"""Which backend runs a program: reasons, required libraries, one more try elsewhere."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from belljar.api import Runner, build_request
from belljar.backends import registry
from belljar.backends.base import Availability, Backend, Plan
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import (
    BackendFailed,
    LanguageMissing,
    LibrariesMissing,
    NotBuiltYet,
    PolicyUnenforceable,
    RequestError,
    SetupFailed,
)
from belljar.events import Event, Output, RunFinished, RunStarted
from belljar.policy import Ceiling, Isolation, Policy
from belljar.testing import FakeBackend
from belljar.types import Display, File, GuestError, Mount, Request, Result, Status

RUNGS = {"jail": "jail", "wasm": "wasm", "docker": "container", "gvisor": "gvisor"}
LACKS = (
    "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named {!r}\n"
)


def fake(name: str, respond: Any = None, **rest: Any) -> FakeBackend:
    given = {"respond": respond} if respond is not None else {}
    return FakeBackend(**given, name=name, isolation=Isolation(RUNGS[name]), **rest)


def engine(*backends: Backend, sinks: Any = (), **settings: Any) -> Engine:
    return Engine(Settings(**settings), sinks=sinks, backends={b.name: b for b in backends})


def missing(name: str, reason: str) -> FakeBackend:
    found = Availability(available=False, reason=reason, fix="apt-get install it")
    return fake(name, availability=found)


# -- the reason


def test_the_reason_says_what_spoke_against_the_others() -> None:
    jar = engine(fake("jail"), fake("wasm"), fake("gvisor"))
    first = jar.run(Request(code="import json"))
    assert first.backend_reason == "auto: jail is the first choice here and holds the policy"
    floor = {"min_isolation": "wasm"}
    pure = jar.run(Request(code="import json"), wishes=floor)
    assert (pure.backend, pure.backend_reason) == (
        "wasm", "auto: wasm, because jail cannot reach the floor wasm",
    )  # fmt: skip
    native = jar.run(Request(code="import numpy"), wishes=floor)
    assert (native.backend, native.backend_reason) == (
        "gvisor",
        "auto: gvisor, because jail cannot reach the floor wasm; wasm cannot offer module 'numpy'",
    )


def test_preferring_isolation_takes_the_strongest_that_can_run_the_program() -> None:
    jar = engine(fake("jail"), fake("wasm"), fake("gvisor"))
    pure = jar.run(Request(code="import json", prefer="isolation"))
    assert (pure.backend, pure.backend_reason) == (
        "wasm", "auto: wasm isolates most of what can run it here (prefer=isolation)",
    )  # fmt: skip
    native = jar.run(Request(code="import numpy", prefer="isolation"))
    assert (native.backend, native.backend_reason) == (
        "gvisor",
        "auto: gvisor, because wasm cannot offer module 'numpy' (prefer=isolation)",
    )
    assert jar.run(Request(code="import json")).backend == "jail"  # the control arm
    asked = engine(fake("jail"), fake("wasm"), prefer="isolation")
    assert asked.run(Request(code="import json")).backend == "wasm"
    assert asked.run(Request(code="import json", prefer="speed")).backend == "jail"


def test_without_a_jail_pure_python_runs_on_wasm() -> None:
    jar = engine(missing("jail", "no user namespaces"), fake("wasm"), fake("docker"))
    result = jar.run(Request(code="import json"))
    assert result.backend == "wasm"
    assert "jail cannot be had here (no user namespaces)" in result.backend_reason


class InImages(FakeBackend):
    """A backend with images, as docker is one."""

    takes_images = True

    def compile(self, policy: Policy, request: Request) -> Plan:
        return replace(super().compile(policy, request), image=request.image or "belljar/python:1")


@pytest.mark.parametrize(
    ("listed", "image", "allowed"),
    [
        ((), "belljar/python:1", False),
        (("belljar/*",), None, True),
        (("python:3.*",), None, False),
        (("python:3.*",), "python:3.11-slim", True),
        (("python:3.*",), "registry.test/python:3.11", False),
        (("*",), "registry.test/python:3.11", False),
        (("registry.test/**",), "registry.test/deep/er/python:3.11", True),
        (("python",), "python", False),
        (("python:latest",), "python", True),
        (("python@sha256:0b1c",), "python@sha256:0b1c", True),
        (("python@sha256:0b1c",), "python:3.11", False),
        (("a.b:1",), "axb:1", False),
    ],
)
def test_only_images_that_the_operator_lists_are_used(
    listed: tuple[str, ...], image: str | None, allowed: bool
) -> None:
    backend = InImages(name="docker", isolation=Isolation.CONTAINER)
    jar = engine(backend, ceiling=Ceiling(images=(listed, ("**",))))
    if allowed:
        assert jar.run(Request(code="1", image=image), backend="docker").success
        return
    with pytest.raises(PolicyUnenforceable, match=r"ceiling\.images") as refusal:
        jar.run(Request(code="1", image=image), backend="docker")
    assert refusal.value.fields == ("image",)
    # The control arm: without the list it runs.
    assert engine(backend).run(Request(code="1", image=image), backend="docker").success


def test_a_fallback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    jar = engine(missing("docker", "no engine"), fake("jail"))
    result = jar.run(Request(code="1"), backend="docker")
    assert result.fallback is not None and result.fallback.used == "jail"
    assert [(r.name, r.levelname) for r in caplog.records] == [("belljar", "WARNING")]
    assert caplog.records[0].getMessage() in result.warnings
    jar.run(Request(code="1"), backend="jail")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", registry.PLANNED)
def test_a_backend_that_is_planned_says_so_and_what_there_is(name: str) -> None:
    with pytest.raises(NotBuiltYet, match="not built yet") as refusal:
        Engine(Settings()).run(Request(code="1"), backend=name)
    assert refusal.value.code == "not_built_yet"
    assert "docker" in refusal.value.available


def test_a_doubted_backend_is_used_when_there_is_no_other_and_the_reason_says_so() -> None:
    jar = engine(fake("jail"), fake("wasm"), missing("gvisor", "no engine (here or there)"))
    result = jar.run(Request(code="import numpy"), wishes={"min_isolation": "wasm"})
    assert result.backend == "wasm"
    assert "though it cannot offer module 'numpy'" in result.backend_reason
    assert "gvisor cannot be had here (no engine)" in result.backend_reason


class WithoutNode(FakeBackend):
    """A jail on a host where Node.js is not installed."""

    def compile(self, policy: Policy, request: Request) -> Plan:
        raise LanguageMissing("node is not installed", fix="apt-get install nodejs")


def test_quickjs_stands_in_for_a_missing_node_but_not_for_programs_that_name_it() -> None:
    jar = engine(WithoutNode(name="jail"), fake("wasm"))
    plain = jar.run(Request(code="1 + 1", language="javascript"))
    assert plain.backend == "wasm"
    assert "node is not installed" in plain.backend_reason
    with pytest.raises(LanguageMissing, match="node is not installed"):
        jar.run(Request(code="require('fs')", language="javascript"))
    alone = engine(fake("wasm")).run(Request(code="typeof require", language="javascript"))
    assert alone.backend == "wasm"


def test_what_the_host_lacks_is_told_once() -> None:
    jar = engine(missing("jail", "told once, in this test"), fake("docker"))
    first, second = (jar.run(Request(code="1")) for _ in range(2))
    assert first.warnings == (
        "backend 'jail' is not available: told once, in this test; it would have been used"
        " (fix: apt-get install it)",
    )
    assert second.warnings == ()
    jar.plan(Request(code="1"))  # planning does not use it up
    other = engine(missing("jail", "another reason, in this test"), fake("docker"))
    other.plan(Request(code="1"))
    assert len(other.run(Request(code="1")).warnings) == 1


def test_what_would_not_have_been_used_is_not_missed() -> None:
    jar = engine(fake("jail"), missing("wasm", "not installed, says this test"), fake("gvisor"))
    assert jar.run(Request(code="1")).warnings == ()
    native = jar.run(Request(code="import numpy"), wishes={"min_isolation": "wasm"})
    assert (native.backend, native.warnings) == ("gvisor", ())
    pure = jar.run(Request(code="import json"), wishes={"min_isolation": "wasm"})
    assert (pure.backend, len(pure.warnings)) == ("gvisor", 1)  # the control arm


# -- a backend that a found belljar.toml names


@pytest.mark.parametrize(
    ("named", "used", "why"),
    [
        ("gvisor", "gvisor", ""),
        ("docker", "docker", ""),  # as good as the jail
        ("jail", "jail", ""),
        ("weak", "jail", "isolates less"),
        ("gone", "jail", "not available"),
        ("foreign", "jail", "not one of Belljar's own"),
    ],
)
def test_a_found_files_backend_is_used_unless_it_isolates_less_than_auto(
    named: str, used: str, why: str
) -> None:
    def backends() -> list[Backend]:
        weak = FakeBackend(name="weak", isolation=Isolation.PROCESS)
        gone = FakeBackend(
            name="gone",
            isolation=Isolation.VM,
            availability=Availability(available=False, reason="there is none"),
        )
        return [fake("jail"), fake("docker"), fake("gvisor"), weak, gone]

    result = engine(*backends(), found_backend=named).run(Request(code="1"))
    assert result.backend == used
    assert ("BELLJAR_CONFIG" in "".join(result.warnings)) == bool(why)
    assert why in "".join(result.warnings)
    if named in ("weak", "docker"):  # the control arms: a trusted source names it; the caller does
        assert engine(*backends(), backend=named).run(Request(code="1")).backend == named
        asked = engine(*backends(), found_backend="jail").run(Request(code="1"), backend=named)
        assert asked.backend == named


# -- required libraries


def test_a_backend_that_lacks_a_library_is_passed_over() -> None:
    jail, wasm = fake("jail"), fake("wasm")
    jar = engine(wasm, jail)
    assert jar.run(build_request(code="1")).backend == "wasm"
    result = jar.run(build_request(code="1", require_libraries=["json", "pytest"]))
    assert result.backend == "jail"
    assert "wasm cannot import pytest" in result.backend_reason


def test_what_is_missing_where_is_told_when_nobody_has_it() -> None:
    jail, wasm = fake("jail"), fake("wasm")
    request = build_request(code="1", require_libraries=["pytest", "no_such_library"])
    with pytest.raises(LibrariesMissing) as refusal:
        engine(jail, wasm).run(request)
    assert "no_such_library cannot be imported on 'jail'" in str(refusal.value)
    assert "pytest, no_such_library cannot be imported on 'wasm'" in str(refusal.value)
    assert refusal.value.to_dict()["libraries"] == ["no_such_library", "pytest"]
    with pytest.raises(LibrariesMissing):
        engine(jail, wasm).run(request, backend="wasm")
    assert jail.plans == wasm.plans == []


def test_a_place_that_cannot_be_looked_into_is_asked_once() -> None:
    def respond(request: Request) -> Result:
        value = ["no_such"] if "no_such" in request.args else []
        return Result(status=Status.SUCCESS, value=value)

    docker = fake("docker", respond)
    jar = engine(docker)
    good = build_request(code="1", require_libraries=["numpy"], stdin="kept for the program")
    assert jar.run(good).success
    assert jar.run(good).success
    assert [plan.request.stdin for plan in docker.plans].count(b"") == 1
    assert len(docker.plans) == 3
    jar.plan(build_request(code="1", require_libraries=["no_such"]))  # starts nothing
    assert len(docker.plans) == 3
    with pytest.raises(LibrariesMissing):
        jar.run(build_request(code="1", require_libraries=["no_such"]))


def test_libraries_are_for_python_programs() -> None:
    request = build_request(code="1", language="javascript", require_libraries=["json"])
    with pytest.raises(RequestError, match="Python"):
        engine(fake("jail")).run(request)


# -- one more try


def lacking(module: str = "numpy", **more: Any) -> Result:
    text = LACKS.format(module)
    error = GuestError(
        type="ModuleNotFoundError", message=f"No module named {module!r}", traceback=text
    )
    return Result(status=Status.ERROR, exit_code=1, stderr=text, error=error, **more)


def without(module: str = "numpy", said: Any = (), **more: Any) -> FakeBackend:
    return fake(
        "wasm",
        lambda request: lacking(module, **more),
        output=lambda request: [*said, ("stderr", LACKS.format(module).encode())],
    )


def works(request: Request) -> Result:
    return Result(status=Status.SUCCESS, exit_code=0)


def test_a_program_that_missed_a_module_is_run_once_more_and_marked() -> None:
    seen: list[Event] = []
    jail = fake("jail", works, output=lambda request: [("stdout", b"1\n")])
    jar = engine(without("pytest"), jail, sinks=[seen.append])
    result = jar.run(build_request(code="import json", retry=True), backend="auto")
    assert (result.status, result.backend, result.retried) == (Status.SUCCESS, "jail", "wasm")
    assert result.backend_reason == "retried on jail because wasm has no module 'pytest'"
    assert result.backend_reason in result.warnings
    assert result.to_dict()["retried"] == "wasm"
    kinds = [type(event) for event in seen]
    assert kinds == [RunStarted, RunStarted, Output, RunFinished]  # the traceback was not heard


def test_without_being_asked_nothing_is_tried_again() -> None:
    jail = fake("jail")
    seen: list[Event] = []
    jar = engine(without("pytest"), jail, sinks=[seen.append])
    result = jar.run(build_request(code="import json"), backend="auto")
    assert (result.backend, result.retried, jail.plans) == ("wasm", None, [])
    assert Output in [type(event) for event in seen]


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ([("stdout", b"begun\n")], {}),
        ([("stderr", b"begun\n")], {}),
        ([], {"files": {"out": File(path="out", size=1)}}),
        ([], {"displays": (Display(data={"text/plain": "x"}),)}),
        ([], {"value": 5}),
    ],
)
def test_after_an_effect_nothing_is_tried_again(said: Any, more: Any) -> None:
    jail = fake("jail")
    seen: list[Event] = []
    jar = engine(without("pytest", said, **more), jail, sinks=[seen.append])
    result = jar.run(build_request(code="import json", retry=True))
    assert (result.backend, result.retried, jail.plans) == ("wasm", None, [])
    outputs = [(event.stream, event.data) for event in seen if isinstance(event, Output)]
    assert outputs == [*said, ("stderr", LACKS.format("pytest").encode())]


@pytest.mark.parametrize(
    ("asked", "wishes"),
    [
        ({"mounts": (Mount("/usr", "usr", "rw"),)}, {}),
        ({}, {"network": "any"}),
        ({}, {"filesystem": {"read_write": ["/usr"]}}),
    ],
)
def test_where_an_effect_cannot_be_seen_nothing_is_tried_again(asked: Any, wishes: Any) -> None:
    jail = fake("jail")
    result = engine(without("pytest"), jail).run(
        Request(code="import json", retry=True, **asked), wishes=wishes
    )
    assert (result.backend, jail.plans) == ("wasm", [])


def test_never_below_the_floor() -> None:
    jail, gvisor = fake("jail"), fake("gvisor")
    floor = {"min_isolation": "wasm"}
    request = build_request(code="import json", retry=True)
    alone = engine(without("pytest"), jail).run(request, wishes=floor)
    assert (alone.backend, alone.retried, jail.plans) == ("wasm", None, [])
    both = engine(without("pytest"), jail, gvisor).run(request, wishes=floor)
    assert (both.backend, both.retried, jail.plans) == ("gvisor", "wasm", [])


def test_a_named_backend_is_left_only_for_what_it_may_fall_back_to() -> None:
    request = build_request(code="import json", retry=True)
    jail, gvisor = fake("jail"), fake("gvisor")
    alone = engine(without("pytest"), jail).run(request, backend="wasm")
    assert (alone.backend, jail.plans) == ("wasm", [])
    assert engine(without("pytest"), jail, gvisor).run(request, backend="wasm").backend == "gvisor"
    allowed = engine(without("pytest"), jail, fallback_allow=("jail",))
    assert allowed.run(request, backend="wasm").backend == "jail"


def test_not_where_the_module_is_missing_too() -> None:
    jail = fake("jail")
    result = engine(without("no_such_module"), jail).run(
        build_request(code="import json", retry=True), backend="auto"
    )
    assert (result.backend, result.retried, jail.plans) == ("wasm", None, [])


def test_any_other_failure_is_final() -> None:
    def fails(request: Request) -> Result:
        error = GuestError(type="ValueError", message="No module named 'pytest'", traceback="x")
        return Result(status=Status.ERROR, stderr="x", error=error)

    jail = fake("jail")
    result = engine(fake("wasm", fails), jail).run(build_request(code="1", retry=True))
    assert (result.backend, jail.plans) == ("wasm", [])


@pytest.mark.parametrize("wrong", ["yes", 1])
def test_retry_is_true_or_false(wrong: Any) -> None:
    with pytest.raises(RequestError, match="retry"):
        Runner(engine=engine(fake("jail"))).execute("1", retry=wrong)


# -- explain


def test_an_explanation_names_every_backend_and_runs_none() -> None:
    backends = [fake("jail"), fake("wasm"), missing("docker", "no engine"), fake("gvisor")]
    jar = engine(*backends)
    found = jar.explain(Request(code="import numpy"), wishes={"min_isolation": "wasm"})
    assert found.backend == "gvisor"
    said = {each.name: (each.able, each.why) for each in found.verdicts}
    assert said == {
        "jail": (False, "cannot reach the floor wasm"),
        "wasm": (True, "cannot offer module 'numpy'"),
        "docker": (False, "cannot reach the floor wasm"),
        "gvisor": (True, ""),
    }
    nobody = jar.explain(Request(code="1"), wishes={"min_isolation": "vm"})
    assert nobody.backend is None
    assert "min_isolation" in nobody.reason
    assert not any(backend.plans for backend in backends)


@pytest.mark.skipif(sys.platform != "linux", reason="the backends of Linux")
def test_the_real_jail_and_the_real_wasm_agree_with_what_was_read() -> None:
    from belljar.backends.jail import JailBackend
    from belljar.backends.wasm import WasmBackend

    wasm, jail = WasmBackend(tidy=True), JailBackend()
    for backend in (wasm, jail):
        if not backend.probe().available:
            pytest.skip(backend.probe().reason)
    with engine(wasm, jail) as jar:
        pure = jar.run(build_request(code="import json; json.loads('[1]')"))
        assert (pure.backend, pure.value) == ("wasm", [1])
        native = jar.run(build_request(code="import ctypes; ctypes.sizeof(ctypes.c_int)"))
        assert (native.backend, native.value) == ("jail", 4)
        hidden = "name = ''.join(['cty', 'pes'])\nprint(__import__(name).__name__)"
        careful = jar.run(build_request(code=hidden))
        assert (careful.backend, careful.stdout) == ("jail", "ctypes\n")
        # Optional to all appearances: wasm is taken, fails, and jail is not.
        late = "try:\n    import ctypes\nexcept ImportError as e:\n    raise\nprint(1)"
        request = build_request(code=late, retry=True)
        again = jar.run(request)
        assert (again.backend, again.retried, again.stdout) == ("jail", "wasm", "1\n"), again
        assert again.backend_reason == "retried on jail because wasm has no module 'ctypes'"
        assert jar.run(build_request(code=late)).status is Status.ERROR  # the control arm
        begun = jar.run(build_request(code=f"open('made', 'w').close()\n{late}", retry=True))
        assert (begun.backend, begun.retried) == ("wasm", None)


# -- a backend that is there and cannot be set up


def refuse_to_start(request: Request) -> Result:
    raise SetupFailed("the jail could not be set up: mount proc on /proc (EPERM)")


def test_auto_goes_on_when_its_choice_cannot_be_set_up_and_remembers_it() -> None:
    heard: list[Event] = []
    first, second = fake("jail", refuse_to_start), fake("docker")
    jar = engine(first, second, sinks=[heard.append])
    result = jar.run(Request(code="import json"))
    why = "the jail could not be set up: mount proc on /proc"
    assert (result.backend, result.success) == ("docker", True)
    assert f"'jail' could not be used: {why}; ran on 'docker'" in result.warnings
    assert result.backend_reason == f"auto: docker, because jail cannot be set up here ({why})"
    assert result.fallback is not None
    assert (result.fallback.wanted, result.fallback.used) == ("jail", "docker")
    kinds = [type(event).__name__ for event in heard]
    assert kinds == ["RunStarted", "RunStarted", "RunFinished"]
    tried = len(first.plans)
    again = jar.run(Request(code="1"))
    assert again.warnings == result.warnings and again.fallback == result.fallback
    assert len(first.plans) == tried


def test_threads_whose_first_runs_fail_together_all_get_a_result() -> None:
    jar, start = engine(fake("jail", refuse_to_start), fake("docker")), threading.Barrier(4)

    def run() -> str | None:
        start.wait()
        return jar.run(Request(code="1")).backend

    with ThreadPoolExecutor(4) as pool:
        assert {each.result() for each in [pool.submit(run) for _ in range(4)]} == {"docker"}


def test_what_cannot_be_set_up_never_goes_below_the_floor() -> None:
    weak = FakeBackend(name="weak", isolation=Isolation.PROCESS)
    jar = engine(fake("jail", refuse_to_start), weak)
    with pytest.raises(SetupFailed):
        jar.run(Request(code="1"), wishes={"min_isolation": "landlock"})
    assert not weak.plans
    assert jar.run(Request(code="1")).backend == "weak"  # the control arm


def test_a_named_backend_that_cannot_be_set_up_stays_the_one() -> None:
    jar = engine(fake("jail", refuse_to_start), fake("docker"))
    with pytest.raises(SetupFailed):
        jar.run(Request(code="1"), backend="jail")
    with pytest.raises(SetupFailed):
        jar.run(Request(code="1", fallback=False))


def test_a_failure_after_the_program_may_have_started_is_raised() -> None:
    def break_later(request: Request) -> Result:
        raise BackendFailed("the run's supervisor was killed")

    second = fake("docker")
    with pytest.raises(BackendFailed, match="killed"):
        engine(fake("jail", break_later), second).run(Request(code="1"))
    assert not second.plans


def test_a_request_cannot_choose_weaker_isolation_by_failing() -> None:
    """Neither for itself nor for others: the simplest program can be set up here."""

    def refuse_this(request: Request) -> Result:
        if request.code == "odd":
            raise SetupFailed("the run could not be set up: File name too long")
        return Result(status=Status.SUCCESS, exit_code=0)

    second = fake("docker")
    jar = engine(fake("jail", refuse_this), second)
    with pytest.raises(SetupFailed, match="too long"):
        jar.run(Request(code="odd"))
    assert jar.run(Request(code="1")).backend == "jail" and not second.plans


def test_a_backend_that_has_worked_is_not_left() -> None:
    broken = threading.Event()

    def break_down(request: Request) -> Result:
        if broken.is_set():
            raise SetupFailed("no space left for namespaces")
        return Result(status=Status.SUCCESS, exit_code=0)

    jar = engine(fake("jail", break_down), fake("docker"))
    assert jar.run(Request(code="1")).backend == "jail"
    broken.set()
    with pytest.raises(SetupFailed, match="no space"):
        jar.run(Request(code="1"))

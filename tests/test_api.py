"""The public calls: what they accept, refuse by name, hand on, and how they end."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar import api
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import (
    BelljarError,
    LanguageUnknown,
    PolicyError,
    PolicyUnenforceable,
    RequestError,
)
from belljar.policy import Isolation, Limits, Policy
from belljar.testing import FakeBackend
from belljar.types import Result, Status

SOURCE = str(Path(belljar.__file__).parents[1])


@pytest.fixture
def fake() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def runner(fake: FakeBackend) -> Iterator[api.Runner]:
    with api.Runner(engine=Engine(Settings(), backends={"fake": fake})) as made:
        yield made


# -- the pinned signature


def test_run_has_the_signature_that_others_rely_on() -> None:
    shown = inspect.signature(belljar.run).parameters
    defaults = {name: p.default for name, p in shown.items() if name != "code"}
    assert defaults == {
        "language": "python", "backend": "auto", "level": "standard", "policy": None,
        "timeout": None, "memory": None, "cpus": None, "processes": None, "disk": None,
        "output": None, "value": None, "displays": None, "open_files": None, "fuel": None,
        "stdin": b"", "args": (), "env": None, "files": None, "outputs": (), "context": None,
        "outputs_to": None, "outputs_each": None, "outputs_total": None,
        "mounts": (), "network": None,
        "modules": None, "min_isolation": None, "python": None, "image": None, "on_stdout": None,
        "on_stderr": None, "settle": None, "require_libraries": (), "retry": None,
        "fallback": None,
        "prefer": None,
        "workdir": None,
    }  # fmt: skip
    assert {p.kind for name, p in shown.items() if name != "code"} == {
        inspect.Parameter.KEYWORD_ONLY
    }


# -- what a request may say


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"code": 3}, "code"),
        ({"code": b"1"}, "code"),
        ({"code": "a\0b"}, "code"),
        ({"language": "cobol"}, "language"),
        ({"language": []}, "language"),
        ({"stdin": 3}, "stdin"),
        ({"stdin": "\ud800"}, "stdin"),
        ({"args": "one two"}, "args"),
        ({"args": [1]}, "args"),
        ({"args": [None]}, "args"),
        ({"args": ["a\0"]}, "args"),
        ({"args": ["\ud800"]}, "args"),
        ({"args": 7}, "args"),
        ({"env": ["A=1"]}, "env"),
        ({"env": {"": "x"}}, "env"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"A\0": "x"}}, "env"),
        ({"env": {"\ud800": "x"}}, "env"),
        ({"env": {"A": 1}}, "env['A']"),
        ({"env": {"A": None}}, "env['A']"),
        ({"env": {"A": "x\0"}}, "env['A']"),
        ({"env": {"A": "\ud800"}}, "env['A']"),
        ({"files": ["a"]}, "files"),
        ({"files": {"../a": b""}}, "files"),
        ({"files": {"/etc/a": b""}}, "files"),
        ({"files": {3: b""}}, "files"),
        ({"files": {"a\ud800": b""}}, "files"),
        ({"files": {"a": 3}}, "files['a']"),
        ({"files": {"main.py": b""}}, "files"),
        ({"files": {"./main.py": b""}}, "files"),
        ({"files": {"main.py/x": b""}}, "files"),
        ({"files": {"a": b"", "./a": b""}}, "files"),
        ({"files": {"a": b"", "a/b": b""}}, "files"),
        ({"files": {"a/b": b"", "a": b""}}, "files"),
        ({"outputs": "*.csv"}, "outputs"),
        ({"outputs": [b"*"]}, "outputs"),
        ({"context": [1]}, "context"),
        ({"context": {"not a name": 1}}, "context"),
        ({"context": {3: 1}}, "context"),
        ({"mounts": "/usr:/usr"}, "mounts"),
        ({"mounts": ["/usr"]}, "mounts"),
        ({"mounts": ["/nowhere/at/all:x"]}, "mounts.src"),
        ({"mounts": ["/usr/share:../x"]}, "mounts.dst"),
        ({"mounts": ["/usr/share:x", "/usr/lib:x"]}, "mounts"),
        ({"mounts": ["/usr/share:x"], "files": {"x/y": b""}}, "mounts"),
        ({"mounts": ["/usr/share:x/y"], "files": {"x": b""}}, "mounts"),
        ({"mounts": ["/usr/share:main.py"]}, "mounts"),
        ({"python": 3}, "python"),
        ({"python": "a\0"}, "python"),
        ({"image": 3}, "image"),
        ({"workdir": 3}, "workdir"),
        ({"workdir": "a/../.."}, "workdir"),
        ({"workdir": "/elsewhere"}, "workdir"),
        ({"prefer": "luck"}, "prefer"),
        ({"policy": "strict"}, "policy"),
        ({"policy": {"colour": 1}}, "colour"),
        ({"timeout": 0}, "timeout"),
        ({"memory": "much"}, "memory"),
        ({"processes": 1.5}, "processes"),
        ({"level": "loose"}, "level"),
        ({"network": "some"}, "network"),
        ({"min_isolation": "castle"}, "min_isolation"),
        ({"colour": "blue"}, "colour"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_starts(
    runner: api.Runner, fake: FakeBackend, wrong: dict[str, Any], field: str
) -> None:
    code = wrong.get("code", "1")
    with pytest.raises((RequestError, PolicyError)) as refusal:
        runner.execute(code, **{key: value for key, value in wrong.items() if key != "code"})
    assert refusal.value.field == field
    assert field in str(refusal.value)
    json.dumps(refusal.value.to_dict())
    assert not fake.plans


@pytest.mark.parametrize("name", ["functions", "secrets"])
def test_names_of_later_versions_are_reserved(runner: api.Runner, name: str) -> None:
    early: dict[str, Any] = {name: 1}
    for call in (
        lambda: runner.execute("1", **early),
        lambda: belljar.create_runner(**early),
    ):
        with pytest.raises(RequestError) as refusal:
            call()
        assert (refusal.value.field, "reserved" in str(refusal.value)) == (name, True)


def test_a_request_is_code_or_a_command() -> None:
    assert api.build_request(code="1").code == "1"
    assert api.build_request(command=["ls", "-l"]).command == ("ls", "-l")
    for wrong in ({}, {"code": "1", "command": ["ls"]}):
        with pytest.raises(RequestError) as refusal:
            api.build_request(**wrong)  # type: ignore[arg-type]
        assert refusal.value.field == "code"


def test_a_command_may_have_a_file_of_any_name() -> None:
    request = api.build_request(command=["cat"], files={"main.py": "x"})
    assert request.files == {"main.py": b"x"}


def test_everything_said_reaches_the_backend_as_it_was_meant(
    runner: api.Runner, fake: FakeBackend
) -> None:
    runner.execute(
        "x", {"x": 1}, language="py", stdin="ü", args=("a", "b"), env={"A": "1"},
        files={"./d//f": "t", "b": bytearray(b"u")}, outputs=["*.csv"],
        mounts=["/usr/share:share"], timeout="1500ms", memory="64M", modules="any",
    )  # fmt: skip
    plan = fake.plans[0]
    request = plan.request
    assert (request.code, request.language, request.stdin) == ("x", "python", "ü".encode())
    assert (request.args, request.env, request.outputs) == (("a", "b"), {"A": "1"}, ("*.csv",))
    assert request.files == {"d/f": b"t", "b": b"u"}
    assert request.context == {"x": 1}
    assert [(m.src, m.dst, m.mode) for m in request.mounts] == [("/usr/share", "share", "ro")]
    assert (plan.policy.limits.timeout, plan.policy.limits.memory) == (1.5, 64 << 20)


def test_a_callers_own_containers_may_change_after_the_call(
    runner: api.Runner, fake: FakeBackend
) -> None:
    files: dict[str, bytes | str] = {"a": "1"}
    env = {"A": "1"}
    runner.execute("1", files=files, env=env)
    files["a"] = "2"
    env["A"] = "2"
    assert fake.requests[0].files == {"a": b"1"}
    assert fake.requests[0].env == {"A": "1"}


# -- policy, level and backend


def test_a_policy_object_or_mapping_is_the_base_of_the_calls_own_keywords(
    runner: api.Runner, fake: FakeBackend
) -> None:
    whole = Policy(
        level="standard",
        min_isolation=Isolation.JAIL,
        limits=Limits(timeout=7, memory=1 << 28, cpus=1, processes=9),
    )
    runner.execute("1", policy=whole, processes=3)
    runner.execute("1", policy={"timeout": 8, "processes": 4}, timeout=2)
    first, second = (plan.policy for plan in fake.plans)
    assert (first.limits.timeout, first.limits.processes) == (7, 3)
    assert first.min_isolation is Isolation.JAIL
    assert (second.limits.timeout, second.limits.processes) == (2, 4)


def test_a_runners_defaults_stand_until_a_call_says_otherwise(fake: FakeBackend) -> None:
    engine = Engine(Settings(), backends={"fake": fake})
    with api.Runner(engine=engine, level="permissive", timeout=3, env={"A": "1"}) as runner:
        runner.execute("1")
        runner.execute("1", timeout=4, level="standard", env=None)
    first, second = fake.plans
    assert (first.policy.level, first.policy.limits.timeout) == ("permissive", 3)
    assert (second.policy.level, second.policy.limits.timeout) == ("standard", 4)
    assert first.request.env == second.request.env == {"A": "1"}


def ask(code: str, **environ: str) -> Any:
    """What a fresh interpreter with this configuration answers."""
    program = (
        "import belljar, json\n"
        "def tell(**how):\n"
        "    try: result = belljar.run('6 * 7', **how)\n"
        "    except belljar.BelljarError as error: return error.to_dict()\n"
        "    return {'value': result.value, 'backend': result.backend}\n"
        f"print(json.dumps({code}))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE, "HOME": "/nonexistent", **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_the_configured_level_binds_a_plain_call_and_an_explicit_one_replaces_it() -> None:
    plain, explicit = ask(
        "[tell(), tell(level='standard')]", BELLJAR_LEVEL="strict", BELLJAR_BACKEND="subprocess"
    )
    assert plain["code"] == "policy_unenforceable"
    assert "min_isolation" in plain["fields"]
    assert explicit == {"value": 42, "backend": "subprocess"}
    assert ask("tell()", BELLJAR_BACKEND="subprocess")["value"] == 42  # the control arm


def test_the_configured_backend_binds_a_plain_call_and_an_explicit_one_replaces_it() -> None:
    plain, explicit = ask(
        "[tell(modules='any'), tell(backend='subprocess')]",
        BELLJAR_BACKEND="inprocess",
        BELLJAR_LEVEL="permissive",
    )
    assert plain == {"value": 42, "backend": "inprocess"}
    assert explicit["backend"] == "subprocess"


def test_the_operators_floor_binds_whatever_the_call_says() -> None:
    told = ask(
        "tell(level='permissive', min_isolation='none', backend='subprocess')",
        BELLJAR_CEILING_MIN_ISOLATION="vm",
    )
    assert told["code"] == "policy_unenforceable"
    assert "min_isolation" in told["fields"]


# -- callbacks


def test_callbacks_get_text_in_order_and_characters_whole(fake: FakeBackend) -> None:
    euro = "€".encode()
    chatty = FakeBackend(
        output=lambda request: [
            ("stdout", b"a" + euro[:1]),
            ("stderr", b"!"),
            ("stdout", euro[1:]),
            ("stdout", b"\xff"),
            ("stdout", euro[:2]),
        ]
    )
    out, err = list[str](), list[str]()
    with api.Runner(engine=Engine(Settings(), backends={"fake": chatty})) as runner:
        runner.execute("1", on_stdout=out.append, on_stderr=err.append)
        runner.execute("1", on_stderr=err.append)
    assert "".join(out) == "a€\ufffd\ufffd"  # also the half of a character at the very end
    assert err == ["!", "!"]


def test_a_callback_that_raises_ends_the_run_and_is_heard() -> None:
    class Enough(Exception):
        pass

    def stop(text: str) -> None:
        raise Enough(text)

    code = "import time\nprint('hello', flush=True)\ntime.sleep(60)"
    with belljar.create_runner(backend="subprocess") as runner:
        with pytest.raises(Enough, match="hello"):
            runner.execute(code, on_stdout=stop)
        assert runner.execute("1 + 1").value == 2


# -- asyncio


def test_arun_answers_like_run() -> None:
    result = asyncio.run(belljar.arun("print('hi'); 6 * 7", backend="subprocess"))
    assert (result.value, result.stdout) == (42, "hi\n")


def test_arun_refuses_like_run() -> None:
    with pytest.raises(LanguageUnknown):
        asyncio.run(belljar.arun("1", language="cobol"))
    with pytest.raises(PolicyUnenforceable):
        asyncio.run(belljar.arun("1", min_isolation="vm", backend="subprocess"))


def test_cancelling_arun_kills_the_guest_first(tmp_path: Path) -> None:
    alive = threading.Event()
    code = (
        "import os, time\nopen('box/pid', 'w').write(str(os.getpid()))\n"
        "print('up', flush=True)\ntime.sleep(100)\nopen('box/late', 'w')"
    )

    async def cancel_it() -> None:
        task = asyncio.ensure_future(
            belljar.arun(
                code,
                backend="subprocess",
                mounts=[f"{tmp_path}:box:rw"],
                on_stdout=lambda text: alive.set(),
            )
        )
        assert await asyncio.to_thread(alive.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_it())
    assert (tmp_path / "pid").exists()
    assert not (tmp_path / "late").exists()
    assert not list(Path("/tmp").glob(f"belljar-{os.getpid()}-*"))


def test_a_second_cancellation_does_not_leave_the_guest_to_itself() -> None:
    running, told, may_end, ended = (threading.Event() for _ in range(4))

    class Slow(FakeBackend):
        def run(self, plan: Any, emit: Any, cancel: Any) -> Result:
            running.set()
            cancel.wait(30)
            told.set()
            may_end.wait(30)  # as long as a kill may take
            ended.set()
            return super().run(plan, emit, cancel)

    async def cancel_twice() -> None:
        with api.Runner(engine=Engine(Settings(), backends={"fake": Slow()})) as runner:
            task = asyncio.ensure_future(runner.aexecute("1"))
            assert await asyncio.to_thread(running.wait, 30)
            task.cancel()
            assert await asyncio.to_thread(told.wait, 30)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert not task.done()
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set()

    asyncio.run(cancel_twice())


# -- runners


def test_a_closed_runner_refuses(runner: api.Runner, fake: FakeBackend) -> None:
    assert runner.execute("1").success
    runner.close()
    assert fake.closed
    with pytest.raises(RequestError) as refusal:
        runner.execute("1")
    assert refusal.value.field == "runner"


def test_one_runner_serves_many_threads_without_crosstalk() -> None:
    def one(runner: api.Runner, number: int) -> tuple[int, object, str, list[str], list[str]]:
        heard: list[str] = []
        result = runner.execute(
            "import os\nprint(n)\nopen(f'out-{n}', 'w').write(str(n))\nn * n",
            {"n": number},
            env={"MARK": str(number)},
            on_stdout=heard.append,
        )
        assert result.success, result
        return number, result.value, result.stdout, sorted(result.files), heard

    with (
        belljar.create_runner(backend="subprocess", timeout=60) as shared,
        ThreadPoolExecutor(6) as pool,
    ):
        for number, value, out, files, heard in pool.map(partial(one, shared), range(18)):
            assert (value, out, files) == (number * number, f"{number}\n", [f"out-{number}"])
            assert "".join(heard) == out


def test_one_request_may_run_many_times_at_once() -> None:
    request = api.build_request(code="import time; time.sleep(0.3); 'done'")
    with Engine(Settings()) as engine, ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(engine.run, request, backend="subprocess") for _ in range(3)]
        assert [run.result().value for run in runs] == ["done"] * 3


def test_a_result_is_a_guests_failure_and_an_exception_is_ours() -> None:
    with belljar.create_runner(backend="subprocess") as runner:
        failed = runner.execute("1/0")
        assert failed.status is Status.ERROR
        assert failed.error is not None and failed.error.type == "ZeroDivisionError"
        with pytest.raises(BelljarError):
            runner.execute("1", fuel=5)

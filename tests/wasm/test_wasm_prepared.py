"""The instance that a worker prepares: it serves one run, nobody can tell, and limits hold on it.

The worker is driven step by step in a process of its own, so that a rehearsal happens when the test
says so and not when ten milliseconds are over.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.wasm import WasmBackend, _order
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request, Result
from belljar.wasm import build, cache

_FOUND = WasmBackend().probe()
pytestmark = pytest.mark.skipif(
    not _FOUND.available or not build.description(build.JAVASCRIPT),
    reason=_FOUND.reason or "the JavaScript guest has not been built",
)
LANGUAGES = ("python", "javascript")

# Steps: ["rehearse"], ["fail"] (a rehearsal that ends in a trap), ["run", order], ["again", order]
# (on the instance of the last run: never done by a worker). Says for each what became of it, on its
# last line.
DRIVER = """
import json, marshal, os, socket, sys, threading
from belljar.wasm import engine, worker
import wasmtime

def trap(*instance):
    raise wasmtime.WasmtimeError("out of room")

setup, steps = json.loads(sys.stdin.read())
ours, theirs = socket.socketpair()
said, last = [], None

def frames():
    data, kinds = b"", []
    theirs.setblocking(False)
    try:
        while piece := theirs.recv(1 << 20):
            data += piece
    except BlockingIOError:
        pass
    while data:
        size = int.from_bytes(data[1:5], "big")
        payload, data, kind = data[5:5 + size], data[5 + size:], data[0]
        kinds.append([kind, marshal.loads(payload) if kind == 0x10 else payload.decode()])
    return kinds

def drive():
    global last
    try:
        made = worker.Worker(setup, ours, worker.Streams())
        threading.Thread(target=made.clock.run, daemon=True).start()
        keep, rehearse = made._guests.run, made._guests.rehearse
        for step, *order in steps:
            before = made._parked
            if step in ("rehearse", "fail"):
                made._guests.rehearse = rehearse if step == "rehearse" else trap
                made._rehearse()
                said.append({"same": made._parked is before, "frames": frames()})
                continue
            full = {"files": [], "fuel": None, "epoch": True, "seconds": 20.0, **order[0],
                    "stdin": order[0].get("stdin", "").encode()}
            if step == "again":
                code = keep(*last, full)
                said.append({"code": code, "frames": frames()})
                continue
            if len(order) > 1:  # it is used again: keep it open
                last = before
                before[0].close = lambda: None
            made._renew(made._run(full))
            try:
                before[0].set_epoch_deadline(1)
                gone = False
            except ValueError:
                gone = True
            said.append({"same": made._parked is before, "gone": gone, "frames": frames()})
    except BaseException as error:
        said.append({"died": repr(error)})

threading.stack_size(engine.THREAD_STACK)
thread = threading.Thread(target=drive)
thread.start()
thread.join()
os.write(2, json.dumps(said).encode())
os._exit(0)
"""


def compiled(language: str) -> cache.Compiled:
    library = cache.library()
    assert library is not None
    guest = build.GUESTS[language]
    return cache.prepare(guest, fuel=False, installed=library, say=lambda text: None)


def order(code: str, **more: Any) -> dict[str, Any]:
    request = {
        "env": {"GIVEN": "1"}, "directory": "/work", "code": code, "filename": "main",
        "args": ["a"], "context": {},
    }  # fmt: skip
    return {"request": json.dumps(request), **more}


def drive(
    tmp_path: Path, language: str, steps: list[Any], *, memory: int | None = 64 << 20
) -> tuple[list[dict[str, Any]], str]:
    """What became of each step, and what the programs wrote."""
    found = compiled(language)
    setup = {
        "language": language, "guest": found.path, "parts": found.parts, "fuel": False,
        "memory": 0 if memory is None else found.memory + memory, "directory": "/work",
        "preopens": [(str(tmp_path), "/work", True)],
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([setup, steps]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stderr.splitlines()[-1])
    assert not any("died" in each for each in said), said
    return said, done.stdout


def ending(step: dict[str, Any]) -> dict[str, Any]:
    (report,) = [payload for kind, payload in step["frames"] if kind == 0x10]
    return dict(report)


# Everything that a rehearsal could have left behind, as far as a program can see it.
LOOKS = {
    "python": (
        "import os, sys, gc, builtins, atexit, warnings\n"
        "print([(k, type(v).__name__) for k, v in globals().items()], dict(os.environ),"
        " os.getcwd(), sys.argv, sorted(sys.modules), sorted(vars(builtins)), atexit._ncallbacks(),"
        " sys.path, sys.stdout.write_through, sys.flags, gc.get_threshold(),"
        " sys.getrecursionlimit(), os.listdir('.'), __file__, __name__)"
    ),
    "javascript": (
        "console.log(Object.getOwnPropertyNames(globalThis), env, scriptArgs, stdin,"
        " setTimeout(() => 0, 0), typeof result, new Error('x').stack)"
    ),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_program_can_tell_a_rehearsed_instance(tmp_path: Path, language: str) -> None:
    look = ["run", order(LOOKS[language])]
    _, plain = drive(tmp_path, language, [look])
    rehearsed, after = drive(tmp_path, language, [["rehearse"], look])
    assert rehearsed[0]["frames"] == []
    assert len(plain) > 200
    assert after == plain
    # Whoever runs second on an instance does see something.
    _, second = drive(
        tmp_path, language, [["run", order("leak = 1"), "kept"], ["again", order(LOOKS[language])]]
    )
    assert second != plain


RANDOM = {
    "python": "import random\nprint(random.random())",
    "javascript": "console.log(Math.random())",
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_rehearsed_instances_are_seeded_apart(tmp_path: Path, language: str) -> None:
    look = ["run", order(RANDOM[language])]
    _, out = drive(tmp_path, language, [["rehearse"], look, ["rehearse"], look, look])
    assert len(set(out.split())) == 3


MARK = {
    "python": ("import builtins; builtins.leak = 1", "print('leak' in dir(__builtins__))"),
    "javascript": ("globalThis.leak = 1", "console.log('leak' in globalThis)"),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_instance_serves_one_run(tmp_path: Path, language: str) -> None:
    mark, look = (order(code) for code in MARK[language])
    steps = [["run", mark], ["run", look], ["rehearse"], ["run", mark], ["rehearse"], ["run", look]]
    said, out = drive(tmp_path, language, steps)
    runs = [each for each in said if "gone" in each]
    assert [(each["same"], each["gone"]) for each in runs] == [(False, True)] * 4
    assert out.split() == [{"python": "False", "javascript": "false"}[language]] * 2
    # The same mark on the same instance is there.
    _, out = drive(tmp_path, language, [["run", mark, "kept"], ["again", look]])
    assert out.lower().split() == ["true"]


HUNGRY = {
    "python": "print(len(bytearray(100 << 20)))",
    "javascript": "console.log(new Uint8Array(100 << 20).length)",
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_memory_limit_holds_on_a_rehearsed_instance(tmp_path: Path, language: str) -> None:
    steps = [["rehearse"], ["run", order(HUNGRY[language])]]
    said, out = drive(tmp_path, language, steps)
    assert ending(said[1])["code"] == 1
    assert out == ""
    said, out = drive(tmp_path, language, steps, memory=200 << 20)
    assert ending(said[1])["code"] == 0
    assert out == f"{100 << 20}\n"


ENDLESS = {"python": "while True: pass", "javascript": "for (;;);"}
SHORT = {"python": "for _ in range(9): pass", "javascript": "for (let i = 0; i < 9; i++);"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_deadline_of_the_order_holds_on_a_rehearsed_instance(
    tmp_path: Path, language: str
) -> None:
    steps = [
        ["rehearse"], ["run", order(ENDLESS[language], seconds=0.1)],
        ["rehearse"], ["run", order(SHORT[language], seconds=20.0)],
    ]  # fmt: skip
    said, _ = drive(tmp_path, language, steps)
    assert "interrupt" in ending(said[1])["trap"]
    assert ending(said[3]) | {"code": 0, "trap": ""} == ending(said[3])


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_rehearsal_that_fails_costs_the_instance_and_not_the_worker(
    tmp_path: Path, language: str
) -> None:
    steps = [["fail"], ["run", order(SHORT[language])], ["rehearse"]]
    said, _ = drive(tmp_path, language, steps)
    assert [each["same"] for each in said] == [False, False, True]
    assert ending(said[1])["code"] == 0
    # Without any room the program is what fails, or it fits: in any case there is an answer.
    steps = [["rehearse"], ["run", order(SHORT[language])]]
    said, _ = drive(tmp_path, language, steps, memory=0)
    assert "code" in ending(said[1])


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_instance_is_rehearsed_once(tmp_path: Path, language: str) -> None:
    # The second rehearsal would end in a trap, and cost the instance, if it took place.
    said, _ = drive(tmp_path, language, [["rehearse"], ["fail"], ["run", order("1")], ["fail"]])
    assert [each["same"] for each in said] == [True, True, False, False]


@pytest.mark.parametrize("language", LANGUAGES)
def test_input_reaches_a_run_on_a_worker_that_has_rehearsed(tmp_path: Path, language: str) -> None:
    echo = {"python": "print(input())", "javascript": "console.log(stdin)"}[language]
    steps = [["rehearse"], ["run", order(echo, stdin="first")], ["run", order(echo, stdin="other")]]
    said, out = drive(tmp_path, language, steps)
    assert out.split() == ["first", "other"]
    # Python's input is a file of the instance, so it had one of its own, and the other waits on.
    assert said[1]["same"] is (language == "python")


# -- through the engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Settings(), backends={"wasm": WasmBackend()}) as engine:
        yield engine


def run(engine: Engine, language: str, code: str, **asked: Any) -> Result:
    wishes = {"modules": "any", **asked.pop("wishes", {})}
    return engine.run(Request(code=code, language=language, **asked), wishes=wishes)


@pytest.mark.parametrize("language", LANGUAGES)
def test_only_guests_that_can_see_files_get_some(engine: Engine, language: str) -> None:
    request = Request(code="1", language=language, files={"data": b"x"}, outputs=("*",))
    plan = engine.plan(request, wishes={"modules": "any"})
    told, before = _order(plan, plan.spec)
    assert len(told["files"]) == len(before) == (2 if language == "python" else 0)
    result = engine.run(request, wishes={"modules": "any"})
    assert (result.success, dict(result.files)) == (True, {})


def test_a_file_that_a_program_writes_comes_back_and_is_gone_for_the_next(engine: Engine) -> None:
    wrote = run(engine, "python", "open('out', 'w').write('x')", outputs=("out",))
    assert wrote.files["out"].data == b"x"
    assert run(engine, "python", "import os; os.listdir('.')").value == ["main.py"]


def test_an_order_larger_than_any_buffer_arrives_whole(engine: Engine) -> None:
    data = bytes(range(256)) * (1 << 15)
    code = "import hashlib; hashlib.sha256(open('data', 'rb').read()).hexdigest()"
    result = run(engine, "python", code, files={"data": data})
    assert result.value == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("language", LANGUAGES)
def test_idle_time_costs_no_fuel(engine: Engine, language: str) -> None:
    used = set()
    for pause in (0.0, 0.0, 0.2, 0.0):  # long enough for a rehearsal, if there were one
        time.sleep(pause)
        used.add(run(engine, language, "1 + 1", wishes={"fuel": 10**9}).usage.fuel)
    assert len(used) == 1
    other = run(engine, language, "2 + 2 + 2", wishes={"fuel": 10**9}).usage.fuel
    assert other not in used

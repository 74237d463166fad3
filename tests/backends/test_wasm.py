"""The wasm backend: a fresh instance every time, and an engine that holds what it promises."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.base import Cancel
from belljar.backends.wasm import WasmBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendUnavailable, PolicyUnenforceable
from belljar.types import Mount, Request, Result, Status
from belljar.wasm import build
from belljar.wasm import engine as wasm_engine

_FOUND = WasmBackend().probe()
pytestmark = pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)
GENEROUS = 30.0  # seconds by which a kill has to be over, on any machine


class Jar:
    def __init__(self, **options: Any) -> None:
        self.backend = WasmBackend(**options)
        self.engine = Engine(Settings(), backends={"wasm": self.backend})

    def run(self, code: str | None, *, level: str = "standard", **wanted: Any) -> Result:
        keys = ("command", "mounts", "files", "python", "language", "outputs", "stdin")
        asked = {key: wanted.pop(key) for key in keys if key in wanted}
        cancel = wanted.pop("cancel", None)
        return self.engine.run(
            Request(code=code, **asked),
            level=level,
            wishes={"modules": "any", **wanted},
            cancel=cancel,
        )

    def workers(self) -> list[int]:
        """The descriptors of the idle workers: equal numbers, equal workers."""
        pool = self.backend._pool
        idle = pool._idle.values() if pool is not None else ()
        return sorted(worker.jail.pidfd for workers in idle for worker in workers)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(scope="module")
def warm() -> Iterator[Jar]:
    jar = Jar()
    yield jar
    jar.close()


@pytest.fixture
def jar() -> Iterator[Jar]:
    jar = Jar()
    yield jar
    jar.close()


def test_every_field_is_enforced_at_every_level(warm: Jar) -> None:
    for level in ("permissive", "standard", "strict"):
        result = warm.run("import sys; sys.platform", level=level)
        assert (result.value, result.isolation) == ("wasi", "wasm")
        assert {held.state for held in result.enforcement.values()} == {"enforced"}, level


def test_it_is_a_whole_cpython_with_its_standard_library(warm: Jar) -> None:
    names = """argparse asyncio collections csv dataclasses datetime decimal difflib email.message
        fractions html.parser http.client json logging pathlib pickle random re sqlite3 statistics
        string tomllib typing unittest.mock urllib.parse uuid xml.etree.ElementTree zipfile zlib
        zoneinfo"""
    result = warm.run(f"import {', '.join(names.split())}, sys\nsys.version_info[:2]")
    assert result.value == (3, 14), result.stderr


# -- nothing of one run is in the next -------------------------------------------------------------


def test_one_run_leaves_nothing_to_the_next_on_the_same_worker(jar: Jar) -> None:
    first = jar.run("""
import builtins, json, os, sys
builtins.print = None
json.loads = None
sys.modules["leak"] = os
os.environ["LEAK"] = "x"
open("left", "w").write("x")
open("/tmp/left", "w").write("x")
""")
    kept = jar.workers()
    second = jar.run("""
import json, os, sys
print([json.loads("1"), "leak" in sys.modules, "LEAK" in os.environ, os.listdir("."),
       os.listdir("/tmp")])
""")
    assert first.success
    assert (len(kept), jar.workers()) == (1, kept)
    assert second.stdout == "[1, False, False, ['main.py'], []]\n"


def test_an_interpreter_below_tmp_is_neither_shown_nor_cleared_away() -> None:
    """Its directory is mounted in the worker's /tmp, where runs leave things that are deleted."""
    home = tempfile.mkdtemp(prefix="belljar-venv-", dir="/tmp")
    try:
        os.chmod(home, 0o755)
        venv.create(home, with_pip=False, symlinks=True)
        kept = os.path.join(home, "share", "a", "kept")
        os.makedirs(os.path.dirname(kept))
        Path(kept).write_text("ours")
        (packages,) = Path(home).glob("lib/python3*/site-packages")
        (packages / "ours.pth").write_text("\n".join(path for path in sys.path if path))
        program = (
            "import belljar\n"
            "with belljar.create_runner(backend='wasm') as runner:\n"
            "    for _ in range(3):\n"
            '        code = \'import os; print(os.listdir("/tmp")); open("/tmp/x", "w")\'\n'
            "        result = runner.execute(code)\n"
            "        print(result.status.value, result.stdout, result.stderr)\n"
        )
        python = os.path.join(home, "bin", "python")
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
        assert done.stdout.split("\n")[::2] == ["success []"] * 3 + [""], done
        assert Path(kept).read_text() == "ours"
    finally:
        shutil.rmtree(home)


def test_random_numbers_differ_from_run_to_run(warm: Jar) -> None:
    code = "import random, os, uuid; [random.random(), os.urandom(8), str(uuid.uuid4())]"
    assert not any(map(lambda a, b: a == b, warm.run(code).value, warm.run(code).value))


def test_a_worker_that_was_left_with_a_forest_is_replaced(jar: Jar) -> None:
    assert jar.run("1").success
    assert len(jar.workers()) == 1
    result = jar.run("import os\nfor number in range(2000): os.mkdir(str(number))")
    assert result.success, result
    assert jar.workers() == []
    assert jar.run("import os; os.listdir('.')").value == ["main.py"]


def test_many_callers_at_once_each_get_their_own(warm: Jar) -> None:
    def one(number: int) -> Any:
        return warm.run(f"open('n', 'w').write('{number}')\nprint({number})\nint(open('n').read())")

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(one, range(30)))
    assert [result.value for result in results] == list(range(30))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(30)]


# -- time ------------------------------------------------------------------------------------------

BUSY = "while True: pass"


def test_a_busy_guest_is_stopped_by_the_engine_and_its_worker_lives(jar: Jar) -> None:
    assert jar.run("1").success
    kept = jar.workers()
    result = jar.run(BUSY, timeout=0.5)
    assert (result.status, result.exit_code) == (Status.TIMEOUT, None)
    assert jar.workers() == kept


@pytest.mark.parametrize("code", [BUSY, "7 ** 7 ** 9", "import re; re.match('(a+)+b', 'a' * 40)"])
def test_without_the_engine_s_deadline_the_worker_is_killed(code: str) -> None:
    jar = Jar(disable=frozenset({"epoch"}))
    try:
        assert jar.run("1").success
        started = time.monotonic()
        result = jar.run(code, timeout=0.5)
        assert result.status is Status.TIMEOUT
        assert jar.workers() == []
        assert time.monotonic() - started < GENEROUS
        assert jar.run("2").value == 2
    finally:
        jar.close()


@pytest.mark.parametrize(
    "code",
    ["import select; select.select([], [], [], 60)", "import time; time.sleep(60)"],
    ids=["blocking call", "sleep"],
)
def test_a_guest_asleep_in_the_host_is_a_timeout(jar: Jar, code: str) -> None:
    started = time.monotonic()
    result = jar.run(f"print('before', flush=True)\n{code}", timeout=1)
    assert (result.status, result.stdout) == (Status.TIMEOUT, "before\n")
    assert 0.9 <= result.usage.wall < GENEROUS
    assert time.monotonic() - started < GENEROUS
    assert result.kill is not None
    assert result.kill.survivors == 0


def test_a_cancelled_run_takes_its_worker_along(jar: Jar) -> None:
    assert jar.run("1").success
    with Cancel() as cancel:
        cancel.set()
        assert jar.run(BUSY, cancel=cancel).status is Status.KILLED
    assert jar.workers() == []
    assert jar.run("2").value == 2


# -- memory and stack ------------------------------------------------------------------------------


def test_memory_grows_to_the_limit_and_not_beyond(warm: Jar) -> None:
    grow = (
        "x = []\ntry:\n while 1: x.append(bytes(1 << 20))\nexcept MemoryError: n = len(x); del x\nn"
    )
    most = warm.run(grow, memory="128M")
    assert most.success, most
    assert 100 <= most.value <= 128
    assert warm.run("x = bytes(150 << 20)", memory="128M").status is Status.OOM
    assert warm.run("len(bytes(150 << 20))", memory="256M").value == 150 << 20


def test_without_the_store_s_limit_the_same_memory_is_given() -> None:
    jar = Jar(disable=frozenset({"store_limits"}))
    try:
        assert jar.run("len(bytes(150 << 20))", memory="128M").value == 150 << 20
    finally:
        jar.close()


@pytest.mark.parametrize(
    "code",
    [
        "def f(): f()\nf()",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import json; json.loads('[' * 10**6)",
        "eval('(' * 5000 + ')' * 5000)",
        "x = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
        "f = lambda: 0\nfor _ in range(10**5): f = (lambda g: lambda: g())(f)\nf()",
    ],
    ids=["calls", "no limit", "json", "parser", "repr", "closures"],
)
def test_an_exhausted_stack_is_the_guest_s_error_and_not_the_worker_s_end(
    jar: Jar, code: str
) -> None:
    assert jar.run("1").success
    kept = jar.workers()
    result = jar.run(code, timeout=20)
    assert result.status in (Status.ERROR, Status.OOM), result  # CPython's parser calls it memory
    assert result.error is not None
    assert result.error.type in ("RecursionError", "MemoryError", "WasmTrap", "SyntaxError")
    assert jar.workers() == kept


def test_an_abort_is_an_error_in_the_engine_s_words(warm: Jar) -> None:
    result = warm.run("import os; print('x', flush=True); os.abort()")
    assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 134, "x\n")
    assert result.error is not None
    assert "unreachable" in result.error.message


def test_exit_codes_are_the_program_s(warm: Jar) -> None:
    assert warm.run("import os; os._exit(4)").exit_code == 4
    assert warm.run("raise SystemExit(7)").exit_code == 7
    result = warm.run("import sys; sys.exit('why')")
    assert (result.exit_code, result.stderr) == (1, "why\n")


def test_exit_handlers_run_and_open_files_are_flushed(warm: Jar) -> None:
    result = warm.run(
        "import atexit, sys\natexit.register(print, 'handler')\nsys.kept = open('out', 'w')\n"
        "sys.kept.write('said')",
        outputs=("out",),
    )
    assert result.stdout == "handler\n"
    assert result.files["out"].data == b"said"


# -- fuel ------------------------------------------------------------------------------------------


def test_fuel_runs_out(warm: Jar) -> None:
    result = warm.run(BUSY, fuel=400_000_000)
    assert (result.status, result.exit_code) == (Status.FUEL_EXHAUSTED, None)
    assert result.usage.fuel == 400_000_000
    assert result.enforcement["fuel"].state == "enforced"
    enough = warm.run("sum(range(1000))", fuel=400_000_000)
    assert (enough.status, enough.value) == (Status.SUCCESS, 499500)


def test_the_same_program_takes_the_same_fuel_every_time(warm: Jar) -> None:
    code = "import json, random\nrandom.random()\nprint(json.dumps({'a': sorted(range(100))}))"
    used = {warm.run(code, fuel=10**9).usage.fuel for _ in range(400)}
    assert len(used) == 1
    assert used != {warm.run(code + "\nsum(range(1000))", fuel=10**9).usage.fuel}
    assert warm.run("1").usage.fuel is None


# -- what is absent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "what"),
    [
        ("import threading; threading.Thread(target=print).start()", "RuntimeError", "threads"),
        ("import _thread; _thread.start_new_thread(print, ())", "RuntimeError", "threads"),
        ("import subprocess; subprocess.run(['ls'])", "OSError", "processes"),
        ("import os; os.fork()", "AttributeError", "processes"),
        ("import os; os.system('ls')", "AttributeError", "processes"),
        ("import ssl", "ModuleNotFoundError", "TLS"),
        ("import ctypes", "ModuleNotFoundError", "native libraries"),
        ("import numpy", "ModuleNotFoundError", "packages beyond the standard library"),
    ],
)
def test_what_is_absent_is_said_in_one_sentence_that_names_another_backend(
    warm: Jar, code: str, kind: str, what: str
) -> None:
    result = warm.run(code)
    assert result.status is Status.ERROR
    assert result.error is not None
    assert result.error.type == kind
    assert f"the wasm backend has no {what}; the backend 'jail' has" in result.error.message


def test_a_module_that_nobody_has_is_plainly_missing(warm: Jar) -> None:
    result = warm.run("import no_such_module")
    assert result.error is not None
    assert result.error.message == "No module named 'no_such_module'"


@pytest.mark.parametrize(
    "asked", [{"command": ("echo", "x")}, {"language": "bash"}, {"python": "/usr/bin/python3"}]
)
def test_what_no_guest_runs_is_refused_before_anything_starts(warm: Jar, asked: Any) -> None:
    with pytest.raises(BackendUnavailable, match="the wasm backend runs no"):
        warm.run(None if "command" in asked else "x", **asked)


def test_an_open_network_is_refused(warm: Jar) -> None:
    with pytest.raises(PolicyUnenforceable) as refusal:
        warm.run("1", network="any")
    assert refusal.value.fields == ("network",)


def test_asyncio_works_without_sockets(warm: Jar) -> None:
    result = warm.run("""
import asyncio
async def one(n):
    await asyncio.sleep(0.01)
    return n
async def main():
    return await asyncio.gather(*map(one, range(3)))
asyncio.run(main())
""")
    assert result.value == [0, 1, 2], result.stderr


# -- the file system: what the engine has had holes in ---------------------------------------------


@pytest.fixture
def mounts(tmp_path: Path) -> dict[str, Path]:
    tmp_path.chmod(0o755)
    found = {}
    for name in ("ro", "rw", "out"):
        found[name] = tmp_path / name
        found[name].mkdir()
        found[name].chmod(0o777)
        (found[name] / "given").write_text(f"given-{name}")
        (found[name] / "given").chmod(0o666)
    (found["rw"] / "planted").symlink_to(found["out"])
    (found["rw"] / "planted-file").symlink_to(found["out"] / "given")
    return found


ESCAPES = {
    "dots": "open('rw/../../../../../../../{out}/given').read()",
    "dots through a directory": "os.mkdir('rw/d'); open('rw/d/../../../../{out}/given').read()",
    "absolute": "open('{out}/given').read()",
    "planted link": "open('rw/planted/given').read()",
    "planted link, trailing slash": "os.listdir('rw/planted/')",
    "planted link to a file": "open('rw/planted-file').read()",
    "planted link, written": "open('rw/planted-file', 'w').write('by the guest')",
    "own link": "os.symlink('{out}', 'rw/own'); open('rw/own/given').read()",
    "own relative link": "os.symlink('../../../../..{out}', 'rw/up'); open('rw/up/given').read()",
    "own link, trailing slash": "os.symlink('../..', 'rw/up'); os.listdir('rw/up/')",
    "truncate read-only": "os.open('ro/given', os.O_RDONLY | os.O_TRUNC)",
    "truncate by path": "os.truncate('ro/given', 0)",
    "write read-only": "open('ro/given', 'w').write('by the guest')",
    "create read-only": "open('ro/new', 'w').write('by the guest')",
    "create read-only, trailing slash": "os.mkdir('ro/new/')",
    "rename in": "os.rename('rw/given', 'ro/given')",
    "rename out": "os.rename('ro/given', 'rw/moved')",
    "replace, trailing slash": "os.mkdir('rw/d'); os.rename('rw/d/', 'ro/d/')",
    "hard link out": "os.link('ro/given', 'rw/linked'); open('rw/linked', 'w').write('x')",
    "hard link to work": "os.link('ro/given', 'linked'); open('linked', 'w').write('x')",
    "unlink read-only": "os.unlink('ro/given')",
    "times read-only": "os.utime('ro/given', (1, 1))",
}


@pytest.mark.parametrize("attempt", ESCAPES)
def test_no_path_leads_out_and_nothing_changes_what_is_read_only(
    warm: Jar, mounts: dict[str, Path], attempt: str
) -> None:
    before = os.stat(mounts["ro"] / "given")
    result = warm.run(
        f"import os\n{ESCAPES[attempt].format(out=mounts['out'])}",
        mounts=(Mount(str(mounts["ro"]), "ro", "ro"), Mount(str(mounts["rw"]), "rw", "rw")),
    )
    assert result.status is Status.ERROR, result
    assert "given-out" not in repr(result)
    for name in ("ro", "out"):
        assert [path.name for path in mounts[name].iterdir()] == ["given"]
        assert (mounts[name] / "given").read_text() == f"given-{name}"
    after = os.stat(mounts["ro"] / "given")
    assert (after.st_mtime_ns, after.st_nlink) == (before.st_mtime_ns, before.st_nlink)


def test_the_same_acts_succeed_inside_a_writable_mount(warm: Jar, mounts: dict[str, Path]) -> None:
    result = warm.run(
        """
import os
os.mkdir("rw/d"); os.rename("rw/d/", "rw/e/")
os.symlink("given", "rw/own"); assert open("rw/own").read() == "given-rw"
os.link("rw/given", "rw/linked"); open("rw/linked", "w").write("by the guest")
os.utime("rw/given", (1, 1)); os.truncate("rw/given", 2)
[sorted(os.listdir("/data")), open("/data/given").read()]
""",
        mounts=(Mount(str(mounts["rw"]), "rw", "rw"), Mount(str(mounts["ro"]), "/data", "ro")),
    )
    assert result.value == [["given"], "given-ro"], result
    assert (mounts["rw"] / "given").read_text() == "by"
    assert (mounts["rw"] / "e").is_dir()


def test_a_single_file_is_mounted_below_the_work_directory_or_refused(
    warm: Jar, mounts: dict[str, Path]
) -> None:
    file = str(mounts["ro"] / "given")
    assert warm.run("open('one').read()", mounts=(Mount(file, "one", "ro"),)).value == "given-ro"
    with pytest.raises(PolicyUnenforceable) as refusal:
        warm.run("1", mounts=(Mount(file, "/elsewhere/one", "ro"),))
    assert refusal.value.fields == ("mounts",)


# -- the engine itself -----------------------------------------------------------------------------


def test_an_engine_below_the_floor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WasmBackend().probe().available
    monkeypatch.setattr(wasm_engine, "FLOOR", (999, 0, 0))
    found = WasmBackend().probe()
    assert not found.available
    assert "999.0.0" in found.reason
    assert found.fix is not None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("50.0.1", (50, 0, 1)), ("51", (51,)), ("50.1.0rc1", (50, 1, 0)), ("x", ())],
)
def test_versions_are_read_as_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert wasm_engine.parse_version(text) == numbers


def test_a_closed_backend_has_no_workers_left() -> None:
    jar = Jar()
    assert jar.run("1").success
    [pidfd] = jar.workers()
    worker = next(iter(jar.backend._pool._idle.values()))[0]  # type: ignore[union-attr]
    assert worker.alive()
    jar.close()
    with pytest.raises(OSError):
        os.fstat(pidfd)


# -- JavaScript ------------------------------------------------------------------------------------

needs_javascript = pytest.mark.skipif(
    not build.description(build.JAVASCRIPT), reason="the JavaScript guest has not been built"
)


def javascript(jar: Jar, code: str, **wanted: Any) -> Result:
    return jar.run(code, language="javascript", **wanted)


@needs_javascript
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 2", 3),
        ("[1, 2.5, 'ü', null, true]", [1, 2.5, "ü", None, True]),
        ("({a: {b: [1n, 2n ** 70n]}})", {"a": {"b": [1, 2**70]}}),
        ("({$: 1})", {"$": 1}),
        ("new Map([[1, 'a']])", {1: "a"}),
        ("new Uint8Array([0, 255])", b"\x00\xff"),
        ("new Date(250)", datetime.datetime(1970, 1, 1, 0, 0, 0, 250000, tzinfo=datetime.UTC)),
        ("await Promise.resolve(7)", 7),
        ("var result = 5; undefined", 5),
        ("const f = async () => 8; f()", 8),
        ("'\\ud800'", "\ufffd"),
        ("[typeof require, typeof process, typeof fetch, typeof host]", ["undefined"] * 4),
    ],
)
def test_javascript_values_come_back_typed(warm: Jar, code: str, value: object) -> None:
    result = javascript(warm, code)
    assert result.success, result
    assert result.value == value


@needs_javascript
def test_javascript_has_its_streams_arguments_and_variables(warm: Jar) -> None:
    code = """
console.log("out", {a: [1]}); console.error("err");
[stdin, env.GIVEN, given.map(x => x * 2)]
"""
    request = Request(
        code=code, language="javascript", stdin=b"in", env={"GIVEN": "env"},
        context={"given": [1, 2]},
    )  # fmt: skip
    result = warm.engine.run(request, wishes={"modules": "any"})
    assert (result.stdout, result.stderr) == ("out { a: [ 1 ] }\n", "err\n")
    assert result.value == ["in", "env", [2, 4]]


@needs_javascript
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("throw new TypeError('boom')", "TypeError"),
        ("let x = ;", "SyntaxError"),
        ("nobody", "ReferenceError"),
        ("await Promise.reject(new RangeError('no'))", "RangeError"),
        ("Promise.reject(new EvalError('lost')); 1", "EvalError"),
        ("function f() { return f() + 1 }\nf()", "RangeError"),
        ("throw {not: 'an error'}", "Error"),
    ],
)
def test_javascript_errors_are_typed(warm: Jar, code: str, kind: str) -> None:
    result = javascript(warm, code)
    assert (result.status, result.exit_code) == (Status.ERROR, 1)
    assert result.error is not None
    assert result.error.type == kind
    assert "Uncaught" in result.stderr


@needs_javascript
def test_a_javascript_error_says_where(warm: Jar) -> None:
    result = javascript(warm, "function f() { null.x }\n\nf()")
    assert result.error is not None
    assert "at f (main.js:1:" in result.error.traceback
    assert "main.js:3:" in result.error.traceback


@needs_javascript
def test_a_rejection_that_is_handled_later_is_no_error(warm: Jar) -> None:
    result = javascript(warm, "const p = Promise.reject(new Error('x')); p.catch(() => 0); 1")
    assert (result.status, result.value) == (Status.SUCCESS, 1)


@needs_javascript
def test_javascript_timers_fire_in_order_and_count_as_time(warm: Jar) -> None:
    code = "setTimeout(() => console.log('b'), 20); setTimeout(() => console.log('a'), 5); 'now'"
    result = javascript(warm, code)
    assert (result.stdout, result.value) == ("a\nb\n", "now")
    assert javascript(warm, "setTimeout(() => 0, 60000)", timeout=0.5).status is Status.TIMEOUT


@needs_javascript
def test_javascript_is_held_by_the_same_limits(warm: Jar) -> None:
    assert javascript(warm, "while (true);", timeout=0.5).status is Status.TIMEOUT
    hungry = "let x = []; while (true) x.push(new Array(10000).fill(1))"
    assert javascript(warm, hungry, memory="64M").status is Status.OOM
    assert javascript(warm, "new Array(1e6).fill(1).length", memory="64M").value == 10**6
    flood = javascript(
        warm, "for (let i = 0; i < 20000; i++) console.log('x'.repeat(100))", output="8K"
    )
    assert (flood.status, flood.truncated) == (Status.SUCCESS, True)
    assert len(flood.stdout) <= 8 << 10
    spent = javascript(warm, "while (true);", fuel=50_000_000)
    assert (spent.status, spent.usage.fuel) == (Status.FUEL_EXHAUSTED, 50_000_000)
    code = "[3,1,2].sort(); Math.random(); Math.random()\n'same'"
    used = {javascript(warm, code, fuel=10**9).usage.fuel for _ in range(100)}
    assert len(used) == 1


@needs_javascript
def test_random_numbers_of_javascript_are_spread_evenly(warm: Jar) -> None:
    code = "const n = Array(10).fill(0); for (let i = 0; i < 1e4; i++) n[Math.random() * 10 | 0]++"
    counts = javascript(warm, f"{code}\nn").value
    assert sum(counts) == 10000 and all(800 < count < 1200 for count in counts)


@needs_javascript
def test_one_javascript_run_leaves_nothing_to_the_next(warm: Jar) -> None:
    assert javascript(warm, "globalThis.leak = 1; Array.prototype.map = null; 1").success
    assert javascript(warm, "[typeof leak, typeof [].map]").value == ["undefined", "function"]
    assert javascript(warm, "Math.random()").value != javascript(warm, "Math.random()").value

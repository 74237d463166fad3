"""Programs that attack the engine itself, in both languages: it holds, and its worker lives on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.backends.wasm import WasmBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Mount, Request, Result, Status
from belljar.wasm import build

_FOUND = WasmBackend().probe()
pytestmark = pytest.mark.skipif(
    not _FOUND.available or not build.description(build.JAVASCRIPT),
    reason=_FOUND.reason or "the JavaScript guest has not been built",
)
GENEROUS = 20.0  # seconds by which a kill has to be over, on any machine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Settings(), backends={"wasm": WasmBackend()}) as engine:
        yield engine


def run(engine: Engine, language: str, code: str, mounts: Any = (), **wishes: Any) -> Result:
    request = Request(code=code, language=language, mounts=mounts)
    return engine.run(request, wishes={"modules": "any", **wishes})


def workers(engine: Engine, language: str) -> list[int]:
    """The idle workers of this language: equal numbers, equal workers."""
    pool = engine.backend("wasm")._pool  # type: ignore[attr-defined]
    return sorted(
        worker.jail.pidfd
        for idle in pool._idle.values()
        for worker in idle
        if worker.house.language == language
    )


# -- the stack


@pytest.mark.parametrize(
    "code",
    [
        "(function f() { f() })()",
        "let f = () => 0; for (let i = 0; i < 1e5; i++) { const g = f; f = () => g() } f()",
        "JSON.parse('['.repeat(1e6))",
        "let x = []; for (let i = 0; i < 1e5; i++) x = [x]; JSON.stringify(x)",
        "let x = []; for (let i = 0; i < 1e5; i++) x = [x]; String(x)",
        "eval('('.repeat(1e6))",
        "'x'.replace(/./g, function f() { return f() })",
        "class A { get x() { return this.x } } new A().x",
        "new Proxy({}, { get(t, k, r) { return r[k] } }).x",
        "[2, 1].sort(function f() { return f() })",
    ],
    ids=["calls", "closures", "parse", "stringify", "join", "parser", "replace", "getter", "proxy",
         "sort"],
)  # fmt: skip
def test_an_exhausted_javascript_stack_is_the_program_s_error(engine: Engine, code: str) -> None:
    assert run(engine, "javascript", "1").success
    kept = workers(engine, "javascript")
    result = run(engine, "javascript", code, timeout=20)
    assert result.status is Status.ERROR, result
    assert result.error is not None
    assert result.error.type in ("RangeError", "InternalError", "SyntaxError", "WasmTrap")
    assert workers(engine, "javascript") == kept
    assert run(engine, "javascript", "2").value == 2


# -- memory at the cap


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("javascript", "const x = []; for (;;) x.push(new Uint8Array(1 << 20).fill(1))"),
        ("javascript", "let s = 'x'; for (;;) s = s + s.slice(0, 1 << 20) + Math.random()"),
        ("javascript", "const m = new Map(); for (let i = 0;; i++) m.set(i, 'v' + i)"),
        ("javascript", "const x = []; for (;;) { try { x.push(new Uint8Array(1 << 20)) }"
                       " catch (e) { x.push(1) } }"),
        ("python", "x = {}\ni = 0\nwhile True:\n    x[i] = str(i) * 100\n    i += 1"),
        ("python", "s = 'x'\nwhile True: s += s"),
        ("python", "x = []\nwhile True:\n    try: x.append(bytes(1 << 20))\n"
                   "    except MemoryError: x.append(1)"),
    ],
)  # fmt: skip
def test_memory_grows_to_the_cap_and_the_worker_lives(
    engine: Engine, language: str, code: str
) -> None:
    result = run(engine, language, code, memory="64M", timeout=15)
    assert result.status in (Status.OOM, Status.TIMEOUT), result
    assert run(engine, language, "3", memory="64M").value == 3
    # The control arm: what fits is given.
    fits = {"python": "len(bytes(32 << 20))", "javascript": "new Uint8Array(32 << 20).length"}
    assert run(engine, language, fits[language], memory="64M").value == 32 << 20


# -- floods


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import sys\nfor _ in range(200): sys.{stream}.write('x' * 100_000)"),
        ("python", "import sys\nsys.{stream}.write('x' * 20_000_000)"),
        ("javascript", "for (let i = 0; i < 200; i++) {call}('x'.repeat(100000))"),
        ("javascript", "{call}('x'.repeat(2e7))"),
    ],
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_is_cut_and_the_run_goes_on(
    engine: Engine, language: str, code: str, stream: str
) -> None:
    call = {"stdout": "console.log", "stderr": "console.error"}[stream]
    code = code.replace("{stream}", stream).replace("{call}", call) + "\n7"
    result = run(engine, language, code, output="8K")
    assert (result.status, result.truncated, result.value) == (Status.SUCCESS, True, 7)
    assert len(getattr(result, stream)) <= 8 << 10
    assert getattr(result.usage, f"{stream}_bytes") >= 20_000_000


# -- time


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("javascript", "await new Promise(done => setTimeout(done, 60000))"),
        ("javascript", "setInterval(() => 0, 1)"),
        ("javascript", "(function f() { Promise.resolve().then(f) })()"),
        ("javascript", "/(a+)+b/.test('a'.repeat(60))"),
        ("javascript", "({ get x() { for (;;); } })"),
        (
            "python",
            "import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: 0",
        ),
        ("python", "import select\nwhile True: select.select([], [], [], 60)"),
        ("python", "class A:\n    def __repr__(self):\n        while True: pass\nprint(A())"),
        ("python", "import atexit, time\natexit.register(time.sleep, 60)"),
    ],
)
def test_nothing_outlives_the_deadline(engine: Engine, language: str, code: str) -> None:
    started = time.monotonic()
    result = run(engine, language, code, timeout=0.5)
    assert result.status is Status.TIMEOUT, result
    assert time.monotonic() - started < GENEROUS
    assert run(engine, language, "5").value == 5


def test_a_promise_that_nobody_keeps_ends_at_once_or_at_the_deadline(engine: Engine) -> None:
    result = run(engine, "javascript", "await new Promise(() => 0)", timeout=0.5)
    assert result.status in (Status.ERROR, Status.TIMEOUT), result


# -- files


@pytest.fixture
def mounts(tmp_path: Path) -> dict[str, Path]:
    tmp_path.chmod(0o755)
    found = {name: tmp_path / name for name in ("one", "two", "out")}
    for name, path in found.items():
        path.mkdir()
        path.chmod(0o777)
        (path / "given").write_text(f"given-{name}")
        (path / "given").chmod(0o666)
    return found


ESCAPES = {
    "dots below a descriptor": (
        "d = os.open('rw', os.O_RDONLY)\nos.open('../../../..{out}/given', os.O_RDONLY, dir_fd=d)"
    ),
    "the parent of a descriptor": (
        "d = os.open('rw', os.O_RDONLY)\nu = os.open('..', os.O_RDONLY, dir_fd=d)\n"
        "os.open('..', os.O_RDONLY, dir_fd=u)"
    ),
    "a link to the root, with a slash": "os.symlink('/', 'rw/root/')\nos.listdir('rw/root/')",
    "a chain of links": (
        "os.symlink('..', 'rw/a'); os.symlink('a/..', 'rw/b'); os.symlink('b/..', 'rw/c')\n"
        "os.listdir('rw/c/..')"
    ),
    "a link that is replaced": (
        "os.mkdir('rw/d'); os.listdir('rw/d'); os.rmdir('rw/d'); os.symlink('../..', 'rw/d')\n"
        "os.listdir('rw/d/')"
    ),
    "rename over a mount": "os.rename('rw', 'moved')",
    "rename onto a mount": "os.mkdir('d'); os.rename('d', 'ro')",
    "rename with dots": "os.rename('rw/given', 'rw/../ro/new')",
    "hard link with dots": (
        "os.link('ro/given', 'rw/../rw/linked'); open('rw/linked', 'a').write('x')"
    ),
    "hard link through a link": (
        "os.symlink('../ro/given', 'rw/l'); os.link('rw/l', 'rw/linked')\n"
        "open('rw/linked', 'a').write('x')"
    ),
    "the host's processes": "os.listdir('/proc/self')",
    "the worker's own files": "os.listdir('/.wasm')",
}


@pytest.mark.parametrize("attempt", ESCAPES)
def test_no_path_of_a_program_s_making_leads_out(
    engine: Engine, mounts: dict[str, Path], attempt: str
) -> None:
    result = run(
        engine,
        "python",
        f"import os\n{ESCAPES[attempt].format(out=mounts['out'])}\nprint('done')",
        mounts=(Mount(str(mounts["one"]), "ro", "ro"), Mount(str(mounts["two"]), "rw", "rw")),
    )
    assert result.status is Status.ERROR, result
    assert "done" not in result.stdout
    for name in ("one", "out"):
        assert [path.name for path in mounts[name].iterdir()] == ["given"]
        assert (mounts[name] / "given").read_text() == f"given-{name}"
        assert (mounts[name] / "given").stat().st_nlink == 1


def test_between_two_writable_mounts_nothing_is_linked_and_the_same_works_inside(
    engine: Engine, mounts: dict[str, Path]
) -> None:
    result = run(
        engine,
        "python",
        """
import os
said = []
for act, name in ((os.link, "two/linked"), (os.rename, "two/moved")):
    try:
        act("one/given", name)
    except OSError as error:
        said.append(type(error).__name__)
os.link("one/given", "one/linked"); os.rename("one/linked", "one/moved")
known = ("given", "linked", "moved")  # beside them are placeholders of protected names
shown = [[name for name in sorted(os.listdir(where)) if name in known] for where in ("one", "two")]
[len(said), *shown]
""",
        mounts=(Mount(str(mounts["one"]), "one", "rw"), Mount(str(mounts["two"]), "two", "rw")),
    )
    assert result.value == [2, ["given", "moved"], ["given"]], result


def test_javascript_has_no_files_at_all(engine: Engine, mounts: dict[str, Path]) -> None:
    names = ("std", "os", "bjson", "require", "process", "Deno", "loadScript", "fs")
    code = f"[{', '.join(f'typeof {name}' for name in names)}]"
    mounted = (Mount(str(mounts["one"]), "rw", "rw"),)
    assert run(engine, "javascript", code, mounts=mounted).value == ["undefined"] * len(names)
    for module in ("std", "os", "./rw/given", "fs"):
        result = run(engine, "javascript", f"await import('{module}')", mounts=mounted)
        assert result.status is Status.ERROR, (module, result)

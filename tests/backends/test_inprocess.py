"""Backend inprocess: what it holds, with control arms; what it says of itself; what it leaves."""

from __future__ import annotations

import builtins
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.backends import inprocess_run
from belljar.backends.base import Cancel
from belljar.backends.inprocess import NO_BOUNDARY, InProcessBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import LanguageUnknown, PolicyUnenforceable, RequestError
from belljar.events import Event, Output
from belljar.guest import charts
from belljar.resolve import POLICY_KEYS, resolve
from belljar.types import Mount, Request, Result, Status

GENEROUS = 30.0


def run(
    code: str,
    *,
    disable: tuple[str, ...] = (),
    emit: Callable[[Event], None] = lambda event: None,
    cancel: Cancel | None = None,
    **wanted: Any,
) -> Result:
    """Through the backend itself, so that the import lint of the engine is not in the way."""
    wishes = {"modules": "any"} | {key: wanted.pop(key) for key in POLICY_KEYS if key in wanted}
    level = wanted.pop("level", "permissive")
    request = Request(code=code, **wanted)
    backend = InProcessBackend(disable=frozenset(disable))
    plan = backend.compile(resolve(level, wishes).policy, request)
    if cancel is not None:
        return backend.run(plan, emit, cancel)
    with Cancel() as never:
        return backend.run(plan, emit, never)


def error_of(result: Result) -> str:
    assert result.status is Status.ERROR, result
    assert result.error is not None
    return result.error.type


# -- what it says of itself ----------------------------------------------------------------------


def test_it_says_that_it_is_no_boundary() -> None:
    assert NO_BOUNDARY in InProcessBackend().probe().notes
    for code in ("1", "1 / 0", "import sys; sys.exit(3)"):
        assert NO_BOUNDARY in run(code).warnings
    assert NO_BOUNDARY in run("while True: pass", timeout=0.2).warnings
    assert run("1").isolation == "none"


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_every_level_but_permissive_refuses_it(level: str) -> None:
    with pytest.raises(PolicyUnenforceable) as refusal:
        run("1", level=level)
    assert "min_isolation" in refusal.value.fields
    assert run("1", level="permissive").success


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("mounts", {"mounts": (Mount("/usr", "usr"),)}),
        ("fuel", {"fuel": 1000}),
        ("network", {"network": ["example.org"]}),
        ("min_isolation", {"min_isolation": "process"}),
    ],
)
def test_what_it_cannot_hold_is_refused_by_name(field: str, wanted: dict[str, Any]) -> None:
    with pytest.raises(PolicyUnenforceable) as refusal:
        run("1", **wanted)
    assert refusal.value.fields == (field,)


def test_nothing_but_what_the_host_keeps_claims_to_be_enforced() -> None:
    report = run("1", modules=["math"]).enforcement
    assert {name for name, held in report.items() if held.state == "enforced"} == {
        "output",
        "value",
        "displays",
        "mounts",
    }
    assert report["modules"].state == "best_effort"


@pytest.mark.parametrize("layer", InProcessBackend.layers)
def test_a_layer_that_is_off_is_absent_from_the_report_and_told(layer: str) -> None:
    before, after = run("1").enforcement, run("1", disable=(layer,))
    assert after.enforcement != before
    assert any(held.state == "absent" for held in after.enforcement.values())
    assert any(layer in warning for warning in after.warnings)


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="moat"):
        InProcessBackend(disable=frozenset({"moat"}))


@pytest.mark.parametrize(
    "wanted",
    [{"code": "echo", "language": "bash"}, {"command": ("true",)}],
    ids=["bash", "command"],
)
def test_only_python_runs_in_a_python_process(wanted: dict[str, Any]) -> None:
    backend, policy = InProcessBackend(), resolve("permissive", {}).policy
    with pytest.raises(LanguageUnknown) as refusal:
        backend.compile(policy, Request(**wanted))
    assert refusal.value.field == "language"


def test_another_interpreter_is_refused() -> None:
    with pytest.raises(RequestError) as refusal:
        run("1", python="/usr/bin/python3")
    assert refusal.value.field == "python"


# -- what it gives back --------------------------------------------------------------------------


def state_of_the_process() -> dict[str, Any]:
    mask = os.umask(0)
    os.umask(mask)
    state = {
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "umask": mask,
        "filters": list(warnings.filters),
        "recursion": sys.getrecursionlimit(),
        "main": sys.modules["__main__"],
        "tempdir": tempfile.gettempdir(),
        "functions": (time.sleep, os._exit, os.abort, threading.Thread.start, threading.excepthook),
        "display": hasattr(builtins, "display"),
        "threads": set(threading.enumerate()),
        "leftovers": [name for name in os.listdir(tempfile.gettempdir()) if own_directory(name)],
    }
    for name in ("stdin", "stdout", "stderr", "__stdout__", "argv", "path", "excepthook"):
        state[name] = getattr(sys, name)
        state[f"{name} content"] = list(getattr(sys, name)) if name in ("argv", "path") else None
    if sys.platform == "linux":
        import resource

        state["address space"] = resource.getrlimit(resource.RLIMIT_AS)
    return state


def own_directory(name: str) -> bool:
    return name.startswith(f"belljar-{os.getpid()}-")


MESS = """
import os, sys, tempfile, threading, time, warnings
os.umask(0)
sys.setrecursionlimit(1234)
warnings.simplefilter("error")
sys.stdout = sys.stderr = None
sys.argv.append("mine"); sys.path.append("/mine")
os.environ["MINE"] = "1"
os.makedirs("a/b"); os.chdir("a/b")
sys.excepthook = print
tempfile.tempdir = "/nowhere"
"""


@pytest.mark.parametrize(
    "ending", ["", "1 / 0", "while True: pass", "sys.exit(2)", "raise OSError"]
)
def test_the_process_is_put_back_whatever_the_program_did(ending: str) -> None:
    run("1")  # what is kept for good, is kept after the first run
    before = state_of_the_process()
    run(MESS + ending, timeout=1, env={"GIVEN": "1"}, stdin=b"x")
    assert state_of_the_process() == before


def test_the_process_is_put_back_when_a_listener_fails() -> None:
    run("1")
    before = state_of_the_process()

    def fail(event: Event) -> None:
        raise LookupError("the listener's own")

    with pytest.raises(LookupError):
        run("print('x', flush=True)\nimport time; time.sleep(60)", emit=fail)
    assert state_of_the_process() == before
    assert run("1 + 1").value == 2


def test_a_failure_before_the_program_starts_puts_everything_back() -> None:
    before = state_of_the_process()
    with pytest.raises(RequestError):
        run("1", files={"../up": b""})
    with pytest.raises(RequestError):
        run("1", context={"x": object()})
    assert state_of_the_process() == before


def test_modules_of_one_program_are_not_there_for_the_next() -> None:
    for text in ("first", "second"):
        files = {"belljar_helper.py": f"word = {text!r}".encode()}
        assert run("import belljar_helper; belljar_helper.word", files=files).value == text
    assert error_of(run("import belljar_helper")) == "ModuleNotFoundError"


def test_variables_of_one_program_are_not_there_for_the_next() -> None:
    assert run("left_over = 1").success
    assert error_of(run("left_over")) == "NameError"


def test_figures_of_one_program_are_not_shown_by_the_next(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    own: dict[str, Any] = {
        "env": {"MPLCONFIGDIR": str(tmp_path)},
        "filesystem": {"read_write": [str(tmp_path)]},
    }
    code = "import matplotlib; matplotlib.use('agg')\nimport matplotlib.pyplot as plt; "
    drawn = run(code + "plt.plot([1, 2]); None", **own)
    assert [list(shown.data) for shown in drawn.displays] == [
        ["text/plain", "image/png", charts.MIME]
    ]
    assert run(code + "None", **own).displays == ()


# -- streams -------------------------------------------------------------------------------------


def test_streams_have_buffers_and_no_descriptor() -> None:
    code = """
import io, sys
sys.stdout.buffer.write(b"raw\\n")
found = []
for stream in (sys.stdin, sys.stdout, sys.stderr):
    try:
        stream.fileno()
    except io.UnsupportedOperation:
        found.append(stream.encoding)
found
"""
    result = run(code)
    assert result.stdout == "raw\n"
    assert result.value == ["utf-8"] * 3


def test_what_other_threads_print_meanwhile_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    def echo(event: Event) -> None:
        assert isinstance(event, Output)
        print(event.data.decode().upper(), end="", flush=True)

    result = run("print('guest')", emit=echo)
    assert result.stdout == "guest\n"
    assert capsys.readouterr().out == "GUEST\n"


def test_output_past_the_cap_is_dropped_unless_the_cap_is_off() -> None:
    code = "print('x' * 100_000)"
    capped, whole = run(code, output=1000), run(code, output=1000, disable=("output_cap",))
    assert (capped.status, capped.truncated) == (Status.SUCCESS, True)
    assert len(capped.stdout) <= 1000
    assert (len(whole.stdout), whole.truncated) == (100_001, False)


# -- the audit hook ------------------------------------------------------------------------------

PROCESSES = [
    "os.system('true')",
    "os.spawnv(os.P_WAIT, '/bin/true', ['true'])",
    "subprocess.run(['true']).returncode",
    "os.kill(os.getpid(), 0) or 0",
]


@pytest.mark.parametrize("code", PROCESSES)
def test_processes_are_refused(code: str) -> None:
    code = f"import os, subprocess\n{code}"
    assert error_of(run(code)) == "PermissionError"
    assert run(code, disable=("audit",)).value == 0


@pytest.mark.parametrize("call", ["os.fork()", "os.execv('/bin/false', ['false'])"])
def test_calls_that_would_take_our_process_with_them_are_refused(call: str) -> None:
    assert error_of(run(f"import os\n{call}")) == "PermissionError"


@pytest.mark.parametrize(
    "call",
    [
        "open(outside + '/new', 'w')",
        "open(outside + '/old', 'r+')",
        "os.open(outside + '/new', os.O_CREAT | os.O_WRONLY)",
        "os.remove(outside + '/old')",
        "os.rename(outside + '/old', outside + '/new')",
        "os.rename(outside + '/old', 'mine')",
        "os.mkdir(outside + '/dir')",
        "os.symlink('x', outside + '/link')",
        "os.link(outside + '/old', 'mine')",
        "os.chmod(outside + '/old', 0o777)",
        "os.truncate(outside + '/old', 0)",
        "shutil.rmtree(outside)",
        "open('way/new', 'w')",
        "os.remove('old', dir_fd=os.open(outside, os.O_RDONLY))",
        "pathlib.Path(outside, 'old').write_text('x')",
    ],
)
def test_nothing_is_written_outside_the_work_directory(tmp_path: Path, call: str) -> None:
    code = f"import os, pathlib, shutil\nos.symlink(outside, 'way')\n{call}\nNone"

    def attempt(place: str, **wanted: Any) -> tuple[Result, dict[str, Any]]:
        outside = tmp_path / place
        outside.mkdir()
        (outside / "old").write_text("old")
        before = contents(outside)
        result = run(code, context={"outside": str(outside)}, **wanted)
        after = contents(outside) if outside.exists() else {}
        return result, {"changed": before != after or (outside / "old").stat().st_nlink > 1}

    refused, seen = attempt("shut")
    assert error_of(refused) == "PermissionError"
    assert not seen["changed"]
    free, seen = attempt("free", disable=("audit",))
    assert free.success, free.error
    allowed, seen = attempt("open", filesystem={"read_write": [str(tmp_path / "open")]})
    assert allowed.success, allowed.error


def contents(directory: Path) -> dict[str, tuple[int, str]]:
    return {
        path.name: (path.lstat().st_mode, path.read_text() if path.is_file() else "")
        for path in sorted(directory.iterdir())
    }


def test_inside_the_work_directory_everything_is_written() -> None:
    code = """
import os, shutil, tempfile
os.makedirs("a/b"); open("a/b/c", "w").write("x")
os.symlink("/etc", "etc"); os.remove("etc")
os.rename("a", "d"); shutil.rmtree("d")
os.makedirs("/usr/lib", exist_ok=True)  # is there already: nothing is made
with tempfile.TemporaryDirectory() as place:
    open(os.path.join(place, "x"), "w").write("x")
open(os.devnull, "w").write("x")
"""
    assert run(code).success


def test_hidden_paths_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("canary")
    code = "open(where + '/secret').read()"
    wanted: dict[str, Any] = {"context": {"where": str(tmp_path)}}
    assert run(code, **wanted).value == "canary"  # the control arm
    hidden: dict[str, Any] = {"filesystem": {"hidden": [str(tmp_path)]}}
    assert error_of(run(code, **wanted, **hidden)) == "PermissionError"
    assert error_of(run("import os; os.listdir(where)", **wanted, **hidden)) == "PermissionError"


def test_other_threads_are_left_alone(tmp_path: Path) -> None:
    done = []

    def work(event: Event) -> None:
        (tmp_path / "ours").write_text("written during the run")
        done.append(os.system("true"))

    assert run("print('now')", emit=work).success
    assert (tmp_path / "ours").exists()
    assert set(done) == {0}


def test_a_program_s_own_threads_are_held_too(tmp_path: Path) -> None:
    code = """
import threading
caught = []
def work():
    try:
        open(where + "/new", "w")
    except PermissionError:
        caught.append(threading.current_thread().name)
def nested():
    inner = threading.Thread(target=work, name="inner"); inner.start(); inner.join()
for target in (work, nested):
    thread = threading.Thread(target=target, name="outer"); thread.start(); thread.join()
caught
"""
    wanted: dict[str, Any] = {"context": {"where": str(tmp_path)}}
    assert run(code, **wanted).value == ["outer", "inner"]
    assert not (tmp_path / "new").exists()
    assert run(code, **wanted, disable=("audit",)).value == []  # the control arm
    assert (tmp_path / "new").exists()


# -- threads and their end -----------------------------------------------------------------------


def test_threads_are_waited_for_unless_they_are_daemons() -> None:
    code = """
import threading, time
def say(word, after):
    time.sleep(after); print(word)
threading.Thread(target=say, args=("waited", 0.2)).start()
threading.Thread(target=say, args=("never", 60), daemon=True).start()
print("main")
"""
    result = run(code)
    assert (result.status, result.stdout) == (Status.SUCCESS, "main\nwaited\n")
    assert result.kill is not None
    assert result.kill.survivors == 0


def test_a_thread_that_python_does_not_know_is_refused() -> None:
    code = "import _thread\n_thread.start_new_thread(print, ())"
    assert error_of(run(code)) == "PermissionError"


def test_an_exception_in_a_thread_is_told_on_stderr() -> None:
    code = "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()"
    result = run(code)
    assert result.success
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        """
count = 0
while count < 5:
    try:
        while True: pass
    except BaseException:
        count += 1
""",
    ],
    ids=["busy", "asleep", "in a thread", "stubborn"],
)
def test_a_program_past_its_time_is_ended(code: str) -> None:
    before = threading.active_count()
    started = time.monotonic()
    result = run(code, timeout=0.3)
    assert (result.status, result.exit_code, result.signal) == (Status.TIMEOUT, None, None)
    assert result.kill is not None
    assert (result.kill.reason, result.kill.survivors) == ("timeout", 0)
    assert threading.active_count() == before
    assert time.monotonic() - started < GENEROUS


@pytest.fixture
def traced() -> Iterator[Callable[..., Any]]:
    """The calling thread under a tracer, as with a debugger."""

    def trace(frame: Any, event: str, arg: Any) -> Any:
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    yield trace
    sys.settrace(before)


def test_a_debugger_does_not_keep_a_program_alive(
    traced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess_run, "_GRACE", 0.05)
    native = "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire(timeout=1)"
    before = set(threading.enumerate())
    for code, survivors in (("while True: pass", 0), (native, 1), ("while True: pass", 0)):
        result = run(code, timeout=0.1)
        assert result.kill is not None
        assert (result.status, result.kill.survivors) == (Status.TIMEOUT, survivors)
    assert sys.gettrace() is traced
    for thread in set(threading.enumerate()) - before:
        thread.join(GENEROUS)
        assert not thread.is_alive()


def test_without_the_watchdog_time_is_not_held() -> None:
    code = "import time; time.sleep(0.3); 'woke'"
    assert run(code, timeout=0.1, disable=("watchdog",)).value == "woke"
    assert run(code, timeout=0.1).status is Status.TIMEOUT


def test_a_thread_that_cannot_be_ended_is_abandoned_told_and_still_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess_run, "_GRACE", 0.05)
    code = """
import threading
lock = threading.Lock()
lock.acquire()
try:
    lock.acquire(timeout=1)  # inside native code no exception arrives
finally:
    open(where + "/new", "w")
"""
    before = set(threading.enumerate())
    result = run(code, timeout=0.1, context={"where": str(tmp_path)})
    assert result.status is Status.TIMEOUT
    assert result.kill is not None
    assert result.kill.survivors == 1
    assert any("could not be ended" in warning for warning in result.warnings)
    assert run("1 + 1").value == 2  # the next program has the process meanwhile
    for thread in set(threading.enumerate()) - before:
        thread.join(GENEROUS)
        assert not thread.is_alive()
    assert list(tmp_path.iterdir()) == []


# -- the other limits ----------------------------------------------------------------------------


def test_growing_memory_is_oom() -> None:
    code = "x = []\nwhile len(x) < 300: x.append(bytearray(1 << 20))"
    result = run(code, memory="64M")
    assert result.status is Status.OOM
    assert result.usage.peak_memory is not None
    assert run(code, memory="1G").success  # the control arm


def test_one_huge_allocation_is_oom_at_once() -> None:
    result = run("x = bytearray(8 << 30)", memory="64M")
    assert result.status is Status.OOM
    assert result.error is not None
    assert result.error.type == "MemoryError"


def test_processor_time_past_the_share_is_a_timeout() -> None:
    result = run("while True: pass", cpus=0.1, timeout=3)
    assert result.status is Status.TIMEOUT
    assert result.kill is not None
    assert result.kill.reason == "cpu"
    assert result.usage.cpu is not None
    assert 0.2 < result.usage.cpu < 2


def test_files_past_the_disk_limit_are_a_limit() -> None:
    code = "for n in range(8): open(f'{n}', 'wb').write(bytes(1 << 20))"
    result = run(code, disk="4M")
    assert (result.status, result.limit_hit) == (Status.LIMIT, "disk")
    assert run(code, disk="16M").success


def test_descriptors_past_the_number_are_refused() -> None:
    code = "import os\nkept = [open(os.devnull) for _ in range(60)]\nlen(kept)"
    result = run(code, open_files=40)
    assert (result.status, result.limit_hit) == (Status.LIMIT, "fds")
    assert run(code, open_files=100).value == 60


def test_descriptors_that_no_hook_sees_are_counted() -> None:
    code = """
import os, time
kept = []
try:
    for _ in range(60): kept.append(os.dup(fd))
    time.sleep(rest)
finally:
    for one in kept: os.close(one)
"""
    with open(os.devnull) as file:
        given = {"fd": file.fileno(), "rest": 60}
        result = run(code, open_files=40, context=given)
        assert (result.status, result.limit_hit) == (Status.LIMIT, "fds")
        assert run(code, open_files=100, context=given | {"rest": 0}).success


# -- the import hook -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["import socket", "from os import path", "__import__('socket')"])
def test_imports_that_are_not_allowed_are_refused_while_it_runs_too(code: str) -> None:
    result = run(code, modules=["math"])
    assert error_of(result) == "ImportError"
    assert result.error is not None
    assert "not allowed" in result.error.message
    assert run(code).success


def test_what_allowed_modules_import_is_their_own_business() -> None:
    assert run("import statistics; statistics.mean([1, 3])", modules=["statistics"]).value == 2
    files = {"pkg/__init__.py": b"", "pkg/part.py": b"import math; n = 7"}
    code = "from __future__ import annotations\nfrom pkg import part\npart.n"
    assert run(code, modules=["json"], files=files).value == 7


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("os._exit(5)", 5),
        ("os.abort()", 134),
        ("raise KeyboardInterrupt", 130),
        ("sys.exit('word')", 1),
        ("sys.exit(-1)", 255),
    ],
)
def test_a_program_ends_and_our_process_does_not(code: str, exit_code: int) -> None:
    result = run(f"import os, sys\nprint('before')\n{code}")
    assert (result.status, result.exit_code) == (Status.ERROR, exit_code)
    assert result.stdout == "before\n"


def test_a_run_that_waits_for_its_turn_can_be_cancelled() -> None:
    up = threading.Event()
    first: list[Result] = []
    with Cancel() as end_first, Cancel() as end_second:

        def hold() -> None:
            code = "print('up', flush=True)\nimport time; time.sleep(60)"
            first.append(run(code, emit=lambda event: up.set(), cancel=end_first))

        holder = threading.Thread(target=hold)
        holder.start()
        assert up.wait(GENEROUS)
        end_second.set()
        second = run("print('never')", cancel=end_second)
        assert (second.status, second.stdout) == (Status.KILLED, "")
        end_first.set()
        holder.join(GENEROUS)
    assert first[0].status is Status.KILLED
    assert first[0].stdout == "up\n"


def test_a_program_that_runs_a_program_here_does_not_hang() -> None:
    code = """
import belljar
belljar.run("1", backend="inprocess", level="permissive", timeout=0.2)
"""
    started = time.monotonic()
    assert run(code, timeout=1).status is Status.TIMEOUT
    assert time.monotonic() - started < GENEROUS
    assert run("1").success


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(Settings())
    yield engine
    engine.close()


def test_it_is_found_by_its_name_and_never_chosen_by_auto(engine: Engine) -> None:
    request = Request(code="6 * 7")
    named = engine.run(request, level="permissive", backend="inprocess")
    assert (named.value, named.backend, named.isolation) == (42, "inprocess", "none")
    plan = engine.plan(request, level="permissive", backend="auto")
    assert plan.backend != "inprocess"

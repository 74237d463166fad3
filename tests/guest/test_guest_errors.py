"""Uncaught exceptions: the traceback that CPython would print, typed fields, and caps."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest
from worker_process import run_program

from belljar.guest import protocol
from belljar.guest.failures import MAX_MESSAGE, MAX_TRACEBACK

TELLING = {
    "a plain error": "def f(x):\n    return 1 / x\n\nf(0)\n",
    "in the last expression": "x = 0\n1 / x",
    "in a call over several lines": "def f(*a):\n    raise ValueError(a)\nf(\n  1,\n  2,\n)",
    "a cause": "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('v') from e\n",
    "a context": "try:\n    {}['k']\nexcept KeyError:\n    [][1]\n",
    "recursion": "def f():\n    f()\nf()\n",
    "a class of its own": "class Odd(Exception):\n    pass\nraise Odd('x')\n",
    "no message": "raise RuntimeError\n",
    "of a module": "import json\njson.loads('{')\n",
    "bad syntax": "x = 1\ndef f(:\n    pass\n",
    "bad indentation": "if True:\nx = 1\n",
    "a return outside": "x = 1\nreturn x\n",
    "an unclosed bracket": "x = (1,\n  2\ny = 3\n",
    "form feeds count no lines": "x = 1\n\x0c\ny = '\u2028'\n1 / 0\n",
    "carriage returns": "x = 1\r\ny = 2\r\n1 / 0\r\n",
    "a generator exit": "raise GeneratorExit\n",
}


@pytest.mark.parametrize("name", TELLING)
def test_stderr_is_what_cpython_prints_for_the_script(
    name: str, python: str, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_bytes(TELLING[name].encode())
    run = run_program(TELLING[name], python=python, cwd=tmp_path)
    script = subprocess.run([python, "main.py"], cwd=tmp_path, capture_output=True, text=True)
    # A script's own frames are named by its absolute path.
    expected = script.stderr.replace(f'"{tmp_path}/main.py"', '"main.py"')
    assert _comparable(run.stderr) == _comparable(expected)
    assert run.traceback == run.stderr
    assert run.exit_code == script.returncode == 1
    assert run.value is None


def _comparable(text: str) -> str:
    """Without what differs between the two ways to the same words.

    The interpreter's own printer underlines less than the `traceback` module (before 3.13) and says
    `__main__.` (before 3.11), and a deep recursion ends a few frames earlier inside a worker.
    """
    lines = [line for line in text.splitlines() if line.strip("~^ ")]
    lines = [line for line in lines if not line.startswith("  [Previous line repeated")]
    lines = [line.split("maximum recursion depth exceeded")[0] for line in lines]
    return "\n".join(lines).replace("__main__.", "")


def test_a_nul_byte_in_the_source_is_an_error_and_not_an_end(python: str) -> None:
    run = run_program("print('ran')\nx = '\0'\n", python=python)
    assert (run.stdout, run.exit_code) == ("", 1)
    assert run.error_type in ("ValueError", "SyntaxError")
    assert "null bytes" in run.stderr


def test_source_lines_show_without_a_file(python: str, tmp_path: Path) -> None:
    run = run_program("def f():\n    1 / 0  # here\n\nf()", python=python, cwd=tmp_path)
    assert '  File "main.py", line 2, in f\n    1 / 0  # here\n' in run.traceback
    assert '  File "main.py", line 4, in <module>\n    f()\n' in run.traceback
    assert list(tmp_path.iterdir()) == []


def test_the_caret_of_a_syntax_error_shows(python: str) -> None:
    run = run_program("x = 1\nfor in y:\n    pass", python=python)
    assert run.error_type == "SyntaxError"
    assert '  File "main.py", line 2\n    for in y:\n        ^' in run.traceback


def test_errors_have_the_fields_a_result_needs(python: str) -> None:
    run = run_program(
        "import json\nclass E(json.JSONDecodeError): ...\nE('m', 'd', 0).nope", python=python
    )
    assert run.error_type == "AttributeError"
    run = run_program("import json; json.loads('')", python=python)
    assert run.error_type == "json.decoder.JSONDecodeError"
    assert run.report.error is not None
    assert run.report.error.message == "Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("raise OSError(28, 'No space left on device')", errno.ENOSPC),
        ("import os; os.open('/nowhere/at/all', 0)", errno.ENOENT),
        ('raise RuntimeError("can\'t start new thread")', errno.EAGAIN),
        ("raise RuntimeError('something else')", None),
        ("raise OSError('no number')", None),
        ("raise OSError('text', 'text')", None),
        ("class E(OSError):\n    errno = 28\nraise E(2, 'x')", errno.ENOENT),
        ("raise ValueError(28)", None),
    ],
)
def test_the_errno_of_an_oserror_is_a_hint(code: str, number: int | None, edge_python: str) -> None:
    run = run_program(code, python=edge_python)
    assert (run.report.hint.errno, run.report.hint.memory) == (number, False)


CHAINED = """
try:
    1 / 0
except ZeroDivisionError as error:
    raise ValueError(%s) from error
"""
LIMIT_MEMORY = """
import resource
limit = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


@pytest.mark.parametrize(
    "code",
    [
        "x = [0] * 10**9",
        "x = []\nwhile True:\n    x.append(bytes(100))",
        "x = []\nwhile True:\n    x = [x]",
        "def f():\n    x = []\n    while True:\n        x.append(bytearray(1000))\nf()",
        "x = {}\nwhile True:\n    x[len(x)] = str(len(x))",
    ],
)
def test_memory_used_up_is_reported_even_then(code: str, python: str) -> None:
    run = run_program(LIMIT_MEMORY + code, python=python)
    assert run.error_type == "MemoryError", run.stderr
    assert run.report.hint.memory
    assert run.report.ended
    assert run.exit_code == 1


def test_an_error_under_a_memory_limit_is_not_for_want_of_memory(python: str) -> None:
    control = run_program(LIMIT_MEMORY + "raise ValueError", python=python)
    assert control.error_type == "ValueError"
    assert not control.report.hint.memory


def test_a_parser_that_overflows_is_not_out_of_memory(python: str) -> None:
    run = run_program("x = " + "-" * 200_000 + "1", python=python)
    assert run.error_type in ("MemoryError", "RecursionError")
    assert not run.report.hint.memory


def test_descriptors_used_up_still_leave_a_traceback(python: str) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
while True:
    held.append(open('/dev/null'))  # the line
"""
    run = run_program(code, python=python)
    assert (run.error_type, run.report.hint.errno) == ("OSError", errno.EMFILE)
    assert "held.append(open('/dev/null'))  # the line" in run.traceback
    assert "Too many open files" in run.stderr


def test_a_program_that_copes_without_descriptors_still_has_its_value(python: str) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True:
        held.append(open('/dev/null'))
except OSError as error:
    result = {'refused': error.errno, 'held': len(held) > 20}
"""
    run = run_program(code, python=python)
    assert (run.exit_code, run.value) == (0, {"refused": errno.EMFILE, "held": True})


def test_a_deep_program_that_needs_more_than_python_objects_still_runs(python: str) -> None:
    total = run_program("x = " + "+".join(["1"] * 900) + "\nx", python=python)
    assert total.value in (900, None), total.stderr


def test_a_recursion_limit_that_leaves_no_room_does_not_hide_the_error(python: str) -> None:
    run = run_program("import sys\nsys.setrecursionlimit(20)\n" + CHAINED % "'x'", python=python)
    assert run.error_type == "ValueError"
    assert "direct cause" in run.traceback, "the full traceback, not the emergency one"


def test_a_message_that_takes_most_of_the_memory_is_not_copied(python: str) -> None:
    run = run_program(LIMIT_MEMORY + CHAINED % "'x' * (25 << 20)", python=python)
    assert run.error_type == "ValueError"
    assert "direct cause" in run.traceback, "the full traceback, not the emergency one"


def test_a_million_frames_are_cut_short(edge_python: str) -> None:
    code = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(512 << 20)
def odd(n): return even(n - 1) if n else 1 / 0
def even(n): return odd(n - 1) if n else 1 / 0
caught = []
def deep():
    try:
        odd(20_000)
    except ZeroDivisionError as error:
        caught.append(error)
thread = threading.Thread(target=deep)
thread.start()
thread.join()
raise caught[0]
"""
    run = run_program(code, python=edge_python)
    assert run.error_type == "ZeroDivisionError", run.stderr[-500:]
    assert len(run.traceback) <= MAX_TRACEBACK


def test_messages_and_tracebacks_are_capped(edge_python: str) -> None:
    run = run_program("raise ValueError('head' + 'x' * 10**7 + 'tail')", python=edge_python)
    assert run.report.error is not None
    message = run.report.error.message
    assert len(message) <= MAX_MESSAGE
    assert message.startswith("headx")
    assert message.endswith("xtail")
    assert "characters cut" in message
    assert len(run.traceback) <= MAX_TRACEBACK
    assert len(run.stderr) <= MAX_TRACEBACK


def test_an_exception_hook_of_the_program_is_asked(python: str) -> None:
    hook = "sys.excepthook = lambda kind, error, trace: print('hook', error, trace.tb_lineno)"
    run = run_program(f"import sys\n{hook}\n1 / 0", python=python)
    assert (run.stdout, run.stderr, run.exit_code) == ("hook division by zero 3\n", "", 1)
    assert run.error_type == "ZeroDivisionError"
    run = run_program("import sys\nsys.excepthook = lambda *a: sys.exit(5)\n1 / 0", python=python)
    assert run.exit_code == 5


@pytest.mark.parametrize("name", ["traceback", "linecache", "tokenize", "token", "io", "errno"])
def test_a_file_named_like_the_standard_library_does_not_spoil_the_report(
    name: str, edge_python: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text("open('imported', 'w')\nraise SystemExit\n")
    run = run_program("1 / 0  # the line", python=edge_python, cwd=tmp_path)
    assert run.error_type == "ZeroDivisionError"
    assert "1 / 0  # the line" in run.traceback
    assert not (tmp_path / "imported").exists()


SHOWS_THE_STACK = """
import faulthandler, inspect, sys, threading, traceback, warnings
traceback.print_stack()
faulthandler.dump_traceback()
warnings.warn('deep', stacklevel=20)
print([frame.filename for frame in inspect.stack()], sys.argv, getattr(sys, 'orig_argv', 0))
def late():
    raise ValueError('thread')
thread = threading.Thread(target=late)
thread.start()
thread.join()
raise RuntimeError('x')
"""


def test_no_traceback_shows_where_the_worker_is_installed(python: str) -> None:
    run = run_program(SHOWS_THE_STACK, python=python)
    assert run.error_type == "RuntimeError"
    for text in (run.stdout, run.stderr, run.traceback):
        assert protocol.GUEST_DIR not in text
    assert "<belljar>" in run.stderr, "the worker's frames are there, without their file"

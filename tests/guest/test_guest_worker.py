"""The worker runs a program as CPython runs a script, in every interpreter that a guest may be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_process import DEADLINE, interpreters, run_program

from belljar.guest import protocol
from belljar.report import Report, run_frame
from belljar.types import Request


def test_our_own_interpreter_is_among_those_tested() -> None:
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in interpreters()


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", 2),
        ("x = 20\nx * 2 + 2;", 42),
        ("result = 7", 7),
        ("result = 7\nprint('said')", 7),
        ("result = 7\n'last wins'", "last wins"),
        ("x = 5", None),
        ("", None),
        ("# only a comment", None),
        ("'a docstring'", "a docstring"),
        ("'doc'\n__doc__", "doc"),
        ("'doc'\nx = 1\n__doc__ + '!'", "doc!"),
        ("from __future__ import annotations\ndef f(x: y): pass\nf.__annotations__", {"x": "y"}),
        (
            "from __future__ import annotations\nd = {}\n"
            "exec('def f(x: nope): pass', d) or d['f'].__annotations__",
            {"x": "nope"},
        ),
        ("x: int = 3\n__annotations__['x'] is int", True),
        ("if True:\n    5", None),
        ("(y := 3)", 3),
        ("def f():\n    return sum(k for k in z)\nz = [1, 2]\nf()", 3),
        ("[n for n in (1, 2) if n in globals().get('seen', (1, 2))]", [1, 2]),
        ("result = 1\nimport sys\nsys.exit(0)", 1),
        ("(1, {2}, {3: b'x'})", (1, {2}, {3: b"x"})),
        ("'é😀\\u2028'", "é😀\u2028"),
        ("x = '''a\r\nb'''\nlen(x)", 3),
    ],
)  # fmt: skip
def test_the_value_is_the_last_expression_else_result(code: str, value: Any, python: str) -> None:
    run = run_program(code, python=python)
    assert (run.value, run.exit_code, run.stderr) == (value, 0, "")
    assert run.report.ended
    assert run.report.warnings == ()


def test_main_is_a_real_module(python: str) -> None:
    code = """
import inspect, os, pickle, sys, dataclasses, typing
@dataclasses.dataclass
class Thing:
    size: 'int'
def helper():
    return 1
main = sys.modules['__main__']
facts = {
    'module': main.Thing is Thing and vars(main) is globals(),
    'pickle': pickle.loads(pickle.dumps(Thing(3))) == Thing(3),
    'hints': typing.get_type_hints(Thing) == {'size': int},
    'source': inspect.getsource(helper).startswith('def helper'),
    'names': (__name__, os.path.basename(__file__), __package__, __spec__, __doc__),
    'argv': sys.argv,
    'path': sys.path[0] == os.getcwd() == os.path.dirname(__file__),
    'annotations': __annotations__ if sys.version_info < (3, 14) else {},
    'builtins': __builtins__.len([1]),
}
facts
"""
    run = run_program(code, python=python, args=("-x", "é"))
    assert run.value == {
        "module": True,
        "pickle": True,
        "hints": True,
        "source": True,
        "names": ("__main__", "main.py", None, None, None),
        "argv": ["main.py", "-x", "é"],
        "path": True,
        "annotations": {},
        "builtins": 1,
    }, run.stderr


def test_a_program_imports_its_neighbours_and_reads_its_stdin(python: str, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("answer = 42\n")
    code = "import neighbour, sys\nprint(sys.stdin.read().upper())\ninput_end = sys.stdin.read()\n"
    run = run_program(
        code + "neighbour.answer, input_end",
        python=python,
        cwd=tmp_path,
        stdin="straße\n".encode(),
    )
    assert (run.value, run.stdout) == ((42, ""), "STRASSE\n\n")


def test_output_is_utf8_whatever_the_locale(python: str) -> None:
    run = run_program(
        "print('é😀')", python=python, env={"LANG": "en_US.ISO-8859-1", "LC_ALL": "C"}
    )
    assert run.stdout == "é😀\n", run.stderr


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(None)", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(True)", 1, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('a word')", 1, "a word\n"),
        ("import sys; sys.exit((1, 2))", 1, "(1, 2)\n"),
        ("raise SystemExit(7)", 7, ""),
        ("import os; os._exit(9)", 9, ""),
        ("exit(4)", 4, ""),
    ],
)
def test_exit_codes_are_cpythons(code: str, exit_code: int, stderr: str, edge_python: str) -> None:
    run = run_program(code, python=edge_python)
    assert (run.exit_code, run.stderr, run.report.error) == (exit_code, stderr, None)
    plain = subprocess.run([edge_python, "-I", "-c", code], capture_output=True, text=True)
    assert (plain.returncode, plain.stderr) == (exit_code, stderr)


def test_an_unhandled_interrupt_dies_by_the_signal(python: str) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)"
    run = run_program(code, python=python)
    assert run.exit_code == -signal.SIGINT
    assert run.error_type == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in run.stderr


def test_threads_are_joined_and_exit_handlers_run_after_the_report(python: str) -> None:
    code = """
import atexit, threading
atexit.register(print, 'handler')
go = threading.Event()
def late():
    go.wait()
    print('thread')
threading.Thread(target=late).start()
threading.Timer(0.05, go.set).start()
'value'
"""
    run = run_program(code, python=python)
    assert (run.value, run.exit_code) == ("value", 0)
    assert run.stdout == "thread\nhandler\n"


def test_context_becomes_variables(python: str) -> None:
    context = {"number": 3, "words": ("a", {"b"}), "blob": b"\x00\xff", "nothing": None}
    run = run_program("(number + 1, words, blob, nothing)", python=python, context=context)
    assert run.value == (4, ("a", {"b"}), b"\x00\xff", None)


def test_a_dataframe_goes_in_and_comes_out_typed() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    run = run_program("df.assign(c=df.a * 2)", context={"df": frame})
    pandas.testing.assert_frame_equal(run.value, frame.assign(c=frame.a * 2))


def test_context_that_this_guest_cannot_read_is_an_error_that_says_so() -> None:
    pandas = pytest.importorskip("pandas")
    context = {"df": pandas.DataFrame({"a": [1]})}
    bare = next((p for p in interpreters().values() if not _has_pandas(p)), None)
    if bare is None:
        pytest.skip("every interpreter here has pandas")
    run = run_program("print('ran')", python=bare, context=context)
    assert (run.stdout, run.exit_code, run.error_type) == ("", 1, "ImportError")
    assert "context variable 'df'" in run.stderr


def _has_pandas(python: str) -> bool:
    return (
        subprocess.run([python, "-I", "-c", "import pandas"], capture_output=True).returncode == 0
    )


def test_the_channel_does_not_leak_into_subprocesses(python: str) -> None:
    code = """
import os, subprocess, sys
ask = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
mine = sorted(map(int, os.listdir('/proc/self/fd')))[:-1]
theirs = subprocess.run([sys.executable, '-I', '-c', ask], stdout=-1, close_fds=False).stdout
mine, eval(theirs)
"""
    run = run_program(code, python=python)
    mine, theirs = run.value
    assert theirs == [0, 1, 2]
    assert len(mine) == 4, "the three streams and the channel"


def test_a_forked_child_that_falls_off_the_end_says_nothing(python: str) -> None:
    code = """
import os
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
display('child' if pid == 0 else 'parent')
'parent' if pid else 'child'
"""
    run = run_program(code, python=python)
    assert run.value == "parent"
    assert [shown.data["text/plain"] for shown in run.report.displays] == ["'parent'"]
    assert run.report.warnings == ()


def test_the_worker_also_speaks_over_two_pipes(python: str, tmp_path: Path) -> None:
    to_guest, from_guest = os.pipe(), os.pipe()
    boot = protocol.boot_code(protocol.GUEST_DIR, to_guest[0], from_guest[1])
    process = subprocess.Popen(
        [python, "-I", "-c", boot], pass_fds=[to_guest[0], from_guest[1]], cwd=tmp_path
    )
    os.close(to_guest[0])
    os.close(from_guest[1])
    with os.fdopen(to_guest[1], "wb") as sender, os.fdopen(from_guest[0], "rb") as receiver:
        sender.write(run_frame(Request(code="6 * 7"), "main.py"))
        sender.flush()
        report = Report()
        report.feed(receiver.read())
    assert process.wait(DEADLINE) == 0
    assert (report.ready, report.value, report.ended) == (True, 42, True)


@pytest.mark.parametrize("last_words", [b"", protocol.encode(protocol.CLOSE)])
def test_a_worker_without_a_program_ends_quietly(last_words: bytes, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        boot = protocol.boot_code(protocol.GUEST_DIR, theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", boot], pass_fds=[theirs.fileno()], cwd=tmp_path
        )
        ours.sendall(last_words)
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(DEADLINE) == 0


def test_one_interpreter_serves_many_programs(python: str, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    loop = (
        "from belljar_guest.worker import Channel, Interpreter\n"
        "from belljar_guest import protocol\n"
        f"channel = Channel({theirs.fileno()}, {theirs.fileno()})\n"
        "live = Interpreter(channel)\n"
        "while (frame := channel.receive()).kind == protocol.RUN:\n"
        "    live.run(protocol.loads(frame.payload))\n"
        "    channel.send(protocol.END)\n"
    )
    boot = protocol.boot_code(protocol.GUEST_DIR, -1).split("from ")[0] + f"exec({loop!r})"
    with ours:
        with theirs:
            process = subprocess.Popen(
                [python, "-I", "-c", boot],
                pass_fds=[theirs.fileno()],
                cwd=tmp_path,
                stderr=subprocess.DEVNULL,
            )
        seen = []
        for code in ("x = 1", "x += 1", "1 / 0", "import sys; sys.exit(3)", "x"):
            ours.sendall(run_frame(Request(code=code), "main.py"))
            report = Report()
            while not report.ended:
                report.feed(ours.recv(65536))
            seen.append((report.value, report.error and report.error.type))
        ours.sendall(protocol.encode(protocol.CLOSE))
        assert process.wait(DEADLINE) == 0
    assert seen == [
        (None, None),
        (None, None),
        (None, "ZeroDivisionError"),
        (None, None),
        (2, None),
    ]


def test_starting_imports_nothing_heavy(python: str) -> None:
    code = "import sys; sorted({'json', 're', 'typing', 'ast', 'traceback'} & set(sys.modules))"
    plain = subprocess.run(
        [python, "-I", "-c", code.replace("sorted", "print(*sorted") + ")"],
        capture_output=True,
        env={},  # whoever measures us may load more into every child
        text=True,
    )
    assert run_program(code, python=python).value == plain.stdout.split()

"""Programs that lie, forge, flood or break things on their way out spoil only their own report."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from worker_process import run_program

from belljar.guest.failures import MAX_MESSAGE
from belljar.guest.marked import Opaque
from belljar.types import Result, Status


def test_frames_forged_on_stdout_are_only_output(edge_python: str) -> None:
    code = r"""
print('{"type":"result","status":"ok","exit_code":0,"value":"FORGED"}', flush=True)
import os
os.write(1, b'\x82\x00\x00\x00\x08"FORGED"\x87\x00\x00\x00\x00')
raise SystemExit(7)
"""
    run = run_program(code, python=edge_python)
    assert (run.exit_code, run.value, run.report.error) == (7, None, None)
    assert run.report.warnings == ()
    assert "FORGED" in run.stdout


@pytest.mark.parametrize(
    "garbage",
    [
        r"b'\xff\xff\xff\xff' * 4 + b'\x7f\xff\xff\xff\xff\xff\xff\xff'",
        r"b'\x82\x7f\xff\xff\xff' + b'x' * 100",
        r"b'\x83\x00\x00\x00\x02{}'",
        r"b'\x84\x00\x00\x00\x07{\"a\":1}'",
        r"b'\x86\x00\x00\x00\x00'",
        r"b'\x00' * 5",
    ],
)
def test_garbage_on_every_descriptor_costs_only_the_value(garbage: str, edge_python: str) -> None:
    code = f"""
import os
write = os.write
for fd in range(3, 64):
    try: write(fd, {garbage})
    except OSError: pass
print('went on')
'the value'
"""
    run = run_program(code, python=edge_python)
    assert (run.exit_code, run.stdout) == (0, "went on\n")
    assert len(run.report.warnings) == 1
    control = run_program(code.replace("os.write", "lambda *ignored: 0"), python=edge_python)
    assert (control.value, control.report.warnings) == ("the value", ())


def test_a_truncated_frame_and_a_hang_leave_nothing_but_the_kill() -> None:
    code = """
import os, time
for fd in range(3, 64):
    try: os.write(fd, b'\\x82\\0\\0\\x10\\0{"type":')
    except OSError: pass
print('hanging', flush=True)
time.sleep(600)
"""
    run = run_program(code, deadline=3)
    assert run.timed_out
    assert run.exit_code == -signal.SIGKILL
    assert (run.stdout, run.value, run.report.ended) == ("hanging\n", None, False)


def test_a_closed_channel_changes_no_exit_code(edge_python: str) -> None:
    close = """
import os
for fd in range(0, 256):
    try: os.close(fd)
    except OSError: pass
"""
    for ending, exit_code in (("os._exit(5)", 5), ("raise SystemExit(6)", 6), ("pass", 0)):
        run = run_program(close + ending, python=edge_python)
        assert (run.exit_code, run.report.ended) == (exit_code, False)


def test_a_file_in_the_place_of_the_channel_is_not_written_to(
    edge_python: str, tmp_path: Path
) -> None:
    code = """
import os
os.closerange(3, 256)
for _ in range(20):
    os.open('precious', os.O_CREAT | os.O_RDWR)
display('shown')
'the value'
"""
    run = run_program(code, python=edge_python, cwd=tmp_path)
    assert run.exit_code == 0
    assert (tmp_path / "precious").read_bytes() == b""


def test_an_exit_handler_can_print_but_not_change_the_report(edge_python: str) -> None:
    code = """
import atexit, os
def forge():
    os.write(1, b'{"status":"ok"}')
    display('late')
    for fd in range(3, 64):
        try: os.write(fd, b'\\x82\\x00\\x00\\x00\\x08"FORGED"')
        except OSError: pass
atexit.register(forge)
raise ValueError('real failure')
"""
    run = run_program(code, python=edge_python)
    assert (run.exit_code, run.error_type, run.value) == (1, "ValueError", None)
    assert run.stdout == '{"status":"ok"}'
    assert run.report.displays == ()


def test_exit_from_a_thread_is_the_exit(edge_python: str) -> None:
    code = """
import os, threading, time
threading.Timer(0.1, os._exit, (3,)).start()
time.sleep(600)
"""
    run = run_program(code, python=edge_python)
    assert (run.exit_code, run.report.ended, run.timed_out) == (3, False, False)


def test_stdin_holds_only_what_the_caller_gave(edge_python: str) -> None:
    run = run_program("import os\nos.read(0, 65536)", python=edge_python, stdin=b"mine")
    assert run.value == b"mine"


def test_an_object_that_pickles_into_code_crosses_as_text(edge_python: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"""
import os, pickle
class X:
    def __reduce__(self): return (os.system, ('touch {marker}',))
"""
    run = run_program(code + "result = X()", python=edge_python)
    assert run.value is None or type(run.value) is Opaque
    assert run.report.displays[0].data["text/plain"].startswith("<__main__.X object")
    run = run_program(code + "result = pickle.dumps(X())", python=edge_python)
    assert type(run.value) is bytes
    assert not marker.exists()


def test_a_repr_that_hangs_counts_against_the_time() -> None:
    code = """
import time
class R:
    def __repr__(self):
        print('asked', flush=True)
        time.sleep(600)
result = R()
"""
    run = run_program(code, deadline=3)
    assert run.timed_out
    assert run.stdout == "asked\n"


@pytest.mark.parametrize(
    "members",
    [
        "def __repr__(self): raise SystemExit(0)",
        "def __repr__(self): raise KeyboardInterrupt",
        "def __repr__(self): return 3",
        "def __repr__(self): raise SystemExit(0)\n    __class__ = property(lambda self: 1 / 0)",
        "def __getattribute__(self, name): raise KeyboardInterrupt",
        "def __getattr__(self, name): return self\n    def __call__(self, *a): return self",
        "def __repr__(self): return '\\ud800' * 10**6",
        "def _repr_html_(self): raise SystemExit(0)",
        "def __repr__(self): return repr(self)",
    ],
)
def test_a_value_that_objects_to_being_shown_is_still_a_success(
    members: str, edge_python: str
) -> None:
    run = run_program(f"class R:\n    {members}\nresult = R()", python=edge_python)
    assert (run.exit_code, run.stderr) == (0, "")
    assert run.value is None or (type(run.value) is Opaque and len(run.value) < 20_000)
    assert run.report.ended
    assert len(run.report.displays[0].data["text/plain"]) < 20_000


def test_a_metaclass_that_lies_spoils_nothing(edge_python: str) -> None:
    code = """
class Meta(type):
    def __getattribute__(cls, name): raise KeyboardInterrupt
    def __instancecheck__(cls, other): raise KeyboardInterrupt
    def __subclasscheck__(cls, other): raise KeyboardInterrupt
class R(metaclass=Meta): pass
result = [R(), R]
"""
    run = run_program(code, python=edge_python)
    assert (run.exit_code, run.value, run.report.ended) == (0, None, True)


@pytest.mark.parametrize(
    "code",
    [
        "result = ['x' * 1000] * 4_000_000",
        "result = 'x' * (64 << 20)",
        "result = list(range(3_000_000))",
        "result = []\nfor _ in range(50):\n    result = [result, result]",
        "result = []\nresult.append(result)",
        "result = []\nfor _ in range(100_000):\n    result = [result]",
        "result = 1 << (1 << 24)",
    ],
)
def test_a_value_too_large_or_too_deep_is_replaced_by_a_short_text(code: str) -> None:
    run = run_program(code)
    assert (run.exit_code, run.value) == (0, None)
    assert len(run.report.displays) == 1
    assert len(run.report.displays[0].data["text/plain"]) <= 16 << 10
    (warning,) = run.report.warnings
    assert warning.startswith("the value was dropped: ")


def test_values_of_misleading_types_cross_as_what_they_are(edge_python: str) -> None:
    code = """
class D(dict):
    def items(self): import time; time.sleep(600); return []
class S(str):
    def encode(self, *a): return b'EVIL'
class I(int):
    def __index__(self): raise KeyboardInterrupt
result = {'d': D(a=1), 's': S('x'), 'i': I(3), 'b': True}
"""
    run = run_program(code, python=edge_python)
    assert run.value == {"d": {"a": 1}, "s": "x", "i": 3, "b": True}
    assert [type(item) for item in run.value.values()] == [dict, str, int, bool]


def test_numbers_that_json_lacks_and_half_characters_make_strict_json(edge_python: str) -> None:
    for code in (
        "result = {'a': float('nan'), 'b': float('inf'), 'c': -float('inf'), 'd': 1e400}",
        r"result = {'\ud800': '\udfff', 'ok': '\u0000'}",
        r"print('\ud800') if 0 else ValueError('\udfff')",
        r"raise ValueError('\udfff')",
    ):
        run = run_program(code, python=edge_python)
        result = Result(status=Status.SUCCESS, value=run.value, error=run.report.error)
        json.dumps(result.to_dict(), allow_nan=False, ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    "members",
    [
        "def __str__(self): return '\\x1b]0;x\\x07' + 'A' * 10**8",
        "def __str__(self): raise SystemExit(0)",
        "def __str__(self): raise KeyboardInterrupt",
        "def __str__(self): return 3",
        "__cause__ = property(lambda self: 1 / 0)",
        "__notes__ = property(lambda self: 1 / 0)",
        "__notes__ = ['n' * 10**7]",
        "__traceback__ = property(lambda self: 1 / 0)",
        "__class__ = property(lambda self: 1 / 0)",
        "__module__ = 3",
        "def __reduce__(self): return (open, ('marker', 'w'))",
        "def __getattribute__(self, name): raise KeyboardInterrupt",
    ],
)
def test_an_exception_that_objects_to_being_told_is_still_told(
    members: str, edge_python: str, tmp_path: Path
) -> None:
    run = run_program(
        f"class E(Exception):\n    {members}\nraise E()", python=edge_python, cwd=tmp_path
    )
    assert run.exit_code == 1
    assert run.report.error is not None
    assert run.report.error.type in ("E", "Exception")
    assert len(run.report.error.message) <= MAX_MESSAGE
    assert 'File "main.py", line 3, in <module>' in run.stderr
    assert len(run.stderr) < 100_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "vandalism",
    [
        "import sys; sys.stderr = None",
        "import sys; sys.stderr = 3",
        "import sys; sys.stderr.close()",
        "import sys; sys.modules.clear()",
        "import sys; sys.path = None",
        "import sys; sys.excepthook = None",
        "import sys; del sys.excepthook",
        "import builtins; builtins.len = builtins.issubclass = None",
        "import os; os.write = os.getpid = os.fstat = None",
        "import sys; sys.modules['traceback'] = sys.modules['linecache'] = None",
        "import sys; sys.settrace(lambda *a: 1 / 0)",
        "import gc; gc.disable()",
        "import sys; sys.exit = None; raise_ = SystemExit",
    ],
)
def test_a_vandalised_interpreter_still_fails_with_its_own_exit_code(
    vandalism: str, edge_python: str
) -> None:
    code = f"{vandalism}\nraise ValueError('the end')"
    run = run_program(code, python=edge_python)
    plain = subprocess.run([edge_python, "-I", "-c", code], capture_output=True)
    assert run.exit_code == plain.returncode
    assert run.exit_code in (1, 120), "120: CPython could not flush a stream"
    assert not run.timed_out
    assert run.report.error is None or run.report.error.message == "the end"

"""`belljar` as a real process over the real default backend: what a shell sees of it."""

from __future__ import annotations

import glob
import json
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from real_command import COMMAND, Process, environment

from belljar.backends.base import Cancel
from belljar.cli import running

DEADLINE = 100  # seconds, for what takes a moment on an idle machine
FOREVER = "import sys, time\nprint('up', flush=True)\nwhile True: time.sleep(1)"


def test_output_exit_code_and_silence(cli: Process) -> None:
    done = cli("run", "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 7)


def test_every_byte_passes_a_pipe_untouched(cli: Process) -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 4)"
    assert cli("run", "-c", code).stdout == bytes(range(256)) * 4


def test_an_exception_shows_its_traceback_and_exits_one(cli: Process) -> None:
    done = cli("run", "-c", "1/0")
    assert done.returncode == 1
    assert b"ZeroDivisionError" in done.stderr
    assert b"belljar:" not in done.stderr


def test_json_tells_the_exception(cli: Process) -> None:
    done = cli("run", "--json", "-c", "x = 3\n1/0")
    told = json.loads(done.stdout)
    assert (told["status"], told["error"]["type"]) == ("error", "ZeroDivisionError")
    assert "1/0" in told["error"]["traceback"]
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_loop_ends_at_its_timeout_with_124(cli: Process) -> None:
    began = time.monotonic()
    done = cli("run", "-c", "while True: pass", "--timeout", "1")
    assert done.returncode == 124
    assert time.monotonic() - began < 30
    assert b"timeout" in done.stderr
    assert b"--timeout 2s" in done.stderr


def test_death_by_a_signal_is_128_plus_its_number(cli: Process) -> None:
    done = cli("run", "-c", "import os; os.kill(os.getpid(), 11)")
    assert done.returncode == 139
    assert b"segmentation fault (signal 11)" in done.stderr


def test_too_much_memory_is_137(cli: Process) -> None:
    done = cli("run", "-c", "x = bytearray(1 << 30)", "--memory", "128M")
    assert done.returncode == 137
    assert b"--memory 256M" in done.stderr


def test_a_refused_import_is_126_and_the_same_runs_without_the_lint(cli: Process) -> None:
    words = ("run", "-c", "import socket; print('ran')")
    refused = cli(*words, "--modules", "safe")
    assert (refused.returncode, refused.stdout) == (126, b"")
    assert b"socket" in refused.stderr
    assert cli(*words).stdout == b"ran\n"


def test_strict_on_the_subprocess_backend_is_refused_with_126(cli: Process) -> None:
    done = cli("run", "-c", "1", "--level", "strict", "--backend", "subprocess")
    assert done.returncode == 126
    assert b"min_isolation" in done.stderr
    assert cli("run", "-c", "1", "--backend", "subprocess").returncode == 0


def test_a_missing_command_is_127(cli: Process) -> None:
    assert cli("exec", "--", "no-such-command").returncode == 127
    assert cli("exec", "--", "true").returncode == 0


def test_exec_runs_a_command_with_its_input(cli: Process) -> None:
    done = cli("exec", "--", "sort", "-r", input=b"a\nc\nb\n")
    assert (done.stdout, done.returncode) == (b"c\nb\na\n", 0)
    assert cli("exec", "--", "sh", "-c", "exit 9").returncode == 9


def test_our_standard_input_is_the_programs(cli: Process) -> None:
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    assert cli("run", "-c", code, input=b"\xff\x00abc").stdout == b"cba\x00\xff"
    assert cli("run", "-c", code, "--stdin", "/dev/null", input=b"abc").stdout == b""


def test_a_standard_input_that_never_ends_is_explained(cli: Process) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "-c", "print(input())"],
        bufsize=0,  # else readline takes what communicate should see
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=cli.directory,
    )
    assert process.stderr is not None
    assert b"standard input" in process.stderr.readline()
    out, err = process.communicate(b"at last\n", timeout=DEADLINE)
    assert (out, process.returncode) == (b"at last\n", 0)
    assert b"--stdin /dev/null" in err


def test_the_program_may_come_from_standard_input(cli: Process) -> None:
    (cli.directory / "given").write_text("from a file")
    code = b"import sys; print(sys.argv[1:], repr(sys.stdin.read()))"
    assert cli("run", "-", "a", input=code).stdout == b"['a'] ''\n"
    done = cli("run", "-", "--stdin", "given", input=code)
    assert done.stdout == b"[] 'from a file'\n"


def test_arguments_environment_and_files_reach_the_program(cli: Process) -> None:
    (cli.directory / "job.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['A'], open('d/in.txt').read())"
    )
    (cli.directory / "in.txt").write_text("text")
    words = "run job.py one --env A=b --file in.txt:d/in.txt -- --two"
    assert cli(*words.split()).stdout == b"['one', '--two'] b text\n"


def test_nothing_of_our_environment_reaches_the_program_unasked(cli: Process) -> None:
    code = "import os; print(os.environ.get('CANARY'))"
    assert cli("run", "-c", code, CANARY="token").stdout == b"None\n"
    assert cli("run", "-c", code, "--env", "CANARY", CANARY="token").stdout == b"token\n"


def test_outputs_come_out(cli: Process) -> None:
    code = (
        "import os; os.mkdir('d'); open('d/a.csv', 'w').write('1'); open('b.txt', 'w').write('2')"
    )
    assert cli("run", "-c", code, "--out", "*.csv").returncode == 0
    assert [path.name for path in cli.directory.rglob("*") if path.is_file()] == ["a.csv"]


def test_other_languages(cli: Process) -> None:
    (cli.directory / "a.sh").write_text("echo shell $1")
    done = cli("run", "a.sh", "x")
    assert (done.stdout, done.returncode) == (b"shell x\n", 0)


@pytest.mark.parametrize("backend", ["jail", "subprocess", "landlock", "inprocess"])
def test_a_traceback_names_the_file_that_was_run(cli: Process, backend: str) -> None:
    (cli.directory / "job.py").write_text("print(__file__)\n1/0")
    words = ("--backend", backend, "--level", "permissive", "--modules", "any")
    done = cli("run", "job.py", *words)
    assert b'job.py", line 1' not in done.stderr
    assert b'job.py", line 2' in done.stderr
    assert b"job.py" in done.stdout
    assert b"main.py" not in done.stderr + done.stdout


def test_a_file_called_like_a_module_does_not_stand_before_it(cli: Process) -> None:
    (cli.directory / "json.py").write_text("import json; print(json.dumps([1]))")
    done = cli("run", "json.py")
    assert (done.stdout, done.returncode) == (b"[1]\n", 0)


def test_another_languages_program_keeps_its_name_too(cli: Process) -> None:
    (cli.directory / "job.sh").write_text("echo $0")
    assert cli("run", "job.sh").stdout.rstrip().endswith(b"job.sh")


def test_a_refusal_is_a_table_whose_fix_is_a_flag(cli: Process) -> None:
    done = cli("run", "-c", "1", "--backend", "subprocess", "--memory", "512")
    assert done.returncode == 125
    assert done.stderr.decode().splitlines() == [
        "belljar: memory: 512 bytes is less than 4 MiB, the least that a sandbox can start with:"
        " did you mean 512M?",
        "  fix: write --memory 4M or more",
    ]
    done = cli("run", "-c", "1", "--min-isolation", "vm")
    first, *rows, fix = done.stderr.decode().splitlines()
    assert first.endswith("the policy needs isolation vm")
    assert all(len(row) < 150 for row in rows)
    assert fix.startswith("  fix: ")
    assert done.returncode == 126


def test_an_option_that_is_nearly_ours_is_named(cli: Process) -> None:
    """`outputs` is what the library calls it."""
    for words in (("--outputs", "*.txt"), ("--outputs=*.txt",)):
        said = cli("run", *words, "-c", "1").stderr.decode()
        assert {"--out", "--outputs-to"} <= set(said.partition("mean ")[2].split())
    assert b"did you mean" not in cli("run", "--zzz", "-c", "1").stderr


def test_strict_names_its_modules_and_the_flag_and_explain_agrees(cli: Process) -> None:
    done = cli("run", "-c", "import sys", "--level", "strict")
    said = done.stderr.decode()
    assert done.returncode == 126
    assert 'level "strict", which allows only json, math, statistics' in said
    assert "--modules any" in said
    assert "modules=" not in said
    told = cli("explain", "-c", "import sys", "--level", "strict")
    assert told.returncode == 126
    assert b"allows only json, math, statistics" in told.stdout
    plan = cli("run", "-c", "import sys", "--level", "strict", "--explain")
    assert b"allows only json, math, statistics" in plan.stdout
    assert cli("explain", "-c", "import json", "--level", "strict").returncode == 0


def test_no_fallback_refuses_where_the_named_backend_is_missing(cli: Process) -> None:
    missing = {"DOCKER_HOST": "unix:///nonexistent/engine.sock"}
    done = cli("run", "-c", "1", "--backend", "docker", "--no-fallback", **missing)
    assert (done.stdout, done.returncode) == (b"", 127)
    for quiet in ((), ("--quiet",)):
        done = cli("run", "-c", "print(1)", "--backend", "docker", *quiet, **missing)
        if done.returncode == 0:  # there is something as strong here
            assert done.stdout == b"1\n"
            line, fix = done.stderr.decode().splitlines()
            assert line.startswith("belljar: warning: 'docker' could not be used: there is no")
            assert len(line) < 200
            assert fix.startswith("  fix: apt-get install docker.io")


def test_a_full_disk_in_memory_is_fixed_by_what_would_be_accepted(cli: Process) -> None:
    full = "file = open('big', 'wb', buffering=0)\nwhile file.write(bytes(1 << 20)): pass"
    for asked, fix in (
        (("--memory", "64M"), "--memory 128M"),  # its disk is half of it
        (("--memory", "64M", "--disk", "40M"), "--disk 80M --memory 128M"),
        (("--memory", "64M", "--disk", "8M"), "--disk 16M"),
    ):
        done = cli("run", "-c", full, "--backend", "jail", "--no-fallback", *asked)
        if done.returncode == 127:
            pytest.skip(done.stderr.decode())
        assert done.stderr.decode().splitlines()[-1] == f"  fix: allow more with {fix}"


def test_a_pipe_gets_every_byte_past_the_output_limit(cli: Process) -> None:
    code = "for i in range(400_000): print(i)"
    done = cli("run", "-c", code, "--output", "4K")
    assert done.stdout == b"".join(b"%d\n" % i for i in range(400_000))
    assert (done.stderr, done.returncode) == (b"", 0)


def test_json_keeps_the_head_and_the_tail_within_the_output_limit(cli: Process) -> None:
    code = "print('HEAD'); print('x' * 100_000); print('TAIL')"
    result = json.loads(cli("run", "-c", code, "--output", "4K", "--json").stdout)
    assert result["stdout"].startswith("HEAD\n")
    assert result["stdout"].endswith("TAIL\n")
    assert "bytes dropped" in result["stdout"]
    assert len(result["stdout"]) <= 4096
    assert result["truncated"]


@pytest.mark.slow
def test_output_past_what_is_passed_on_is_an_error_with_one_line(cli: Process) -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * (1 << 20))"
    process = cli.start("run", "-c", code, "--timeout", "120", "--backend", "subprocess")
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        size = 0
        while piece := process.stdout.read(1 << 20):
            size += len(piece)
        assert size == 1 << 30
        said = process.stderr.read().decode()
    assert said.startswith("belljar: output: the program wrote more than 1 GiB to stdout")
    assert process.returncode == 137


def test_a_slow_reader_does_not_grow_the_command(cli: Process) -> None:
    code = "import sys\nfor _ in range(200): sys.stdout.write('x' * (1 << 20))"
    process = cli.start("run", "-c", code, "--timeout", "60", "--backend", "subprocess")
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert select.select([process.stdout], [], [], DEADLINE)[0]
        deadline = time.monotonic() + DEADLINE
        while descendants(process.pid):  # the whole of its output has been taken from the guest
            assert time.monotonic() < deadline
            time.sleep(0.05)
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0])
        assert peak < 100 << 10
        assert len(process.stdout.read()) == 200 << 20
    assert process.returncode == 0


def test_output_arrives_while_the_program_runs(cli: Process) -> None:
    process = cli.start("run", "-c", FOREVER)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.terminate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_guest_and_then_us(
    cli: Process, number: signal.Signals, code: int
) -> None:
    process = cli.start("run", "-c", FOREVER, "--timeout", "10m")
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    survivors = descendants(process.pid)
    assert survivors
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code
    assert b"cancelled" in err
    assert b"Traceback" not in err
    assert not [pid for pid in survivors if alive(pid)]


def test_two_signals_at_once_still_end_cleanly(cli: Process) -> None:
    process = cli.start("run", "-c", FOREVER, "--timeout", "10m")
    assert process.stdout is not None
    process.stdout.readline()
    survivors = descendants(process.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode in (130, 143)
    assert b"Traceback" not in err
    assert not [pid for pid in survivors if alive(pid)]


def test_a_signal_ends_a_wait_that_had_not_begun_when_it_came() -> None:
    class Unset(Cancel):
        """As long as Python has not come to the signal's handler, nobody has set it."""

        def set(self) -> None:
            return

    with Unset() as cancel:
        with running._signals_cancel(cancel) as received:
            os.kill(os.getpid(), signal.SIGTERM)
            assert select.select([cancel.fileno()], [], [], DEADLINE)[0]
        assert received == [signal.SIGTERM]
        assert signal.set_wakeup_fd(-1) == -1


def descendants(pid: int) -> list[int]:
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            children = Path(path).read_text().split()
        except OSError:  # it ended while we looked
            continue
        for child in children:
            found += [int(child), *descendants(int(child))]
    return found


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_reader_that_leaves_ends_the_run_quietly(cli: Process) -> None:
    code = "import itertools\nfor i in itertools.count(): print(i, flush=True)"
    process = cli.start("run", "-c", code, "--timeout", "60", "--output", "1G")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(DEADLINE) == 141
    process.stderr.close()


def test_a_reader_that_stalls_does_not_stall_the_clock(cli: Process) -> None:
    """The guest fills our stdout, nobody reads, and it is killed at its timeout all the same."""
    code = "print('x' * 900_000, flush=True)\nimport time\nwhile True: time.sleep(1)"
    # On a backend that keeps nothing warm: all our descendants belong to the run.
    process = cli.start("run", "-c", code, "--timeout", "2", "--backend", "subprocess")
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE)[0]
    guests = descendants(process.pid)
    assert guests
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in guests):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # there is no event for somebody else's grandchild
    assert process.poll() is None  # it waits for the reader with what it has
    out, _ = process.communicate(timeout=DEADLINE)
    assert len(out) == 900_001
    assert process.returncode == 124


def test_ctrl_c_gives_up_on_a_reader_that_stalls(cli: Process) -> None:
    process = cli.start("run", "-c", "print('x' * 900_000)", "--backend", "subprocess")
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE)[0]
    deadline = time.monotonic() + DEADLINE
    while descendants(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130
    process.communicate()


@pytest.mark.parametrize(
    "words", [("run", "-c", "print(1)"), ("run", "-c", "1", "--json"), ("settings",)]
)
def test_output_that_cannot_be_written_is_a_failure_of_ours(
    cli: Process, words: tuple[str, ...]
) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd=cli.directory,
        )
    assert done.returncode == 125
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_json_that_nobody_reads_to_its_end_ends_quietly(cli: Process, unbuffered: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "-c", "print('x' * 1_000_000)", "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED=unbuffered),
        cwd=cli.directory,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"{"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(DEADLINE) == 141


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_descriptors_do_no_harm(cli: Process, closed: tuple[int, ...]) -> None:
    mark = cli.directory / "mark"
    streams = {0: "<&-", 1: ">&-", 2: "2>&-"}
    line = " ".join(
        [*map(_quoted, COMMAND), "run -c \"open('m','w').write('ran'); print('x')\" --out m"]
        + [streams[number] for number in closed]
    )
    done = subprocess.run(
        ["sh", "-c", line],
        input=b"",
        capture_output=True,
        env=environment(),
        cwd=cli.directory,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done
    assert done.stdout == (b"" if 1 in closed else b"x\n")
    assert (cli.directory / "m").read_text() == "ran"
    assert not mark.exists()


def _quoted(word: str) -> str:
    return f"'{word}'"


def test_modules_in_the_current_directory_are_not_ours(cli: Process) -> None:
    """A hostile checkout with a json.py must not run in the host process."""
    for name in ("json", "select", "tomllib", "argparse", "socket", "subprocess", "tempfile"):
        (cli.directory / f"{name}.py").write_text(
            f"open({str(cli.directory / 'canary')!r}, 'a').write({name!r})"
        )
    (cli.directory / "belljar.toml").write_text("[defaults]\ntimeout = 5\n")
    os.chmod(cli.directory / "belljar.toml", 0o644)
    assert cli("run", "-c", "print(1)", "--json").returncode == 0
    assert cli("doctor", "--json").returncode in (0, 1)
    assert not (cli.directory / "canary").exists()


def test_a_current_directory_that_is_gone_does_no_harm(cli: Process) -> None:
    gone = cli.directory / "gone"
    gone.mkdir()
    line = " ".join(['rmdir "$PWD" && exec', *map(_quoted, COMMAND), "run -c 'print(1)'"])
    done = subprocess.run(
        ["sh", "-c", line],
        input=b"",
        capture_output=True,
        env=environment(),
        cwd=gone,
        timeout=DEADLINE,
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"1\n", b"", 0)


def test_a_configuration_error_stops_every_command(cli: Process) -> None:
    for words in (("run", "-c", "1"), ("exec", "--", "true"), ("doctor",), ("settings",)):
        done = cli(*words, BELLJAR_TIMEUOT="1")
        assert done.returncode == 125
        assert b"BELLJAR_TIMEOUT" in done.stderr


def test_words_that_are_not_utf8_are_refused_in_plain_words(cli: Process) -> None:
    def run(*words: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*map(os.fsencode, COMMAND), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(),
            cwd=cli.directory,
        )

    for words in (
        [b"run", b"-c", b"print('\xff')"],
        [b"run", b"-c", b"print(1)", b"a\xff"],
        [b"run", b"\xff.py"],
        [b"run", b"-c", b"1", b"--\xff"],
        [b"\xff"],
    ):
        done = run(*words)
        assert (done.returncode, done.stdout) == (125, b""), words
        assert done.stderr.startswith(b"belljar: "), words
    assert run(b"run", b"-c", "print('é')".encode()).stdout == "é\n".encode()
    # A command's words are bytes to the kernel, and stay so.
    assert run(b"exec", b"--", b"echo", b"\xff").stdout == b"\xff\n"


@pytest.mark.parametrize("words", [("doctor",), ("backends",), ("settings",), ("--version",)])
def test_the_other_commands_print_json_too(cli: Process, words: tuple[str, ...]) -> None:
    done = cli(*words, "--json")
    assert done.returncode == 0
    assert isinstance(json.loads(done.stdout), dict)
    plain = cli(*words)
    assert plain.stdout
    assert plain.stderr == b""


# The end of the process


ENDING = """
import atexit, sys, threading, time
from belljar import cli
sys.argv = ["belljar", "--version"]
def later():
    time.sleep(0.2)
    print("thread")
if THREAD:
    threading.Thread(target=later).start()
atexit.register(print, "at exit")
sys.stdout.write("before ")
cli.command()
"""


@pytest.mark.parametrize("thread", [False, True])
def test_the_end_waits_for_threads_runs_what_is_registered_and_flushes(thread: bool) -> None:
    done = subprocess.run(
        [COMMAND[0], "-c", ENDING.replace("THREAD", str(thread))],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    before, *rest = done.stdout.splitlines()
    assert before.startswith("before belljar ")
    assert rest == (["thread", "at exit"] if thread else ["at exit"])


def test_output_that_cannot_be_written_at_the_end_is_told() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [COMMAND[0], "-c", ENDING.replace("THREAD", "False")],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode != 0
    assert b"No space left" in done.stderr

"""Conformance: the world a program wakes up in: input, arguments, environment, signals."""

from __future__ import annotations

import hashlib
import os
import signal

import pytest

from ...errors import BackendUnavailable, LanguageUnknown, RequestError
from ...types import Status
from .harness import Backed, Jar


class Programs(Backed):
    def test_stdin_is_read_as_bytes(self, jar: Jar) -> None:
        given = b"line one\n\x00\xff binary\n"
        assert jar.run("import sys; sys.stdin.buffer.read()", stdin=given).value == given

    def test_stdin_is_read_as_lines(self, jar: Jar) -> None:
        result = jar.run("[input(), input()]", stdin="grün\nblau\n".encode())
        assert result.value == ["grün", "blau"]

    def test_without_stdin_there_is_nothing_to_read(self, jar: Jar) -> None:
        assert jar.run("import sys; sys.stdin.read()").value == ""
        result = jar.run("input()")
        assert result.error is not None
        assert result.error.type == "EOFError"

    def test_stdin_larger_than_any_pipe_arrives_whole(self, jar: Jar) -> None:
        given = bytes(range(256)) * 16384  # 4 MiB
        code = "import sys, hashlib; hashlib.sha256(sys.stdin.buffer.read()).hexdigest()"
        assert jar.run(code, stdin=given).value == hashlib.sha256(given).hexdigest()

    def test_stdin_that_nobody_reads_holds_nothing_up(self, jar: Jar) -> None:
        result = jar.run("print('done')", stdin=b"x" * (4 << 20))
        assert (result.status, result.stdout) == (Status.SUCCESS, "done\n")

    def test_stdin_and_output_flow_at_the_same_time(self, jar: Jar) -> None:
        given = (
            b"0123456789abcde\n" * 65536
        )  # 1 MiB each way: a deadlock if one waits for the other
        result = jar.run(
            "import sys\nfor line in sys.stdin: sys.stdout.write(line)", stdin=given, output="2M"
        )
        assert result.success
        assert result.stdout.encode() == given

    def test_arguments_arrive_as_given(self, jar: Jar) -> None:
        given = ("plain", "two words", "", "--flag", "-c", "日本", "quote'\"$HOME`x`", "a\nb")
        assert jar.run("import sys; sys.argv[1:]", args=given).value == list(given)

    def test_an_argument_with_a_nul_is_refused(self, jar: Jar) -> None:
        with pytest.raises(RequestError) as refusal:
            jar.run("1", args=("a\0b",))
        assert refusal.value.field.startswith("args")

    def test_code_with_a_nul_is_refused(self, jar: Jar) -> None:
        with pytest.raises(RequestError) as refusal:
            jar.run("print(1)\0print(2)")
        assert refusal.value.field == "code"

    def test_the_environment_is_what_was_given_and_nothing_of_the_host(
        self, jar: Jar, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOST_CANARY_SECRET", "host-only")
        code = "import os; [os.environ.get('HOST_CANARY_SECRET'), os.environ.get('GIVEN')]"
        assert jar.run(code, env={"GIVEN": "wért=1"}).value == [None, "wért=1"]
        everything = jar.run("import os; repr(dict(os.environ)) + repr(os.environb)").value
        assert "host-only" not in everything
        # The control arm: the same variable is seen when it is given on purpose.
        assert jar.run(code, env={"HOST_CANARY_SECRET": "given"}).value == ["given", None]

    @pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"A\0": "x"}, {"A": "x\0"}])
    def test_an_impossible_environment_is_refused(self, jar: Jar, env: dict[str, str]) -> None:
        with pytest.raises(RequestError) as refusal:
            jar.run("1", env=env)
        assert refusal.value.field.startswith("env")

    def test_the_program_is_the_real_main_module(self, jar: Jar) -> None:
        result = jar.run("""
            import sys

            class Thing:
                pass

            here = sys.modules["__main__"]
            [__name__, here.Thing is Thing, Thing.__module__]
            """)
        assert result.value == ["__main__", True, "__main__"]

    def test_future_imports_and_docstrings_may_stand_first(self, jar: Jar) -> None:
        result = jar.run('"""Doc."""\nfrom __future__ import annotations\n__doc__')
        assert result.value == "Doc."

    def test_what_exit_handlers_and_threads_say_is_heard(self, jar: Jar) -> None:
        jar.needs_processes()
        result = jar.run("""
            import atexit, threading
            atexit.register(print, "handler")
            threading.Timer(0.1, print, ["thread"]).start()
            print("main")
            """)
        assert result.success
        assert sorted(result.stdout.split()) == ["handler", "main", "thread"]

    def test_what_a_child_process_says_is_heard(self, jar: Jar) -> None:
        jar.needs_children()
        result = jar.run("""
            import subprocess, sys
            child = [sys.executable, "-c", "import sys; print('child'); sys.exit(4)"]
            subprocess.run(child).returncode
            """)
        assert (result.value, result.stdout) == (4, "child\n")

    def test_the_host_s_descriptors_are_not_inherited(self, jar: Jar) -> None:
        jar.needs_own_process()
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        try:
            inode = os.fstat(writer).st_ino
            result = jar.run(f"""
                import os
                found = []
                for fd in range(256):
                    try:
                        if os.fstat(fd).st_ino == {inode}:
                            found.append(fd)
                    except OSError:
                        pass
                found
                """)
        finally:
            os.close(reader)
            os.close(writer)
        assert result.value == []

    @pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGTERM", "SIGILL", "SIGUSR1"])
    def test_death_by_a_signal_of_its_own_is_an_error_with_that_signal(
        self, jar: Jar, name: str
    ) -> None:
        jar.needs_processes()
        result = jar.run(f"""
            import os, signal
            print("before", flush=True)
            signal.signal(signal.{name}, signal.SIG_DFL)
            os.kill(os.getpid(), signal.{name})
            signal.pause()
            """)
        assert (result.status, result.exit_code) == (Status.ERROR, None)
        assert result.signal == getattr(signal, name)
        assert result.stdout == "before\n"

    def test_a_real_crash_is_an_error_with_its_signal(self, jar: Jar) -> None:
        jar.needs_processes()
        result = jar.run("import ctypes; ctypes.string_at(0)")
        assert (result.status, result.exit_code) == (Status.ERROR, None)
        assert result.signal == signal.SIGSEGV

    def test_a_kill_that_was_not_ours_is_killed(self, jar: Jar) -> None:
        jar.needs_processes()
        result = jar.run("import os; os.kill(os.getpid(), 9)")
        assert (result.status, result.exit_code, result.signal) == (Status.KILLED, None, 9)

    @pytest.mark.parametrize("language", ["klingon", "", "../python", "python;ls"])
    def test_an_unknown_language_is_refused_with_the_known_ones(
        self, jar: Jar, language: str
    ) -> None:
        with pytest.raises(LanguageUnknown) as refusal:
            jar.run("1", language=language)
        assert "python" in str(refusal.value)

    @pytest.mark.parametrize(
        ("language", "code"),
        [
            ("bash", 'read line; echo "$1 $line $GIVEN"; echo oops >&2; exit 3'),
            (
                "javascript",
                "const line = require('fs').readFileSync(0, 'utf8').trim();"
                "console.log(process.argv[2], line, process.env.GIVEN);"
                "console.error('oops'); process.exit(3)",
            ),
        ],
    )
    def test_other_languages_have_the_same_streams_and_exit_codes(
        self, jar: Jar, language: str, code: str
    ) -> None:
        if language == "javascript":
            jar.needs_packages()  # of Node's
        # Node reserves address space by the gigabyte, so a memory limit needs room for it.
        room = "4G" if language == "javascript" else None
        try:
            result = jar.run(
                code,
                language=language,
                args=("arg",),
                stdin=b"in\n",
                env={"GIVEN": "env"},
                memory=room,
            )
        except (LanguageUnknown, BackendUnavailable) as lacking:
            pytest.skip(str(lacking))
        assert (result.status, result.exit_code) == (Status.ERROR, 3)
        assert (result.stdout, result.stderr) == ("arg in env\n", "oops\n")

    def test_a_command_runs_without_a_shell(self, jar: Jar) -> None:
        jar.needs_processes()
        result = jar.run("", command=("echo", "$HOME", "two  words"))
        assert (result.status, result.stdout) == (Status.SUCCESS, "$HOME two  words\n")

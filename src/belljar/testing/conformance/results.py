"""Conformance: streams, exit codes, errors, unicode, and the result's own shape."""

from __future__ import annotations

import json

import pytest

from ...types import Status
from .harness import Backed, Jar

RESULT_KEYS = [
    "id", "status", "exit_code", "signal", "limit_hit", "explanation", "stdout", "stderr",
    "truncated", "value", "error", "displays", "files", "changes", "usage", "timings",
    "enforcement", "kill", "settled", "backend", "backend_reason", "fallback", "retried",
    "isolation", "warnings",
]  # fmt: skip


class Results(Backed):
    def test_a_quiet_program_succeeds(self, jar: Jar) -> None:
        result = jar.run("x = 1")
        assert (result.status, result.exit_code, result.signal) == (Status.SUCCESS, 0, None)
        assert result.success
        assert (result.stdout, result.stderr, result.value, result.error) == ("", "", None, None)

    def test_an_empty_program_succeeds(self, jar: Jar) -> None:
        assert jar.run("").success
        assert jar.run("# only a comment").success

    def test_the_two_streams_are_kept_apart(self, jar: Jar) -> None:
        result = jar.run("import sys; print('out'); print('err', file=sys.stderr)")
        assert (result.stdout, result.stderr) == ("out\n", "err\n")

    def test_output_without_a_newline_is_kept(self, jar: Jar) -> None:
        assert jar.run("import sys; sys.stdout.write('no newline')").stdout == "no newline"

    @pytest.mark.parametrize(
        ("code", "exit_code"),
        [
            ("sys.exit()", 0),
            ("sys.exit(None)", 0),
            ("sys.exit(0)", 0),
            ("sys.exit(3)", 3),
            ("sys.exit(True)", 1),
            ("sys.exit(255)", 255),
            ("sys.exit(-1)", 255),
            ("raise SystemExit(7)", 7),
            ("sys.exit('a last word')", 1),
        ],
    )
    def test_the_exit_code_is_the_program_s_own(self, jar: Jar, code: str, exit_code: int) -> None:
        result = jar.run(f"import sys\nprint('before')\n{code}")
        assert result.exit_code == exit_code
        assert result.status is (Status.SUCCESS if exit_code == 0 else Status.ERROR)
        assert result.error is None
        assert result.signal is None
        assert result.stdout == "before\n"
        assert ("a last word" in result.stderr) == ("a last word" in code)

    def test_an_exit_code_set_without_ceremony_counts_too(self, jar: Jar) -> None:
        jar.needs_own_process()
        result = jar.run("import os; print('before', flush=True); os._exit(5)")
        assert (result.status, result.exit_code) == (Status.ERROR, 5)
        assert result.stdout == "before\n"

    def test_an_uncaught_exception_comes_with_its_source_line(self, jar: Jar) -> None:
        result = jar.run("""
            def share(cake, people):
                return cake / people

            print("sharing")
            share(1, 0)
            """)
        assert (result.status, result.exit_code, result.signal) == (Status.ERROR, 1, None)
        assert result.error is not None
        assert result.error.type == "ZeroDivisionError"
        assert result.error.message == "division by zero"
        assert "return cake / people" in result.error.traceback
        assert "share(1, 0)" in result.error.traceback
        assert "worker.py" not in result.error.traceback  # the program's frames, not ours
        assert result.stdout == "sharing\n"

    def test_the_cause_of_an_exception_is_in_its_traceback(self, jar: Jar) -> None:
        result = jar.run("""
            try:
                {}["missing"]
            except KeyError as lost:
                raise RuntimeError("no key") from lost
            """)
        assert result.error is not None
        assert (result.error.type, result.error.message) == ("RuntimeError", "no key")
        assert "KeyError: 'missing'" in result.error.traceback

    def test_an_exception_of_the_program_s_own_class_is_named(self, jar: Jar) -> None:
        result = jar.run("class Upset(Exception): pass\nraise Upset('deeply')")
        assert result.error is not None
        assert result.error.type.rsplit(".", 1)[-1] == "Upset"
        assert result.error.message == "deeply"

    def test_an_exception_that_cannot_be_shown_is_still_an_error(self, jar: Jar) -> None:
        result = jar.run("""
            class Mute(Exception):
                def __str__(self):
                    raise ValueError("not even this")

            raise Mute
            """)
        assert result.status is Status.ERROR
        assert result.error is not None
        assert result.error.type.rsplit(".", 1)[-1] == "Mute"

    def test_endless_recursion_is_an_error(self, jar: Jar) -> None:
        result = jar.run("def f(): return f()\nf()")
        assert result.status is Status.ERROR
        assert result.error is not None
        assert result.error.type == "RecursionError"

    @pytest.mark.parametrize("code", ["def f(:\n    pass", "x = (1,", "  indented = True\n y = 2"])
    def test_a_program_that_does_not_parse_is_an_error(self, jar: Jar, code: str) -> None:
        result = jar.run(code)
        assert result.status is Status.ERROR
        assert result.exit_code == 1
        assert result.error is not None
        assert result.error.type in ("SyntaxError", "IndentationError")
        assert code.split("\n")[0].strip() in result.error.traceback

    def test_the_error_forgets_nothing_that_was_printed_before(self, jar: Jar) -> None:
        result = jar.run("import sys\nprint('a')\nprint('b', file=sys.stderr)\n1/0")
        assert result.stdout == "a\n"
        assert result.stderr.startswith("b\n")

    def test_code_and_output_are_unicode(self, jar: Jar) -> None:
        result = jar.run("größe = '日本語 🫙 \\u0000 é'\nprint(größe)\ngröße")
        assert result.stdout == "日本語 🫙 \0 é\n"
        assert result.value == "日本語 🫙 \0 é"

    def test_output_that_is_no_utf8_is_replaced_not_lost(self, jar: Jar) -> None:
        result = jar.run("""
            import sys
            sys.stdout.buffer.write(b"a\\xff\\xfeb\\xe6\\x97")
            sys.stdout.buffer.flush()
            """)
        assert result.success
        assert result.stdout.startswith("a\ufffd")
        assert "b" in result.stdout
        json.dumps(result.to_dict(), allow_nan=False).encode()

    def test_lone_surrogates_do_no_harm(self, jar: Jar) -> None:
        result = jar.run("x = '\\ud800'\nraise ValueError(x)")
        assert result.status is Status.ERROR
        assert result.error is not None
        assert result.error.type == "ValueError"
        json.dumps(result.to_dict(), allow_nan=False).encode()

    @pytest.mark.parametrize(
        "code", ["1 + 1", "1 / 0", "float('nan')", "b'\\xff'", "'\\ud800'", "{1: (2, 3)}"]
    )
    def test_a_result_is_strict_json_with_the_pinned_keys(self, jar: Jar, code: str) -> None:
        shown = jar.run(code).to_dict()
        assert list(shown) == RESULT_KEYS
        text = json.dumps(shown, allow_nan=False)
        text.encode("utf-8")
        assert json.loads(text) == shown

    def test_a_result_says_what_it_cost(self, jar: Jar) -> None:
        result = jar.run("print('x' * 100)\nsum(range(10**6))")
        assert result.usage.wall > 0
        assert result.usage.stdout_bytes == 101
        assert result.usage.stderr_bytes == 0
        assert all(seconds >= 0 for seconds in result.timings.values())
        if result.usage.peak_memory is not None:
            assert result.usage.peak_memory > 1 << 20

    def test_each_run_has_the_id_of_its_request(self, jar: Jar) -> None:
        assert jar.run("1", id="abc123").id == "abc123"
        assert jar.run("1").id != jar.run("1").id

"""Conformance: many runs at once, output while it comes, cancelling, and the end of a backend."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ...backends.base import Cancel
from ...errors import BelljarError
from ...events import Output, RunFinished, RunStarted
from ...types import Result, Status
from .harness import Backed, Jar, Watch

PROMPTLY = 30.0  # seconds; the programs below would take sixty
# Ends at which CPython does not flush what it has buffered.
LOSING = {
    "killed": "import time\ntime.sleep(60)",
    "leaves": "import os\nos._exit(0)",
    "crashes": "import ctypes; ctypes.string_at(0)",
}


class Runs(Backed):
    def test_runs_at_the_same_time_do_not_mix(self, jar: Jar) -> None:
        code = """
            import os, sys
            token = sys.stdin.read()
            open("file.txt", "w").write(token)
            for _ in range(200):
                print(token, flush=True)
                print(token, file=sys.stderr)
            [token, os.environ["TOKEN"], sys.argv[1], given, open("file.txt").read(),
             open("in.txt").read(), sum(name.endswith(".txt") for name in os.listdir("."))]
            """

        def one(token: str) -> Result:
            return jar.run(
                code,
                stdin=token.encode(),
                env={"TOKEN": token},
                args=(token,),
                context={"given": token},
                files={"in.txt": token.encode()},
                outputs=("file.txt",),
            )

        tokens = [f"token-{number}-{number * 7919}" for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(one, tokens))
        for token, result in zip(tokens, results, strict=True):
            assert result.success, result
            assert result.value == [*[token] * 6, 2]
            assert result.stdout == f"{token}\n" * 200
            assert result.stderr == f"{token}\n" * 200
            assert result.files["file.txt"].data == token.encode()
        assert len({result.id for result in results}) == len(tokens)

    def test_one_run_s_end_does_not_touch_its_neighbours(self, jar: Jar) -> None:
        jar.needs(timeout=0.5)
        with ThreadPoolExecutor(4) as pool:
            slow = pool.submit(jar.run, "import time; time.sleep(2); 'slept'")
            ended = [
                pool.submit(jar.run, "while True: pass", timeout=0.5),
                pool.submit(jar.run, "1 / 0"),
            ]
            assert [run.result().status for run in ended] == [Status.TIMEOUT, Status.ERROR]
            assert slow.result().value == "slept"

    def test_output_arrives_while_the_program_still_runs(self, jar: Jar) -> None:
        # Seeing the first line is what ends the run: kept back until the end, it would never end.
        with Cancel() as cancel:
            watch = Watch(b"first\n", cancel.set)
            started = time.monotonic()
            result = jar.run(
                "import time\nprint('first')\ntime.sleep(60)\nprint('last')",
                emit=watch,
                cancel=cancel,
            )
        assert result.status is Status.KILLED
        assert result.stdout == "first\n"
        assert time.monotonic() - started < PROMPTLY

    @pytest.mark.parametrize("ending", LOSING)
    def test_lines_printed_before_a_sudden_end_are_kept(self, jar: Jar, ending: str) -> None:
        jar.needs(timeout=1)
        if ending != "killed":
            jar.needs_own_process()
        if ending == "crashes":
            jar.needs_processes()
        result = jar.run(f"print('kept')\nprint('rest', end='')\n{LOSING[ending]}", timeout=1)
        assert not result.success or ending == "leaves"
        assert result.stdout.startswith("kept\n")
        if ending == "crashes":
            assert 'File "main.py", line 3 in <module>' in result.stderr
            assert "site-packages/belljar" not in result.stderr
            assert result.signal == 11

    def test_await_works_outside_of_functions(self, jar: Jar) -> None:
        jar.needs_processes()  # an event loop has a pair of sockets
        code = """
            import asyncio
            async def double(number):
                await asyncio.sleep(0)
                return number * 2
            some = await double(2)
            await double(some)
            """
        assert jar.run(code).value == 8
        failed = jar.run(code.replace("await asyncio", "1 / 0; await asyncio"))
        assert failed.error is not None
        assert failed.error.type == "ZeroDivisionError"
        assert "asyncio/" not in failed.error.traceback

    def test_the_pieces_are_the_exact_bytes_of_each_stream(self, jar: Jar) -> None:
        watch = Watch()
        result = jar.run(
            """
            import sys
            for number in range(50):
                sys.stdout.buffer.write(b"\\xe6\\x97")
                sys.stdout.buffer.flush()
                sys.stdout.buffer.write(b"\\xa5\\xff\\n")
                sys.stdout.buffer.flush()
                sys.stderr.write(f"{number}\\n")
            """,
            emit=watch,
        )
        assert result.success
        assert watch.seen("stdout") == b"\xe6\x97\xa5\xff\n" * 50
        assert watch.seen("stderr") == b"".join(b"%d\n" % number for number in range(50))
        outputs = [event for event in watch.events if isinstance(event, Output)]
        assert {event.id for event in outputs} == {result.id}

    def test_a_run_starts_and_finishes_once(self, jar: Jar) -> None:
        watch = Watch()
        result = jar.run("print('x')", emit=watch)
        first, *_, last = watch.events
        assert isinstance(first, RunStarted)
        assert first.backend == jar.backend.name
        assert isinstance(last, RunFinished)
        assert last.result.id == result.id
        kinds = [type(event) for event in watch.events]
        assert (kinds.count(RunStarted), kinds.count(RunFinished)) == (1, 1)

    @pytest.mark.parametrize("code", ["time.sleep(60)", "while True: pass"], ids=["asleep", "busy"])
    def test_another_thread_cancels_a_run(self, jar: Jar, code: str) -> None:
        up = threading.Event()
        with Cancel() as cancel, ThreadPoolExecutor(1) as pool:
            run = pool.submit(
                jar.run,
                f"import time\nprint('up', flush=True)\n{code}",
                emit=Watch(b"up", up.set),
                cancel=cancel,
            )
            assert up.wait(30)
            started = time.monotonic()
            cancel.set()
            result = run.result()
        assert time.monotonic() - started < PROMPTLY
        assert (result.status, result.exit_code) == (Status.KILLED, None)
        assert result.stdout == "up\n"

    def test_a_run_cancelled_before_it_starts_is_killed(self, jar: Jar) -> None:
        started = time.monotonic()
        with Cancel() as cancel:
            cancel.set()
            result = jar.run("import time; time.sleep(60)", cancel=cancel)
        assert result.status is Status.KILLED
        assert time.monotonic() - started < PROMPTLY

    def test_a_cancel_after_the_end_changes_nothing(self, jar: Jar) -> None:
        with Cancel() as cancel:
            result = jar.run("42", cancel=cancel)
            cancel.set()
        assert (result.status, result.value) == (Status.SUCCESS, 42)

    def test_a_closed_backend_refuses_to_run(self, jar: Jar) -> None:
        plan = jar.plan("1")
        with Cancel() as cancel:
            assert jar.backend.run(plan, Watch(), cancel).success  # the control arm
            jar.backend.close()
            with pytest.raises(BelljarError):
                jar.backend.run(plan, Watch(), cancel)
        jar.backend.close()  # a second time does no harm

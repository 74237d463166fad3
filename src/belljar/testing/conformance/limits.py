"""Conformance: every limit that a backend claims holds, and a run that hits one says which."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ...types import Status
from .harness import Backed, Jar

BUSY = "while True: pass"
ASLEEP = "import time; time.sleep(60)"
STUBBORN = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGXCPU, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""
FORKS = """
import os, time
children = 0
try:
    while children < wanted:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        children += 1
finally:
    print(children, flush=True)
"""
GENEROUS = 30.0  # seconds by which a kill has to be over, on any machine


class Limits(Backed):
    @pytest.mark.parametrize("code", [BUSY, ASLEEP], ids=["busy", "asleep"])
    def test_a_program_past_its_time_is_a_timeout(self, jar: Jar, code: str) -> None:
        jar.needs(timeout=1)
        started = time.monotonic()
        result = jar.run(f"print('started', flush=True)\n{code}", timeout=1)
        assert result.status is Status.TIMEOUT
        assert result.exit_code is None
        assert result.stdout == "started\n"
        assert result.usage.wall >= 0.9
        assert time.monotonic() - started < GENEROUS

    def test_a_program_within_its_time_is_left_alone(self, jar: Jar) -> None:
        jar.needs(timeout=1)
        assert jar.run("import time; time.sleep(0.2); 'woke'", timeout=20).value == "woke"

    def test_a_program_that_ignores_everything_is_a_timeout_too(self, jar: Jar) -> None:
        jar.needs(timeout=1)
        jar.needs_own_process()
        started = time.monotonic()
        result = jar.run(STUBBORN, timeout=1)
        assert (result.status, result.exit_code, result.signal) == (Status.TIMEOUT, None, 9)
        assert result.kill is not None
        assert result.kill.survivors == 0
        assert time.monotonic() - started < GENEROUS

    def test_time_in_exit_handlers_counts(self, jar: Jar) -> None:
        jar.needs(timeout=1)
        jar.needs_own_process()
        code = "import atexit, time; atexit.register(time.sleep, 60)"
        assert jar.run(code, timeout=1).status is Status.TIMEOUT

    def test_processor_time_is_held_to_the_share(self, jar: Jar) -> None:
        jar.needs(cpus=0.5, timeout=2)
        result = jar.run(BUSY, cpus=0.5, timeout=2)
        assert result.status is Status.TIMEOUT
        assert result.usage.cpu is not None
        assert result.usage.cpu <= 0.5 * 2 + 0.5

    def test_many_processes_share_one_core(self, jar: Jar) -> None:
        jar.needs(cpus=1, timeout=2)
        jar.needs_processes()
        if (os.cpu_count() or 1) < 2:
            pytest.skip("this host has one core only")
        result = jar.run(
            "import os\nfor _ in range(3): os.fork()\nwhile True: pass", cpus=1, timeout=2
        )
        assert result.status is Status.TIMEOUT
        assert result.usage.cpu is not None
        assert result.usage.cpu <= 1 * 2 + 1

    @pytest.mark.parametrize(
        "code",
        [
            "x = [0] * 10**9",
            "x = bytearray(1 << 30)",
            "x = []\nwhile True: x.append(bytearray(1 << 20))",
            "raise MemoryError",
        ],
        ids=["one list", "one buffer", "growing", "raised"],
    )
    def test_a_program_past_its_memory_is_oom(self, jar: Jar, code: str) -> None:
        jar.needs(memory="128M")
        # Best effort may come late, not never: the program gives it time, and fails if it is left.
        code += "\nimport time; time.sleep(10)"
        result = jar.run(f"print('started', flush=True)\n{code}", memory="128M")
        assert result.status is Status.OOM, result
        assert result.stdout == "started\n"

    def test_a_program_within_its_memory_is_left_alone(self, jar: Jar) -> None:
        jar.needs(memory="128M")
        result = jar.run("x = bytearray(100 << 20)\nlen(x)", memory="256M")
        assert (result.status, result.value) == (Status.SUCCESS, 100 << 20)

    def test_a_fork_loop_is_stopped_at_its_number(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_processes()
        result = jar.run(FORKS, processes=20, context={"wanted": 200})
        assert (result.status, result.limit_hit) == (Status.LIMIT, "pids"), result
        if jar.held("processes").state == "enforced":
            assert 1 <= int(result.stdout) <= 20

    def test_a_program_may_live_with_a_refused_fork(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_processes()
        if jar.held("processes").state != "enforced":
            pytest.skip("processes are not enforced: past the number the whole run is ended")
        code = FORKS.replace("finally:", "except OSError:")
        result = jar.run(code, processes=20, context={"wanted": 200})
        assert result.success, result
        assert 1 <= int(result.stdout) <= 20

    def test_forks_within_the_number_are_left_alone(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_processes()
        result = jar.run(FORKS, processes=50, context={"wanted": 30})
        assert (result.status, result.stdout) == (Status.SUCCESS, "30\n")

    def test_the_host_can_still_fork_meanwhile(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_processes()
        first = jar.run(FORKS, processes=10, context={"wanted": 200})
        assert first.status is Status.LIMIT
        assert jar.run(FORKS, processes=10, context={"wanted": 5}).success

    def test_a_file_past_the_disk_limit_is_refused(self, jar: Jar) -> None:
        jar.needs(disk="4M")
        jar.needs_own_process()
        code = """
            with open("big", "wb") as file:
                for _ in range(64):
                    file.write(bytes(1 << 20))
            """
        result = jar.run(code, disk="4M")
        assert (result.status, result.limit_hit) == (Status.LIMIT, "disk"), result
        assert sum(file.size for file in result.files.values()) <= 4 << 20

    def test_files_within_the_disk_limit_are_written(self, jar: Jar) -> None:
        jar.needs(disk="4M")
        result = jar.run("open('big', 'wb').write(bytes(3 << 20))", disk="16M")
        assert result.success
        assert result.files["big"].size == 3 << 20

    def test_many_files_past_the_disk_limit_end_the_run(self, jar: Jar) -> None:
        jar.needs(disk="8M")
        # Best effort may come late, not never: the program gives it time, and fails if it is left.
        code = """
            import time
            for number in range(64):
                open(f"file{number}", "wb").write(bytes(1 << 20))
            time.sleep(10)
            """
        result = jar.run(code, disk="8M")
        assert (result.status, result.limit_hit) == (Status.LIMIT, "disk"), result

    def test_descriptors_past_the_number_are_refused(self, jar: Jar) -> None:
        jar.needs(open_files=32)
        jar.needs_own_process()
        code = "kept = [open('x', 'w') for _ in range(1000)]"
        result = jar.run(code, open_files=32)
        assert (result.status, result.limit_hit) == (Status.LIMIT, "fds"), result

    def test_descriptors_within_the_number_are_given(self, jar: Jar) -> None:
        jar.needs(open_files=32)
        jar.needs_own_process()
        result = jar.run("len([open('x', 'w') for _ in range(100)])", open_files=256)
        assert result.value == 100

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_big_output_keeps_its_head_and_tail_and_the_run_goes_on(
        self, jar: Jar, stream: str
    ) -> None:
        jar.needs(output="64K")
        code = f"""
            import sys
            sys.{stream}.write("HEAD")
            for _ in range(64):
                sys.{stream}.write("x" * 65536)
            sys.{stream}.write("TAIL")
            "done"
            """
        result = jar.run(code, output="64K")
        assert (result.status, result.value, result.truncated) == (Status.SUCCESS, "done", True)
        assert result.limit_hit is None
        text = getattr(result, stream)
        assert len(text.encode()) <= 64 << 10
        assert text.startswith("HEAD")
        assert text.endswith("TAIL")
        assert len(text) > 32 << 10
        assert getattr(result.usage, f"{stream}_bytes") == 8 + (4 << 20)
        whole = jar.run(code, output="8M")
        assert not whole.truncated
        assert len(getattr(whole, stream)) == 8 + (4 << 20)

    def test_a_flood_of_output_does_not_grow_the_host(self, jar: Jar) -> None:
        jar.needs(output="64K")
        if not os.path.exists("/proc/self/clear_refs"):
            pytest.skip("this host does not count its own peak")
        code = "import sys\npiece = 'x' * (1 << 20)\nfor _ in range(256): sys.stdout.write(piece)"
        jar.run(code.replace("256", "2"), output="1M")  # what is allocated once is not growth
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_kib()
        result = jar.run(code, output="1M")
        assert result.success
        assert result.usage.stdout_bytes == 256 << 20
        assert peak_kib() - before < 16 << 10


def peak_kib() -> int:
    """The largest resident set of this process since it was last reset."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))

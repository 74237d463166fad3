"""Conformance: every limit that a backend claims holds, and a run that hits one says which."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ...minima import LEAST
from ...policy import Isolation
from ...types import Status
from .harness import Backed, Jar, Watch

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
# Python ignores the signal, until it is switched on.
SIGXFSZ = "import os, signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); "
GENEROUS = 30.0  # seconds by which a kill has to be over, on any machine


CHILD_PAST_MEMORY = """
import os, time
if os.fork() == 0:
    x = []
    try:
        while True: x.append(bytearray(b"x" * (1 << 20)))
    except MemoryError:
        time.sleep(10)
    os._exit(0)
os.wait()
"""


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
        jar.needs_children()
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

    def test_a_child_past_the_memory_makes_the_run_oom(self, jar: Jar) -> None:
        """Whether the kernel takes the child alone or the whole tree, and however the rest ends."""
        jar.needs(memory="128M")
        jar.needs_children()
        result = jar.run(CHILD_PAST_MEMORY, memory="128M", min_isolation="process")
        assert result.status is Status.OOM, result
        fits = jar.run(CHILD_PAST_MEMORY.replace("while True", "while len(x) < 10"), memory="128M")
        assert fits.success, fits

    def test_displays_past_their_limit_are_dropped_and_said_so(self, jar: Jar) -> None:
        jar.needs(displays="100K")
        code = """
            class Shown:
                def _repr_html_(self):
                    return "x" * 60_000

            for _ in range(8):
                display(Shown())
            """
        result = jar.run(code, displays="100K")
        assert result.success, result
        assert result.truncated
        assert len(result.displays) == 1
        (warning,) = [text for text in result.warnings if "`displays`" in text]
        assert "7 of the displays were dropped" in warning
        whole = jar.run(code, displays="1M")  # the control arm
        assert (len(whole.displays), whole.truncated) == (8, False)

    def test_a_program_within_its_memory_is_left_alone(self, jar: Jar) -> None:
        jar.needs(memory="128M")
        result = jar.run("x = bytearray(100 << 20)\nlen(x)", memory="256M")
        assert (result.status, result.value) == (Status.SUCCESS, 100 << 20)

    def test_a_fork_loop_is_stopped_at_its_number(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_children()
        result = jar.run(FORKS, processes=20, context={"wanted": 200})
        # Where no control group counts refused forks, and the tree cannot be counted either, the
        # program's own report confirms nothing.
        if result.status is Status.ERROR:
            assert "cgroup" not in jar.held("processes").by
            assert any("`processes`" in warning for warning in result.warnings), result
        else:
            assert (result.status, result.limit_hit) == (Status.LIMIT, "pids"), result
        if jar.held("processes").state == "enforced":
            assert 1 <= int(result.stdout) <= 20

    def test_a_program_may_live_with_a_refused_fork(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_children()
        if jar.held("processes").state != "enforced":
            pytest.skip("processes are not enforced: past the number the whole run is ended")
        code = FORKS.replace("finally:", "except OSError:")
        result = jar.run(code, processes=20, context={"wanted": 200})
        assert result.success, result
        assert 1 <= int(result.stdout) <= 20

    def test_forks_within_the_number_are_left_alone(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_children()
        result = jar.run(FORKS, processes=50, context={"wanted": 30})
        assert (result.status, result.stdout) == (Status.SUCCESS, "30\n")

    def test_the_host_can_still_fork_meanwhile(self, jar: Jar) -> None:
        jar.needs(processes=20)
        jar.needs_children()
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
        code = """
            kept = []
            try:
                while len(kept) < 1000: kept.append(open("x", "w"))
            finally:
                print(len(kept), flush=True)
            """
        result = jar.run(code, open_files=32)
        # The kernel counts no refused descriptors: what the program reports is an error.
        assert (result.status, result.limit_hit) == (Status.ERROR, None), result
        assert any("`open_files`" in warning for warning in result.warnings), result
        # A worker of the wasm rung has some for itself, which a program may use up.
        own = 32 if jar.backend.isolation is Isolation.WASM else 0
        assert 1 <= int(result.stdout) <= 32 + own

    @pytest.mark.parametrize(
        ("code", "field"),
        [
            ("import errno; raise OSError(errno.ENOSPC, 'No space left on device')", "disk"),
            ("import errno; raise OSError(errno.EFBIG, 'File too large')", "disk"),
            ("import errno; raise OSError(errno.EMFILE, 'Too many open files')", "open_files"),
            ("import errno; raise BlockingIOError(errno.EAGAIN, 'try again')", "processes"),
            (f"{SIGXFSZ}os.kill(os.getpid(), signal.SIGXFSZ)", "disk"),
        ],
        ids=["ENOSPC", "EFBIG", "EMFILE", "EAGAIN", "SIGXFSZ"],
    )
    def test_a_program_that_only_reports_a_limit_has_not_hit_one(
        self, jar: Jar, code: str, field: str
    ) -> None:
        if "kill" in code:
            jar.needs_processes()
        if field == "processes" and (why := jar.lacks_children()):
            pytest.skip(f"always at that limit: {jar.backend.name} {why}")
        result = jar.run(code)
        assert (result.status, result.limit_hit) == (Status.ERROR, None), result
        # The control group may know that no fork was refused: then there is nothing to doubt.
        counted = field == "processes" and "cgroup" in jar.held("processes").by
        assert counted or any(f"`{field}`" in warning for warning in result.warnings), result

    def test_a_memory_error_is_oom_and_says_whether_the_kernel_confirms_it(self, jar: Jar) -> None:
        result = jar.run("raise MemoryError")
        assert result.status is Status.OOM
        assert any("MemoryError" in warning for warning in result.warnings), result
        jar.needs(memory="128M")
        if "cgroup" not in jar.held("memory").by:
            return
        hog = "x = []\nwhile True: x.append(b'x' * (1 << 20))"
        confirmed = jar.run(f"{hog}\nimport time; time.sleep(10)", memory="128M")
        assert confirmed.status is Status.OOM
        if confirmed.signal == 9:
            assert not any("MemoryError" in warning for warning in confirmed.warnings)

    def test_descriptors_within_the_number_are_given(self, jar: Jar) -> None:
        jar.needs(open_files=32)
        jar.needs_own_process()
        result = jar.run("len([open('x', 'w') for _ in range(100)])", open_files=256)
        assert result.value == 100

    @pytest.mark.parametrize("field", ["memory", "open_files", "disk", "cpus", "processes"])
    def test_the_least_value_of_a_limit_ends_in_a_result(self, jar: Jar, field: str) -> None:
        least = {**LEAST, "processes": 1, **getattr(jar.backend, "least", {})}[field]
        jar.needs(**{field: least})
        result = jar.run("1", timeout=60, **{field: least})
        assert result.status in (Status.SUCCESS, Status.OOM, Status.LIMIT)

    def test_the_plan_names_the_disk_limit_that_is_held(self, jar: Jar) -> None:
        plan = jar.plan(memory="128M")
        if plan.enforcement["disk"].state != "enforced":
            pytest.skip("disk is not enforced here")
        disk = plan.policy.limits.disk
        fill = "with open('f', 'wb') as f:\n    for _ in range({}): f.write(bytes(1 << 16))"
        assert jar.run(fill.format(disk >> 17), memory="128M").success  # half of it
        result = jar.run(fill.format((disk >> 16) + 16), memory="128M")
        assert (result.status, result.limit_hit) == (Status.LIMIT, "disk")

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

    def test_a_stream_cap_above_the_output_limit_lets_events_carry_what_the_result_drops(
        self, jar: Jar
    ) -> None:
        jar.needs(output="64K")
        code = """
            import sys
            for number in range(4096):
                sys.stdout.write(f"{number:07} " * 32)
            """
        whole = "".join(f"{number:07} " * 32 for number in range(4096)).encode()
        capped, streamed = Watch(), Watch()
        assert jar.run(code, output="64K", emit=capped).truncated
        assert len(capped.seen("stdout")) < 256 << 10  # the head, a marker and the tail
        result = jar.run(code, output="64K", stream_cap=4 << 20, emit=streamed)
        assert streamed.seen("stdout") == whole
        assert len(result.stdout.encode()) <= 64 << 10
        assert result.truncated

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

"""What a program finds around it: limits that it can see, its environment, and useful errors."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

import belljar
from belljar import PolicyUnenforceable, RequestError
from belljar.backends import cores, registry, warmth
from belljar.types import Request

BACKENDS = ("jail", "landlock", "subprocess")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def grouped() -> None:
    from belljar.linux import probe

    if probe.facts().cgroup is None:
        pytest.skip("no control group counts here")


@every_backend
def test_address_space_is_no_tighter_than_the_memory_and_a_gibibyte(backend: str) -> None:
    """Without that, reserving a gibibyte with 512 MiB of memory ended in a MemoryError."""
    code = """
import mmap
reserved = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
reserved[0] = 1
len(reserved)
"""
    result = belljar.run(code, backend=backend, memory="512M")
    assert result.value == 1 << 30, result.stderr
    result = belljar.run(code.replace("1 << 30", "8 << 30"), backend=backend, memory="512M")
    assert result.error is not None and not result.success


@every_backend
def test_other_languages_have_address_space_without_end(backend: str) -> None:
    """AddressSanitizer maps terabytes of it, and no binary that is built with it started."""
    result = belljar.run("ulimit -d", language="bash", backend=backend)
    assert result.stdout == "unlimited\n", result.stderr


@every_backend
def test_memory_is_still_counted_below_that(backend: str) -> None:
    result = belljar.run("len(b'x' * (700 << 20))", backend=backend, memory="256M")
    assert result.status == "oom"


@every_backend
def test_a_program_sees_as_many_processors_as_its_limit(backend: str) -> None:
    code = "import os\n[os.cpu_count(), len(os.sched_getaffinity(0))]"
    result = belljar.run(code, backend=backend, cpus=1)
    assert result.value == [1, 1], result.stderr
    most = len(os.sched_getaffinity(0))
    result = belljar.run(code, backend=backend, cpus=most)
    assert result.value == [most, most], result.stderr


@pytest.mark.parametrize("backend", ["jail", "landlock"])
def test_what_a_runner_keeps_warm_can_be_seen(backend: str) -> None:
    with belljar.create_runner(backend=backend) as runner:
        assert runner.stats() == {}
        assert runner.execute("1").success
        before = runner.stats()[backend]
        assert before["fork_servers"] == 1 and before["memory"] > 1 << 20
        assert runner.execute("import asyncio").success  # another set of modules
        assert runner.stats()[backend]["memory"] > before["memory"]
    assert runner.stats().get(backend, before)["fork_servers"] <= 2


@pytest.mark.parametrize("backend", ["jail", "landlock"])
def test_what_programs_of_late_import_is_there_for_the_next(backend: str) -> None:
    if backend == "jail" and sys.prefix.startswith("/tmp/"):
        pytest.skip("an interpreter below /tmp is shown to each run, not to the zygote")
    code = "import sys; there = 'pydantic' in sys.modules\nimport pydantic\nthere"
    with belljar.create_runner(backend=backend) as runner:
        first, *_, last = [runner.execute(code) for _ in range(3)]
        other = runner.execute("import sys, json\n'pydantic' in sys.modules")
    assert [first.value, last.value, other.value] == [False, True, False]


def test_few_libraries_are_learned_and_only_after_several_programs() -> None:
    recent = warmth.Recent()
    names = sorted(warmth.LEARNED)
    ask = {name: Request(code=f"import {name}") for name in (*names, "antigravity")}
    assert not warmth.LEARNED & {*recent.of_request(ask["sympy"]).preload}
    assert "sympy" in recent.of_request(ask["sympy"]).preload
    for name in names:
        recent.of_request(ask[name])
        assert len(warmth.LEARNED & {*recent.of_request(ask[name]).preload}) <= 4
    assert "antigravity" not in [*map(recent.of_request, [ask["antigravity"]] * 3)][-1].preload
    assert recent.of_request(Request(code="print(1)")).preload == ()


@pytest.mark.parametrize("backend", ["bubblewrap", "firejail", "nsjail"])
def test_a_launched_program_has_a_home_of_its_own_and_its_processors(backend: str) -> None:
    if not registry.load(backend).probe().available:
        pytest.skip(f"no {backend} here")
    code = """
import os, pathlib
cache = pathlib.Path.home() / ".cache"
cache.mkdir()
(cache / "fonts").write_text("x")
open("kept", "w").close()
len(os.sched_getaffinity(0))
"""
    result = belljar.run(code, backend=backend, cpus=1)
    assert result.value == 1, result.stderr
    assert list(result.files) == ["kept"]


def test_the_least_busy_processors_are_given_out() -> None:
    host = tuple(range(1000, 1004))
    first = cores.take(2, host)
    second = cores.take(2, host)
    assert sorted(first + second) == list(host)
    cores.release(first)
    assert set(cores.take(2, host)) == set(first)
    assert cores.take(4, host) == ()  # all of them need no choice
    for taken in (first, second):
        cores.release(taken)


@every_backend
def test_the_programs_file_and_first_directory_are_absolute(backend: str) -> None:
    code = """
import os, sys
here = os.getcwd()
os.chdir("/")
os.chdir(os.path.dirname(__file__))
[__file__ == os.path.join(here, "main.py"), sys.path[0] == here, os.getcwd() == here]
"""
    assert belljar.run(code, backend=backend).value == [True, True, True]


@every_backend
def test_the_callers_python_path_is_followed(backend: str) -> None:
    result = belljar.run(
        "import found_there\nfound_there.x",
        backend=backend,
        files={"lib/found_there.py": "x = 3"},
        env={"PYTHONPATH": "lib"},
    )
    assert result.value == 3, result.stderr
    assert not result.files


def test_a_hash_seed_is_refused_where_it_has_no_effect() -> None:
    with pytest.raises(RequestError, match="PYTHONHASHSEED"):
        belljar.run("1", backend="jail", env={"PYTHONHASHSEED": "1"})


@every_backend
def test_the_environment_has_what_programs_ask_for(backend: str) -> None:
    code = """
import os, shutil, sys
home = os.path.expanduser("~")
open(os.path.join(home, "cache"), "w").close()
{
    "first": os.environ["PATH"].split(":")[0] == os.path.dirname(sys.executable),
    "python": shutil.which("python") is not None,
    "home": os.path.commonpath([home, os.getcwd()]) == os.getcwd(),
    "set": sorted({"LANG", "TERM", "TZ", "USER", "TMPDIR"} & set(os.environ)),
}
"""
    result = belljar.run(code, backend=backend, outputs=["**"])
    assert result.value == {
        "first": True,
        "python": os.path.exists(Path(sys.executable).parent / "python"),
        "home": False,
        "set": ["LANG", "TERM", "TMPDIR", "TZ", "USER"],
    }, result.stderr
    assert "cache" not in [Path(name).name for name in result.files]


@every_backend
@pytest.mark.parametrize("path", ["/mnt/data/a.csv", "/home/user/a.csv", "/workspace/a.csv"])
def test_a_path_of_another_sandbox_names_the_directory_that_is_kept(
    backend: str, path: str
) -> None:
    result = belljar.run(f"import os\nprint(os.getcwd())\nopen({path!r}, 'w')", backend=backend)
    assert f"belljar: files are kept in {result.stdout.strip()} only" in result.stderr
    assert result.error is not None and "files are kept in" in result.error.traceback
    result = belljar.run("open('/mnt/database', 'w')", backend=backend)
    assert "files are kept" not in result.stderr


def test_landlock_says_what_multiprocessing_lacks() -> None:
    for made in (
        "import multiprocessing\nmultiprocessing.Lock()",
        "from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=9)",
    ):
        result = belljar.run(made, backend="landlock")
        assert "no memory here for processes to share" in result.stderr
        assert "use threads, or a backend" in result.explanation


@pytest.mark.parametrize("path", ["/proc", "/"])
def test_landlock_refuses_to_show_proc_before_anything_starts(path: str) -> None:
    runner = belljar.create_runner(backend="landlock")
    with pytest.raises(PolicyUnenforceable, match="/proc"):
        runner.execute("1", policy={"filesystem": {"read_only": [path]}})


def test_a_context_with_a_table_has_its_libraries_ready() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1]})
    given = warmth.of_request(Request(code="df.a.sum()", context={"df": frame}))
    named = warmth.of_request(Request(code="import pandas\ndf.a.sum()", context={"df": frame}))
    assert given.preload == named.preload
    assert "pandas" in given.preload
    assert "pandas" not in warmth.of_request(Request(code="x", context={"x": 1})).preload


def test_subprocess_shows_nothing_of_the_kernels_proc() -> None:
    code = """
import os
os.chdir("/proc")
names = [name for name in os.listdir() if not name.isdigit() and not os.path.islink(name)]
[name for name in names if (os.listdir(name) if os.path.isdir(name) else open(name).read())]
"""
    result = belljar.run(code, backend="subprocess")
    assert set(result.value) == {
        "cpuinfo", "loadavg", "meminfo", "stat", "swaps", "uptime", "version", "vmstat",
    }, result.stderr  # fmt: skip


def test_address_space_is_part_of_what_holds_memory_where_nothing_counts() -> None:
    from belljar.backends.layered import data_limit

    assert data_limit(1 << 29, counted=False) == (1 << 29) + (256 << 20)
    assert data_limit(1 << 29, counted=True) >= (1 << 29) + (1 << 30)
    assert resource.RLIMIT_DATA

"""The jail's limits as a caller meets them, whoever holds them: cgroup version 1, 2, or none.

scripts/other-kernel runs this file on other kernels.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest

from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed
from belljar.events import Emit, Event, Output
from belljar.linux import cgroup
from belljar.types import Request, Result, Status

pytestmark = pytest.mark.skipif(
    not JailBackend().probe().available, reason=JailBackend().probe().reason
)
HOME = cgroup.find()
needs_cgroup = pytest.mark.skipif(HOME is None, reason="no control group can be made here")
MIB = 1 << 20
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # of other host processes


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(Settings(), backends={"jail": JailBackend()}) as made:
        yield made


def run(engine: Engine, code: str, emit: Emit | None = None, **wishes: Any) -> Result:
    # Time enough for a processor that is emulated.
    wishes = {"modules": "any", "timeout": 60, **wishes}
    return engine.run(Request(code=code), level="standard", wishes=wishes, emit=emit)


def test_the_report_names_who_holds_the_limits(engine: Engine) -> None:
    told = run(engine, "print(1)", cpus=0.5)
    assert told.stdout == "1\n"
    for field in ("memory", "cpus", "processes"):
        by = told.enforcement[field].by
        assert (f"cgroup v{HOME.version} " in by) if HOME is not None else ("cgroup" not in by)


CHILDREN = """
import os, sys
hold, let_go = os.pipe()
done, tell = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        os.close(let_go)
        os.close(done)
        x = bytearray(b"x") * ({mib} << 17)
        os.write(tell, b"1")
        os.close(tell)
        os.read(hold, 1)
        os._exit(0)
os.close(tell)
while os.read(done, 8):  # until each of them has its share, or is dead
    pass
os.close(let_go)
sys.exit(any(os.wait()[1] for _ in range(8)))
"""
MEMFD = """
import os
fd = os.memfd_create("x")
for _ in range({mib}):
    os.write(fd, b"x" * (1 << 20))
"""
FILE = """
with open("/tmp/file", "wb") as file:
    for _ in range({mib} // 2):
        file.write(b"x" * (1 << 20))
x = bytearray(b"x") * ({mib} << 19)
"""


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(b'x') * ({mib} << 20)",
        CHILDREN,
        FILE,
        pytest.param(MEMFD, marks=needs_cgroup),  # without, nobody counts it and it is closed
    ],
    ids=["process", "children", "file", "memfd"],
)
def test_memory_is_counted_whatever_it_is_used_for(engine: Engine, code: str) -> None:
    code = code.format(mib=160)
    wishes = {"processes": 20, "disk": 90 * MIB}
    over = run(engine, code, memory=120 * MIB, **wishes)
    assert over.status is Status.OOM, over
    within = run(engine, code, memory=400 * MIB, **wishes)  # the control arm
    assert within.status is Status.SUCCESS, within
    assert run(engine, "print(1)", memory=120 * MIB, **wishes).stdout == "1\n"


def test_a_fork_bomb_meets_the_limit_and_the_next_run_does_not_feel_it(engine: Engine) -> None:
    bomb = "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(100)"
    bombed = run(engine, bomb, processes=12)
    assert (bombed.status, bombed.limit_hit) == (Status.LIMIT, "pids"), bombed
    fork = "import os\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1])"
    after = run(engine, fork, processes=12)
    assert (after.status, after.stdout) == (Status.SUCCESS, "0\n"), after


@needs_cgroup
@pytest.mark.parametrize("parked", [0, 4])
def test_so_many_processes_and_not_one_more(parked: int) -> None:
    """A jail that was parked has a keeper; the limit is the program's."""
    count = (
        "import os, time\nmade = 0\ntry:\n  while True:\n"
        "    if os.fork() == 0: time.sleep(100)\n    made += 1\n"
        "except BlockingIOError: print(1 + made)"
    )
    backend = JailBackend(parked=parked)
    with Engine(Settings(), backends={"jail": backend}) as engine:
        told = [run(engine, count, processes=7).stdout for _ in range(6)]
        time.sleep(0.2)  # the next is parked, and at hand
        told += [run(engine, count, processes=7).stdout for _ in range(2)]
    assert told == ["7\n"] * 8


@needs_cgroup
def test_the_processor_share_is_that_of_all_processes_together(engine: Engine) -> None:
    code = (
        "import os, time\nstart = time.monotonic()\nchildren = [os.fork() for _ in range(2)]\n"
        "while time.monotonic() < start + 3: pass\n"
        "if 0 in children: os._exit(0)\nfor pid in children: os.waitpid(pid, 0)\n"
        "print(sum(os.times()[:4]) / (time.monotonic() - start))"
    )
    told = run(engine, code, cpus=0.25, processes=10)
    assert told.status is Status.SUCCESS, told
    assert float(told.stdout) < 0.6  # one core for itself would be 1, and nothing else runs


def test_a_run_out_of_time_is_gone_with_its_children(engine: Engine) -> None:
    token = processes.mark()
    seen: set[int] = set()

    def look(event: Event) -> None:
        if isinstance(event, Output):
            seen.update(processes.marked(token))

    code = (
        "import subprocess, time\n"
        f"loop = ['sh', '-c', 'trap : TERM; while :; do :; done # {token}']\n"
        "for _ in range(3): subprocess.Popen(loop, start_new_session=True)\n"
        "while True:\n    print(1, flush=True)\n    time.sleep(0.2)"
    )
    told = run(engine, code, emit=look, timeout=5, processes=20)
    assert told.status is Status.TIMEOUT, told
    assert len(seen) == 3
    assert told.kill is not None and told.kill.survivors == 0
    assert not processes.marked(token)


def test_a_later_run_is_not_charged_with_the_peak_of_an_earlier_one(engine: Engine) -> None:
    first = run(engine, "x = bytearray(b'x') * (100 << 20)", memory=150 * MIB)
    assert first.usage.peak_memory is not None and first.usage.peak_memory > 90 * MIB
    for _ in range(3):
        later = run(engine, "print(1)", memory=150 * MIB)
        assert later.usage.peak_memory is not None and later.usage.peak_memory < 50 * MIB


MANY = """
import os
from pathlib import Path

import processes
from test_jail_limits import MIB, Engine, JailBackend, Settings, run

def left():
    tasks = Path("/proc/self/task").glob("*/children")
    children = "".join(file.read_text() for file in tasks)
    return processes.control_groups(os.getpid()), processes.descriptors(), children

with Engine(Settings(), backends={"jail": JailBackend()}) as engine:
    run(engine, "print(1)")  # what a process opens once and for all
before = left()
with Engine(Settings(), backends={"jail": JailBackend()}) as engine:
    for number in range(300):
        if number % 50 == 0:  # some end by a limit: their groups are used again, too
            run(engine, "x = bytearray(b'x') * (90 << 20)", memory=60 * MIB)
        else:
            told = run(engine, f"print({number})", memory=60 * MIB)
            assert told.stdout == f"{number}\\n", told
    groups, _, children = left()
    # As many as slots, whatever the number of runs. Version 1 has three directories for each.
    assert len(groups) <= 3 * 12, groups
    assert children  # the control arm
assert left() == before, (left(), before)
"""


def test_three_hundred_runs_leave_nothing_behind() -> None:
    """In a process of its own: other tests' engines have groups and descriptors as well."""
    done = subprocess.run([sys.executable, "-c", MANY], env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


HOST = """
from belljar.backends.jail import JailBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.events import Output
from belljar.types import Request

def told(event):
    if isinstance(event, Output):
        print("started", flush=True)

with Engine(Settings(), backends={"jail": JailBackend()}) as engine:
    request = Request(code="import time; print(1, flush=True); time.sleep(100)")
    engine.run(request, level="standard", wishes={"modules": "any", "timeout": 200}, emit=told)
"""


@needs_cgroup
def test_the_next_host_process_sweeps_up_after_one_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "started\n"
        left = processes.control_groups(host.pid)
        host.send_signal(signal.SIGKILL)
    assert left and all(path.exists() for path in left)
    with Engine(Settings(), backends={"jail": JailBackend()}) as engine:
        assert run(engine, "print(1)").stdout == "1\n"
        assert not any(path.exists() for path in left)


@pytest.mark.skipif(
    HOME is None or HOME.version != 2 or os.geteuid() != 0,
    reason="needs cgroup version 2, and root to play the owner of the hierarchy",
)
def test_a_run_whose_limit_was_taken_away_has_no_result() -> None:
    assert HOME is not None
    above = Path(HOME.directories[0], f"above-{os.urandom(4).hex()}")
    above.mkdir()
    switch = above / "cgroup.subtree_control"
    switch.write_text("+cpu +memory +pids")
    facts = processes.facts(cgroup=cgroup.Home(2, (str(above),)))
    try:
        with Engine(Settings(), backends={"jail": JailBackend(facts=facts)}) as engine:
            for _ in range(3):
                assert run(engine, "print(1)").stdout == "1\n"
            switch.write_text("-cpu")
            for _ in range(4):  # in a parked jail, and in one that is to be made
                with pytest.raises(BackendFailed, match=r"lost a controller|cpu\.max"):
                    run(engine, "print(1)")
    finally:
        above.rmdir()


# One socket receives what another sends, and none reads it: 4 times the limit asked for below.
LOOPBACK = """
import socket, time
import os
kept, hold = [], os.pipe()
for _ in range(12):
    if os.fork() == 0:
        for _ in range(100):
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            receiver.bind(("127.0.0.1", 0))
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sender.setblocking(False)
            kept += [receiver, sender]
            for _ in range(8):
                try: sender.sendto(b"x" * 60000, receiver.getsockname())
                except BlockingIOError: break
        os.write(hold[1], b"1")
        time.sleep(60)
done = 0
while done < 12: done += len(os.read(hold[0], 12))
used = [line.split() for line in open("/proc/self/net/sockstat") if line.startswith("UDP:")]
print(int(used[0][-1]) * os.sysconf("SC_PAGESIZE"))
"""


@pytest.mark.skipif(HOME is None or HOME.version != 1, reason="version 2 counts it as any memory")
def test_version_1_counts_socket_buffers_beside_other_memory(engine: Engine) -> None:
    found = {}
    for memory in (128 * MIB, 2048 * MIB):  # the second is the control arm
        told = run(engine, LOOPBACK, memory=memory, processes=20)
        assert told.status is Status.SUCCESS, told
        assert "a quarter" in told.enforcement["memory"].by
        found[memory] = int(told.stdout)  # of the whole host, in all its network namespaces
    assert found[128 * MIB] < 80 * MIB
    assert found[2048 * MIB] > 160 * MIB


READER = """
import os
total = 0
for place, _, names in os.walk("/usr/lib"):
    for name in names:
        path = os.path.join(place, name)
        if os.path.isfile(path) and not os.path.islink(path) and total < 60 << 20:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while piece := os.read(fd, 1 << 20): total += len(piece)
            os.close(fd)
print(total >> 20)
"""


@needs_cgroup
def test_the_peak_of_a_run_leaves_out_what_an_earlier_one_read() -> None:
    with Engine(Settings(), backends={"jail": JailBackend()}) as engine:
        for _ in range(3):
            large = run(engine, READER).usage.peak_memory
            small = [run(engine, "1").usage.peak_memory for _ in range(4)]
            assert large is None or large > 30 * MIB  # the control arm: it is counted
            assert all(peak is None or peak < 16 * MIB for peak in small), small


def test_what_needs_small_sockets_and_pipes_works_where_a_watchdog_counts_them() -> None:
    code = """
import asyncio, multiprocessing, socket
async def serve():
    async def echo(reader, writer):
        writer.write(await reader.read(100))
        writer.close()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.writelines([b"over", b" tcp"])
    told = await reader.read(100)
    writer.close()
    server.close()
    return told
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        shared = manager.list([1])
        shared.append(2)
        print(list(shared), asyncio.run(serve()))
"""
    backend = JailBackend(disable=frozenset({"cgroup"}))
    with Engine(Settings(), backends={"jail": backend}) as engine:
        told = run(engine, code)
    assert (told.status, told.stdout) == (Status.SUCCESS, "[1, 2] b'over tcp'\n"), told


HUGE = """
import mmap
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000
try:
    with mmap.mmap(-1, 2 << 20, flags=flags) as page: page[0] = 1
    print("had")
except OSError as error:
    print(error.errno)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can fill the pool of huge pages")
def test_a_page_of_the_pool_of_huge_ones_cannot_be_had() -> None:
    pool = Path("/proc/sys/vm/nr_hugepages")
    before = pool.read_text()
    pool.write_text("4")
    try:
        told = []
        for off in (frozenset({"seccomp"}), frozenset[str]()):  # the control arm first
            with Engine(Settings(), backends={"jail": JailBackend(disable=off)}) as engine:
                told.append(run(engine, HUGE).stdout)
    finally:
        pool.write_text(before)
    assert told == ["had\n", f"{errno.ENOMEM}\n"]

"""One backend where the host has no privilege: no root, no control groups, one user id.

When the tests run as root, the package is copied to where everybody can read it, and another
interpreter runs it as another user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import belljar

NOBODY = 63992  # an id that no account and no other test has
SYSTEM_PYTHON = "/usr/bin/python3"
PROGRAM = '''
import json, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from belljar.backends import registry
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Mount, Request

engine = Engine(Settings(), backends={sys.argv[3]: registry.load(sys.argv[3])})

def run(code, level="standard", mounts=(), **wishes):
    wishes.setdefault("modules", "any")
    return engine.run(Request(code=code, mounts=mounts), level=level, wishes=wishes,
                      backend=sys.argv[3])

project = os.path.join(sys.argv[2], "project")
os.mkdir(project, 0o700)
planted = run(
    "import os\\n"
    "open('p/new', 'w').write('x')\\n"
    "try: open('p/.envrc', 'w').write('x'); planted = True\\n"
    "except OSError: planted = False\\n"
    "planted", mounts=(Mount(project, "p", "rw"),))
hog = "x = []\\nwhile True: x.append(bytearray(1 << 20))"
family = (
    "import os, time\\nfor _ in range(6):\\n    if os.fork() == 0:\\n"
    "        data = bytearray(b'x') * (100 << 20); time.sleep(30)\\ntime.sleep(10)")
forks = (
    "import os, signal\\nn = 0\\ntry:\\n    while n < 200:\\n        if os.fork() == 0:"
    " signal.pause()\\n        n += 1\\nfinally: print(n)")
loop = run(forks, processes=20)
# Memory that no process's pages show: {count} pairs in each of {children} children, all full.
pairs = """
import os, time
socket = __import__("socket")
kept, hold = [], os.pipe()
for _ in range({children}):
    if os.fork() == 0:
        for _ in range({count}):
            kept += (pair := socket.socketpair(socket.AF_UNIX, socket.{kind}))
            for one in pair:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                one.setblocking(False)
                try:
                    while True: one.send(b"x" * 32768)
                except BlockingIOError: pass
        os.write(hold[1], b"1")
        time.sleep(20)
        os._exit(0)
done = 0
while done < {children}: done += len(os.read(hold[0], 100))
time.sleep(0.3)
"""
pipes = """
import os, time
kept, hold = [], os.pipe()
for _ in range(12):
    if os.fork() == 0:
        for _ in range(110):
            kept += (pair := os.pipe())
            os.set_blocking(pair[1], False)
            try:
                while True: os.write(pair[1], b"x" * 4096)
            except BlockingIOError: pass
        os.write(hold[1], b"1")
        time.sleep(20)
        os._exit(0)
done = 0
while done < 12: done += len(os.read(hold[0], 100))
time.sleep(0.3)
"""
# Reading maps the shared page of zeros, by page tables that are this process's own memory.
tables = """
import mmap, time
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
room = mmap.mmap(-1, {gibibytes} << 30, flags=flags, prot=mmap.PROT_READ)
for at in range(0, len(room), 2 << 20): room[at]
time.sleep(0.3)
"""
# The first thread ends, and with it what /proc shows of the process by its number.
headless = """
import ctypes, os, platform, threading, time
def work():
    time.sleep(0.2)
    x = bytearray(b"x") * ({mebibytes} << 20)
    time.sleep(0.5)
    os._exit(0)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""
ordinary = """
import asyncio, multiprocessing, os
context = multiprocessing.get_context("fork")
async def both():
    process = await asyncio.create_subprocess_exec("/bin/cat", stdin=-1, stdout=-1)
    out, _ = await process.communicate(b"piped")
    return out
def double(n): return 2 * n
with context.Pool(6) as pool: doubled = pool.map(double, range(5))
near, far = context.Pipe()
near.send("paired")
print(doubled, asyncio.run(both()), far.recv(), end="")
"""
flight = """
import array, errno, os, socket, time
kept, sent = [], 0
try:
    while True:
        near, far = socket.socketpair()
        kept += [near, far]
        for _ in range(20):
            fds = [os.open("/dev/null", 0) for _ in range(50)]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            try: near.sendmsg([b"x"], [rights])
            finally: [os.close(fd) for fd in fds]
            sent += 50
except OSError as error: print(errno.errorcode[error.errno], sent, flush=True)
time.sleep(3)
"""
def beside(attack, code):
    told = []
    thread = threading.Thread(target=lambda: told.append(run(attack)))
    thread.start()
    time.sleep(1.5)
    others = [run(code).stdout for _ in range(3)]
    thread.join()
    return told[0].stdout, others
watches = "import ctypes; print(ctypes.CDLL(None).inotify_init1(0))"
few = {"memory": "64M", "processes": 30}
answers = {
    "pairs": [
        run(pairs.format(children=12, count=100, kind=kind), **few).status
        for kind in ("SOCK_STREAM", "SOCK_SEQPACKET")],
    "few pairs": run(pairs.format(children=2, count=5, kind="SOCK_STREAM"),
                     **few).status,
    "pipes": run(pipes, **few).status,
    "tables": [run(tables.format(gibibytes=n), **few).status for n in (1, 60)],
    "in flight": (lambda told, others: [told.split()[:1], others])(*beside(flight, "print(1)")),
    "inotify": run(watches).stdout,
    "headless": [run(headless.format(mebibytes=n), memory="128M").status for n in (30, 250)],
    "ordinary": run(ordinary, memory="192M").stdout,
    "strict states": sorted({held.state for name, held in
                             run("1", level="strict").enforcement.items() if name != "modules"}),
    "strict": run("6 * 7", level="strict").value,
    "states": sorted({held.state for held in run("1").enforcement.values()}),
    "identity": list(run("import os; (os.getpid(), os.getuid(), os.getgroups())").value[:2]),
    "hog": run(hog, memory="128M").status,
    "family": run(family, memory="256M").status,
    "forks": [loop.status, loop.limit_hit, int(loop.stdout) <= 20],
    "memfd": run(
        "import os\\ntry: os.memfd_create('x'); s = 'made'\\n"
        "except OSError: s = 'refused'\\ns").value,
    "spin": run("while True: pass", timeout=1, cpus=0.5).status,
    "affinity": run(
        "import os\\ntry: os.sched_setaffinity(0, range(os.cpu_count())); s = 'changed'\\n"
        "except OSError: s = 'refused'\\ns").value,
    "planted": planted.value,
    "project": sorted(os.listdir(project)),
}
engine.close()
print(json.dumps(answers))
'''

# What every jail answers.
EXPECTED = [
    ("strict", 42),
    ("states", ["enforced"]),
    ("strict states", ["enforced"]),
    ("pairs", ["oom", "oom"]),
    ("few pairs", "success"),
    ("pipes", "oom"),
    ("tables", ["success", "oom"]),
    ("in flight", [["ETOOMANYREFS"], ["1\n"] * 3]),
    ("inotify", "-1\n"),
    ("headless", ["success", "oom"]),
    ("ordinary", "[0, 2, 4, 6, 8] b'piped' paired"),
    ("hog", "oom"),
    ("family", "oom"),
    ("forks", ["limit", "pids", True]),
    ("memfd", "refused"),
    ("spin", "timeout"),
    ("affinity", "refused"),
    ("planted", False),
    ("project", ["new"]),
]


@contextmanager
def answers_of(backend: str, user: int = NOBODY) -> Iterator[dict[str, Any]]:
    directory = tempfile.mkdtemp(prefix="belljar-unprivileged-", dir="/var/tmp")
    python, before = sys.executable, []
    try:
        if os.geteuid() == 0:
            if not os.path.exists(SYSTEM_PYTHON):
                pytest.skip("no interpreter that another user could run")
            python = SYSTEM_PYTHON
            before = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            if shutil.which(before[0]) is None:
                pytest.skip("no setpriv here")
            os.chown(directory, user, user)
        package = Path(directory, "package", "belljar")
        shutil.copytree(Path(belljar.__file__).parent, package)
        Path(directory).chmod(0o755)
        done = subprocess.run(
            [*before, python, "-I", "-B", "-c", PROGRAM, str(package.parent), directory, backend],
            capture_output=True,
            text=True,
            timeout=280,
            env={},
            cwd="/",
        )
        if "BackendUnavailable" in done.stderr:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)
    finally:
        shutil.rmtree(directory)

"""Conformance: when a run returns, all that it started is gone, and the host kept nothing."""

from __future__ import annotations

import operator
import os
import secrets
import threading
import time
from pathlib import Path

import pytest

from ...backends.base import Cancel
from ...types import Mount, Status
from .harness import Backed, Jar, Watch, marked_processes

# Both end by themselves after a while, so that a backend which fails here leaves no lasting mess.
DAEMON = """
import os, signal, sys, time
token = "{token}"
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        os.set_inheritable(writer, True)
        tail = "import os, sys, time; os.write(int(sys.argv[2]), b'x'); time.sleep(20)"
        os.execv(sys.executable, [sys.executable, "-S", "-c", tail, token, str(writer)])
    os._exit(0)
os.close(writer)
os.read(reader, 1)
print("daemon is up", flush=True)
"""
# The half second is for the host, to see the daemon alive before it is gone.
ENDINGS = {
    "returns": "time.sleep(0.5)",
    "fails": "time.sleep(0.5)\n1 / 0",
    "times out": "while True: pass",
    "is cancelled": "time.sleep(60)",
}
COMET = """
import os, signal, time
out = os.open("shown/beat", os.O_WRONLY | os.O_CREAT, 0o666)
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end, count = time.monotonic() + 20, 0
    while time.monotonic() < end:
        count += 1
        os.pwrite(out, b"%09d" % count, 0)
        if count == 20:
            os.write(writer, b"x")
        if os.fork():
            os._exit(0)
    os._exit(0)
os.read(reader, 1)
print("comet is up", flush=True)
"""
# Connections whose last owner waits when closing them, for whoever reads what we send. That we are
# not the last one is a race with the reader: so there are some, a thread for each, and other news.
LINGERING = """
import os, stat, threading, time
def attempt(act, *arguments):
    try:
        return act(*arguments)
    except (OSError, ImportError, AttributeError):
        return None
def is_socket(fd):
    found = attempt(os.fstat, fd)
    return found is not None and stat.S_ISSOCK(found.st_mode)
def connection():
    import socket, struct
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    kept.append(listener.accept())
    linger = struct.pack("ii", 1, 60)
    attempt(sender.setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, linger)
    sender.setblocking(False)
    while attempt(sender.send, bytes(1 << 16)): pass
    return sender
def hand_over(sender, fd):
    import socket
    with socket.socket(fileno=os.dup(fd)) as end:
        os.write(1, bytes(1 << 16))
        attempt(socket.send_fds, end, [b"A"], [sender.fileno()])
        sender.close()
kept = []
inherited = [fd for fd in range(3, 64) if is_socket(fd)]
for sender in [attempt(connection) for _ in range(8)]:
    if sender and inherited:
        threading.Thread(target=hand_over, args=(sender, inherited[0]), daemon=True).start()
time.sleep(60)
"""

# What it says it takes back, so that whoever was told of it may wait for it in vain. When he does,
# he leaves what is said elsewhere: then not another word.
STEALING = """
import os, select, time
def attempt(act, *arguments):
    try:
        return act(*arguments)
    except OSError:
        return None
out, err = [
    attempt(os.open, f"/proc/self/fd/{fd}", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    for fd in (1, 2)
]
end = time.perf_counter() + 2
while out is not None and err is not None and time.perf_counter() < end:
    for wait in range(10, 200, 3):
        os.write(1, b"x")
        until = time.perf_counter() + wait / 1e6  # the reader is on its way
        while time.perf_counter() < until: pass
        attempt(os.read, out, 100)
        os.write(2, b".")
        time.sleep(0.001)
        if select.select([err], [], [], 0)[0]:
            time.sleep(0.02)
            if select.select([err], [], [], 0)[0]:
                time.sleep(60)
time.sleep(60)
"""


class Kills(Backed):
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_a_daemon_that_ignores_signals_and_holds_stdout_is_gone(
        self, jar: Jar, ending: str
    ) -> None:
        jar.needs_children()
        if not os.path.isdir("/proc/self"):
            pytest.skip("this host has no /proc to look for survivors in")
        token = f"belljar-canary-{secrets.token_hex(8)}"
        during: list[int] = []
        code = DAEMON.format(token=token) + ENDINGS[ending]
        with Cancel() as cancel:

            def is_up() -> None:
                during.extend(marked_processes(token))
                if ending == "is cancelled":
                    cancel.set()

            limit = {"timeout": 2} if ending == "times out" else {}
            result = jar.run(code, emit=Watch(b"daemon is up", is_up), cancel=cancel, **limit)
        left = marked_processes(token)
        assert result.stdout == "daemon is up\n"
        assert left == []
        expected = {"returns": Status.SUCCESS, "fails": Status.ERROR, "times out": Status.TIMEOUT}
        assert result.status is expected.get(ending, Status.KILLED)
        assert result.kill is None or result.kill.survivors == 0
        if not during:
            pytest.skip("this host cannot see the guest's processes: their absence proves little")

    def test_a_tight_chain_of_forks_is_gone(self, jar: Jar, open_dir: Path) -> None:
        jar.needs_children()
        mounts = (Mount(str(open_dir), "shown", "rw"),)
        jar.needs(mounts=mounts)
        result = jar.run(COMET, mounts=mounts)
        assert (result.status, result.stdout) == (Status.SUCCESS, "comet is up\n"), result
        beat = open_dir / "beat"
        last = beat.read_text()
        assert int(last) >= 20  # it did fly
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert beat.read_text() == last
        assert result.kill is None or result.kill.survivors == 0

    def test_nothing_of_a_run_stays_in_the_host_process(self, jar: Jar) -> None:
        if not os.path.isdir("/proc/self/fd"):
            pytest.skip("this host does not list its own descriptors")

        def some_runs() -> None:
            assert jar.run("1", stdin=b"x" * (1 << 20), files={"a": b"x"}).success
            assert jar.run("1 / 0").status is Status.ERROR
            assert jar.run("print('x' * 10**6)", output="1K", outputs=("*",)).success
            with pytest.raises(ValueError, match="language"):
                jar.run("1", language="klingon")
            if jar.held("timeout").state != "absent":
                assert jar.run("while True: pass", timeout=0.5).status is Status.TIMEOUT
            with Cancel() as cancel:
                cancel.set()
                jar.run("import time; time.sleep(60)", cancel=cancel)

        # What a backend keeps for good is there after some runs, which ones is its own business;
        # what it leaks is more after each. Less is no leak: an earlier test's may go meanwhile.
        some_runs()
        seen = [held()]
        while len(seen) < 6:
            for _ in range(3):
                some_runs()
            deadline = time.monotonic() + 5
            while not (kept := all(map(operator.le, held(), seen[-1]))):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            if kept:
                return
            seen.append(held())
        pytest.fail(f"descriptors, dead children, threads, always more: {seen}")

    def test_a_child_that_outlives_its_parent_does_not_hold_the_run_up(self, jar: Jar) -> None:
        jar.needs_children()
        started = time.monotonic()
        result = jar.run("import subprocess; subprocess.Popen(['sleep', '60'])\nprint('done')")
        assert (result.status, result.stdout) == (Status.SUCCESS, "done\n")
        assert time.monotonic() - started < 30

    def test_a_stopped_child_is_gone_too(self, jar: Jar) -> None:
        jar.needs_children()
        started = time.monotonic()
        result = jar.run("""
            import os, signal
            pid = os.fork()
            if pid == 0:
                while True: signal.pause()
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
            print("stopped")
            """)
        assert (result.status, result.stdout) == (Status.SUCCESS, "stopped\n")
        assert result.kill is None or result.kill.survivors == 0
        assert time.monotonic() - started < 30

    def test_a_program_cannot_make_the_host_wait_for_a_connection(self, jar: Jar) -> None:
        jar.needs_own_process()  # or the sockets that it finds are the host's own
        jar.needs(timeout=1)
        started = time.monotonic()
        result = jar.run(LINGERING, timeout=1)
        assert time.monotonic() - started < 30
        assert (result.status, result.stderr) == (Status.TIMEOUT, "")

    def test_a_program_cannot_make_the_host_wait_for_output_that_it_took_back(
        self, jar: Jar
    ) -> None:
        jar.needs_own_process()
        jar.needs(timeout=3)
        started = time.monotonic()
        result = jar.run(STEALING, timeout=3)
        assert time.monotonic() - started < 30
        assert result.status is Status.TIMEOUT
        assert set(result.stdout) <= {"x"} and set(result.stderr) <= {"."}

    @pytest.mark.parametrize("end", [4, 64])
    def test_a_program_may_close_what_it_did_not_open(self, jar: Jar, end: int) -> None:
        jar.needs_own_process()
        jar.needs_processes()  # in WebAssembly all its directories are such descriptors
        code = f"""
import os
os.closerange(3, {end})
kept = open("first", "w")
kept.write("said late")
print("on")
"""
        result = jar.run(code)
        assert (result.status, result.stdout, result.exit_code) == (Status.SUCCESS, "on\n", 0)
        assert {name: each.size for name, each in result.files.items()} == {"first": 9}


def held() -> tuple[int, int, int]:
    """How many descriptors, dead children and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(zombies()), threading.active_count()


def zombies() -> list[int]:
    """Children of this process that are dead and not waited for."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue  # this kernel does not list them
        for child in children:
            try:
                state = Path("/proc", child, "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if state == "Z":
                found.append(int(child))
    return found

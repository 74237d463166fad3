"""A host where user namespaces are forbidden, for real: runs belljar there and tells JSON.

Started by test_landlock_host. Before anything else it puts a filter on itself that refuses unshare,
setns, mount and clone with namespaces, as the default profile of a container does.
Every key of the answer is one question; the test knows the right answers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

from belljar import doctor
from belljar.backends.landlock import LandlockBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import PolicyUnenforceable
from belljar.linux import probe, seccomp, syscalls
from belljar.types import Request, Result

ATTEMPT = """
import errno, os, socket
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
"""
FAMILY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = bytearray(b"x") * (64 << 20)
        time.sleep(30)
        os._exit(0)
for _ in range(6):
    if os.wait()[1]:
        os._exit(1)
"""
FORKS = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)"
THREADS = """
import threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
time.sleep(20)
"""
UNSEEN = """
import os, time
for _ in range(16):
    fd = os.open("x", os.O_CREAT | os.O_WRONLY)
    os.unlink("x")
    os.write(fd, bytes(1 << 20))
time.sleep(20)
"""
HOARD = """
import mmap
size = 512 << 20
pages = mmap.mmap(-1, size)
for at in range(0, size, 1 << 20):
    pages[at:at + (1 << 20)] = b"x" * (1 << 20)
    pages.madvise(mmap.MADV_DONTNEED, at, 1 << 20)
"""


class Questions:
    def __init__(self) -> None:
        self.own = tempfile.mkdtemp(prefix="belljar-questions-")
        self.canary = os.path.join(self.own, "canary")
        with open(self.canary, "w") as file:
            file.write("canary-content")
        os.chmod(self.canary, 0o600)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(os.path.join(self.own, "socket"))
        self.server.listen()
        self.auto = Engine(Settings())

    def run(
        self,
        code: str,
        off: tuple[str, ...] = (),
        facts: dict[str, Any] | None = None,
        **wishes: Any,
    ) -> Result:
        given = replace(probe.facts(), **facts) if facts else None
        backend = LandlockBackend(disable=frozenset(off), facts=given)
        engine = Engine(Settings(), backends={"landlock": backend})
        try:
            return engine.run(Request(code=code), wishes={"modules": "any", **wishes})
        finally:
            engine.close()

    def ended(self, result: Result) -> list[Any]:
        left = result.kill.survivors if result.kill is not None else None
        return [result.status.value, result.limit_hit, left]

    # -- which backend

    def host(self) -> list[Any]:
        facts = probe.facts()
        finding = doctor.kernel_protections(facts, doctor.read_file)[0]
        return [facts.userns, finding.name, "backend landlock serves" in finding.detail]

    def auto_standard(self) -> list[Any]:
        result = self.auto.run(Request(code="6 * 7"))
        return [result.backend, result.isolation, result.value]

    def auto_strict(self) -> list[str]:
        try:
            self.auto.run(Request(code="1"), level="strict")
        except PolicyUnenforceable as refusal:
            return ["min_isolation"] if "min_isolation" in refusal.fields else list(refusal.fields)
        return ["ran"]

    def floor(self) -> list[Any]:
        result = self.auto.run(Request(code="1"), wishes={"min_isolation": "landlock"})
        return [result.backend, sorted({held.state for held in result.enforcement.values()})]

    # -- what it holds, and what does without the layer

    def read_canary(self) -> list[Any]:
        code = f"{ATTEMPT}attempt(lambda: open({self.canary!r}).read())"
        return [self.run(code).value, self.run(code, ("landlock",)).value]

    def chmod_canary(self) -> list[Any]:
        code = f"{ATTEMPT}attempt(lambda: os.chmod({self.canary!r}, 0o644))"
        self.run(code)
        held = os.stat(self.canary).st_mode & 0o777
        self.run(code, ("seccomp",))
        opened = os.stat(self.canary).st_mode & 0o777
        os.chmod(self.canary, 0o600)
        return [held, opened]

    def own_mode(self) -> list[Any]:
        code = (
            "import os, subprocess\n"
            "open('a', 'w').write('#!/bin/sh\\necho ran')\n"
            "os.chmod('a', 0o750)\n"
            "(os.stat('a').st_mode & 0o777, subprocess.run(['./a'], capture_output=True).stdout)"
        )
        return [self.run(code).value[0], self.run(code).value[1].decode()]

    def unix_socket(self) -> list[Any]:
        path = os.path.join(self.own, "socket")
        code = f"{ATTEMPT}attempt(lambda: socket.socket(socket.AF_UNIX).connect({path!r}))"
        return [self.run(code).value, self.run(code, ("seccomp",)).value]

    def network(self) -> list[Any]:
        code = f"{ATTEMPT}attempt(lambda: socket.socket(socket.AF_INET))"
        return [self.run(code).value, self.run(code, network="any").value]

    def signal_scoped(self) -> list[Any]:
        return self._signals({}, (), ("landlock",))

    def signal_filtered(self) -> list[Any]:
        """As on a kernel whose Landlock does not scope signals: the filter has to hold them."""
        return self._signals({"landlock_abi": 5}, ("landlock",), ("landlock", "seccomp"))

    def _signals(
        self, facts: dict[str, Any], off: tuple[str, ...], more: tuple[str, ...]
    ) -> list[Any]:
        told: list[Any] = []
        for layers in (off, more):
            with subprocess.Popen(["sleep", "60"]) as victim:
                code = f"{ATTEMPT}attempt(lambda: os.kill({victim.pid}, 15))"
                told.append(self.run(code, layers, facts).value)
                if told[-1] == "done":  # then it is on its way out
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        victim.wait(20)
                told.append(victim.poll() is None)
                victim.kill()
        return told

    def own_signal(self) -> list[Any]:
        result = self.run("import os; os.kill(os.getpid(), 10)", facts={"landlock_abi": 5})
        return [result.status.value, result.signal == signal.SIGUSR1]

    def limits_of_others(self) -> list[Any]:
        code = (
            f"{ATTEMPT}import resource\n"
            "attempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)))"
        )
        return [self.run(code).value, self.run(code, ("seccomp",)).value]

    def watch_directory(self) -> list[Any]:
        code = f"""
import ctypes
libc = ctypes.CDLL(None)
fd = libc.inotify_init()
libc.inotify_add_watch(fd, {self.own!r}.encode(), 0x100) >= 0
"""
        return [self.run(code).value, self.run(code, ("seccomp",)).value]

    def attribute(self) -> list[Any]:
        try:
            os.setxattr(self.canary, "user.secret", b"canary-content")
        except OSError:
            return ["ENOTSUP", "done"]  # this file system has none, so that nothing can leak
        code = f"{ATTEMPT}attempt(lambda: os.getxattr({self.canary!r}, 'user.secret'))"
        return [self.run(code).value, self.run(code, ("seccomp",)).value]

    def processes_in_sight(self) -> list[Any]:
        code = f"{ATTEMPT}attempt(lambda: os.listdir('/proc'))"
        return [self.run(code).value, self.run(code, ("landlock",)).value]

    # -- limits

    def memory(self) -> list[Any]:
        code = "x = []\nwhile True: x.append(bytearray(1 << 20))"
        return self.ended(self.run(code, memory="128M"))

    def family(self) -> list[Any]:
        return self.ended(self.run(FAMILY, memory="256M"))

    def forks(self) -> list[Any]:
        return self.ended(self.run(FORKS, processes=20))

    def forks_of_one(self) -> list[Any]:
        return self.ended(self.run(FORKS, min_isolation="landlock"))

    def threads_of_one(self) -> list[Any]:
        few = THREADS.replace("range(100)", "range(10)").replace("20", "0.1")
        return [
            self.ended(self.run(THREADS, processes=20, min_isolation="landlock")),
            self.run(few, processes=20, min_isolation="landlock").success,
        ]

    def unseen_files(self) -> list[Any]:
        return [
            self.ended(self.run(UNSEEN, disk="8M", min_isolation="landlock")),
            self.run(UNSEEN.replace("20", "0"), disk="64M", min_isolation="landlock").success,
        ]

    def unreadable(self) -> list[Any]:
        """A program that closes its /proc files cannot be counted, and is ended."""
        code = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(20)"
        return self.ended(self.run(code, min_isolation="landlock"))

    def hoard(self) -> list[Any]:
        """Memory that no process is seen to have: refused where memory is enforced."""
        result = self.run(HOARD, memory="128M", min_isolation="landlock")
        error = result.error.type if result.error is not None else None
        return [result.status.value, error]

    def processor(self) -> list[Any]:
        """The rate holds, so that the run ends at its timeout, with a tenth of a core used."""
        code = "while True: pass"
        result = self.run(code, cpus=0.1, timeout=4, min_isolation="landlock")
        return [result.status.value, (result.usage.cpu or 0) < 1.5]

    def timeout(self) -> list[Any]:
        return self.ended(self.run(FORKS.replace("100", "10") + "\ntime.sleep(60)", timeout=1))


def main() -> None:
    syscalls.no_new_privileges()
    # What a host without namespaces refuses, and nothing else that a guest's filter does.
    refused = [seccomp._op(seccomp._RETURN, seccomp._ERRNO | errno.EPERM)]
    rules = dict.fromkeys(seccomp.DENIED, refused)
    seccomp.install(seccomp._assemble(rules, syscalls.MACHINE))
    questions = Questions()
    told: dict[str, Any] = {}
    for name in sys.argv[1:]:
        try:
            told[name] = getattr(questions, name)()
        except Exception as error:  # noqa: BLE001 - the test shows it
            told[name] = f"{type(error).__name__}: {error}"
    questions.auto.close()
    base = tempfile.gettempdir()
    told["left"] = [name for name in os.listdir(base) if name.startswith(f"belljar-{os.getpid()}-")]
    print(json.dumps(told))


if __name__ == "__main__":
    main()

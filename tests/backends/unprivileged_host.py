"""A host without any privilege, or root with guests of another user: runs belljar, tells JSON.

Started by test_subprocess_unprivileged, which copies the package to where this user can read it.
Every key of the answer is one question; the test knows the right answers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from belljar.api import REQUEST_KEYS, build_request
from belljar.backends.base import Cancel
from belljar.backends.subprocess import SubprocessBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.events import Event, Output
from belljar.linux import probe
from belljar.types import Result

POORER: dict[str, Any] = {"userns": False, "userns_problem": "test", "proc_mount": False}
ATTEMPT = """
import errno, os
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
"""
DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        os.execvpe("sleep", ["sleep", "600"], os.environ)
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(600)
"""
# Children that each stay below the limit for one process, and together are far above it.
FAMILY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = bytearray(b"x") * (64 << 20)
        time.sleep(30)
        os._exit(0)
for _ in range(6):
    os.wait()
"""
FORKS = """
import errno, os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
    told = "no end"
except OSError as error:
    told = errno.errorcode[error.errno]
[made, told]
"""
THREADS = """
import threading
stop, made = threading.Event(), 0
try:
    while made < 100:
        threading.Thread(target=stop.wait, daemon=True).start()
        made += 1
except RuntimeError:
    pass
stop.set()
made
"""
CLOSED_TREE = """
import os
os.makedirs("a/b")
open("a/b/result.txt", "w").write("found")
os.chmod("a/b/result.txt", 0)
os.chmod("a/b", 0)
os.chmod("a", 0)
"""


class Questions:
    """Each method is a question; `lacking` makes this host still poorer for all of them."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.token, self.port = arguments["token"], arguments["port"]
        self.socket, self.root_file = arguments["socket"], arguments["root_file"]
        self.user = arguments["user"]
        self.lacking = POORER if arguments["poorer"] else {}
        self.own = tempfile.mkdtemp(prefix="belljar-test-")
        with open(f"{self.own}/secret", "w") as file:
            file.write("canary")
        os.chmod(f"{self.own}/secret", 0o600)

    def run(
        self,
        code: str | None,
        *,
        disable: tuple[str, ...] = (),
        emit: Callable[[Event], None] | None = None,
        cancel: Cancel | None = None,
        **options: Any,
    ) -> Result:
        found = replace(probe.facts(), **self.lacking)
        backend = SubprocessBackend(disable=frozenset(disable), facts=found, user=self.user)
        wishes = {key: options.pop(key) for key in list(options) if key not in REQUEST_KEYS}
        options["env"] = {"MARK": self.token, **options.get("env", {})}
        request = build_request(code=code, **options)
        with Engine(Settings(), backends={"subprocess": backend}) as engine:
            return engine.run(request, wishes=wishes, emit=emit, cancel=cancel)

    def ended(self, result: Result) -> list[Any]:
        return [result.status.value, result.limit_hit]

    # -- the host itself

    def facts(self) -> list[Any]:
        found = probe.facts()
        return [os.getuid(), found.root, found.cgroup is not None, found.userns]

    def report(self) -> dict[str, str]:
        return {name: held.state for name, held in self.run("1").enforcement.items()}

    # -- ordinary life

    def hello(self) -> list[Any]:
        result = self.run("print('hi'); x * 7", context={"x": 6}, stdin="in")
        return [result.status.value, result.stdout, result.value]

    def failure(self) -> list[Any]:
        result = self.run("1/0")
        return [result.status.value, result.exit_code, result.error and result.error.type]

    def files(self) -> list[Any]:
        result = self.run(CLOSED_TREE, files={"in.txt": "in"}, outputs=["*.txt"])
        return [(name, (file.data or b"").decode()) for name, file in result.files.items()]

    def command(self) -> list[Any]:
        backend = SubprocessBackend(facts=replace(probe.facts(), **self.lacking), user=self.user)
        with Engine(Settings(), backends={"subprocess": backend}) as engine:
            result = engine.run(build_request(command=["sh", "-c", "id -u; exit 4"]))
        return [result.stdout.strip(), result.exit_code]

    def parallel(self) -> list[Any]:
        told: list[Any] = []
        threads = [
            threading.Thread(target=lambda n=n: told.append(self.run(f"{n}").value))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(told)

    # -- reach

    def network(self) -> str:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {self.port}), 5)"
        result = self.run(code)
        return result.error.type if result.error else "connected"

    def network_when_allowed(self) -> str:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {self.port}), 5).recv(7)"
        return str(self.run(code, network="any").value)

    def daemon_socket(self) -> list[Any]:
        code = (
            ATTEMPT + "import socket\n"
            f"attempt(lambda: socket.socket(socket.AF_UNIX).connect({self.socket!r}))"
        )
        return [self.run(code).value, self.run(code, disable=("seccomp",)).value]

    def own_files(self) -> list[Any]:
        """The guest has our uid: file permissions would let it read and spoil everything."""
        path = f"{self.own}/secret"
        code = ATTEMPT + f"path = {path!r}\n[attempt(lambda: open(path).close()),"
        code += "attempt(lambda: os.truncate(path, 0)), attempt(lambda: os.unlink(path)),"
        code += "(attempt(lambda: os.chmod(path, 0o777)), os.path.exists(path))[1]]"
        held = self.run(code, filesystem={"private_tmp": False}).value
        info = os.stat(path)
        return [held[:3], oct(info.st_mode & 0o777), info.st_size]

    def own_files_when_shown(self) -> Any:
        return self.run("open('box/secret').read()", mounts=[f"{self.own}:box"]).value

    def root_files(self) -> list[Any]:
        code = ATTEMPT + f"attempt(lambda: open({self.root_file!r}).close())"
        return [self.run(code).value, self.run(code, disable=("landlock",)).value]

    def signals(self) -> str:
        code = ATTEMPT + f"attempt(lambda: os.kill({os.getpid()}, 0))"
        return str(self.run(code).value)

    def privileges(self) -> list[Any]:
        if self.lacking:  # /proc is closed there
            return ["1", "1"]
        code = (
            "status = dict(l.split(':\\t', 1) for l in open('/proc/self/status'))\n"
            "caps = [status[n].strip() for n in ('CapPrm', 'CapEff', 'CapBnd', 'CapAmb')]\n"
            "[str(int(set(caps) == {'0' * 16})), status['NoNewPrivs'].strip()]"
        )
        return list(self.run(code).value)

    # -- limits

    def timeout(self) -> list[Any]:
        result = self.run(DAEMON, timeout=1)
        assert result.kill is not None
        return [result.status.value, result.signal, result.kill.survivors, result.stdout]

    def one_large_process(self) -> list[Any]:
        return self.ended(self.run("x = bytearray(b'x') * (1 << 30)", memory="128M"))

    def many_processes(self) -> list[Any]:
        return self.ended(self.run(FAMILY, memory="128M", timeout=25))

    def within_memory(self) -> list[Any]:
        return self.ended(self.run("x = bytearray(b'x') * (64 << 20)", memory="128M"))

    def hidden_memory(self) -> list[Any]:
        """A process that closes its accounts to its own user is still counted."""
        code = (
            "import ctypes, time\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
            "x = bytearray(b'x') * (300 << 20)\ntime.sleep(20)"
        )
        return self.ended(self.run(code, memory="128M", timeout=15))

    def uncounted_memory(self) -> list[Any]:
        code = (
            ATTEMPT + "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "def segment():\n    if libc.shmget(0, 4096, 0o1600) < 0:\n"
            "        raise OSError(ctypes.get_errno(), 'shmget')\n"
            "[attempt(lambda: os.memfd_create('x')), attempt(segment)]"
        )
        return list(self.run(code).value)

    def forks(self) -> list[Any]:
        result = self.run(FORKS, processes=20)
        return [result.status.value, result.limit_hit, result.value]

    def forks_uncaught(self) -> list[Any]:
        code = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)"
        return self.ended(self.run(code, processes=20))

    def threads(self) -> Any:
        return self.run(THREADS, processes=20).value

    def disk(self) -> list[Any]:
        code = "open('big', 'wb').write(b'x' * (32 << 20))"
        return self.ended(self.run(code, disk="8M"))

    def small_files(self) -> list[Any]:
        code = (
            "import time\nfor n in range(64):\n    open(str(n), 'wb').write(b'x' * (1 << 20))\n"
            "time.sleep(20)"
        )
        return self.ended(self.run(code, disk="8M", timeout=15))

    def processor(self) -> list[Any]:
        """The rate holds, so that the run ends at its timeout, with a tenth of a core used."""
        result = self.run("while True: pass", cpus=0.1, timeout=4)
        return [result.status.value, (result.usage.cpu or 0) < 1.5]

    def affinity(self) -> list[Any]:
        code = ATTEMPT + f"attempt(lambda: os.sched_setaffinity(0, {os.sched_getaffinity(0)!r}))"
        return [self.run(code, cpus=1).value]

    def cancelled(self) -> list[Any]:
        with Cancel() as cancel:

            def on_output(event: Event) -> None:
                if isinstance(event, Output):
                    cancel.set()

            return self.ended(self.run(DAEMON, emit=on_output, cancel=cancel))

    def broken_callback(self) -> str:
        def on_output(event: Event) -> None:
            if isinstance(event, Output):
                raise LookupError("enough")

        try:
            self.run(DAEMON, emit=on_output)
        except LookupError as error:
            return str(error)
        return "no error"

    # -- as whom

    def owner(self) -> list[Any]:
        """The uid of the guest's process, seen from outside, and of the file that it made."""
        box, seen = f"{self.own}/box", set[str]()
        os.mkdir(box)
        os.chmod(box, 0o777)
        os.chmod(self.own, 0o755)

        def look(event: Event) -> None:
            if not isinstance(event, Output):
                return
            for name in os.listdir("/proc"):
                try:
                    with open(f"/proc/{name}/environ", "rb") as file:
                        ours = self.token.encode() in file.read()
                    with open(f"/proc/{name}/status") as status:
                        uids = next(line for line in status if line.startswith("Uid:"))
                except (OSError, StopIteration):
                    continue
                if ours:
                    seen.update(uids.split()[1:])
            open(f"{box}/seen", "w").close()

        code = (
            "import os, time\nopen('box/made', 'w').close()\nprint('up', flush=True)\n"
            "while not os.path.exists('box/seen'): time.sleep(0.01)"
        )
        self.run(code, mounts=[f"{box}:box:rw"], emit=look)
        return [sorted(seen), os.stat(f"{box}/made").st_uid]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    questions = Questions(arguments)
    told: dict[str, Any] = {}
    for name in arguments["ask"]:
        try:
            told[name] = getattr(questions, name)()
        except Exception as error:  # noqa: BLE001 - the test shows it
            told[name] = f"{type(error).__name__}: {error}"
    shutil.rmtree(questions.own)
    told["left"] = [
        name for name in os.listdir("/tmp") if name.startswith(f"belljar-{os.getpid()}-")
    ]
    print(json.dumps(told))


if __name__ == "__main__":
    main()

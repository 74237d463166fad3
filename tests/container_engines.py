"""Real container engines for the tests: a Docker Engine and Podman's service, private to a session.

Each runs with everything it writes below one directory, in a mount namespace of its own (its mounts
end with it, however it ends), and without touching interfaces, addresses or the firewall. It dies
with the process that started it. What it leaves elsewhere by habit (a key in /etc, empty control
groups, directories in /run) is removed, where it was not there before.

A machine that cannot have an engine gives `CannotHave` with the reason; an engine that should start
and does not is a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from belljar.docker_api import Api
from belljar.errors import BelljarError
from belljar.images import build, names, store

# The tests with engines run in one process, one after the other: each engine is started once, and
# some tests look at all that engines leave on a host.
TOGETHER = pytest.mark.xdist_group("engines")
START, STOP = 60, 30  # seconds; generous: an idle machine needs less than one
_CGROUPS = Path("/sys/fs/cgroup")


class CannotHave(Exception):
    """This machine cannot run the engine; the message says why."""


class Engine:
    """A running engine. `host` is what DOCKER_HOST would be; `api` speaks to it."""

    def __init__(
        self, path: Path, process: subprocess.Popen[bytes] | None, log: Path | None
    ) -> None:
        self.host = f"unix://{path}"
        self.api = Api(str(path))
        self.process, self._log = process, log

    def images(self, *kinds: str) -> None:
        """Make sure that it has these images of ours."""
        lacking = [k for k in kinds if not store.exists(self.api, names.image_name(k))]
        if lacking:
            list(build.from_host(self.api, lacking, lambda line: None))

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-3000:] if self._log else ""


class PrivateEngine:
    """Starts an engine below `directory` on entering and removes every trace of it on leaving."""

    name = ""
    programs: tuple[str, ...] = ()
    habits: tuple[str, ...] = ()  # what it creates outside its directory

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "api.sock"
        self.cgroup = f"belljar-tests-{uuid.uuid4().hex[:12]}"

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def __enter__(self) -> Engine:
        _require(self.programs)
        if len(os.fsencode(self.directory)) > 48:  # Podman takes no more than 50 for its state
            raise CannotHave(f"{self.directory} is too long a name for an engine: shorten TMPDIR")
        # One of its own, because gVisor mounts over it.
        scratch = self.directory / "scratch"
        scratch.mkdir(parents=True)
        self._foreign = [path for path in _expanded(self.habits) if path.exists()]
        log = self.directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                # The first ends the engine with us, the second keeps its mounts to itself.
                ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "slave",
                 *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(scratch), **self.environment()},
                cwd=self.directory,  # its helpers leave notes where they stand
                start_new_session=True,
            )  # fmt: skip
        self.engine = Engine(self.socket, process, log)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self.engine

    def _wait(self) -> None:
        process = self.engine.process
        assert process is not None
        deadline = time.monotonic() + START
        while True:
            with contextlib.suppress(BelljarError):
                self.engine.api.ping()
                return
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not start:\n{self.engine.log()}")
            time.sleep(0.05)  # it has no way to tell us

    def __exit__(self, *exc: object) -> None:
        with contextlib.ExitStack() as last_to_first:  # each of them, whatever the others meet
            last_to_first.callback(shutil.rmtree, self.directory)
            last_to_first.callback(self._forget_habits)
            last_to_first.callback(kill_those_naming, self.directory)
            last_to_first.callback(self._stop)
            last_to_first.callback(self._remove_containers)

    def _remove_containers(self) -> None:
        with contextlib.suppress(BelljarError):
            for container in self.engine.api.json("GET", "/containers/json", {"all": "1"}):
                self.engine.api.json("DELETE", f"/containers/{container['Id']}", {"force": "1"})

    def _stop(self) -> None:
        process = self.engine.process
        assert process is not None
        process.terminate()
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _forget_habits(self) -> None:
        groups = (f"{_CGROUPS}/{self.cgroup}", f"{_CGROUPS}/*/{self.cgroup}")
        for path in _expanded((*self.habits, *groups)):
            if path not in self._foreign:
                _remove(path)


class DockerEngine(PrivateEngine):
    """dockerd from any distribution's packages, with runc, and with runsc where it is installed."""

    name = "docker"
    programs = ("dockerd", "containerd", "runc")
    habits = ("/etc/docker", "/etc/docker/key.json", "/run/containerd", "/run/docker")

    def command(self) -> Sequence[str]:
        settings: dict[str, object] = {}
        if runsc := shutil.which("runsc"):
            # The platform that works on every machine, also without KVM and inside another VM.
            arguments = ["--platform=ptrace", "--network=none"]
            settings["runtimes"] = {"runsc": {"path": runsc, "runtimeArgs": arguments}}
        config = self.directory / "daemon.json"
        config.write_text(json.dumps(settings))
        return (
            "dockerd", "--config-file", str(config), "--data-root", str(self.directory / "data"),
            "--exec-root", str(self.directory / "exec"), "--pidfile", str(self.directory / "pid"),
            "--host", f"unix://{self.socket}", "--cgroup-parent", f"/{self.cgroup}",
            "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none",
        )  # fmt: skip


class PodmanEngine(PrivateEngine):
    """`podman system service`: the same API, a daemon that keeps nothing running."""

    name = "podman"
    programs = ("podman", "conmon", "runc")
    habits = (
        "/var/lib/containers", "/run/libpod", "/run/containers",
        f"{_CGROUPS}/libpod_parent", f"{_CGROUPS}/*/libpod_parent",
    )  # fmt: skip

    def command(self) -> Sequence[str]:
        # Its own defaults are above what a root without CAP_SYS_RESOURCE may set.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        tasks = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        most = int(Path("/proc/sys/kernel/pid_max").read_text())
        tasks = most if tasks < 0 else min(tasks, most)
        files = min(files, 1 << 20) if files > 0 else 1 << 20
        limits = [f"nofile={files}:{files}", f"nproc={tasks}:{tasks}"]
        config = self.directory / "containers.conf"
        config.write_text(f"[containers]\ndefault_ulimits = {json.dumps(limits)}\n")
        return (
            "podman", "--root", str(self.directory / "root"),
            "--runroot", str(self.directory / "r"), "--tmpdir", str(self.directory / "tmp"),
            "--network-config-dir", str(self.directory / "network"),
            "--cgroup-manager", "cgroupfs", "--events-backend", "file",
            "system", "service", "--time=0", f"unix://{self.socket}",
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"CONTAINERS_CONF": str(self.directory / "containers.conf")}


def _require(programs: Iterable[str]) -> None:
    for program in (*programs, "setpriv", "unshare"):
        if shutil.which(program) is None:
            raise CannotHave(f"{program} is not installed: scripts/test installs it")
    if os.geteuid() != 0:
        raise CannotHave("starting a container engine of its own needs root")
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise CannotHave(f"this machine allows no mount namespaces: {tried.stderr.strip()}")
    controllers = Path("/proc/cgroups").read_text()
    if "memory" not in controllers and not (_CGROUPS / "cgroup.controllers").exists():
        raise CannotHave("no control groups are mounted here")


def kill_those_naming(directory: Path) -> None:
    """Kill what an engine left running: only it has processes that name its private directory, and
    what runs in its containers descends from them."""
    deadline = time.monotonic() + STOP
    doomed: set[int] = set()
    while left := [*with_descendants(processes_naming(directory)), *filter(is_alive, doomed)]:
        doomed |= set(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"{left} survived SIGKILL"
        time.sleep(0.05)


def processes_naming(directory: Path) -> list[int]:
    """The processes with `directory` in their command line, without this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.fsencode(directory) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that is dead and waits for its parent's attention does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def with_descendants(pids: Iterable[int]) -> list[int]:
    """`pids` and everything below them, the youngest generation first: parents cannot hand over."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], list(pids)
    while todo:
        found += todo
        todo = [child for pid in todo for child in children.get(pid, [])]
    return list(dict.fromkeys(reversed(found)))


def _expanded(patterns: Iterable[str]) -> list[Path]:
    """The paths that exist, the deepest first."""
    found = [path for pattern in patterns for path in Path("/").glob(pattern.lstrip("/"))]
    return sorted(found, key=lambda path: -len(path.parts))


def _remove(path: Path) -> None:
    if path.is_relative_to(_CGROUPS):
        for folder, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):  # somebody else's processes are in it now
                os.rmdir(folder)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# The engines of this session: started when first asked for, stopped when it ends.
_running: dict[str, Engine] = {}
_endings = contextlib.ExitStack()
_KINDS: dict[str, type[PrivateEngine]] = {"docker": DockerEngine, "podman": PodmanEngine}


def why_not(name: str) -> str:
    """Why this machine cannot have the engine; empty if it can. Starts nothing."""
    if _given(name):
        return ""
    try:
        _require(_KINDS[name].programs)
    except CannotHave as error:
        return str(error)
    return ""


def session(name: str) -> Engine:
    """This session's engine, `docker` or `podman`, with the python image in it.

    TEST_DOCKER_HOST and TEST_PODMAN_HOST name one that runs already and stays.
    """
    if name not in _running:
        if given := _given(name):
            engine = Engine(Path(given.removeprefix("unix://")), None, None)
        else:
            parent = Path(tempfile.mkdtemp(prefix="bj-"))
            parent.chmod(0o711)  # gVisor's kernel runs as nobody, in the scratch directory below it
            _endings.callback(parent.rmdir)
            engine = _endings.enter_context(_KINDS[name](parent / name))
        engine.images("python")
        _running[name] = engine
    return _running[name]


def at_end(callback: Callable[[], object]) -> None:
    """Call this before the engines that run now are stopped."""
    _endings.callback(callback)


def stop_session() -> None:
    """Stop what `session` started."""
    _running.clear()
    _endings.close()


def _given(name: str) -> str | None:
    return os.environ.get(f"TEST_{name.upper()}_HOST")

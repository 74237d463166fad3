"""Real containers: what they are made of, how they end, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER
from container_engines import Engine as ContainerEngine

from belljar.backends.base import Cancel
from belljar.backends.docker import DockerBackend
from belljar.backends.docker_container import OWNER, Container, owner
from belljar.backends.docker_watch import AgentWatch
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import (
    BackendFailed,
    BackendUnavailable,
    CommandNotFound,
    PolicyUnenforceable,
    RequestError,
)
from belljar.events import Event, Output
from belljar.guest import agent
from belljar.images import names
from belljar.types import Mount, Request, Result, Status

pytestmark = [pytest.mark.slow, TOGETHER]


class Bench:
    """A backend behind an engine, and the containers that the container engine knows of."""

    def __init__(
        self, session: ContainerEngine, settings: Settings | None = None, **options: Any
    ) -> None:
        options.setdefault("pool", 0)
        self.api = session.api
        kind = options.pop("kind", DockerBackend)
        self.backend = kind(docker_host=session.host, **options)
        self.engine = Engine(settings or Settings(), backends={kind.name: self.backend})

    def run(self, code: str = "1", *, level: str = "strict", **wanted: Any) -> Result:
        asked = {key: wanted.pop(key) for key in list(wanted) if key in Request.__slots__}
        emit, cancel = wanted.pop("emit", None), wanted.pop("cancel", None)
        if "command" not in asked:
            asked["code"] = textwrap.dedent(code)
        return self.engine.run(
            Request(**asked),
            level=level,
            wishes={"modules": "any", **wanted},
            backend=self.backend.name,
            emit=emit,
            cancel=cancel,
        )

    def containers(self, of: str | None = None) -> list[dict[str, Any]]:
        found = self.api.json("GET", "/containers/json", {"all": "1"})
        mine = of or owner()
        return [each for each in found if (each["Labels"] or {}).get(OWNER) == mine]


@pytest.fixture
def bench(docker_engine: ContainerEngine) -> Iterator[Bench]:
    made = Bench(docker_engine)
    yield made
    made.engine.close()
    assert made.containers() == []


def test_the_kernel_confirms_the_cage(bench: Bench) -> None:
    result = bench.run("""
import os
facts = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
[os.getuid() > 0, facts["CapEff"].strip(), facts["CapBnd"].strip(), facts["NoNewPrivs"].strip(),
 facts["Seccomp"].strip(), os.getcwd(), sorted(os.listdir("/sys/class/net"))]
""")
    zeros = "0" * 16
    assert result.value == [True, zeros, zeros, "1", "2", "/sandbox", ["lo"]]
    assert result.isolation == "container"


def test_a_protection_that_is_not_there_is_noticed(bench: Bench) -> None:
    api, facts = bench.backend._engine()
    shape = bench.engine.plan(Request(code="1"), level="strict", backend="docker").spec.shape
    with pytest.raises(BackendFailed, match="not on in the container: seccomp"):
        Container(api, facts, shape, "unconfined", idle=30)
    # The control arm: with the profile it starts.
    made = Container(api, facts, shape, bench.backend._seccomp(facts), idle=30)
    made.close()
    made.remove()


def test_hanging_up_ends_the_container(bench: Bench) -> None:
    api, facts = bench.backend._engine()
    shape = bench.engine.plan(Request(code="1"), level="strict", backend="docker").spec.shape
    made = Container(api, facts, shape, bench.backend._seccomp(facts), idle=300)
    made.close()
    try:
        assert made.ended(timeout=20)[0] == agent.NOT_STARTED
    finally:
        made.remove()


def test_an_agent_that_cannot_answer_is_killed_with_its_container(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What would be stuck in the kernel is simulated by an engine that freezes the container.
    monkeypatch.setattr("belljar.backends.docker_watch._KILL_SECONDS", 1.0)

    def freeze(event: Event) -> None:
        if isinstance(event, Output):
            (each,) = bench.containers()
            bench.api.json("POST", f"/containers/{each['Id']}/pause")

    result = bench.run("print('up', flush=True)\nwhile True: pass", timeout=1, emit=freeze)
    assert (result.status, result.signal, result.stdout) == (Status.TIMEOUT, 9, "up\n")
    assert bench.containers() == []


HOST = """
import sys, time
from belljar.backends.base import Cancel
from belljar.backends.docker import DockerBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.events import Output
from belljar.types import Request
backend = DockerBackend(docker_host=sys.argv[1], pool=int(sys.argv[2]))
engine = Engine(Settings(), backends={"docker": backend})
def tell(event):
    if isinstance(event, Output):
        print(event.data.decode(), end="", flush=True)
for _ in range(int(sys.argv[2])):
    engine.run(Request(code="1"), backend="docker")
engine.run(Request(code="import time; print('up', flush=True); time.sleep(600)"),
           backend="docker", emit=tell)
"""


@contextlib.contextmanager
def host_process(session: ContainerEngine, pool: int) -> Iterator[tuple[int, str]]:
    """(pid, owner label) of another process that runs a long program in a container."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, session.host, str(pool)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with open(f"/proc/{process.pid}/stat", "rb") as file:
            started = file.read().rsplit(b")", 1)[1].split()[19].decode()
        host, namespace, _, _ = owner().split(":")
        yield process.pid, f"{host}:{namespace}:{process.pid}:{started}"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("pool", [0, 2])
def test_the_containers_of_a_killed_host_end_and_are_swept(
    bench: Bench, docker_engine: ContainerEngine, pool: int
) -> None:
    with host_process(docker_engine, pool) as (pid, label):
        assert bench.containers(label)
        bench.backend.sweep()
        assert bench.containers(label)  # the control arm: its owner lives
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(each["State"] == "running" for each in bench.containers(label)):
        assert time.monotonic() < deadline, "its agent did not notice that the host is gone"
    assert bench.run("1").success  # the first run sweeps
    assert bench.containers(label) == []


def test_a_program_s_own_end_and_the_engine_s_agree(bench: Bench) -> None:
    for code, expected in (("import sys; sys.exit(3)", 3), ("1", 0)):
        assert bench.run(code).exit_code == expected
    result = bench.run("import os; os.kill(os.getpid(), 11)")
    assert (result.status, result.signal) == (Status.ERROR, 11)


def test_memory_in_files_counts(bench: Bench) -> None:
    code = """
import os
for place in ("/sandbox", "/tmp", "/dev/shm"):
    with open(f"{place}/big", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError as full:
            print(place, full.errno, os.path.getsize(f"{place}/big") >> 20)
"""
    result = bench.run(code, memory="64M", disk="32M")  # of /sandbox, main.py has a page
    assert result.stdout == "/sandbox 28 23\n/tmp 28 4\n/dev/shm 28 4\n"
    assert result.usage.peak_memory is not None
    assert result.usage.peak_memory >= 32 << 20


def test_a_full_disk_is_told_with_the_sizes_that_hold(bench: Bench) -> None:
    code = "open('big', 'wb').write(bytes(26 << 20))"
    assert bench.run(code, memory="64M", disk="64M").success  # the control arm
    result = bench.run(code, memory="64M")  # whose disk is half of it
    assert (result.status, result.limit_hit) == (Status.LIMIT, "disk"), result
    assert result.explanation == (
        "The program wrote more to disk than 32 MiB. That is divided: /sandbox 24 MiB, /tmp 4 MiB, "
        "/dev/shm 4 MiB."
    )


def test_a_program_can_start_what_it_has_written(bench: Bench) -> None:
    code = "import os; open('x', 'w').write('#!/bin/sh\\necho ran'); os.chmod('x', 0o700); "
    assert bench.run(code + "os.system('./x')").stdout == "ran\n"


def test_a_missing_image_names_the_command(bench: Bench) -> None:
    with pytest.raises(BackendUnavailable) as lacking:
        bench.run("1", image=names.image_name("python") + "-not-there")
    assert "not-there" in str(lacking.value)
    assert bench.run("1").success  # the control arm
    lost = names.missing(names.image_name("python"), "x")
    assert lost.fix == "belljar images build python"


def test_an_image_is_chosen_by_the_call(bench: Bench, docker_engine: ContainerEngine) -> None:
    docker_engine.images("bash")
    code = f"import json; json.load(open({names.RECORD!r}))['image']"
    assert bench.run(code).value == "python"
    assert bench.run(code, image=names.image_name("bash")).value == "bash"


def test_an_image_of_others_that_is_missing_is_no_traceback(bench: Bench) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"has no image 'example\.invalid/none:1'"
    ) as lacking:
        bench.run("1", image="example.invalid/none:1")
    assert lacking.value.fix == "belljar images pull example.invalid/none:1, or name another image"


def test_the_data_image_has_what_it_is_for(bench: Bench, docker_engine: ContainerEngine) -> None:
    for package in ("numpy", "pandas", "pyarrow", "matplotlib"):
        pytest.importorskip(package)
    docker_engine.images("data")
    code = """
import matplotlib.pyplot as plt, numpy, pandas, pyarrow
table = pandas.DataFrame({"n": numpy.arange(4), "square": numpy.arange(4) ** 2})
plt.plot(table["n"], table["square"])
plt.savefig("plot.png")
assert pyarrow.Table.from_pandas(table).num_rows == 4
[int(table["square"].sum()), open("plot.png", "rb").read(8)]
"""
    result = bench.run(code, memory="1G", timeout=60)  # chosen by what the program imports
    assert result.value == [14, b"\x89PNG\r\n\x1a\n"], result
    plain = bench.run(code, memory="1G", image=names.image_name("python"))  # the control arm
    assert plain.error is not None
    assert plain.error.type == "ModuleNotFoundError"


def test_a_command_that_the_image_lacks_is_named(bench: Bench) -> None:
    with pytest.raises(CommandNotFound, match="no-such-command"):
        bench.run(command=("no-such-command",), image=names.image_name("python"))
    result = bench.run(command=("echo", "there"), image=names.image_name("python"))
    assert result.stdout == "there\n"


def test_another_python_than_the_image_s_is_refused(bench: Bench) -> None:
    here = bench.run("import sys; list(sys.version_info[:2])").value
    right = f"python{here[0]}.{here[1]}"
    assert bench.run("1 + 1", language=right).value == 2
    with pytest.raises(BackendUnavailable, match=r"Python 3\.99 is not installed in image"):
        bench.run("1 + 1", language="python3.99")


def test_a_language_s_strict_profile_is_applied(
    docker_engine: ContainerEngine, tmp_path: Path
) -> None:
    file = tmp_path / "languages.toml"
    file.write_text('[closed]\nextends = "python"\nseccomp = "strict"\n')
    made = Bench(docker_engine, settings=Settings(language_file=str(file)))
    code = "import socket; socket.socket(socket.AF_INET)"
    try:
        closed, plain = made.run(code, language="closed"), made.run(code)
    finally:
        made.engine.close()
    assert closed.error is not None
    assert "Address family not supported" in closed.error.message
    assert plain.success  # the control arm


def test_an_interpreter_of_the_host_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestError, match="image"):
        bench.run("1", python=sys.executable)


def test_files_that_do_not_fit_are_refused(bench: Bench) -> None:
    many = {f"file{number}": b"x" for number in range(2000)}  # a page each
    with pytest.raises(RequestError, match="files"):
        bench.run("1", files=many, disk="4M")
    assert bench.run("import os; len(os.listdir())", files=many, disk="32M").value == 2001


def test_project_metadata_stays_read_only_in_a_writable_mount(bench: Bench, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / ".git" / "config").write_text("[core]\n")
    for path in (project, *project.rglob("*")):
        path.chmod(0o777)
    mounts = (Mount(str(project), "project", "rw"),)
    code = """
import os
told = []
for name in (".git/hooks/pre-commit", ".git/config", ".vscode/tasks.json", ".envrc", "new.txt"):
    try:
        with open(f"project/{name}", "a") as file:
            file.write("evil")
        told.append(name)
    except OSError:
        pass
try:
    os.rename("project/.git", "project/.old")
    told.append("moved")
except OSError:
    pass
told
"""
    result = bench.run(code, mounts=mounts)
    assert result.value == ["new.txt"]  # the control arm is the file that may be written
    assert (project / "new.txt").read_text() == "evil"
    assert sorted(os.listdir(project)) == [".git", "new.txt"]


def test_a_writable_mount_is_written_as_its_owner(bench: Bench, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    project = tmp_path / "project"
    project.mkdir(0o700)
    os.chown(project, 4711, 4712)
    tmp_path.chmod(0o755)
    mounts = (Mount(str(project), "project", "rw"),)
    assert bench.run("open('project/mine', 'w').write('x')", mounts=mounts).success
    info = (project / "mine").stat()
    assert (info.st_uid, info.st_gid) == (4711, 4712)


def test_an_engine_s_socket_is_never_shown(
    bench: Bench, docker_engine: ContainerEngine, tmp_path: Path
) -> None:
    path = docker_engine.api.path
    for source in (path, os.path.dirname(path)):
        with pytest.raises(PolicyUnenforceable, match=r"socket|neither"):
            bench.run("1", mounts=(Mount(source, "shown", "ro"),))
        with pytest.raises(PolicyUnenforceable, match=r"socket|neither"):
            bench.run("1", filesystem={"read_only": [source]})
    plain = tmp_path / "plain"
    plain.mkdir()
    assert bench.run("1", mounts=(Mount(str(plain), "shown", "ro"),)).success


def test_a_cancelled_start_leaves_nothing(bench: Bench) -> None:
    with Cancel() as cancel:
        cancel.set()
        assert bench.run("import time; time.sleep(60)", cancel=cancel).status is Status.KILLED
    assert bench.containers() == []


def test_a_layer_that_is_off_is_off_and_says_so(docker_engine: ContainerEngine) -> None:
    code = "import os; [os.system('touch /evil 2>/dev/null') == 0, os.getuid()]"
    whole = Bench(docker_engine)
    open_root = Bench(docker_engine, disable=frozenset({"read_only_root", "user"}))
    try:
        held, loose = whole.run(code), open_root.run(code)
    finally:
        whole.engine.close()
        open_root.engine.close()
    assert held.value[0] is False
    assert held.value[1] != 0
    assert loose.value == [True, 0]
    assert any("read_only_root" in warning for warning in loose.warnings)


def test_a_fresh_backend_sees_what_the_engine_has(docker_engine: ContainerEngine) -> None:
    backend = DockerBackend(docker_host=docker_engine.host)
    found = backend.probe()
    assert found.available
    assert any(docker_engine.api.path in note for note in found.notes)
    facts = backend._engine()[1]
    poor = DockerBackend(
        docker_host=docker_engine.host, facts=replace(facts, memory=False, rootless=True)
    )
    refused = poor.probe()
    assert not refused.available
    assert "without limits" in refused.reason
    assert refused.fix


@pytest.mark.parametrize(("times", "comes_about"), [(1, True), (2, False)])
def test_a_container_that_lost_us_before_it_had_the_program_is_replaced_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, times: int, comes_about: bool
) -> None:
    """As Podman does now and then. The agent's own exit code says that nothing has run."""
    lost: list[str] = []
    wait = AgentWatch.until_gone

    def lose(watch: AgentWatch) -> Any:
        if len(lost) < times:
            lost.append(watch._container.id)
            watch._socket.shutdown(socket.SHUT_WR)
        return wait(watch)

    monkeypatch.setattr(AgentWatch, "until_gone", lose)
    if comes_about:
        assert bench.run("print(1)").stdout == "1\n"
    else:
        with pytest.raises(BackendFailed, match="lost the way") as caught:
            bench.run("print(1)")
        assert caught.value.retryable
    assert len(set(lost)) == times

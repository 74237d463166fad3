"""Backend `docker`: a fresh container for every run, over the API that Docker and Podman speak.

Theory of operation
- `docker_plan.py` says what a container is made of, `docker_container.py` makes it and has its
  agent (`guest/agent.py`, pid 1 in there) compare the cage with the order. `docker_pool.py` keeps
  some waiting. Here a run is: take one, tell the agent the program, read until it says that nobody
  is left, hang up, have it removed. No container runs two programs.
- One connection carries everything: the engine's `attach`. The program's own output, its frames and
  the agent's words are packets on it, put there by the agent, which the program cannot reach: a
  process with the program's identity has tried (`guest/agent_identity.py`) before it is READY.
- Who kills whom: at the end of its time the agent is told to, and kills everybody in its pid
  namespace at once; files can then still be collected. An agent that does not answer within seconds
  is killed by the engine with the whole container. If our process dies, the connection ends, the
  agent notices and ends, and with pid 1 the container.
- Removal: every container carries its owner (host, process, time of its start) and a deadline as
  labels. The first run of every process sweeps those whose owner is gone.
- Exit status and usage are pid 1's words, from the kernel and the container's control group; where
  the agent itself is killed, the engine's. The guest's own bytes decide nothing. Without DONE from
  the agent the files are not all there, which the result says, and the engine confirms the end.

Facts relied on, the first two of runc only and tried for each container: a process that is not
dumpable is closed to others of its user; seccomp lets a process limit only itself; pid 1 gets no
signal from inside that it has no handler for; with `StdinOnce` an engine closes a container's
input when the attached client hangs up; a tmpfs is counted in its control group.

What it does not protect against: a kernel bug reachable through the allowed calls, a bug in the
engine, side channels between runs on one machine. `gvisor` puts a kernel in between.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import weakref
from types import MappingProxyType

from .. import log
from ..docker_api import Api, ApiError, connect
from ..errors import BackendFailed, BackendUnavailable, BelljarError, RequestError
from ..events import Emit
from ..files import collect
from ..files.copying import Wanted
from ..files.names import checked_name
from ..images import names
from ..policy import Isolation, Policy
from ..records import replace
from ..report import Budgets, run_pieces
from ..types import Request, Result
from . import (
    agent_link,
    docker_plan,
    docker_report,
    jail_plan,
    outcome,
    protect,
    working_directory,
)
from .base import Availability, Cancel, Plan
from .docker_container import LONGEST_RUN, Container, remove, sweep
from .docker_facts import EngineFacts, ask
from .docker_plan import Shape, Spec
from .docker_pool import Pool
from .docker_watch import AgentWatch, EngineHangs, NotStarted
from .layered import Layered
from .pieces import Pieces
from .verdict import Ending

_ANSWER_SECONDS = 10.0  # an engine that takes longer for a simple question hangs


class DockerBackend(Layered):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers.

    `pool` is how many containers may wait for each kind of run, `idle` for how many seconds. With a
    pool of 0 a run returns when its container is removed; otherwise that is done behind its back.
    `tidy` is the same, for tests that count leftovers. `user` is `uid:gid` instead of a fresh one.
    """

    name = "docker"
    isolation = Isolation.CONTAINER
    least = MappingProxyType({"memory": 32 << 20})  # the agent, the interpreter and the worker
    takes_images = True
    gvisor = False

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        docker_host: str | None = None,
        user: str | None = None,
        pool: int = 2,
        idle: float = 300.0,
        runtime: str | None = None,
        facts: EngineFacts | None = None,
    ) -> None:
        super().__init__(disable, docker_plan.LAYERS)
        self.docker_host, self.user = docker_host, user
        self.pool_size, self.idle, self.runtime = pool, idle, runtime
        self.tidy = False
        self._facts = facts
        self._api: Api | None = None
        self._pool: Pool | None = None
        self._unremoved: list[str] = []
        self._swept = False
        self._lock = threading.Lock()
        self._own: weakref.finalize[..., object] | None = None
        self._directory = ""

    @property
    def layers(self) -> tuple[str, ...]:
        """The protections that this engine has, which `disable` can switch off."""
        active = self._active(self._engine()[1])
        return tuple(name for name in docker_plan.LAYERS if name in active)

    def probe(self) -> Availability:
        try:
            _, facts = self._engine()
        except BelljarError as error:
            return Availability(available=False, reason=error.message, fix=error.fix)
        if problem := self._unfit(facts):
            return Availability(available=False, reason=problem[0], fix=problem[1])
        notes = [f"{facts.name} at {facts.socket}"]
        notes += docker_report.shortcomings(facts, self.gvisor)
        return Availability(available=True, notes=(*notes, *outcome.notices(self.disabled)))

    def _unfit(self, facts: EngineFacts) -> tuple[str, str] | None:
        """(why this engine will not do, what to do about it)."""
        if not (facts.memory and facts.pids and facts.cpu):
            why = "rootless without control groups" if facts.rootless else "no control groups"
            return (
                f"{facts.name} at {facts.socket} cannot limit memory, processes and processor "
                f"time ({why}): it would start containers without limits",
                "use cgroup version 2 with delegated controllers (systemctl edit user@.service: "
                "Delegate=cpu cpuset io memory pids), or an engine that runs as root",
            )
        return None

    def compile(self, policy: Policy, request: Request) -> Plan:
        api, facts = self._engine()
        active = self._active(facts)
        report = docker_report.enforcement(
            policy, request, facts, active, gvisor=self.gvisor, user=self.user
        )
        # A number of processes that nobody asked for is not refused, only reported.
        held = dict(report)
        if self.gvisor and "processes" not in policy.explicit:
            del held["processes"]
        self.hold(policy, held)
        image, image_id = self._present(api, facts, docker_plan.images(request, self.name))
        spec = docker_plan.spec(
            policy,
            request,
            facts,
            active,
            image=image,
            image_id=image_id,
            runtime=self._runtime(facts),
            user=self.user,
        )
        planned = self.planned(jail_plan.with_disk(policy), request, report, spec)
        return replace(planned, image=spec.shape.image)

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        try:
            return self._run_once(plan, emit, cancel)
        except NotStarted:  # now and then Podman closes an agent's input; nothing has run
            return self._run_once(plan, emit, cancel)

    def _run_once(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        began = time.monotonic()
        request, spec, limits = plan.request, plan.spec, plan.policy.limits
        assert isinstance(spec, Spec)
        budgets = outcome.budgets_of(plan)
        wanted = outcome.wanted(plan)
        start, program, given = _start_packets(request, spec, limits.timeout, budgets, wanted)
        report, shown = outcome.heard(plan, emit)
        warnings: list[str] = []
        left: list[str] = []
        with contextlib.ExitStack() as cleanup:
            if spec.guarded:
                left = cleanup.enter_context(protect.placeholders(spec.guarded))
            pool = self._ready_pool()
            keep = spec.keep and pool is not None and limits.timeout <= LONGEST_RUN
            container = pool.take(spec.shape) if keep and pool is not None else None
            if container is None:
                container = self._make(spec.shape, limits.timeout)
            cleanup.callback(self._give_back, container, pool if keep else None, warnings)
            log.info(f"run {request.id} in container {container.id[:12]}")
            _refuse_other_python(spec, container)
            watch = AgentWatch(
                container,
                run=request.id,
                start=start,
                program=program,
                stdin=request.stdin,
                timeout=limits.timeout,
                captured=outcome.captures(plan, capped="output_cap" in spec.shape.layers),
                report=report,
                emit=emit,
                cancel=cancel,
                wanted=wanted,
                given=given,
            )  # fmt: skip
            taken = time.monotonic()
            try:
                told = watch.until_gone()
            except BackendFailed as failure:
                self._forget_engine()
                container.stuck = isinstance(failure, EngineHangs)
                raise
            gone = time.monotonic()
            if self.gvisor and spec.written:
                since = time.time() - (gone - began) - 1
                warnings += protect.strip_set_id(spec.written, since)
            result = outcome.of(
                plan,
                Ending(
                    wait_status=told.wait_status,
                    reason=watch.reason,
                    oom_kills=told.oom_kills,
                    forks_refused=told.forks_refused,
                    disk_full=told.disk_full,
                ),
                report,
                watch.captured,
                wall=told.ended - told.started,
                cpu=told.cpu,
                peak_memory=told.peak_memory,
                survivors=0,
                kill_seconds=told.kill_seconds,
                found=watch.found,
                shown=shown,
                warnings=told.warnings,
            )
        return replace(
            result,
            warnings=(*result.warnings, *warnings, *left),
            timings={
                "start": taken - began,
                "run": told.ended - told.started,
                "collect": gone - told.ended,
                "clean": time.monotonic() - gone,
            },
            truncated=result.truncated or told.cut,
        )

    def metrics(self) -> dict[str, int]:
        """The pool's counts: see `docker_pool.py`."""
        return {} if self._pool is None else self._pool.metrics()

    def sweep(self) -> int:
        """Remove the containers of processes that are gone; how many those were."""
        return sweep(self._engine()[0])

    def close(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._unremoved += self._pool.close()
        self._retry_removals()
        if self._own is not None:
            self._own()
            self._directory = ""

    # The engine.

    def _engine(self) -> tuple[Api, EngineFacts]:
        with self._lock:
            if self._api is None:
                self._api = connect(self.docker_host)
            if self._facts is None:
                try:
                    self._facts = ask(self._api)
                except BelljarError:
                    self._api = None
                    raise
            return self._api, self._facts

    def _forget_engine(self) -> None:
        """Something went wrong: ask again before the next run what is there."""
        with self._lock:
            self._api = self._facts = None
            self._swept = False

    def _active(self, facts: EngineFacts) -> frozenset[str]:
        return docker_plan.active_layers(facts, self.disabled, self.gvisor)

    def _runtime(self, facts: EngineFacts) -> str | None:
        return None

    def _present(self, api: Api, facts: EngineFacts, images: tuple[str, ...]) -> tuple[str, str]:
        """(name, id) of the first of `images` that the engine has; BackendUnavailable names the
        last. Asked for every run: a name may mean another image by then, and the engine be gone."""
        try:
            for image in images:
                try:
                    found = api.json("GET", f"/images/{image}/json", timeout=_ANSWER_SECONDS)
                except ApiError as error:
                    if error.status != 404:
                        raise
                    continue
                return image, str(found["Id"])
        except ApiError:
            raise
        except (BackendFailed, BackendUnavailable) as error:
            self._forget_engine()
            raise BackendUnavailable(error.message, fix=error.fix, retryable=True) from error
        raise names.missing(images[-1], f"{facts.name} at {facts.socket}")

    def _make(self, shape: Shape, timeout: float = LONGEST_RUN) -> Container:
        try:
            api, facts = self._engine()
            longest = max(timeout, LONGEST_RUN)
            return Container(
                api,
                facts,
                shape,
                self._seccomp(facts, shape.strict, shape.families),
                empty=self._empty() if any(not source for source, _, _ in shape.binds) else "",
                idle=self.idle,
                longest=longest,
            )
        except (BackendFailed, BackendUnavailable):
            self._forget_engine()
            raise

    def _seccomp(
        self,
        facts: EngineFacts,
        strict: bool = False,
        families: tuple[str, ...] = docker_plan.SOCKETS,
    ) -> str:
        """The profile, as this engine wants it: Docker as text, Podman as the path of a file."""
        from .docker_seccomp import profile

        if "seccomp" not in self._active(facts):
            return ""
        if not facts.podman:
            return profile(facts.machine, strict, families)
        name = "-".join(("strict" if strict else "seccomp", *families))
        path = os.path.join(self._private(), f"{name}.json")
        with self._lock:
            if not os.path.exists(path):
                with open(f"{path}.new", "w") as file:
                    file.write(profile(facts.machine, strict, families))
                os.rename(f"{path}.new", path)
        return path

    def _empty(self) -> str:
        """A directory with nothing in it, which nobody but root may enter."""
        path = os.path.join(self._private(), "empty")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o000)
        return path

    def _private(self) -> str:
        """A directory of our own for what an engine wants to have as a file."""
        with self._lock:
            if not self._directory:
                self._directory = tempfile.mkdtemp(prefix=f"belljar-{os.getpid()}-")
                self._own = weakref.finalize(self, collect.remove_tree, self._directory)
            return self._directory

    # What is kept, and what is given back.

    def _ready_pool(self) -> Pool | None:
        self._retry_removals()
        if not self._swept:
            self._swept = True
            sweep(self._engine()[0])
        if self.tidy or self.pool_size < 1:
            return None
        with self._lock:
            if self._pool is None or self._pool.process != os.getpid():
                assert self._api is not None
                maker = weakref.WeakMethod(self._make)

                def make(shape: Shape) -> Container:
                    method = maker()
                    if method is None:
                        raise BackendFailed("the backend is gone")
                    return method(shape)

                self._pool = Pool(self._api, make, self.pool_size, self.idle)
                # At exit too, when nobody has closed the backend.
                weakref.finalize(self, self._pool.close)
            return self._pool

    def _give_back(self, container: Container, pool: Pool | None, warnings: list[str]) -> None:
        if pool is not None and not (self.tidy or container.stuck):
            pool.discard(container)
            return
        container.close()
        if container.stuck:
            self._unremoved.append(container.id)
            return
        try:
            container.remove()
        except BelljarError as error:
            self._unremoved.append(container.id)
            warnings.append(f"container {container.id[:12]} is not removed yet: {error.message}")

    def _retry_removals(self) -> None:
        while self._unremoved:
            id = self._unremoved.pop()
            try:
                remove(self._engine()[0], id)
            except BelljarError:
                self._unremoved.append(id)
                return


def _refuse_other_python(spec: Spec, container: Container) -> None:
    if container.python[: len(spec.version)] != spec.version:
        wanted, found = (".".join(map(str, v)) for v in (spec.version, container.python))
        raise BackendUnavailable(
            f"Python {wanted} is not installed in image {spec.shape.image!r}, which has {found}",
            fix="name an image that has it: image=... in the call or in the language file",
        )


def _start_packets(
    request: Request, spec: Spec, timeout: float, budgets: Budgets, wanted: Wanted
) -> tuple[list[bytes], Pieces, frozenset[str]]:
    """(what the agent is told first, the worker's RUN frame, names of the files it is given)."""
    files = {checked_name("files", name): data for name, data in request.files.items()}
    called = working_directory.program_file(request, spec.file or "", docker_plan.WORK)
    program = Pieces(run_pieces(request, called, budgets) if spec.worker else ())
    if spec.file and request.code is not None:  # also for the worker: multiprocessing reads it
        files[spec.file] = request.code.encode("utf-8", "surrogatepass")
    room = spec.shape.scratch[0][1]
    if sum(map(len, files.values())) > room:
        raise RequestError("files", f"do not fit into a disk of {room} bytes", fix="raise `disk`")
    stamp = time.time_ns()
    listed = [(name, len(data), stamp) for name, data in files.items()]
    message = spec.start(request, timeout, listed, wanted)
    return agent_link.start_packets(message, list(files.values())), program, frozenset(files)

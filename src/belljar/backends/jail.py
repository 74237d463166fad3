"""Backend `jail`: full CPython, or any command, in a fresh kernel jail from a warm fork server.

Theory of operation
- `zygotes.py` hands out ready jails, `linux/zygote.py` and `linux/slot.py` make them (they say
  which process holds which descriptor and who kills whom). Here a run is: take a jail, write the
  start message and the program to it, read until it is gone, collect its files, give it back.
- A result is returned when the guest has been waited for and pid 1 of its namespace, which is ours,
  has no children left: everybody in there is a child of its, or will be. Exit status and usage are
  the slot's words, on a socket that the guest never had. What is left then is the unmounting.
- The work directory is a memory file system. We hold a descriptor of it from the start; it lives
  until that is closed, so files are read when nobody is left who could change them.
- Each protection is a layer that can be switched off in the constructor, for tests that ask what
  it is good for. A backend with a layer off says so in every result.

Facts relied on, and how to check them again: `belljar doctor`; `pytest tests/linux tests/backends`.
- In a pid namespace every orphan becomes a child of pid 1, and its end is everybody's end.
- A process has given its children on to pid 1 when its own end is announced.
- RLIMIT_NPROC counts per user namespace.

What it does not protect against: a kernel bug reachable through the allowed calls, and side
channels between runs on one machine. For hostile tenants choose a rung above it.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import collect
from ..errors import BackendFailed, RequestError
from ..events import Emit
from ..linux import root
from ..policy import Isolation, Policy
from ..report import Report, run_frame
from ..types import Request, Result
from . import jail_plan, jail_report, outcome, protect
from .base import Availability, Cancel, Plan, refuse_unless_held
from .fleet import Fleet
from .jail_plan import Spec
from .supervise import Ended, Watch
from .zygotes import Jail

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

_KILL_SECONDS = 10.0  # a jail that still lives then is broken


class JailBackend:
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers.

    `parked` is how many ready jails may wait for each kind of run; how many do follows demand.
    `tidy` keeps nothing between runs but one bare warm interpreter, for tests that count leftovers.
    """

    name = "jail"
    isolation = Isolation.JAIL

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        facts: HostFacts | None = None,
        parked: int = 8,
        tidy: bool = False,
    ) -> None:
        known = jail_plan.LAYERS
        if unknown := disable - set(known):
            raise ValueError(f"unknown layers {sorted(unknown)}; known: {', '.join(known)}")
        self.disabled = disable
        self.parked = parked
        self.tidy = tidy
        self._given_facts = facts
        self._fleet: Fleet | None = None
        self._closed = False
        self._availability: Availability | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The protections that this host has, which `disable` can switch off."""
        active = jail_plan.active_layers(self.facts, self.disabled)
        return tuple(name for name in jail_plan.LAYERS if name in active)

    @property
    def facts(self) -> HostFacts:
        if self._given_facts is not None:
            return self._given_facts
        from ..linux import probe

        return probe.facts()

    def probe(self) -> Availability:
        if self._availability is None:
            self._availability = self._find_out()
        return self._availability

    def _find_out(self) -> Availability:
        facts = self.facts
        lacking = (
            ("user namespaces", facts.userns, facts.userns_problem),
            ("mounting /proc in a user namespace", facts.proc_mount, facts.proc_mount_problem),
            ("seccomp", facts.seccomp, facts.seccomp_problem),
        )
        for what, there, problem in lacking:
            if not there:
                return Availability(
                    available=False,
                    reason=f"{what}: {problem}",
                    fix=(
                        "sysctl kernel.unprivileged_userns_clone=1 "
                        "kernel.apparmor_restrict_unprivileged_userns=0 "
                        "user.max_user_namespaces=10000; in a container: "
                        "docker run --security-opt seccomp=unconfined "
                        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined"
                    ),
                )
        notes = list(jail_report.shortcomings(facts))
        notes += outcome.notices(self.disabled)
        return Availability(available=True, notes=tuple(notes))

    def compile(self, policy: Policy, request: Request) -> Plan:
        active = jail_plan.active_layers(self.facts, self.disabled)
        report = jail_report.enforcement(policy, request, self.facts, active)
        # With a layer switched off on purpose the report says what is missing, and the run goes on.
        held = {} if self.disabled else report
        refuse_unless_held(self.name, self.isolation, policy, held)
        return Plan(
            backend=self.name,
            isolation=self.isolation,
            request=request,
            policy=policy,
            enforcement=report,
            spec=jail_plan.spec(policy, request, self.facts, active),
            warnings=outcome.notices(self.disabled),
        )

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        request, spec = plan.request, plan.spec
        assert isinstance(spec, Spec)
        report, shown = outcome.heard(plan, emit)
        message, before = _start_message(request, spec)
        with contextlib.ExitStack() as cleanup:
            if spec.guarded:
                cleanup.enter_context(protect.placeholders(spec.guarded))
            bare = spec.outer.worker and not spec.outer.preload
            keep = spec.keep and (bare or not self.tidy)
            if keep:
                fleet = self._warm()
            else:
                fleet = Fleet(self.facts)
                cleanup.callback(fleet.close)
            jail = fleet.take(spec.outer, spec.shape)
            cleanup.callback(jail.release, keep=not self.tidy)
            watch = JailWatch(jail, plan, message, report, emit, cancel)
            taken = time.monotonic()
            watch.begin()
            ended = watch.until_gone()
            gone = time.monotonic()
            found = collect.changed_files(jail.work, before, request.outputs)
            result = outcome.of_watch(
                plan, watch, ended, report, jail.group, found=found, shown=shown
            )
            collected = time.monotonic()
            if keep and not self.tidy:
                # Not earlier: it would compete with the run for processors.
                jail.replenish(self.parked)
        return replace(
            result,
            timings={
                "start": taken - began,
                "run": ended.ended - ended.started,
                "settle": gone - ended.ended,
                "collect": collected - gone,
                "clean": time.monotonic() - collected,
            },
        )

    def close(self) -> None:
        self._closed = True
        if self._fleet is not None:
            self._fleet.close()

    def _warm(self) -> Fleet:
        fleet = self._fleet
        if fleet is None or fleet.process != os.getpid():
            self._sweep()
            fleet = self._fleet = Fleet(self.facts)
            # At exit too, when nobody has closed the backend.
            weakref.finalize(self, fleet.close)
        return fleet

    def _sweep(self) -> None:
        """Remove the control groups that crashed processes left; their jails died with them."""
        if self.facts.cgroup is not None and "cgroup" not in self.disabled:
            from ..linux import cgroup

            cgroup.sweep(self.facts.cgroup)


class JailWatch(Watch):
    """The poll loop of a run in a jail: it is waiting already, and is killed by pidfd."""

    def __init__(
        self,
        jail: Jail,
        plan: Plan,
        message: bytes,
        report: Report,
        emit: Emit,
        cancel: Cancel,
    ) -> None:
        request, limits = plan.request, plan.policy.limits
        self._jail = jail
        self._began = 0.0
        self._killed = 0.0
        if not request.stdin:
            os.close(jail.stdin)
        group = jail.group
        super().__init__(
            run=request.id,
            control=jail.run,
            frames=jail.frames,
            program=message,
            stdout=jail.stdout,
            stderr=jail.stderr,
            stdin=jail.stdin if request.stdin else None,
            data=request.stdin,
            timeout=limits.timeout,
            output_cap=limits.output if "output_cap" in plan.spec.layers else outcome.NO_CAP,
            report=report,
            emit=emit,
            cancel=cancel,
            on_kill=group.release if group is not None else lambda: None,
        )

    def begin(self) -> None:
        """The program's time starts now: it is already waiting for what we send."""
        self._started = True
        self._began = time.monotonic()
        self._deadline = self._began + self._timeout
        self._send(self._jail.frames.fileno())

    def until_gone(self) -> Ended:
        try:
            ended = super().until_gone()
        except BackendFailed:
            self._kill_all()  # its slot is gone, who would have
            raise
        ended = replace(ended, started=min(self._began, ended.ended))
        # A guest that had ended when our kill came was not ended by it.
        if ended.reason or not self.reason or ended.wait_status != signal.SIGKILL:
            return ended
        passed = max(0.0, ended.ended - self._killed)
        return replace(ended, reason="host", kill_seconds=ended.kill_seconds + passed)

    def _supervisor_says(self, fd: int) -> None:
        super()._supervisor_says(fd)
        if self.ended is not None and fd in self._readers:
            self._done_with(fd)  # its last word; that it ends too is nobody's business

    def _kill(self, reason: str) -> None:
        if self.ended is not None or self.reason:
            return
        self.reason = reason
        self._killed = time.monotonic()
        self._deadline = self._killed + _KILL_SECONDS
        self._on_kill()
        self._kill_all()

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            signal.pidfd_send_signal(self._jail.pidfd, signal.SIGKILL)


def _start_message(request: Request, spec: Spec) -> tuple[bytes, dict[str, collect.Stamp]]:
    """What the guest reads first, and the state of the work directory that it makes of it."""
    files = {collect.checked_name("files", name): data for name, data in request.files.items()}
    program = b""
    if spec.worker:
        program = run_frame(request, spec.file or "")
    if spec.file and request.code is not None:  # also for the worker: multiprocessing reads it
        files[spec.file] = request.code.encode("utf-8", "surrogatepass")
    room = spec.shape.disk
    if sum(map(len, files.values())) > room:
        raise RequestError("files", f"do not fit into a disk of {room} bytes", fix="raise `disk`")
    stamp = time.time_ns()
    env = {
        "PATH": jail_plan.GUEST_PATH,
        "HOME": root.WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "USER": "user",
        "PYTHONDONTWRITEBYTECODE": "1",
        **request.env,
    }
    start: dict[str, Any] = {
        "argv": list(spec.argv),
        "frames": spec.worker,
        "env": env,
        "files": [(name, len(data), stamp) for name, data in files.items()],
    }
    head = marshal.dumps(start)
    before: dict[str, collect.Stamp] = {n: (stamp, len(data), 0) for n, data in files.items()}
    return b"".join((len(head).to_bytes(4, "big"), head, *files.values(), program)), before

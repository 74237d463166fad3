"""Backend `jail`: full CPython, or any command, in a fresh kernel jail from a warm fork server.

Theory of operation
- `zygotes.py` hands out ready jails, `linux/zygote.py` and `linux/slot.py` make them (they say
  which process holds which descriptor and who kills whom). Here a run is: take a jail, write the
  start message and the program to it, read until it is gone, collect its files, give it back.
- A result is returned when the guest has been waited for and pid 1 of its namespace, which is ours,
  has no children left: everybody in there is a child of its, or will be. Exit status and usage are
  the slot's words, on a socket that the guest never had. What is left then is the unmounting.
- `settle="later"`: the answer is given when the guest has said its end and closed its streams; its
  exit code is then its own word, and the result says `settled=False`. `settle.py` waits for the
  kernel's word, and the jail's place is taken until then.
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
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from .. import languages
from ..errors import BackendFailed
from ..events import Emit
from ..files import collect
from ..policy import Isolation, Policy
from ..records import replace
from ..types import Enforcement, Request, Result
from . import cores, jail_plan, jail_report, outcome, protect, warmth
from .base import Availability, Cancel, Plan
from .fleet import Fleet
from .jail_plan import Spec
from .jail_watch import JailWatch
from .layered import HostLayered
from .settle import Settler
from .start_message import start_message

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

_REMEMBERED = 64
_CONTAINER = (
    "in a container: docker run --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)
_FIXES = {
    "user namespaces": "sysctl kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0 "
    f"user.max_user_namespaces=10000; {_CONTAINER}",
    "mounting /proc in a user namespace": f"unmount what covers parts of /proc; {_CONTAINER}",
}
_SECCOMP_FIX = "use a kernel with CONFIG_SECCOMP_FILTER, and a 64-bit Python on x86-64 or arm64"
# The policy as it is held, what holds it, and how.
_Compiled = tuple[Policy, dict[str, Enforcement], Spec]


class JailBackend(HostLayered):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers.

    `parked` is how many ready jails may wait for each kind of run; how many do follows demand.
    `tidy` keeps nothing between runs but one and the same bare interpreter, for tests that count
    leftovers.
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
        super().__init__(disable, jail_plan.LAYERS, facts)
        self.parked = parked
        self.tidy = tidy
        self._fleet: Fleet | None = None
        self._settler = Settler()
        self._recent = warmth.Recent()
        self._known: dict[tuple[Policy, warmth.Warmth], _Compiled] = {}
        self._availability: Availability | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The protections that this host has, which `disable` can switch off."""
        active = jail_plan.active_layers(self.facts, self.disabled)
        return tuple(name for name in jail_plan.LAYERS if name in active)

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
                    fix=_FIXES.get(what, _SECCOMP_FIX),
                )
        if facts.bare_root:
            return Availability(
                available=False,
                reason="root without CAP_SYS_ADMIN can neither mount nor give each run its own ids",
                fix="in a container: docker run --user 1000, or docker run --cap-add SYS_ADMIN",
            )
        notes = list(jail_report.shortcomings(facts))
        notes += outcome.notices(self.disabled)
        return Availability(available=True, notes=tuple(notes))

    def compile(self, policy: Policy, request: Request) -> Plan:
        held, report, spec = self._compiled(policy, request)
        return self.planned(held, request, dict(report), spec)

    def _compiled(self, policy: Policy, request: Request) -> _Compiled:
        """Remembered for what most runs are: a program for our own interpreter, and no mounts."""
        key, warm, files = None, None, policy.filesystem
        special = request.python or request.command or request.mounts
        plain = languages.BUILT_IN["python"]  # a file may have made another thing of the name
        if (
            request.language == "python"
            and languages.of(request) is plain
            and not (special or files.read_only or files.read_write or files.hidden)
        ):
            warm = self._recent.of_request(request)
            key = policy, warm
            if (known := self._known.get(key)) is not None:
                return known
        active = jail_plan.active_layers(self.facts, self.disabled)
        report = jail_report.enforcement(policy, request, self.facts, active)
        self.hold(policy, report)
        spec = jail_plan.spec(policy, request, self.facts, active, warm)
        compiled = jail_plan.with_disk(policy), report, spec
        if key is not None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = compiled
        return compiled

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        request, spec = plan.request, plan.spec
        assert isinstance(spec, Spec)
        report, shown = outcome.heard(plan, emit)
        with contextlib.ExitStack() as cleanup:
            own = cores.take(spec.cores, self.facts.cpus)
            cleanup.callback(cores.release, own)
            message, before = start_message(
                request,
                argv=spec.argv,
                file=spec.file,
                worker=spec.worker,
                room=spec.shape.disk,
                cores=own,
                env=protect.environment(jail_plan.GUEST_DIR) if spec.guarded else {},
                budgets=outcome.budgets_of(plan),
            )
            cleanup.callback(message.close)
            left: list[str] = []
            if spec.guarded:
                left = cleanup.enter_context(protect.placeholders(spec.guarded))
            bare = spec.outer.worker and not spec.outer.preload
            keep = spec.keep and (bare or not self.tidy)
            if keep:
                fleet = self._warm()
            else:
                fleet = Fleet(self.facts)
                cleanup.callback(fleet.close)
            jail = fleet.take(spec.outer, spec.shape)
            cleanup.callback(jail.release, keep=not self.tidy)
            taken = time.monotonic()

            def full() -> bool:
                return outcome.file_system_full(jail.work, spec.shape.disk)

            watch = JailWatch(jail, plan, message, report, emit, cancel)
            later = request.settle == "later" and spec.worker and keep and not self.tidy
            if later and watch.until_said():
                try:
                    found = collect.changed_files(jail.work, before, outcome.wanted(plan))
                    said = watch.as_said()
                    result = outcome.of_watch(
                        plan, watch, said, report, None, found=found, shown=shown,
                        disk_full=full,
                    )  # fmt: skip
                except BaseException:
                    watch.abandon()
                    raise
                self._settler.add(watch, cleanup.pop_all(), jail, self.parked)
                return replace(
                    result,
                    settled=False,
                    kill=None,
                    usage=replace(result.usage, cpu=None, peak_memory=None),
                    timings={
                        "start": taken - began,
                        "run": said.ended - said.started,
                        "collect": time.monotonic() - said.ended,
                    },
                )
            ended = watch.until_gone()
            gone = time.monotonic()
            found = collect.changed_files(jail.work, before, outcome.wanted(plan))
            result = outcome.of_watch(
                plan, watch, ended, report, jail.group, found=found, shown=shown, disk_full=full
            )
            collected = time.monotonic()
            if keep and not self.tidy:
                # Not earlier: it would compete with the run for processors. A caller who is alone
                # need not wait for it; of many, each does his own.
                if jail.alone:
                    self._settler.finish(cleanup.pop_all(), jail, self.parked)
                else:
                    jail.replenish(self.parked)
        return replace(
            result,
            warnings=(*result.warnings, *left),
            timings={
                "start": taken - began,
                "run": ended.ended - ended.started,
                "settle": gone - ended.ended,
                "collect": collected - gone,
                "clean": time.monotonic() - collected,
            },
        )

    def stats(self) -> dict[str, int]:
        return self._fleet.stats() if self._fleet is not None else {}

    def close(self) -> None:
        with _making:
            self._closed = True
        if self._fleet is not None:
            _close(self._settler, self._fleet)

    def _warm(self) -> Fleet:
        fleet = self._fleet
        if fleet is None or fleet.process != os.getpid():
            with _making:
                fleet = self._make_warm()
        return fleet

    def _make_warm(self) -> Fleet:
        """What this process keeps; a fork of the host has none of its parent's."""
        if self._closed:
            raise BackendFailed("this backend is closed")
        fleet = self._fleet
        if fleet is None or fleet.process != os.getpid():
            self._sweep()
            fleet, self._settler = Fleet(self.facts, retire=not self.tidy), Settler()
            # At exit too, when nobody has closed the backend.
            weakref.finalize(self, _close, self._settler, fleet)
            self._fleet = fleet
        return fleet

    def _sweep(self) -> None:
        """Remove the control groups that crashed processes left; their jails died with them."""
        if self.facts.cgroup is not None and "cgroup" not in self.disabled:
            from ..linux import cgroup

            cgroup.sweep(self.facts.cgroup)


def _close(settler: Settler, fleet: Fleet) -> None:
    if fleet.process != os.getpid():
        return  # a fork of the process that owns them
    settler.close(then=fleet.close)


# Callers who come first at the same time share what one of them makes.
_making = threading.Lock()


def _after_fork() -> None:
    """Whoever held it is not in this process."""
    global _making
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no jail, but a name
    os.register_at_fork(after_in_child=_after_fork)

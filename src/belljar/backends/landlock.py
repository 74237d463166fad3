"""Backend `landlock`: a fork of a warm interpreter, held without any namespace.

Where user namespaces are forbidden there is no jail: Ubuntu's AppArmor switch, a container with the
default seccomp profile. What is left to an ordinary process is Landlock, seccomp and rlimits, and
those go a long way. This is that rung: above `process`, because system calls are an allow list and
whoever demands it has every field enforced; below `jail`, because the host's processes, the names
and sizes of its files and its host name are in sight.

Theory of operation
- `run` makes a private directory (work/, tmp/), socket pairs and pipes, and hands their other ends
  to a zygote (`linux/landlock_zygote.py`, which see: it says which process holds which descriptor
  and who kills whom). Then it sits in one poll loop (`supervise.py`). There is no exec for Python.
- Kill, then wait, then collect, then delete: the supervisor's last line arrives when the kernel has
  no process of the run left; only then are files read, by descriptor, and the directory removed.
- How many processes a run may be: `landlock_plan.py`.
- Each protection is a layer that can be switched off in the constructor, for tests that ask what
  it is good for. A backend with a layer off says so in every result.

Facts relied on, and how to check them again: `belljar doctor`; `pytest tests/backends tests/linux`.
- Landlock denies opening and changing files by path, ptrace and all of /proc/PID towards processes
  outside the domain; from ABI 6 on signals and abstract sockets; from ABI 3 on truncation. It does
  not hold stat, readlink, chmod, chown, utime, extended attributes, inotify or AF_UNIX by path:
  seccomp closes all of these but the first two (`linux/seccomp_landlock.py`); a supervisor changes
  the modes of what a program may write (`linux/modes.py`).
- A process that has no children left, as a subreaper, has no descendants left either.

What it does not protect against: a kernel bug reachable through the allowed calls, side channels,
learning names and sizes of files, and filling a disk in small files faster than the watchdog looks.
"""

from __future__ import annotations

import itertools
import marshal
import os
import socket
import sys
import tempfile
import time
import weakref
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from .. import languages
from ..errors import BackendFailed, SetupFailed
from ..events import Emit
from ..files import collect
from ..interpreter import can_reach
from ..policy import Isolation, Policy
from ..records import plain, replace
from ..report import Report, run_pieces
from ..types import Request, Result
from . import (
    cores,
    guest_env,
    landlock_plan,
    landlock_report,
    memory_file,
    outcome,
    protect,
    run_directory,
    supervised,
    warmth,
    working_directory,
)
from .base import Availability, Cancel, Plan
from .landlock_plan import Spec
from .landlock_zygotes import Fleet
from .layered import HostLayered
from .pieces import Pieces
from .subprocess import _user
from .supervise import Watch

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from ..linux.probe import HostFacts


class LandlockBackend(HostLayered):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers.

    `tidy` keeps nothing between runs but one bare warm interpreter, for tests that count leftovers.
    """

    name = "landlock"
    isolation = Isolation.LANDLOCK

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        facts: HostFacts | None = None,
        user: str | None = None,
        tidy: bool = False,
    ) -> None:
        super().__init__(disable, landlock_plan.LAYERS, facts)
        self.user = _user(user) if user is not None else None
        self.tidy = tidy
        self._turn = itertools.count()
        self._recent = warmth.Recent()
        self._fleet: Fleet | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The protections that this host has, which `disable` can switch off."""
        return tuple(n for n in landlock_plan.LAYERS if n in self._active(frozenset()))

    def _active(self, disabled: frozenset[str]) -> frozenset[str]:
        return landlock_plan.active_layers(self.facts, disabled, self.user)

    def probe(self) -> Availability:
        facts = self.facts
        if not facts.landlock_abi:
            return Availability(
                available=False,
                reason="the kernel does not offer Landlock",
                fix="boot Linux 5.13 or later with lsm=landlock,... on the kernel's command line",
            )
        if not facts.seccomp:
            return Availability(
                available=False,
                reason=f"seccomp: {facts.seccomp_problem}",
                fix="use a kernel with CONFIG_SECCOMP_FILTER, on x86-64 or arm64",
            )
        if self.user is not None:
            if not facts.root:
                return Availability(
                    available=False,
                    reason="`user` is set, and only root can become another user",
                    fix="unset `user`, or run as root",
                )
            executable = os.path.realpath(sys.executable)
            if not can_reach(executable, *self.user):
                return Availability(
                    available=False,
                    reason=f"uid {self.user[0]} cannot reach {executable}",
                    fix="install Python where that user can read it, or choose another `user`",
                )
        notes = landlock_report.shortcomings(facts, self.user)
        return Availability(available=True, notes=(*notes, *outcome.notices(self.disabled)))

    def compile(self, policy: Policy, request: Request) -> Plan:
        active = self._active(self.disabled)
        report = landlock_report.enforcement(policy, request, self.facts, active)
        self.hold(policy, report)
        spec = landlock_plan.spec(policy, request, self.facts, active, self._recent)
        return self.planned(policy, request, report, spec)

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        request, spec = plan.request, plan.spec
        assert isinstance(spec, Spec)
        report, shown = outcome.heard(plan, emit)
        budgets = outcome.budgets_of(plan)
        files = dict(request.files)
        if spec.file and request.code is not None:
            files[spec.file] = request.code.encode("utf-8", "surrogatepass")
        fleet = self._warm()
        with ExitStack() as cleanup:
            own = cores.take(spec.visible, self.facts.cpus)
            cleanup.callback(cores.release, own)
            try:
                counted = landlock_plan.counts_writes(spec.children, plan.policy)
                base = landlock_plan.work_base() if counted else None
                root = cleanup.enter_context(run_directory.made(base))
                work = run_directory.fill(root, files, spec.links, self.user)
                called = working_directory.program_file(request, spec.file or "", work)
                if spec.worker and not spec.argv:
                    program = memory_file.run_message(request, called, budgets)
                    cleanup.callback(program.close)
                else:
                    program = Pieces(run_pieces(request, called, budgets) if spec.worker else ())
                before = collect.snapshot(work)
                group = supervised.group(
                    plan.policy.limits,
                    self.facts.cgroup if spec.children == "group" else None,
                    overhead=0,
                )
                if group is not None:
                    cleanup.callback(group.remove)
                watch = self._start(plan, fleet, root, program, group, own, report, emit, cancel)
            except OSError as error:
                raise SetupFailed(
                    f"the run could not be set up: {error}", retryable=True
                ) from error
            try:
                ended = watch.until_gone()
            except BaseException:
                if group is not None:
                    group.kill()
                raise
            found = collect.changed_files(work, before, outcome.wanted(plan))
            settled = time.monotonic()
            result = outcome.of_watch(
                plan, watch, ended, report, group, found=found, shown=shown,
                disk_full=lambda: outcome.directories_full(
                    [work, os.path.join(root, "tmp")], plan.policy.limits.disk
                ),
                most_processes=1 if spec.children == "one" else None,
            )  # fmt: skip
        if self.tidy:
            fleet.keep_only(())
        timings = {
            "start": ended.started - began,
            "run": ended.ended - ended.started,
            "settle": settled - ended.ended,
            "clean": time.monotonic() - settled,
        }
        warnings = (
            *result.warnings,
            *landlock_plan.childless(spec.children, result, self.facts),
            *protect.exposed(plan.policy, request),
        )
        return replace(result, timings=timings, warnings=warnings)

    def doubt(self, policy: Policy, request: Request) -> str:
        """Why it may not run the program to its end; `auto` then prefers another backend."""
        return landlock_plan.doubt(policy, request, self.facts, self._active(self.disabled))

    def stats(self) -> dict[str, int]:
        return self._fleet.stats() if self._fleet is not None else {}

    def close(self) -> None:
        self._closed = True
        if self._fleet is not None:
            self._fleet.close()

    # -- before the run --------------------------------------------------------------------------

    def _warm(self) -> Fleet:
        fleet = self._fleet
        if fleet is None or fleet.process != os.getpid():
            self._sweep()
            active = self._active(self.disabled)
            layers = tuple(name for name in landlock_plan.LAYERS if name in active)
            fleet = self._fleet = Fleet(layers, self.user)
            # At exit too, when nobody has closed the backend.
            weakref.finalize(self, fleet.close)
        return fleet

    def _sweep(self) -> None:
        """Remove what processes of ours that crashed left behind."""
        for base in {tempfile.gettempdir(), landlock_plan.work_base()}:
            run_directory.sweep(base)
        if self.facts.cgroup is not None and "cgroup" not in self.disabled:
            from ..linux import cgroup

            cgroup.sweep(self.facts.cgroup)

    def _start(
        self,
        plan: Plan,
        fleet: Fleet,
        root: str,
        program: Pieces,
        group: Group | None,
        own: tuple[int, ...],
        report: Report,
        emit: Emit,
        cancel: Cancel,
    ) -> Watch:
        """Hand the run to a zygote; from then on the Watch owns our ends."""
        spec = plan.spec
        with ExitStack() as ours, ExitStack() as theirs:
            streams = supervised.streams(ours, theirs, plan.request.stdin)
            control, their_control = supervised.socket_pair(ours, theirs)
            frames: socket.socket | None = None
            framed: list[int] = []
            if spec.worker:
                frames, their_frames = supervised.frame_sockets(ours, theirs)
                framed = [their_frames.fileno()]
            groups = []
            for path in group.procs if group is not None else ():
                groups.append(os.open(path, os.O_WRONLY))
                theirs.callback(os.close, groups[-1])
            standard = [streams.their_stdin, streams.their_stdout, streams.their_stderr]
            passed = [their_control.fileno(), *standard, *framed, *groups]
            fleet.start(spec.preload, passed, framed=spec.worker)
            theirs.close()
            supervised.send(control, marshal.dumps(self._message(plan, root, own, group)))
            watch = Watch(
                **supervised.watched(plan, control, streams, report, emit, cancel, group),
                frames=frames,
                program=program,
            )
            ours.pop_all()
        return watch

    def _message(
        self, plan: Plan, root: str, own: tuple[int, ...], group: Group | None
    ) -> dict[str, Any]:
        """Plain values for `linux/landlock_zygote.py` and the `launch.Run` it is made of."""
        spec, request = plan.spec, plan.request
        work, private = os.path.join(root, "work"), os.path.join(root, "tmp")
        cpus, first = self.facts.cpus, next(self._turn)
        # Its limits, which libraries look up; and it may not move itself out of there.
        own_group = [os.path.dirname(path) for path in (group.procs if group is not None else ())]
        watch = None if spec.watch is None else {**plain(spec.watch), "paths": [work, private]}
        return {
            "argv": list(working_directory.command_line(spec.argv, request, spec.file, work)),
            "env": {
                **guest_env.environment(
                    home=os.path.join(private, run_directory.HOME),
                    tmp=private,
                    python=spec.argv[0] if spec.argv and spec.worker else "",
                ),
                **working_directory.environment(request, work),
            },
            "cwd": working_directory.start_in(request, work),
            "user": None,
            "namespaces": False,
            "subreaper": "subreaper" in spec.layers,
            "read_only": [*spec.read_only, *own_group],
            "read_write": [work, private, *spec.read_write],
            "resolved": list(spec.resolved),
            "devices": list(spec.devices),
            "close_network": not spec.families,
            "own_signals": spec.own_signals,
            "seccomp": _filter(
                spec.families, spec.children != "one", spec.counted, spec.affinity, spec.truncate
            ),
            "filter": languages.seccomp_filter(request) if "seccomp" in spec.layers else b"",
            "rlimits": [list(pair) for pair in spec.rlimits],
            "affinity": [cpus[(first + i) % len(cpus)] for i in range(spec.cores)] or list(own),
            "watch": watch,
        }


@cache
def _filter(
    families: tuple[int, ...], children: bool, counted: bool, affinity: bool, truncate: bool
) -> bytes:
    from ..linux import seccomp_landlock

    return seccomp_landlock.delta(
        families,
        children=children,
        counted=counted,
        affinity=affinity,
        truncate=truncate,
    )

"""One runner for other people's sandbox programs: bubblewrap, firejail, nsjail.

Theory of operation
- A backend here is a program to find and an argv compiler, a pure function from a `Sandbox` to
  words. Everything else is shared: `linux/launch_tool.py` supervises the tool (it says which
  process holds which descriptor and who kills whom), `linux/stage.py` is our first process in it.
  The
  stage puts Landlock, rlimits and the jail's seccomp filters on the guest and checks that they are
  on, whatever the tool did; then the guest is our worker, or a command, as everywhere else.
- All that the program writes is in memory file systems. The stage hands us the work directory
  before the guest exists; we hold it until nobody is left who could change it, and read it then.
- Kill, then wait, then collect: the supervisor's last line arrives when the kernel has no process
  of the run left.
- Each protection of ours is a layer that can be switched off in the constructor, for tests that ask
  what it is good for. A backend with a layer off says so in every result.
"""

from __future__ import annotations

import itertools
import marshal
import os
import socket
import subprocess
import time
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import BackendFailed, BackendUnavailable, SetupFailed
from ..events import Emit
from ..files import collect
from ..guest import protocol
from ..linux import root
from ..policy import Isolation, Policy
from ..records import replace
from ..report import Report
from ..types import Enforcement, Request, Result
from . import cores, jail_plan, launched_plan, outcome, protect, supervised, tools
from .base import Availability, Cancel, Plan
from .launched_plan import Ends, Sandbox, Spec
from .layered import HostLayered
from .pieces import Pieces
from .start_message import start_message
from .supervise import Watch
from .tools import Tool

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from ..linux.probe import HostFacts


class LaunchedBackend(HostLayered):
    """The part that all of them share; see the module's docstring."""

    isolation = Isolation.JAIL
    least = MappingProxyType({"memory": 16 << 20})  # the tool and two interpreters of ours
    name: str
    program: str
    fix: str
    version_flag: str | None = "--version"
    takes_filter = False  # whether the tool installs a seccomp program from a descriptor
    overhead: int  # processes beside the guest's

    def __init__(
        self, *, disable: frozenset[str] = frozenset(), facts: HostFacts | None = None
    ) -> None:
        super().__init__(disable, launched_plan.LAYERS, facts)
        self._turn = itertools.count()
        self._swept = False
        self._found: Tool | None = None
        self._availability: Availability | None = None

    # -- what each tool says for itself ----------------------------------------------------------

    def unusable(self, tool: Tool) -> tuple[str, str] | None:
        """(why, fix) if this installation cannot be used."""
        raise NotImplementedError

    def oddities(self, tool: Tool) -> tuple[str, ...]:
        """What is worth knowing of it, for `belljar doctor`."""
        raise NotImplementedError

    def sized(self, tool: Tool) -> bool:
        """Whether the tool itself holds the size of the work directory."""
        raise NotImplementedError

    def tool_user(self, tool: Tool) -> bool:
        """Whether the tool puts the guest into a user namespace."""
        raise NotImplementedError

    def trial(self, tool: Tool) -> tuple[str, ...]:
        """The shortest command line that makes namespaces; a program's follows it."""
        raise NotImplementedError

    def data(self, sandbox: Sandbox) -> tuple[bytes, ...]:
        """What the tool reads from descriptors."""
        return ()

    def arguments(self, tool: Tool, sandbox: Sandbox, ends: Ends) -> tuple[str, ...]:
        raise NotImplementedError

    def arranged(self, spec: Spec, request: Request) -> Spec:
        """`spec` with the places of this tool, where they are not the jail's."""
        return spec

    def amend(
        self, report: dict[str, Enforcement], policy: Policy, request: Request, spec: Spec
    ) -> None:
        """Correct `report` where the tool holds less than, or something else than, the jail."""

    # -- the contract ----------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """The protections that this host has, which `disable` can switch off."""
        active = launched_plan.active_layers(self.facts, self.disabled)
        return tuple(name for name in launched_plan.LAYERS if name in active)

    def probe(self) -> Availability:
        if self._availability is None:
            self._availability = self._find_out()
        return self._availability

    def _find_out(self) -> Availability:
        try:
            tool = self._tool()
        except BackendUnavailable as error:
            return Availability(available=False, reason=error.message, fix=error.fix)
        if problem := self.unusable(tool):
            return Availability(available=False, reason=problem[0], fix=problem[1])
        if not self.facts.seccomp:
            return Availability(
                available=False,
                reason=f"seccomp: {self.facts.seccomp_problem}",
                fix="use a kernel with CONFIG_SECCOMP_FILTER, on x86-64 or arm64",
            )
        if refusal := tools.tried(self.trial(tool)):
            return Availability(
                available=False, reason=f"{self.program} does not work here: {refusal}"
            )
        version = ".".join(map(str, tool.version)) or "of unknown version"
        notes = [f"{self.program} {version} ({tool.path}{', set-uid' if tool.setuid else ''})"]
        if not self.facts.landlock_abi:
            notes.append("no Landlock: one layer less")
        if self.facts.cgroup is None:
            notes.append("no writable cgroup: memory and processor time are counted by a watchdog")
        notes += (*self.oddities(tool), *outcome.notices(self.disabled))
        return Availability(available=True, notes=tuple(notes))

    def _tool(self) -> Tool:
        if self._found is None:
            self._found = tools.find(self.program, self.version_flag, self.fix)
        return self._found

    def compile(self, policy: Policy, request: Request) -> Plan:
        tool = self._tool()
        active = launched_plan.active_layers(self.facts, self.disabled)
        user, sized = self.tool_user(tool), self.sized(tool)
        report = launched_plan.enforcement(
            policy, request, self.facts, active, tool=self.program, tool_user=user, sized=sized
        )
        spec = launched_plan.spec(
            policy,
            request,
            self.facts,
            active,
            overhead=self.overhead,
            tool_user=user,
            sized=sized,
        )
        spec = self.arranged(spec, request)
        self.amend(report, policy, request, spec)
        self.hold(policy, report)
        return self.planned(jail_plan.with_disk(policy), request, report, spec)

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        self._sweep_once()
        request, spec = plan.request, plan.spec
        assert isinstance(spec, Spec)
        report, shown = outcome.heard(plan, emit)
        message, before = start_message(
            request,
            argv=spec.argv,
            file=spec.file,
            worker=spec.worker,
            room=spec.shape.disk,
            home=spec.places.home,
            env=protect.environment(_guest_dir(spec)) if spec.guarded else {},
            budgets=outcome.budgets_of(plan),
            work=spec.places.work,
        )
        with ExitStack() as cleanup:
            left = cleanup.enter_context(protect.placeholders(spec.guarded))
            try:
                group = supervised.group(
                    plan.policy.limits,
                    self.facts.cgroup if "cgroup" in spec.layers else None,
                    overhead=self.overhead,
                )
                if group is not None:
                    cleanup.callback(group.remove)
                watch, supervisor = self._start(plan, message, group, report, emit, cancel, cleanup)
            except OSError as error:
                raise SetupFailed(
                    f"the run could not be set up: {error}", retryable=True
                ) from error
            cleanup.callback(watch.close_work)
            ended = supervised.until_gone(watch, supervisor, group)
            found = (
                collect.changed_files(watch.work, before, outcome.wanted(plan))
                if watch.work >= 0
                else collect.Collected()
            )
            result = outcome.of_watch(
                plan, watch, ended, report, group, found=found, shown=shown,
                disk_full=lambda: watch.work >= 0 and outcome.file_system_full(
                    watch.work, plan.spec.shape.disk
                ),
            )  # fmt: skip
            settled = time.monotonic()
        timings = {
            "start": ended.started - began,
            "run": ended.ended - ended.started,
            "settle": settled - ended.ended,
            "clean": time.monotonic() - settled,
        }
        return replace(result, warnings=(*result.warnings, *left), timings=timings)

    def close(self) -> None:
        self._closed = True

    # -- one run ---------------------------------------------------------------------------------

    def _start(
        self,
        plan: Plan,
        message: Pieces,
        group: Group | None,
        report: Report,
        emit: Emit,
        cancel: Cancel,
        held: ExitStack,
    ) -> tuple[HandedOver, subprocess.Popen[bytes]]:
        spec = plan.spec
        sandbox = launched_plan.present(spec.sandbox)
        with ExitStack() as ours, ExitStack() as theirs:
            streams = supervised.streams(ours, theirs, plan.request.stdin)
            control, their_control = supervised.socket_pair(ours, theirs)
            frames, their_frames = supervised.socket_pair(ours, theirs)
            tell, their_tell = supervised.socket_pair(theirs, theirs)
            ends = Ends(
                tell=their_tell.fileno(),
                frames=their_frames.fileno(),
                stdin=streams.their_stdin,
                stdout=streams.their_stdout,
                stderr=streams.their_stderr,
                filter=self._filter(spec, theirs),
                data=tuple(_memory_file(data, theirs) for data in self.data(sandbox)),
            )
            sources = launched_plan.identities(sandbox, held)
            argv = self.arguments(self._tool(), sandbox, ends)
            orders = {
                "argv": argv,
                "env": {"PATH": tools.PATH, "HOME": os.path.expanduser("~"), "LANG": "C.UTF-8"},
                "frame_fd": -1,
                "tell": tell.fileno(),
                "theirs": list(ends.all),
                "user": None,
                "cgroup": list(group.procs) if group is not None else [],
                "namespaces": False,
                "subreaper": True,
                "watch": spec.watch,
            }
            supervisor = supervised.start(
                "launch_tool",
                their_control,
                passed=(tell.fileno(), *ends.all),
                stdio=(subprocess.DEVNULL,) * 3,
            )
            theirs.close()
            supervised.instruct(ours, supervisor, control, marshal.dumps(orders))
            own = cores.take(0 if spec.shape.cores else spec.shape.visible, self.facts.cpus)
            held.callback(cores.release, own)
            settings = marshal.dumps({**self._settings(spec, sandbox, own), "sources": sources})
            watch = HandedOver(
                **supervised.watched(plan, control, streams, report, emit, cancel, group),
                frames=frames,
                program=message.after(len(settings).to_bytes(4, "big") + settings),
            )
            ours.pop_all()
        return watch, supervisor

    def _filter(self, spec: Spec, theirs: ExitStack) -> int:
        """The jail's base filter as a file, for a tool that installs it for us."""
        if not self.takes_filter or "seccomp" not in spec.layers:
            return -1
        from ..linux import seccomp_jail

        return _memory_file(seccomp_jail.base(), theirs)

    def _settings(self, spec: Spec, sandbox: Sandbox, own: tuple[int, ...]) -> dict[str, Any]:
        """Plain values for `linux/stage.py`."""
        from ..linux import seccomp_jail, syscalls

        places, shape = spec.places, spec.shape
        filters = []
        if "seccomp" in spec.layers:
            filters = [] if self.takes_filter else [seccomp_jail.base()]
            filters.append(
                seccomp_jail.delta(
                    shape.families, memfd=shape.memfd, affinity=shape.affinity, alone=True
                )
            )
        devices = tuple(f"/dev/{name}" for name in root.DEVICES)
        cpus, first = self.facts.cpus, next(self._turn)
        return {
            "work": places.work,
            "scratch": places.scratch,
            "directories": places.directories,
            "links": places.links,
            "probe": places.probe,
            "places": launched_plan.closed_places(sandbox),
            "outside": {
                kind: os.readlink(f"/proc/self/ns/{kind}")
                for kind in ("mnt", "pid", "ipc", "uts", *(() if spec.sandbox.online else ("net",)))
            },
            "own_user": spec.own_user,
            "affinity": [cpus[(first + i) % len(cpus)] for i in range(shape.cores)] or list(own),
            "rlimits": shape.rlimits,
            "last_capability": syscalls.last_capability(),
            "landlock": (
                (places.readable, places.writable, devices) if "landlock" in spec.layers else None
            ),
            "filters": filters,
            "filtered": 2 if filters else 0,
        }

    def _sweep_once(self) -> None:
        if not self._swept:
            self._swept = True
            supervised.sweep(self.facts.cgroup if "cgroup" not in self.disabled else None)


class HandedOver(Watch):
    """A Watch whose first message on the frame socket is a descriptor of the work directory."""

    work = -1

    def _frame(self, fd: int) -> None:
        if self.work >= 0:
            return super()._frame(fd)
        from ..linux import syscalls

        assert isinstance(self._frames, socket.socket)
        try:
            _, passed, _, _ = socket.recv_fds(self._frames, 1, 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            passed = []
        if not passed:  # it ended before there was a guest
            return self._done_with(fd)
        self.work = passed[0]
        syscalls.refuse_descriptors(self._frames)
        return None

    def close_work(self) -> None:
        if self.work >= 0:
            os.close(self.work)


def _guest_dir(spec: Spec) -> str:
    """Where the worker's files are seen: not every tool can move a path."""
    return next(at for source, at, _, _ in spec.sandbox.show if source == protocol.GUEST_DIR)


def _memory_file(data: bytes, theirs: ExitStack) -> int:
    fd = os.memfd_create("belljar")
    theirs.callback(os.close, fd)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd

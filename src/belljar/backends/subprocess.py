"""Backend `subprocess`: a plain child process, held by all that the system offers for it.

Theory of operation (Linux)
- `run` makes a private directory (work/, tmp/), a control group where it may, two socket pairs and
  three pipes, and starts one supervisor (`linux/launch.py`, which see: it says which process holds
  which descriptor and who kills whom). Then it sits in one poll loop (`supervise.py`).
- Kill, then wait, then collect, then delete: the supervisor's last line arrives when the kernel has
  no process of the run left; only then are files read, by descriptor, and the directory removed.
- Each protection is a layer that can be switched off in the constructor, for tests that ask what
  it is good for. A backend with a layer off says so in every result.

Facts relied on, and how to check them again: `belljar doctor`; `pytest tests/backends`.
- RLIMIT_NPROC counts per user namespace, and never binds the host's uid 0.
- Landlock denies ptrace, and so /proc/PID/mem and environ, towards processes outside the domain.
- An AF_UNIX socket can reach a host daemon from any namespace that shows its path: socket(AF_UNIX)
  is closed by seccomp; socketpair stays open.

What it does not protect against: a kernel bug reachable by an ordinary process, reading the
system's public files (/usr, parts of /etc), side channels, and filling a disk in small files
faster than the watchdog looks. It is the rung `process`; the floor `jail` refuses it.
On macOS and Windows `portable.py` takes over with what those have.
"""

from __future__ import annotations

import itertools
import marshal
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .. import languages
from ..errors import BackendFailed, ConfigError, SetupFailed
from ..events import Emit
from ..files import collect
from ..guest import protocol
from ..interpreter import can_reach
from ..policy import Isolation, Policy
from ..records import replace
from ..report import Report, run_pieces
from ..types import Request, Result
from . import (
    cores,
    guest_env,
    outcome,
    proc_files,
    process_plan,
    protect,
    run_directory,
    supervised,
    working_directory,
)
from .base import Availability, Cancel, Plan
from .layered import HostLayered
from .pieces import Pieces
from .process_plan import Spec
from .supervise import Watch

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from ..linux.probe import HostFacts

_ID = re.compile(r"[0-9]{1,10}")


class SubprocessBackend(HostLayered):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers."""

    name = "subprocess"
    isolation = Isolation.PROCESS

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        facts: HostFacts | None = None,
        user: str | None = None,
    ) -> None:
        super().__init__(disable, process_plan.LAYERS, facts)
        self.user = _user(user) if user is not None else None
        self._turn = itertools.count()
        self._swept = False

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that this host has."""
        return tuple(sorted(process_plan.active_layers(self.facts, frozenset())))

    def probe(self) -> Availability:
        if self.user is not None and not self.facts.root:
            return Availability(
                available=False,
                reason="`user` is set, and only root can become another user",
                fix="unset `user`, or run as root",
            )
        executable = os.path.realpath(sys.executable)
        if self.user is not None and not can_reach(executable, *self.user):
            return Availability(
                available=False,
                reason=f"uid {self.user[0]} cannot reach {executable}",
                fix="install Python where that user can read it, or choose another `user`",
            )
        notes = list(process_plan.shortcomings(self.facts, self.user))
        notes += outcome.notices(self.disabled)
        return Availability(available=True, notes=tuple(notes))

    def compile(self, policy: Policy, request: Request) -> Plan:
        active = process_plan.active_layers(self.facts, self.disabled)
        report = process_plan.enforcement(policy, request, self.facts, active, self.user)
        self.hold(policy, report)
        spec = process_plan.spec(policy, request, self.facts, active, self.user)
        return self.planned(policy, request, report, spec)

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        self._sweep_once()
        request, spec = plan.request, plan.spec
        assert isinstance(spec, Spec)
        report, shown = outcome.heard(plan, emit)
        budgets = outcome.budgets_of(plan)
        files = dict(request.files)
        if spec.file and request.code is not None:
            files[spec.file] = request.code.encode("utf-8", "surrogatepass")
        left: list[str] = []
        with ExitStack() as cleanup:
            own = cores.take(spec.visible, self.facts.cpus)
            cleanup.callback(cores.release, own)
            if spec.guarded:
                left = cleanup.enter_context(protect.placeholders(spec.guarded))
            try:
                root = cleanup.enter_context(run_directory.made())
                work = run_directory.fill(root, files, spec.links, self.user)
                called = working_directory.program_file(request, spec.file or "", work)
                program = Pieces(run_pieces(request, called, budgets) if spec.worker else ())
                before = collect.snapshot(work)
                group = supervised.group(
                    plan.policy.limits,
                    self.facts.cgroup if "cgroup" in spec.layers else None,
                    overhead=int("namespaces" in spec.layers),  # init, which is ours
                )
                if group is not None:
                    cleanup.callback(group.remove)
                watch, supervisor = self._start(
                    plan, root, program, group, own, report, emit, cancel
                )
            except OSError as error:
                raise SetupFailed(
                    f"the run could not be set up: {error}", retryable=True
                ) from error
            ended = supervised.until_gone(watch, supervisor, group)
            found = collect.changed_files(work, before, outcome.wanted(plan))
            settled = time.monotonic()
            result = outcome.of_watch(
                plan, watch, ended, report, group, found=found, shown=shown,
                disk_full=lambda: outcome.directories_full(
                    [work, os.path.join(root, "tmp")], plan.policy.limits.disk
                ),
            )  # fmt: skip
        timings = {
            "start": ended.started - began,
            "run": ended.ended - ended.started,
            "settle": settled - ended.ended,
            "clean": time.monotonic() - settled,
        }
        return replace(result, warnings=(*result.warnings, *left), timings=timings)

    def close(self) -> None:
        self._closed = True

    # -- before the run --------------------------------------------------------------------------

    def _start(
        self,
        plan: Plan,
        root: str,
        program: Pieces,
        group: Group | None,
        own: tuple[int, ...],
        report: Report,
        emit: Emit,
        cancel: Cancel,
    ) -> tuple[Watch, subprocess.Popen[bytes]]:
        """Start the supervisor and hand it its message; from then on the Watch owns our ends."""
        worker = plan.spec.worker
        with ExitStack() as ours, ExitStack() as theirs:
            streams = supervised.streams(ours, theirs, plan.request.stdin)
            control, their_control = supervised.socket_pair(ours, theirs)
            frames, their_frames = (
                supervised.frame_sockets(ours, theirs) if worker else (None, None)
            )
            frame_fd = their_frames.fileno() if their_frames is not None else -1
            message = marshal.dumps(self._message(plan, root, frame_fd, group, own))
            supervisor = supervised.start(
                "launch",
                their_control,
                passed=(frame_fd,) if worker else (),
                stdio=(streams.their_stdin, streams.their_stdout, streams.their_stderr),
            )
            theirs.close()
            supervised.instruct(ours, supervisor, control, message)
            watch = Watch(
                **supervised.watched(plan, control, streams, report, emit, cancel, group),
                frames=frames,
                program=program,
            )
            ours.pop_all()
        return watch, supervisor

    def _message(
        self,
        plan: Plan,
        root: str,
        frame_fd: int,
        group: Group | None,
        own: tuple[int, ...],
    ) -> dict[str, Any]:
        """Plain values for `linux/launch.py`; its `Run` reads exactly these."""
        from ..linux import seccomp

        spec, request = plan.spec, plan.request
        work, private = os.path.join(root, "work"), os.path.join(root, "tmp")
        tmp = "/tmp" if spec.private_tmp else private
        argv = list(working_directory.command_line(spec.argv, request, spec.file, work))
        python = argv[0] if spec.worker else ""
        home = os.path.join(tmp, run_directory.HOME)
        env = {**guest_env.environment(home=home, tmp=tmp, python=python)}
        env.update(protect.environment(protocol.GUEST_DIR) if spec.guarded else {})
        env.update(working_directory.environment(request, work))
        if spec.worker:
            argv += ["-c", protocol.boot_code(protocol.GUEST_DIR, frame_fd)]
        cpus = self.facts.cpus
        first = next(self._turn)
        watch = spec.watch and {**spec.watch, "paths": [work, private]}
        return {
            "argv": argv,
            "env": env,
            "cwd": working_directory.start_in(request, work),
            "frame_fd": frame_fd,
            "user": self.user,
            "cgroup": list(group.procs) if group is not None else [],
            "namespaces": "namespaces" in spec.layers,
            "empty_network": spec.empty_network,
            "own_proc": spec.own_proc,
            "subreaper": "subreaper" in spec.layers,
            "proc": proc_files.texts(_visible(spec), plan.policy.limits.memory),
            "scratch": os.path.join(private, "proc"),
            "private_tmp": private if spec.private_tmp else "",
            "freeze": list(spec.freeze),
            "read_only_mounts": "read_only_mounts" in spec.layers,
            "hide": list(spec.hide),
            "shm_size": spec.shm_size,
            "landlock": "landlock" in spec.layers,
            "read_only": list(spec.read_only),
            "resolved": list(spec.resolved),
            "named": list(spec.named),
            "read_write": [
                work,
                private,
                *(["/tmp"] if spec.private_tmp else []),
                *spec.read_write,
            ],
            "devices": list(spec.devices),
            "drop_capabilities": True,
            "seccomp": (
                seccomp.guest_filter(
                    spec.socket_families, closed=spec.closed_calls, ignored=spec.ignored_calls
                )
                if "seccomp" in spec.layers
                else b""
            ),
            "filter": languages.seccomp_filter(request) if "seccomp" in spec.layers else b"",
            "rlimits": [list(pair) for pair in spec.rlimits],
            "affinity": [cpus[(first + i) % len(cpus)] for i in range(spec.cores)] or list(own),
            "watch": watch,
        }

    def _sweep_once(self) -> None:
        """Remove what processes of ours that crashed left behind."""
        if self._swept:
            return
        self._swept = True
        run_directory.sweep()
        supervised.sweep(self.facts.cgroup if "cgroup" not in self.disabled else None)


def _visible(spec: Spec) -> int:
    """How many processors the program may use, with a control group or without."""
    return spec.visible or spec.cores


def _user(text: str) -> tuple[int, int]:
    """ "1000:1000" as (uid, gid). Root is not a user, or a group, to run guests as."""
    uid, _, gid = text.partition(":")
    ids = [int(word) if _ID.fullmatch(word) else 0 for word in (uid, gid or uid)]
    # The largest number means "leave it as it is" to the kernel.
    if not all(0 < number < 2**32 - 1 for number in ids):
        raise ConfigError("user", f"{text!r} is not UID:GID of an unprivileged user")
    return ids[0], ids[1]

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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .. import collect
from ..errors import BackendFailed, ConfigError
from ..events import Displayed, Emit
from ..guest import protocol
from ..policy import Isolation, Policy
from ..report import Report, run_frame
from ..types import Display, KillProof, Request, Result, Usage
from . import process_plan
from .base import Availability, Cancel, Plan, refuse_unless_held
from .process_plan import Spec
from .supervise import Ended, Watch
from .verdict import Ending, judge

if TYPE_CHECKING:
    from ..linux.cgroup import Group
    from ..linux.probe import HostFacts

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LAUNCH = (
    "import sys; sys.path.insert(0, {parent!r}); from belljar.linux.launch import main; main({fd})"
)
_RUN_DIRECTORY = re.compile(r"belljar-(\d+)-\w+(\.gone)?")
_NO_CAP = 1 << 40


class SubprocessBackend:
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers."""

    name = "subprocess"
    isolation = Isolation.PROCESS
    layers = process_plan.LAYERS

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        facts: HostFacts | None = None,
        user: str | None = None,
    ) -> None:
        unknown = disable - set(self.layers)
        if unknown:
            raise ValueError(f"unknown layers {sorted(unknown)}; known: {', '.join(self.layers)}")
        self.disabled = disable
        self.user = _user(user) if user is not None else None
        self._given_facts = facts
        self._turn = itertools.count()
        self._closed = False
        self._swept = False

    @property
    def facts(self) -> HostFacts:
        if self._given_facts is not None:
            return self._given_facts
        from ..linux import probe

        return probe.facts()

    def probe(self) -> Availability:
        if self.user is not None and not self.facts.root:
            return Availability(
                available=False,
                reason="`user` is set, and only root can become another user",
                fix="unset `user`, or run as root",
            )
        notes = list(process_plan.shortcomings(self.facts, self.user))
        if self.disabled:
            notes.append(self._disabled_notice())
        return Availability(available=True, notes=tuple(notes))

    def _disabled_notice(self) -> str:
        return f"layers switched off for a test: {', '.join(sorted(self.disabled))}"

    def compile(self, policy: Policy, request: Request) -> Plan:
        active = process_plan.active_layers(self.facts, self.disabled)
        report = process_plan.enforcement(policy, request, self.facts, active, self.user)
        # With a layer switched off on purpose the report says what is missing, and the run goes on.
        held = {} if self.disabled else report
        refuse_unless_held(self.name, self.isolation, policy, held)
        return Plan(
            backend=self.name,
            isolation=self.isolation,
            request=request,
            policy=policy,
            enforcement=report,
            spec=process_plan.spec(policy, request, self.facts, active, self.user),
            warnings=(self._disabled_notice(),) if self.disabled else (),
        )

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        self._sweep_once()
        request, spec = plan.request, plan.spec
        assert isinstance(spec, Spec)
        shown: list[Display] = []

        def show(display: Display) -> None:
            shown.append(display)
            emit(Displayed(id=request.id, display=display))

        report = Report(on_display=show)
        program = run_frame(request, spec.file or "") if spec.worker else b""
        with self._directory() as root, ExitStack() as cleanup:
            work = self._fill(root, request, spec)
            before = collect.snapshot(work)
            group = self._group(plan)
            if group is not None:
                cleanup.callback(group.remove)
            watch, supervisor = self._start(plan, root, program, group, report, emit, cancel)
            try:
                ended = watch.until_gone()
            except BaseException:
                supervisor.kill()
                if group is not None:
                    group.kill()
                raise
            finally:
                supervisor.wait()
            found = collect.changed_files(work, before, request.outputs)
            settled = time.monotonic()
            result = self._result(plan, watch, ended, report, group)
        timings = {
            "start": ended.started - began,
            "run": ended.ended - ended.started,
            "settle": settled - ended.ended,
            "clean": time.monotonic() - settled,
        }
        return _finish(result, found, tuple(shown), timings)

    def close(self) -> None:
        self._closed = True

    # -- before the run --------------------------------------------------------------------------

    @contextmanager
    def _directory(self) -> Iterator[str]:
        root = tempfile.mkdtemp(prefix=f"belljar-{os.getpid()}-")
        try:
            yield root
        finally:
            collect.remove_tree(root)

    def _fill(self, root: str, request: Request, spec: Spec) -> str:
        """Make work/ and tmp/ below `root`, with the program, its inputs and its links."""
        work = os.path.join(root, "work")
        for path in (work, os.path.join(root, "tmp")):
            os.mkdir(path, 0o700)
        collect.write_inputs(work, request.files)
        if spec.file and request.code is not None:
            collect.write_inputs(work, {spec.file: request.code.encode("utf-8", "surrogatepass")})
        for name, target in spec.links:
            link = os.path.join(work, collect.checked_name("mounts.dst", name))
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(target, link)
        if self.user:
            os.chmod(root, 0o711)
            for directory, names, files in os.walk(root):
                for name in (*names, *files):
                    os.chown(os.path.join(directory, name), *self.user, follow_symlinks=False)
        return work

    def _group(self, plan: Plan) -> Group | None:
        if "cgroup" not in plan.spec.layers or self.facts.cgroup is None:
            return None
        from ..linux.cgroup import Group

        limits = plan.policy.limits
        # One more for init, which is ours.
        processes = limits.processes + ("namespaces" in plan.spec.layers)
        return Group(
            self.facts.cgroup,
            plan.request.id,
            memory=limits.memory,
            processes=processes,
            cpus=limits.cpus,
        )

    def _start(
        self,
        plan: Plan,
        root: str,
        program: bytes,
        group: Group | None,
        report: Report,
        emit: Emit,
        cancel: Cancel,
    ) -> tuple[Watch, subprocess.Popen[bytes]]:
        """Start the supervisor and hand it its message; from then on the Watch owns our ends."""
        request, spec, limits = plan.request, plan.spec, plan.policy.limits
        control, their_control = socket.socketpair()
        frames, their_frames = socket.socketpair() if spec.worker else (None, None)
        stdin, their_stdin = _input_pipe(request.stdin)
        stdout, their_stdout = os.pipe()
        stderr, their_stderr = os.pipe()
        theirs = [end.fileno() for end in (their_control, their_frames) if end is not None]
        supervisor = subprocess.Popen(
            [
                sys.executable, "-I", "-S", "-c",
                _LAUNCH.format(parent=_PACKAGE_PARENT, fd=their_control.fileno()),
            ],
            stdin=their_stdin,
            stdout=their_stdout,
            stderr=their_stderr,
            pass_fds=theirs,
            env={},
            cwd="/",
            start_new_session=True,
        )  # fmt: skip
        frame_fd = their_frames.fileno() if their_frames is not None else -1
        message = marshal.dumps(self._message(plan, root, frame_fd, group))
        for fd in (their_stdin, their_stdout, their_stderr):
            os.close(fd)
        for end in (their_control, their_frames):
            if end is not None:
                end.close()
        control.sendall(len(message).to_bytes(4, "big") + message)
        watch = Watch(
            run=request.id,
            control=control,
            frames=frames,
            program=program,
            stdout=stdout,
            stderr=stderr,
            stdin=stdin,
            data=request.stdin,
            timeout=limits.timeout,
            output_cap=limits.output if "output_cap" in spec.layers else _NO_CAP,
            report=report,
            emit=emit,
            cancel=cancel,
            on_kill=group.release if group is not None else lambda: None,
        )
        return watch, supervisor

    def _message(self, plan: Plan, root: str, frame_fd: int, group: Group | None) -> dict[str, Any]:
        """Plain values for `linux/launch.py`; its `Run` reads exactly these."""
        from ..linux import seccomp

        spec, request = plan.spec, plan.request
        work, private = os.path.join(root, "work"), os.path.join(root, "tmp")
        tmp = "/tmp" if spec.private_tmp else private
        env = {
            "PATH": process_plan.GUEST_PATH,
            "HOME": work,
            "TMPDIR": tmp,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            **request.env,
        }
        argv = list(spec.argv)
        if spec.worker:
            argv += ["-c", protocol.boot_code(protocol.GUEST_DIR, frame_fd)]
        cpus = self.facts.cpus
        first = next(self._turn)
        watch = spec.watch and {**spec.watch, "paths": [work, private]}
        return {
            "argv": argv,
            "env": env,
            "cwd": work,
            "frame_fd": frame_fd,
            "user": self.user,
            "cgroup": list(group.procs) if group is not None else [],
            "namespaces": "namespaces" in spec.layers,
            "empty_network": spec.empty_network,
            "own_proc": spec.own_proc,
            "subreaper": "subreaper" in spec.layers,
            "private_tmp": private if spec.private_tmp else "",
            "freeze": list(spec.freeze),
            "read_only_mounts": "read_only_mounts" in spec.layers,
            "hide": list(spec.hide),
            "shm_size": spec.shm_size,
            "landlock": "landlock" in spec.layers,
            "read_only": list(spec.read_only),
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
            "rlimits": [list(pair) for pair in spec.rlimits],
            "affinity": [cpus[(first + i) % len(cpus)] for i in range(spec.cores)],
            "watch": watch,
        }

    def _sweep_once(self) -> None:
        """Remove what processes of ours that crashed left behind."""
        if self._swept:
            return
        self._swept = True
        base = tempfile.gettempdir()
        for name in os.listdir(base):
            match = _RUN_DIRECTORY.fullmatch(name)
            path = os.path.join(base, name)
            if match and not os.path.exists(f"/proc/{match[1]}") and _is_ours(path):
                collect.remove_tree(path)
        if self.facts.cgroup is not None and "cgroup" not in self.disabled:
            from ..linux import cgroup

            cgroup.sweep(self.facts.cgroup)

    # -- after the run ---------------------------------------------------------------------------

    def _result(
        self, plan: Plan, watch: Watch, ended: Ended, report: Report, group: Group | None
    ) -> Result:
        reason = watch.reason if ended.reason == "host" else ended.reason
        ending = Ending(
            wait_status=ended.wait_status,
            reason=reason,
            oom_kills=group.oom_kills() if group is not None else 0,
            forks_refused=group.forks_refused() if group is not None else None,
        )
        found = judge(ending, report)
        stdout, stderr = watch.captured["stdout"], watch.captured["stderr"]
        peak = group.peak_memory() if group is not None else None
        return Result(
            id=plan.request.id,
            status=found.status,
            exit_code=found.exit_code,
            signal=found.signal,
            limit_hit=found.limit_hit,
            stdout=stdout.text(),
            stderr=stderr.text(),
            truncated=stdout.truncated or stderr.truncated,
            value=report.value,
            error=report.error if found.exit_code != 0 else None,
            usage=Usage(
                wall=ended.ended - ended.started,
                cpu=ended.cpu,
                peak_memory=peak if peak is not None else ended.peak_memory,
                stdout_bytes=stdout.total,
                stderr_bytes=stderr.total,
            ),
            enforcement=plan.enforcement,
            kill=KillProof(
                reason=reason or "ended",
                survivors=ended.survivors,
                seconds=ended.kill_seconds,
            ),
            backend=self.name,
            isolation=self.isolation.value,
            warnings=(*plan.warnings, *found.warnings, *report.warnings),
        )


def _finish(
    result: Result,
    found: collect.Collected,
    shown: tuple[Display, ...],
    timings: dict[str, float],
) -> Result:
    from dataclasses import replace

    return replace(
        result,
        files=found.files,
        displays=shown,
        timings=timings,
        warnings=(*result.warnings, *found.warnings),
    )


def _input_pipe(data: bytes) -> tuple[int | None, int]:
    """(our end or None, the guest's end); no input is an empty file, not a pipe to wait on."""
    if not data:
        return None, os.open(os.devnull, os.O_RDONLY)
    theirs, ours = os.pipe()
    return ours, theirs


def _user(text: str) -> tuple[int, int]:
    """ "1000:1000" as (uid, gid). Root is not a user to run guests as."""
    uid, _, gid = text.partition(":")
    if not (uid.isdigit() and (gid or uid).isdigit()) or int(uid) == 0:
        raise ConfigError("user", f"{text!r} is not UID:GID of an unprivileged user")
    return int(uid), int(gid or uid)


def _is_ours(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except FileNotFoundError:
        return False

"""Backend `subprocess` where there is no Linux: a plain child process with what is left to hold it.

Theory of operation
- `run` makes a private directory (work/, tmp/) and pipes, starts one process in a session of its
  own (POSIX) or in a job object (Windows), and hands both to a `Watch` (`portable_watch.py`): one
  thread a stream, one that waits for the end, one watchdog. The calling thread hears them all,
  keeps the time, looks at the cancel switch twenty times a second and decides.
- Who belongs to the run is found with `ps` (`portable_posix.py`) or known to the job object
  (`portable_windows.py`). Kill, then wait, then collect, then delete: files are read when no
  process of the run is found any more.
- Limits: the shell's `ulimit` before the program starts, a watchdog that adds up the tree four
  times a second, the job object's own. What nothing here holds is named in the report and in a
  warning, and refused if the request asked for it (`portable_plan.py`).

What it does not protect against: reading and changing whatever this user may, and the network,
except for what macOS's deprecated sandbox-exec refuses; a fork bomb or a burst of memory between
two looks; a daemon that leaves the tree unseen with a new environment; work handed to services that
run already (launchd, cron, WSL, COM). If our own process is killed on POSIX, the program runs on
until RLIMIT_CPU ends it.

Tested on Linux by `tests/backends/test_portable.py`, with the network open. macOS's sandbox-exec
and everything in `portable_windows.py` are untested.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from ..errors import BackendFailed, ConfigError, PolicyUnenforceable
from ..events import Emit
from ..files import collect
from ..files.names import checked_name
from ..policy import Isolation, Policy
from ..records import replace
from ..report import run_pieces
from ..types import Request, Result
from . import outcome, portable_plan, working_directory
from .base import Availability, Cancel, Plan
from .layered import Layered
from .pieces import Pieces
from .portable_plan import Host, Spec
from .portable_tree import Launch, Tree
from .portable_watch import Streams, Watch, disk_use
from .verdict import Ending, says_disk

_RUN_DIRECTORY = re.compile(r"belljar-(\d+)-\w+")
_OPEN_NETWORK = (
    'pass network="any" to let the program have the network, or use a backend that closes it '
    "(wasm; docker on macOS; any on Linux)"
)


class PortableBackend(Layered):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers;
    `host` replaces what this machine is found to be, for tests of the report."""

    name = "subprocess"
    isolation = Isolation.PROCESS
    layers = portable_plan.LAYERS

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        host: Host | None = None,
        user: str | None = None,
    ) -> None:
        super().__init__(disable, self.layers)
        self.host = host if host is not None else portable_plan.this_host()
        self.user = _user(user) if user is not None else None
        self._swept = False

    def probe(self) -> Availability:
        host = self.host
        if self.user is not None and not host.root:
            return Availability(
                available=False,
                reason="`user` is set, and only root can become another user",
                fix="unset `user`, or run as root on a POSIX system",
            )
        if not host.windows and host.ps is None:
            return Availability(
                available=False,
                reason="there is no ps, which finds the processes of a run",
                fix="install procps",
            )
        notes = [*portable_plan.shortcomings(host, self.user), *outcome.notices(self.disabled)]
        return Availability(available=True, notes=tuple(notes))

    def compile(self, policy: Policy, request: Request) -> Plan:
        active = frozenset(self.layers) - self.disabled
        report, warnings = portable_plan.enforcement(policy, request, self.host, active, self.user)
        try:
            self.hold(policy, report)
        except PolicyUnenforceable as refusal:
            if "network" in refusal.fields:
                refusal.fix = _OPEN_NETWORK
            raise
        spec = portable_plan.spec(policy, request, self.host, active)
        return self.planned(policy, request, report, spec, warnings)

    def run(self, plan: Plan, emit: Emit, cancel: Cancel) -> Result:
        if self._closed:
            raise BackendFailed("this backend is closed")
        began = time.monotonic()
        self._sweep_once()
        request, spec = plan.request, plan.spec
        assert isinstance(spec, Spec)
        report, shown = outcome.heard(plan, emit)
        budgets = outcome.budgets_of(plan)
        files = self._files()
        with self._directory(files) as root:
            try:
                work, tmp = self._fill(root, request, spec)
            except OSError as error:
                raise BackendFailed(f"the work directory could not be made: {error}") from error
            called = working_directory.program_file(request, spec.file or "", work)
            program = Pieces(run_pieces(request, called, budgets) if spec.worker else ())
            before = files.snapshot(work)
            tree, streams = self._start(plan, root, work, tmp)
            watch = Watch(
                run=request.id,
                tree=tree,
                streams=streams,
                program=program,
                data=request.stdin,
                timeout=plan.policy.limits.timeout,
                captured=outcome.captures(plan, capped="output_cap" in spec.layers),
                watched=spec.watched,
                directories=(work, tmp),
                report=report,
                emit=emit,
                cancel=cancel,
            )
            ended = watch.until_gone()
            found = files.changed_files(work, before, outcome.wanted(plan))
            result = outcome.of(
                plan,
                Ending(
                    wait_status=ended.reaped.wait_status,
                    reason=ended.reason,
                    disk_full=says_disk(ended.reaped.wait_status, report)
                    and outcome.nearly_all(
                        disk_use((work, tmp), plan.policy.limits.disk), plan.policy.limits.disk
                    ),
                ),
                report,
                watch.captured,
                wall=ended.ended - ended.started,
                cpu=ended.reaped.cpu,
                peak_memory=ended.reaped.peak_memory,
                survivors=ended.survivors,
                kill_seconds=ended.kill_seconds,
                found=found,
                shown=shown,
                warnings=ended.warnings,
            )
            settled = time.monotonic()
        timings = {
            "start": ended.started - began,
            "run": ended.ended - ended.started,
            "settle": settled - ended.ended,
            "clean": time.monotonic() - settled,
        }
        return replace(result, timings=timings)

    def close(self) -> None:
        self._closed = True

    # -- before the run --------------------------------------------------------------------------

    def _files(self) -> ModuleType:
        """Who copies files in and out: directory descriptors do not exist on Windows."""
        if self.host.windows:
            from . import portable_files

            return portable_files
        return collect

    def _sweep_once(self) -> None:
        """Remove what processes of ours that crashed left behind."""
        if self._swept or self.host.windows:  # there, asking whether a process lives is a signal
            return
        self._swept = True
        base = tempfile.gettempdir()
        for name in os.listdir(base):
            match = _RUN_DIRECTORY.fullmatch(name)
            path = os.path.join(base, name)
            if not match or _lives(int(match[1])) or not _is_ours(path):
                continue
            try:
                collect.remove_tree(path)
            except OSError:
                continue  # another process of ours sweeps it too, or the next one will try again

    @contextmanager
    def _directory(self, files: ModuleType) -> Iterator[str]:
        root = tempfile.mkdtemp(prefix=f"belljar-{os.getpid()}-")
        try:
            yield root
        finally:
            try:
                files.remove_tree(root)
            except OSError as error:
                raise BackendFailed(
                    f"the run's directory could not be removed: {error}", fix=f"remove {root}"
                ) from error

    def _fill(self, root: str, request: Request, spec: Spec) -> tuple[str, str]:
        """Make work/ and tmp/ below `root`, with the program, its inputs and its links."""
        work, tmp = os.path.join(root, "work"), os.path.join(root, "tmp")
        for path in (work, tmp):
            os.mkdir(path, 0o700)
        if self.host.windows:
            from .portable_windows import checked_names

            checked_names((*request.files, *(name for name, _ in spec.links)))
        collect.write_inputs(work, request.files)
        if spec.file and request.code is not None:
            collect.write_inputs(work, {spec.file: request.code.encode("utf-8", "surrogatepass")})
        for name, target in spec.links:
            link = os.path.join(work, checked_name("mounts.dst", name))
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(target, link, target_is_directory=os.path.isdir(target))
        if self.user:
            os.chmod(root, 0o711)
            for directory, names, files in os.walk(root):
                for name in (*names, *files):
                    os.chown(os.path.join(directory, name), *self.user, follow_symlinks=False)
        return work, tmp

    def _start(self, plan: Plan, root: str, work: str, tmp: str) -> tuple[Tree, Streams]:
        """Start the first process. Its ends of the pipes are closed here, ours are the Watch's."""
        spec, request = plan.spec, plan.request
        with ExitStack() as theirs, ExitStack() as ours:

            def pipe(*, guest_reads: bool) -> tuple[int, int]:
                """(our end, the guest's end)"""
                reader, writer = os.pipe()
                mine, guests = (writer, reader) if guest_reads else (reader, writer)
                ours.callback(os.close, mine)
                theirs.callback(os.close, guests)
                return mine, guests

            stdin = None
            if request.stdin:
                stdin, their_stdin = pipe(guest_reads=True)
            else:
                their_stdin = os.open(os.devnull, os.O_RDONLY)
                theirs.callback(os.close, their_stdin)
            stdout, their_stdout = pipe(guest_reads=False)
            stderr, their_stderr = pipe(guest_reads=False)
            frames: tuple[int, int] | None = None
            their_frames: tuple[int, ...] = ()
            if spec.worker:
                to_guest, their_input = pipe(guest_reads=True)
                from_guest, their_output = pipe(guest_reads=False)
                frames, their_frames = (from_guest, to_guest), (their_input, their_output)
            launch = Launch(
                argv=(
                    *(spec.seatbelt.command(os.path.realpath(root)) if spec.seatbelt else ()),
                    *working_directory.command_line(spec.argv, request, spec.file, work),
                    *self._worker_argv(their_frames),
                ),
                env={
                    **self._environment(work, tmp),
                    **working_directory.environment(request, work),
                },
                cwd=working_directory.start_in(request, work),
                stdin=their_stdin,
                stdout=their_stdout,
                stderr=their_stderr,
                frames=their_frames,
                token=secrets.token_hex(16),
                ps=self.host.ps or "",
                descendants="descendants" in spec.layers,
                user=self.user,
                ulimits=spec.ulimits,
                job=spec.job,
            )
            try:
                tree = self._tree(launch)
            except OSError as error:
                raise BackendFailed(f"the program could not be started: {error}") from error
            ours.pop_all()
        return tree, Streams(stdout=stdout, stderr=stderr, stdin=stdin, frames=frames)

    def _worker_argv(self, frames: tuple[int, ...]) -> tuple[str, ...]:
        if not frames:
            return ()
        if self.host.windows:
            from .portable_windows import worker_code
        else:
            from .portable_posix import worker_code
        return ("-c", worker_code(*frames))

    def _tree(self, launch: Launch) -> Tree:
        if self.host.windows:
            from .portable_windows import WindowsTree

            return WindowsTree(launch)
        from .portable_posix import PosixTree

        return PosixTree(launch)

    def _environment(self, work: str, tmp: str) -> dict[str, str]:
        common = {"PATH": self.host.path, "HOME": work, "PYTHONDONTWRITEBYTECODE": "1"}
        if self.host.windows:
            from .portable_windows import environment

            return {**common, **environment(work, tmp)}
        utf8 = "en_US.UTF-8" if self.host.platform == "darwin" else "C.UTF-8"
        return {**common, "TMPDIR": tmp, "LANG": utf8}


def _user(text: str) -> tuple[int, int]:
    """ "1000:1000" as (uid, gid). Root is not a user to run guests as."""
    uid, _, gid = text.partition(":")
    if not (uid.isdigit() and (gid or uid).isdigit()) or int(uid) == 0:
        raise ConfigError("user", f"{text!r} is not UID:GID of an unprivileged user")
    return int(uid), int(gid or uid)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_ours(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except FileNotFoundError:
        return False

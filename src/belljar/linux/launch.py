"""The supervisor of one run: a small process between the host and the guest.

Theory of operation

    host ──exec──> supervisor (this file; no secrets, empty environment, one thread)
                     │ enters user, pid, net, ipc and uts namespaces           [if asked]
                     └─fork─> init, pid 1 of the new pid namespace
                                │ joins the control groups, own mount namespace, own /proc
                                └─fork─> guest: rlimits, no capabilities, no_new_privs,
                                         Landlock, seccomp, then exec
    Without a pid namespace there is no init: the supervisor forks the guest itself and is a
    subreaper, so that every orphan of the guest becomes its child.

Descriptors: 0, 1, 2 and the frame descriptor are the guest's and pass through; the supervisor and
init close their copies, so that end of file means that the guest's tree is gone. The control
descriptor is ours alone. The host writes one byte to it, or closes it by dying, to have the run
killed. We write lines: `started T`, `failed WHY` (no guest has run), `broken WHY`, `exit ...`.

Who kills whom: killing init makes the kernel kill the whole pid namespace, and waiting for init
returns only when that is done. Without one we kill all descendants again and again until the
kernel says that we have no children left. Both are proofs, not hopes. If we die, init dies with us
(PR_SET_PDEATHSIG) and the namespace with it.

Everything between fork and exec happens in a process that the guest does not share: its exit
status is read by wait4 here or in init, never reported by the guest.

Start-up time is most of a short run: this module and what it imports stay away from json, enum,
typing, socket and the like. The message from the host is a marshalled dict; it comes from the same
interpreter, from the process that started us.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import sys
import time

from . import footprint, landlock, namespaces, own_frames, pace, root, seccomp, syscalls, tree
from .bare import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


def main(control: int, kind: type[Run] | None = None) -> None:
    """Read the launch message from `control`, run one guest, report, exit."""
    reset_signals()
    spec = marshal.loads(read_message(control))
    run: Run | None = None
    try:
        run = (kind or Run)(control, spec)
        run.supervise()
    except Exception as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        say_failure(control, run, error)
    os._exit(0)  # nothing to finalise, and the host is waiting


def say_failure(control: int, run: Run | None, error: BaseException) -> None:
    """`failed` if it is certain that no guest was started: the host may try another backend."""
    word = "broken" if run is not None and run.child >= 0 else "failed"
    _say(control, f"{word} {type(error).__name__}: {error}")


def reset_signals() -> None:
    """Whatever the host ignores, blocks or handles, the run begins like any process.

    Python's own handler for SIGINT must go, too: init would let the guest end it by that signal.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, 32, 33):
            signal.signal(number, signal.SIG_DFL)
    syscalls.reset_library_signals()


def read_message(fd: int) -> bytes:
    return _read_exactly(fd, int.from_bytes(_read_exactly(fd, 4), "big"))


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            os._exit(0)  # the host is gone before anything started
        data += piece
    return data


def _say(control: int, line: str) -> None:
    try:
        os.write(control, line.replace("\n", " ").encode("utf-8", "replace") + b"\n")
    except BrokenPipeError:  # the host is gone; what remains is to end
        return


class Run:
    """One guest from fork to proven end."""

    child = -1

    def __init__(self, control: int, spec: dict[str, Any]) -> None:
        self.control = control
        self.spec = spec
        self.theirs = [spec["frame_fd"]] if spec["frame_fd"] >= 0 else []
        self.peak = footprint.Peak()
        self.left = 0
        self.reason = ""
        self._last_capability: int | None = None

    def supervise(self) -> None:
        spec = self.spec
        groups = self._groups()
        if spec["user"]:
            uid, gid = spec["user"]
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
                raise OSError(1, f"could not become user {uid}:{gid}")
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else /proc/self/uid_map is root's
        if spec["namespaces"]:
            namespaces.enter(network=spec["empty_network"])
        elif spec["subreaper"]:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)

        errors, error_writer = os.pipe()
        statuses, status_writer = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(self.control)
            self._child(groups, error_writer, status_writer)
        for fd in (*groups, error_writer, status_writer, *self.theirs):
            os.close(fd)
        _forget_stdio()
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)

        with open(errors, "rb") as failures:
            problem = failures.read()  # end of file: the exec succeeded and closed it
        problem = problem or self._not_ready()
        if problem:
            self._kill()
            _say(self.control, "failed " + problem.decode("utf-8", "replace"))
            return
        start = time.monotonic()
        _say(self.control, f"started {start:.6f}")

        spent = 0.0
        if not self._wait_for_end():
            # Now: what a killed namespace's first process has not waited for is counted nowhere.
            spent = tree.cpu_seconds(tree.descendants())
            self._kill()
        ended = time.monotonic()
        status, survivors = self._settle(statuses)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = max(spent, usage.ru_utime + usage.ru_stime)
        done = time.monotonic()
        peak = max(self.peak.value, usage.ru_maxrss * 1024)
        _say(
            self.control,
            f"exit {status} {seconds:.6f} {peak} {start:.6f} {ended:.6f} "
            f"{survivors} {done - ended:.6f} {self.reason or '-'} {self.left}",
        )

    def _groups(self) -> list[int]:
        """Descriptors to join the control groups by."""
        return [os.open(path, os.O_WRONLY) for path in self.spec["cgroup"]]

    # -- the guest's side of the fork ------------------------------------------------------------

    def _child(self, groups: list[int], error_writer: int, status_writer: int) -> NoReturn:
        try:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
            for fd in groups:
                os.write(fd, b"0")
                os.close(fd)
            if self.spec["namespaces"]:
                self._arrange_mounts()
                guest = os.fork()
                if guest:
                    os.close(error_writer)
                    count = self.spec["own_proc"] and not self.spec["cgroup"]
                    _be_init(guest, status_writer, self.spec["frame_fd"], count=count)
                syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
            self._become_guest()
        except OSError as error:
            os.write(error_writer, str(error).encode("utf-8", "replace"))
        except Exception as error:  # noqa: BLE001 - reported by the parent, then to the host
            told = f"{type(error).__name__}: {error}"
            os.write(error_writer, told.encode("utf-8", "replace"))
        os._exit(120)

    def _arrange_mounts(self) -> None:
        spec = self.spec
        namespaces.own_mounts()
        if spec["private_tmp"]:
            keep = [*spec["named"], *spec["read_only"], *spec["read_write"]]
            namespaces.private_tmp("/tmp", spec["private_tmp"], keep, spec["resolved"])
        if not spec["read_only_mounts"]:
            for path in spec["freeze"]:
                namespaces.freeze(path)
        for path in spec["hide"]:
            namespaces.hide(path)
        if spec["shm_size"] and os.path.isdir("/dev/shm"):
            namespaces.memory_directory("/dev/shm", spec["shm_size"])
        if spec["own_proc"]:
            self._last_capability = syscalls.last_capability()  # it is covered then
            root.processes_and(spec["proc"], spec["scratch"], None)
        if spec["read_only_mounts"]:
            namespaces.read_only_except(spec["read_write"], spec["freeze"])

    def _become_guest(self) -> NoReturn:
        spec = self.spec
        os.setsid()
        os.chdir(spec["cwd"])
        os.umask(0o077)
        if spec["affinity"]:
            os.sched_setaffinity(0, spec["affinity"])
        if spec["drop_capabilities"]:
            syscalls.drop_capabilities(self._last_capability)
        syscalls.no_new_privileges()
        if spec["landlock"]:
            landlock.restrict(
                spec["read_only"], spec["read_write"], spec["devices"], resolved=spec["resolved"]
            )
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; others should not
        if spec["frame_fd"] >= 0:
            os.set_inheritable(spec["frame_fd"], True)
        # Last but the filter: a small limit on descriptors is the guest's to run into, not ours.
        for number, value in spec["rlimits"]:
            # An operator's own limit may be lower than ours: then it stays.
            hard = resource.getrlimit(number)[1]
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (least, least))
        if spec["seccomp"]:
            seccomp.install(spec["seccomp"])
        if spec["filter"]:
            seccomp.add(spec["filter"])
        os.execve(spec["argv"][0], spec["argv"], spec["env"])

    def _not_ready(self) -> bytes:
        """What is wrong with what was started; nothing, as soon as the guest is the program."""
        return b""

    # -- watching and ending ---------------------------------------------------------------------

    told_by = -1  # a descriptor that can be read from when the guest has ended
    listener = -1  # one that can be read from when a call that a filter stopped waits for `_answer`

    def _wait_for_end(self) -> bool:
        """True when the guest ended by itself; False when it must be killed (`reason` says why)."""
        pidfd = os.pidfd_open(self.child)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        if self.told_by >= 0:
            poll.register(self.told_by, select.POLLIN)
        if self.listener >= 0:
            poll.register(self.listener, select.POLLIN)
        watch = self.spec["watch"]
        next_look = time.monotonic() + (watch["every"] if watch else 0)
        try:
            while True:
                wait = max(0.0, next_look - time.monotonic()) * 1000 if watch else None
                ready = dict(poll.poll(wait))
                if pidfd in ready or self.told_by in ready:
                    return True
                if self.control in ready:
                    self.reason = "host"
                    return False
                if ready.get(self.listener, 0) & select.POLLIN:
                    self._answer()
                if watch and time.monotonic() >= next_look:
                    if self._over(watch):
                        return False
                    next_look = time.monotonic() + watch["every"]
        finally:
            os.close(pidfd)

    def _answer(self) -> None:
        """Take one stopped call and let it return."""

    def _over(self, watch: dict[str, Any]) -> bool:
        """Whether the tree is past a limit that only we hold."""
        members = tree.descendants()
        if (
            watch["processes"]
            and len(members) - (1 if self.spec["namespaces"] else 0) > watch["processes"]
        ):
            self.reason = "pids"
        elif watch["memory"] and self._memory(members, watch["memory"]) > watch["memory"]:
            self.reason = "oom"
        elif watch["cpu"] and not self._keeps_pace(watch):
            self.reason = "cpu"
        elif watch["disk"] and self._disk_is_full(watch):
            self.reason = "disk"
        return bool(self.reason)

    _pace: pace.Pace | None = None

    def _keeps_pace(self, watch: dict[str, Any]) -> bool:
        if self._pace is None:
            self._pace = pace.Pace(watch["rate"], [])
        return self._pace.hold(tree.descendants) and self._pace.total <= watch["cpu"]

    _next_disk_look = 0.0

    def _disk_is_full(self, watch: dict[str, Any]) -> bool:
        # Looking costs a stat a file: often enough to matter, seldom enough not to be the load.
        began = time.monotonic()
        if began < self._next_disk_look:
            return False
        used = tree.disk_use(watch["paths"], watch["disk"])
        ended = time.monotonic()
        self._next_disk_look = ended + max(0.2, 4 * (ended - began))
        return bool(used > watch["disk"])

    _socket = 0

    def _memory(self, members: list[int], limit: int) -> int:
        if not self._socket:
            self._socket = footprint.largest_socket()
        own_network = self.spec["watch"].get("own_network", False)
        files = self._files()
        room = limit - files
        total = files + footprint.of(members, room, self._socket, own_network=own_network)
        self.peak.note(total, members, files)
        return total

    def _files(self) -> int:
        """Bytes of the run's own memory file systems."""
        return 0

    def _kill(self) -> None:
        if self.spec["namespaces"]:
            os.kill(self.child, 9)
            return
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            members = tree.descendants() if self.spec["subreaper"] else [self.child]
            for pid in members:
                try:
                    os.kill(pid, 9)
                except (ProcessLookupError, PermissionError):
                    continue  # gone; or a set-id tool's own process, which ends with its children
            if not self._reap():
                return

    _guest_status = -1

    def _reap(self) -> bool:
        """Collect the dead; False when there is nobody left, dead or alive."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                time.sleep(0.0005)
                return True
            if pid == self.child:
                self._guest_status = status

    def _settle(self, statuses: int) -> tuple[int, int]:
        """After the end of the guest: end the rest of the tree; (wait status, survivors)."""
        if self.spec["namespaces"]:
            _, init_status = os.waitpid(self.child, 0)  # the kernel has emptied the namespace
            with open(statuses, "rb") as answer:
                raw = answer.read().split()
            if raw and not self.reason:
                self.left = int(raw[1])
            return (int(raw[0]) if raw else init_status), 0
        self._kill()
        if self._guest_status < 0:
            raise OSError(16, "the guest does not die")
        return self._guest_status, len(tree.descendants()) if self.spec["subreaper"] else 0


def _be_init(guest: int, status_writer: int, frame_fd: int, *, count: bool) -> NoReturn:
    """Pid 1: reap everybody, and pass the guest's wait status on. Our end is everybody's end.

    `count`: and how many processes there are besides, because no control group counts forks.
    """
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _forget_stdio()
    if frame_fd >= 0:
        os.close(frame_fd)
    while True:
        pid, status = os.wait()
        if pid == guest:
            left = sum(map(str.isdigit, os.listdir("/proc"))) - 1 if count else 0
            os.write(status_writer, b"%d %d" % (status, left))
            os._exit(0)


def _forget_stdio() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


own_frames.without_path(Run.supervise)

if __name__ == "__main__":
    main(int(sys.argv[1]))

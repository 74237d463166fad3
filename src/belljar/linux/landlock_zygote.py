"""A warm interpreter without a jail: it forks a supervisor and a guest for every run.

Theory of operation

    host ──exec──> zygote (this file): an ordinary process that gave up what a fork server can:
                     │ empty environment, one thread, no capabilities, no_new_privs, the jail's
                     │ BASE filter. Program code never runs in here.
                     └─fork─> supervisor of a run: `launch.Run`, the subprocess backend's own, which
                                │ waits, counts, kills and reports; a subreaper
                                └─fork─> guest (landlock_guest.py): session, rlimits, Landlock,
                                         seccomp, a check that all of it is on, then the program

Descriptors: a message on the control socket (SOCK_SEQPACKET) carries those of one run: its own
control socket, the guest's 0, 1, 2, its frame socket if it has one, and the files by which a
control group is joined. The run's message comes over its own control socket and so do the words of
its supervisor, as `launch.py` describes; the guest never has that socket. The guest sends its
supervisor the descriptor that answers its calls of chmod, and keeps none (`modes.py`).

Who kills whom: the host writes to a run's control socket, or closes it by dying, and the supervisor
kills all its descendants until the kernel says that it has none. When the host closes our control
socket we end; runs that are still going on are their supervisors' business. A guest dies with its
supervisor (PR_SET_PDEATHSIG), and cannot signal it: Landlock scopes signals from ABI 6 on, and
before that seccomp does, for a guest that is one process.
"""

from __future__ import annotations

import array
import gc
import marshal
import os
import sys

from . import landlock_guest, launch, leave, modes, own_frames, seccomp, seccomp_jail, syscalls
from .bare import signal, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_MESSAGE = 1 << 16
_PF_EXITING = 4
_LOOKS_IN_VAIN = 3


def main(control: int) -> None:
    """Become the zygote that the first message on `control` describes; serve until it closes."""
    sock = socket.socket(fileno=control)
    spec: dict[str, Any] = marshal.loads(sock.recv(_MESSAGE))
    try:
        settled = _settle(spec)
    except Exception as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        sock.send(f"failed {type(error).__name__}: {error}".encode())
        os._exit(1)
    sock.send(b"ready")
    _serve(sock, settled)


def _settle(spec: dict[str, Any]) -> landlock_guest.Settled:
    """Everything that runs share and that can be done beforehand; the BASE filter comes last."""
    settled = landlock_guest.Settled()
    settled.layers = frozenset(spec["layers"])
    if spec["user"]:
        uid, gid = spec["user"]
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else our own /proc files are root's
    _preload(settled, spec)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"preloading started {threads - 1} threads; such a process cannot fork")
    if "capabilities" in settled.layers:
        syscalls.drop_capabilities()
    syscalls.no_new_privileges()
    if "seccomp" in settled.layers:
        seccomp.install(seccomp_jail.base(openat2=True))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects our dead by itself
    os.environ.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    settled.loaded = leave.Loaded()
    gc.collect()
    gc.freeze()
    gc.disable()
    return settled


def _preload(settled: landlock_guest.Settled, spec: dict[str, Any]) -> None:
    import importlib

    package = type(sys)("belljar_guest")
    package.__path__ = [spec["guest"]]
    sys.modules["belljar_guest"] = package
    for name in ("failures", "shows", "values"):
        importlib.import_module(f"belljar_guest.{name}")
    settled.worker = importlib.import_module("belljar_guest.worker").main
    for name in spec["preload"]:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - somebody else's module, which may do anything
            continue  # the program will hear of it if it asks
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        settled.reseed = numpy.random.seed


def _serve(control: socket.socket, settled: landlock_guest.Settled) -> NoReturn:
    while True:
        message, fds = _receive(control)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            _supervise(fds, message == b"frames", settled)
        for fd in fds:
            os.close(fd)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    message, ancillary, _, _ = sock.recvmsg(_MESSAGE, socket.CMSG_SPACE(4 * 16))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    return message, list(fds)


def _supervise(fds: list[int], framed: bool, settled: landlock_guest.Settled) -> NoReturn:
    control, *standard = fds[:4]
    frames, groups = (fds[4], fds[5:]) if framed else (-1, fds[4:])
    run: Kept | None = None
    try:
        launch.reset_signals()
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
            os.close(fd)
        spec = marshal.loads(launch.read_message(control))
        spec["frame_fd"] = frames
        run = Kept(control, spec, settled, groups)
        run.supervise()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        launch.say_failure(control, run, error)
    os._exit(0)


class Kept(launch.Run):
    """One guest from fork to proven end: without an exec, and with an eye on two more things."""

    def __init__(
        self,
        control: int,
        spec: dict[str, Any],
        settled: landlock_guest.Settled,
        groups: list[int],
    ) -> None:
        super().__init__(control, spec)
        self._settled = settled
        self._group_fds = groups
        self._modes: modes.Modes | None = None
        self._from_guest, self._to_supervisor = (
            end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )

    def _groups(self) -> list[int]:
        return self._group_fds

    def _child(self, groups: list[int], error_writer: int, status_writer: int) -> NoReturn:
        errors = error_writer
        try:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
            for fd in groups:
                os.write(fd, b"0")
            errors = landlock_guest.arrange_descriptors(
                self.spec["frame_fd"], error_writer, self._to_supervisor
            )
            landlock_guest.be_guest(self.spec, self._settled)
        except BaseException as error:  # noqa: BLE001 - reported by the parent, then to the host
            os.write(errors, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
        os._exit(120)

    def _not_ready(self) -> bytes:
        os.close(self._to_supervisor)
        self.listener = modes.listener_from(self._from_guest)
        if self.listener >= 0:
            self._modes = modes.Modes(self.listener, self.spec["read_write"])
        return b""

    def _answer(self) -> None:
        if self._modes is not None:
            self._modes.answer()

    def _over(self, watch: dict[str, Any]) -> bool:
        if watch["threads"] and _threads(self.child) > watch["threads"]:
            self.reason = "pids"
        elif watch["written"] and self._written() > watch["written"]:
            self.reason = "disk"
        return bool(self.reason) or super()._over(watch)

    _unreadable = 0

    def _written(self) -> int:
        """Bytes that the guest has had written to disks, as the kernel counts them."""
        try:
            with open(f"/proc/{self.child}/io", "rb") as file:
                words = file.read().split()
        except PermissionError:
            # It has closed this file to us and so is past any limit; or it is just ending.
            self._unreadable = 0 if _ending(self.child) else self._unreadable + 1
            return 1 << 62 if self._unreadable >= _LOOKS_IN_VAIN else 0
        except OSError:  # it ended while we looked
            return 0
        self._unreadable = 0
        numbers = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        return numbers[b"write_bytes:"] - numbers[b"cancelled_write_bytes:"]


def _ending(pid: int) -> bool:
    """Whether the kernel is taking down every thread of the process."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if not int(file.read().rsplit(b")", 1)[1].split()[6]) & _PF_EXITING:
                    return False
    except (OSError, IndexError):  # it ended while we looked
        return True
    return True


def _threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rsplit(b")", 1)[1].split()[17])
    except (OSError, IndexError):  # it ended while we looked
        return 0


own_frames.without_path(main, _serve, _supervise, Kept._child)

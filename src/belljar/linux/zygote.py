"""A warm interpreter in a jail of its own, whose slots fork one inner jail for every run.

Theory of operation

    host ──exec──> launcher: builds the root, enters the namespaces, waits for the zygote and ends
                     └─fork─> zygote (this file): pid 1 of the outer pid namespace. Empty
                     environment,
                              no secrets, one thread, modules preloaded, BASE filter on
                                └─fork─> slot: has joined the control groups of its runs (slot.py)
                                           └─fork─> guest, in a pid namespace of its own
                                                    (run_guest.py)

Before the host says which zygote it wants, which takes it as long as us, we load the worker and run
an empty program with it. Nothing of that depends on the host's word, and no program is known yet.

The outer jail is made once: user, pid, mount, ipc, uts and (unless the policy opens it) network
namespaces, a root of our own (root.py), no_new_privs. As root its user namespace maps a high range
of host ids, so that nobody in there is anybody outside, and every run gets an id of its own; an
ordinary user has one id to map, his own.

The host writes marshalled dicts on the control socket (SOCK_SEQPACKET, descriptors ride along); it
is the same interpreter on both sides, and nobody else holds that socket. We answer once, with one
line. Everything about a run goes over the shelf socket, straight from its slot.

Who kills whom: when the host closes the control socket, or dies, we exit; as we are pid 1 the
kernel kills every run. When the launcher dies we die (PR_SET_PDEATHSIG). Program code never runs in
here.
"""

from __future__ import annotations

import builtins
import gc
import marshal
import os
import sys

from . import landlock, leave, own_frames, root, run_guest, seccomp, seccomp_jail, slot, syscalls
from .bare import signal, socket

try:  # loaded in every process; the public names are not
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import SourceFileLoader, spec_from_file_location
except ImportError:
    from importlib.machinery import SourceFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

_ALL = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)


# The worker and what it imports, in that order.
_WORKER = ("protocol", "failures", "marked", "shows", "values", "worker")


def main(control: int, guest: str, worker: bool) -> None:
    """Become the zygote that the first message on `control` describes; serve until it closes.

    Before that comes, which takes the host as long as us, all that it does not decide is done.
    `guest` is where the worker's files are.
    """
    os.chdir("/")
    syscalls.close_from(control + 1)
    sock = socket.socket(fileno=control)
    settled = run_guest.Settled()
    if worker:
        _load_worker(settled, guest)
    sys.dont_write_bytecode = True
    base = seccomp_jail.base() if seccomp.supported() else b""
    gc.collect()
    gc.freeze()
    helper = _MappingHelper() if os.geteuid() == 0 else None
    message = sock.recv(slot.MESSAGE)
    if not message:  # started ahead, and not needed
        if helper is not None:
            helper.end()
        os._exit(0)
    spec: dict[str, Any] = marshal.loads(message)
    try:
        _enter(spec, sock, helper)
        _settle(settled, spec, base)
    except Exception as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        sock.send(f"failed {type(error).__name__}: {error}".encode())
        os._exit(1)
    sock.send(b"ready")
    _serve(sock, settled, spec["ids"][1] if spec["ids"] else 0)


def _enter(spec: dict[str, Any], control: socket.socket, helper: _MappingHelper | None) -> None:
    """Returns only in the zygote proper."""
    flags = _ALL if spec["open_network"] else _ALL | syscalls.CLONE_NEWNET
    if "namespaces" not in spec["layers"]:
        flags &= ~(syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWNET)
    if spec["ids"]:
        assert helper is not None  # only root has ids to give away
        syscalls.unshare(syscalls.CLONE_NEWNS)
        root.build(spec["view"])
        syscalls.unshare(flags)
        if not helper.end(b"0 %d %d" % tuple(spec["ids"])):
            raise OSError(1, "the user ids could not be mapped")
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    else:
        if helper is not None:
            helper.end()
        uid, gid = os.geteuid(), os.getegid()
        syscalls.unshare(flags)
        _write("/proc/self/setgroups", b"deny")
        _write("/proc/self/uid_map", b"0 %d 1" % uid)
        _write("/proc/self/gid_map", b"0 %d 1" % gid)
        root.build(spec["view"])
    child = os.fork()
    if child:
        control.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = os.waitpid(child, 0)[1]
        os._exit(min(255, abs(os.waitstatus_to_exitcode(status))))
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
    root.own_proc()
    if flags & syscalls.CLONE_NEWUTS:
        syscalls.sethostname("belljar")


class _MappingHelper:
    """A child that stays outside and writes our id maps when we are inside and say which."""

    def __init__(self) -> None:
        reader, self._orders = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._orders)
            status = 1
            try:
                if ids := os.read(reader, 100):
                    for name in ("uid_map", "gid_map"):
                        _write(f"/proc/{os.getppid()}/{name}", ids)
                    status = 0
            finally:
                os._exit(status)
        os.close(reader)

    def end(self, ids: bytes = b"") -> bool:
        """Whether it has written `ids`; it is gone then."""
        if ids:
            os.write(self._orders, ids)
        os.close(self._orders)
        return os.waitpid(self._pid, 0)[1] == 0


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _settle(settled: run_guest.Settled, spec: dict[str, Any], base: bytes) -> None:
    """Everything that runs share and that can be done beforehand; the BASE filter comes last."""
    settled.layers = frozenset(spec["layers"])
    settled.last_capability = spec["last_capability"]
    if spec["preload"]:
        root.scratch()
        _preload(settled, spec["preload"])
        syscalls.umount(root.RUN)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"preloading started {threads - 1} threads; such a process cannot fork")
    if "landlock" in settled.layers:
        # A shared map of /dev/zero is memory that only a control group counts.
        uncounted = () if "cgroup" in settled.layers else ("zero",)
        devices = [f"/dev/{name}" for name in root.DEVICES if name not in uncounted]
        writable = [root.SANDBOX, *spec["writable"]]
        for tcp in (False, True):
            settled.rulesets[tcp] = landlock.build(("/",), writable, devices, close_network=not tcp)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects our dead by itself
    syscalls.no_new_privileges()
    if "seccomp" in settled.layers:
        seccomp.install(base)
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    settled.loaded = leave.Loaded()
    # What most programs ask for; what the libraries were told when they were loaded is gone.
    run_guest.set_environment(settled, spec["env"])
    gc.collect()
    syscalls.trim_heap()  # every page that we have is one more that each fork copies
    gc.freeze()
    gc.disable()
    if spec["preload"]:
        _gather_memory()


def _gather_memory() -> None:
    """Have what large libraries made in huge pages: a fork copies and an end frees fewer entries.

    Where the kernel cannot, all is as before.
    """
    huge = 2 << 20
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        place, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(number, 16) for number in place.split("-"))
            first = -(-first // huge) * huge
            while first + huge <= last:
                syscalls.gather_pages(first, huge)
                first += huge


def _load_worker(settled: run_guest.Settled, directory: str) -> None:
    """Import the worker from `directory`, as if from where guests see it: they can see tracebacks.

    In there it would take longer, and nothing could be compiled for the next time.
    """
    package = sys.modules["belljar_guest"] = type(sys)("belljar_guest")
    package.__path__ = [root.GUEST_DIR]
    for name in _WORKER:
        full = f"belljar_guest.{name}"
        code = SourceFileLoader(full, f"{directory}/{name}.py").get_code(full)
        seen = f"{root.GUEST_DIR}/{name}.py"
        spec = spec_from_file_location(full, seen)
        assert code is not None and spec is not None
        module = sys.modules[full] = module_from_spec(spec)
        setattr(package, name, module)
        exec(_seen_at(seen, code), module.__dict__)
    settled.worker = module
    _rehearse(settled)


def _seen_at(path: str, code: CodeType) -> CodeType:
    """`code`, and all that is defined in it, as if it had been compiled from `path`."""
    inner = (_seen_at(path, each) if type(each) is type(code) else each for each in code.co_consts)
    return code.replace(co_filename=path, co_consts=tuple(inner))


def _preload(settled: run_guest.Settled, names: list[str]) -> None:
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - somebody else's module, which may do anything
            continue  # the program will hear of it if it asks
    _rehearse(settled)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        settled.reseed = numpy.random.seed


def _rehearse(settled: run_guest.Settled) -> None:
    settled.loaded = leave.Loaded()
    settled.rehearse = _rehearsal(sys.modules["belljar_guest.worker"], settled)
    program = "import sys\nprint(end='')\n1"
    if "pandas" in sys.modules:
        program = _TABLE + program
    if "matplotlib.pyplot" in sys.modules:
        program = _PLOT + program
    settled.rehearsal = {"code": program, "args": [], "filename": "main.py", "context": {}}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    settled.rehearse(theirs.detach(), settled.rehearsal)
    ours.close()


# What most programs do that import pandas: it builds much of itself on first use.
_TABLE = """
import pandas
frame = pandas.DataFrame({"a": [1, 2, 2], "b": [0.5, 1.5, 2.5], "c": ["x", "y", "y"]})
frame.groupby("c")["b"].mean()
frame["a"].sum(), frame.describe(), frame[frame["b"] > 1].sort_values("a")
str(frame), frame.to_csv(None)
"""


# What draws first finds fonts, and builds much of a figure's parts.
_PLOT = """
import io, matplotlib.pyplot
figure, axes = matplotlib.pyplot.subplots()
axes.plot([1, 2], [2, 1], label="a")
axes.set_title("a")
axes.legend()
figure.savefig(io.BytesIO(), format="png")
matplotlib.pyplot.close(figure)
"""


def _rehearsal(worker: Any, settled: run_guest.Settled) -> Any:
    """What a guest does while it waits: run a program that does nothing through everything."""

    kept: list[Any] = []

    def rehearse(frames: int, run: dict[str, Any]) -> None:
        before, path, argv = sys.modules["__main__"], sys.path[:], sys.argv
        worker.main(frames, None, run)
        assert settled.loaded is not None
        leave.let_go_of_files(settled.loaded, run_guest.more_are_open)
        # Not to be freed: giving so large a block back would make malloc keep and clear the next.
        kept.append(builtins.display)  # type: ignore[attr-defined]
        del builtins.display  # type: ignore[attr-defined]
        sys.modules["__main__"] = before
        sys.path[:] = path
        sys.argv = argv

    return rehearse


def _serve(control: socket.socket, settled: run_guest.Settled, ids: int) -> None:
    """Start slots until the host closes the control socket: then we end, and all with us."""
    number = 0
    while True:
        message, fds = slot.receive(control)
        if not message:
            os._exit(0)
        orders, shelf, *groups = fds
        if os.fork() == 0:
            control.close()
            for fd in groups:
                os.write(fd, b"0")
                os.close(fd)
            slot.serve(orders, shelf, settled, number, ids)
        for fd in fds:
            os.close(fd)
        number += 1


own_frames.without_path(main, _serve)

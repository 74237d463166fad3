"""Our first process in somebody else's sandbox: it adds our layers, starts the guest and waits.

It is started by the tool as `python -I -S -c ...`, so it imports only what stands beside it. What
it needs to know is the first message on the frame socket; the guest's start message, its files and
the program follow and are left there for the guest. `launch_tool.py` has the theory of operation.

The stage is pid 1 of the sandbox's pid namespace where the tool lets it (no signal from inside
reaches it, and its end is everybody's end), else a subreaper. The guest is its child, and keeps
0, 1, 2 and the frame socket, 3; everything else is closed before it says that it is ready.
"""

from __future__ import annotations

import array
import marshal
import os
import resource

from . import landlock, launch, mounted, namespaces, run_guest, seccomp, syscalls
from .bare import signal, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


def main(tell: int, frames: int, stdin: int, stdout: int, stderr: int) -> NoReturn:
    say = socket.socket(fileno=tell)
    try:
        launch.reset_signals()
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
        settings: dict[str, Any] = marshal.loads(launch.read_message(frames))
        _be_elsewhere(settings["outside"])  # before anything is touched
        _see_what_was_meant(settings["sources"])
        os.umask(0o077)
        for path in settings["directories"]:
            os.makedirs(path, 0o700, exist_ok=True)
            os.chmod(path, 0o700)
        for path, target in settings["links"]:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)
        work = os.open(settings["work"], os.O_RDONLY | os.O_DIRECTORY)
        host = socket.socket(fileno=frames)
        host.sendmsg([b"w"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (work,)))])
        host.detach()
        os.close(work)
        if os.getpid() != 1:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # nobody of this user looks into us
        answer, ready = os.pipe()
        guest = os.fork()
        if guest == 0:
            _be_guest(settings, (stdin, stdout, stderr, frames), ready)
        os.close(ready)
        with open(answer, "rb") as reader:
            problem = reader.read()
        if problem != b"ready":
            raise OSError(0, problem.decode("utf-8", "replace") or "the guest died in its set-up")
        scratch = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in settings["scratch"]]
        passed = array.array("i", scratch)
        say.sendmsg([b"ready"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        for fd in scratch:
            os.close(fd)
    except BaseException as error:  # noqa: BLE001 - the host must hear of it, whatever it is
        say.sendall(f"failed {type(error).__name__}: {error}".encode("utf-8", "replace"))
        os._exit(1)
    for fd in {stdin, stdout, stderr, frames}:
        os.close(fd)
    while True:
        pid, status = os.wait()
        if pid == guest:
            break
    # Those besides us, and besides the tool's own init.
    left = sum(map(str.isdigit, os.listdir("/proc"))) - (1 if os.getpid() == 1 else 2)
    try:
        say.sendall(b"%d %d\n" % (status, left))
    except BrokenPipeError:
        os._exit(0)  # nobody is there to hear it
    if os.getpid() != 1:
        _end_everybody()
    os._exit(0)


def _be_elsewhere(outside: dict[str, str]) -> None:
    """Fail in the host's own namespaces: a tool may start a program without any of its own."""
    same = [kind for kind, name in outside.items() if os.readlink(f"/proc/self/ns/{kind}") == name]
    if same:
        raise OSError(0, f"these namespaces are the host's: {', '.join(same)}")


def _see_what_was_meant(sources: list[tuple[str, int, int]]) -> None:
    """Fail where the tool's mounts show another file: a link may have led it elsewhere."""
    for path, device, inode in sources:
        try:
            found = os.stat(path)
        except PermissionError:
            continue  # nor can the guest, whose user we are
        if (found.st_dev, found.st_ino) != (device, inode):
            raise OSError(0, f"{path!r} shows another file than was asked for")


def _end_everybody() -> None:
    """Without being pid 1: all that are left in this namespace, but for its init."""
    while True:
        try:
            os.kill(-1, 9)
        except (ProcessLookupError, PermissionError):
            pass  # there is nobody, or only the tool's own init
        try:
            os.wait()
        except ChildProcessError:
            return


def _be_guest(settings: dict[str, Any], own: tuple[int, ...], ready: int) -> NoReturn:
    try:
        # Out of the way of each other first, then side by side from 0 on.
        kept = [syscalls.high(fd) for fd in (*own, ready)]
        for number, fd in enumerate(kept):
            os.dup2(fd, number, inheritable=number < run_guest.FRAMES)
        ready = run_guest.FRAMES + 1
        syscalls.close_from(ready + 1)
        _lose_everything(settings)
        _check(settings)
        os.write(ready, b"ready")
        os.close(ready)
    except BaseException as error:  # noqa: BLE001 - told to the stage, and through it to the host
        os.write(ready, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
        os._exit(120)
    try:
        start = run_guest.receive_start()
    except EOFError:
        os._exit(0)  # the host is gone
    run_guest.go_to_start(start)
    run_guest.execute(start)


def _lose_everything(settings: dict[str, Any]) -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
    os.setsid()
    os.chdir(settings["work"])
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    try:
        run_guest.be_the_first_to_go()
    except OSError:
        pass  # a read-only /proc: then the kernel chooses by size, which comes to the same
    if settings["own_user"]:
        namespaces.own_user()
    if settings["affinity"]:
        os.sched_setaffinity(0, settings["affinity"])
    for number, value in settings["rlimits"]:
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))
    if any(_capabilities(_status())):
        syscalls.drop_capabilities(settings["last_capability"])
    syscalls.no_new_privileges()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if settings["landlock"]:
        landlock.restrict(*settings["landlock"])
    for program in settings["filters"]:
        seccomp.install(program)


def _status() -> dict[str, str]:
    with open("/proc/self/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def _capabilities(facts: dict[str, str]) -> list[int]:
    return [int(facts[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]


def _check(settings: dict[str, Any]) -> None:
    """Every layer that should be on, is on: asked of the kernel, not of our own code."""
    facts = _status()
    wrong = []
    *others, bounding, ambient = _capabilities(facts)
    if any((*others, ambient)) or (bounding and os.geteuid() == 0):
        wrong.append("capabilities")
    if facts["NoNewPrivs"] != "1":
        wrong.append("no_new_privs")
    if settings["filtered"]:
        filters = int(facts.get("Seccomp_filters", settings["filtered"]))
        if facts["Seccomp"] != "2" or filters < settings["filtered"]:
            wrong.append("seccomp")
        elif not _refused(lambda: syscalls.unshare(syscalls.CLONE_NEWUSER)):
            wrong.append("seccomp rules")
    what, where = settings["probe"]
    attempt = os.listdir if what == "list" else _make_below
    if settings["landlock"] and not _refused(lambda: attempt(where)):
        wrong.append("Landlock")
    if open_places := mounted.writable_below(settings["places"]):
        wrong.append(f"read-only mounts ({', '.join(open_places)})")
    if wrong:
        raise OSError(0, f"these protections are not on: {', '.join(wrong)}")


def _make_below(directory: str) -> None:
    os.mkdir(os.path.join(directory, ".probe"))


def _refused(attempt: Any) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False

"""Mounts of a container in which one user of the host's appears as the container's own user.

Files of `owner` on disk are the guest's in there, and what the guest makes is `owner`'s on disk
(idmapped mounts, Linux 5.12; not every file system has them). No file is changed, and outside of
these mounts the guest is a user that owns nothing.

A process of its own does it, because only one without threads may enter another mount namespace.
In there it has the host's privileges among a stranger's files: after `setns` nothing is imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_IDMAP = 0x00100000
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_HELPER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from belljar.linux import remap; "
    "remap.main(sys.argv[2:])"
)
_SECONDS = 30.0
Ids = tuple[int, int]


def problem(path: str) -> str:
    """Why files at `path` cannot be shown so; empty if they can. Tries it, and leaves nothing."""
    return _helped("0", (0, 0), (1, 1), (path,))


def apply(pid: int, targets: Sequence[str], owner: Ids, guest: Ids) -> str:
    """Do it for mounts of the container of process `pid`, parents before what is inside them; the
    reason if that failed."""
    return _helped(str(pid), owner, guest, targets)


def _helped(pid: str, owner: Ids, guest: Ids, targets: Sequence[str]) -> str:
    import subprocess

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ids = [str(each) for each in (*owner, *guest)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-c", _HELPER, root, pid, *ids, *targets],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    said = done.stdout.decode("utf-8", "replace").strip()
    return (said or f"exit code {done.returncode}")[-500:] if done.returncode else ""


def main(words: list[str]) -> None:
    """The helper: pid or 0, owner's uid and gid, guest's uid and gid, targets."""
    from . import syscalls

    try:
        pid, uid, gid, guest_uid, guest_gid = map(int, words[:5])
        users = _users((uid, gid), (guest_uid, guest_gid))
        if pid:
            syscalls.setns(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), _NEWNS)
        for target in words[5:]:
            tree = syscalls.detached_tree(target)
            syscalls.mount_setattr("", _IDMAP, recursive=False, userns=users, fd=tree)
            if pid:
                syscalls.attach_tree(tree, target)
            os.close(tree)
        if pid and os.stat(words[5]).st_uid != guest_uid:
            raise OSError(0, "the owner has not changed")
    except BaseException as error:  # noqa: BLE001 - a traceback would be looked up in there
        os.write(1, str(error).encode())
        os._exit(1)
    os._exit(0)


def _users(owner: Ids, guest: Ids) -> int:
    """A user namespace that maps `owner` to `guest`; a descriptor."""
    from . import syscalls

    there, tell = os.pipe()
    until, _held = os.pipe()  # the child ends when we do
    child = os.fork()
    if child == 0:
        try:
            os.close(_held)
            syscalls.unshare(_NEWUSER)
            os.write(tell, b"x")
            os.read(until, 1)
        finally:
            os._exit(0)
    os.close(tell)
    if not os.read(there, 1):
        raise OSError(0, "this process may make no user namespaces")
    for name, inner, outer in zip(("uid_map", "gid_map"), owner, guest, strict=True):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"{inner} {outer} 1")
    return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)

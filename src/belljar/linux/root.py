"""The file tree that a jail sees, built from nothing: a small memory file system and bind mounts.

`build` runs in a mount namespace of its own. Both pivots are needed: the first moves the host's
tree aside to /old, whatever it is called there, the second throws it away. Nothing of the host is
left to be reached afterwards but the mounts that the view names.
"""

from __future__ import annotations

import errno
import os
import stat

from . import no_links, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A run's memory file system is mounted below here: Landlock finds the rule for a file on the
# parents of a mount point, never on the mount point that it hides.
SANDBOX, RUN = "/sandbox", "/sandbox/run"
WORK, TMP, SHM = "/sandbox/run/work", "/sandbox/run/tmp", "/sandbox/run/shm"
HOME = "/sandbox/run/home"
# Where mounts wait that go below one of those, until the run has mounted it.
WAITING = "/.mounts"
# A pipe that everybody may write to, read-only root or not, unless Landlock is on.
PROBE = "/.probe"
GUEST_DIR = "/.belljar"  # where the worker's files are seen
FIRST_UID = 1  # of the first run, in the zygote's own ids; the next run has the next one
DEVICES = ("null", "zero", "full", "random", "urandom")

LINKS = (
    ("tmp", TMP), ("var/tmp", TMP), ("dev/shm", SHM), ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"), ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
)  # fmt: skip
ETC = {
    "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\n"
    "user:x:1000:1000:user:/sandbox/run/home:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost belljar\n::1 localhost\n",
    "hostname": "belljar\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\n",
}
_SMALL = 256 << 10
_MOST_COPIED = 200
_QUIET = syscalls.MS_NOSUID | syscalls.MS_NODEV
_PROC = _QUIET | syscalls.MS_NOEXEC
_BIND = syscalls.MS_BIND | syscalls.MS_REC
_HARMLESS = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV


def build(view: dict[str, Any]) -> None:
    """Make the tree of `view` this process's root. /proc still is the host's: see `own_proc`.

    `view`: `show` is a list of (source, destination, "ro" or "rw", inside), `links` of (path,
    target), `hide` of paths, `waiting` of (source, mode, inside) for mounts that a run itself puts
    into place; `probe` says whether to leave something there that only Landlock protects. In the
    mounts of the sources in `mapped`, what is the source's owner's belongs to the host id `owner`.
    The sources in `resolved` have no links in their paths; one with a link by now is an error.
    """
    # Under a hardened host's, the guest's id could not enter the directories that we make here.
    os.umask(0o022)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", "/tmp", "tmpfs", _QUIET, "size=4m,mode=755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    syscalls.mount("/tmp/new", "/tmp/new", None, syscalls.MS_BIND)
    syscalls.pivot_root("/tmp", "/tmp/old")
    os.chdir("/new")

    for path in ("dev", "etc", "proc", "run", "var", "home", RUN[1:]):
        os.makedirs(path, 0o755, exist_ok=True)
    shown = [destination for _, destination, _, _ in view["show"]]
    for path, target in (*view["links"], *LINKS):
        path = path.lstrip("/")
        if "/" + path in shown:
            continue
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        os.symlink(target, path)
    for name in DEVICES:
        _bind(f"/old/dev/{name}", f"dev/{name}")
    if view["probe"]:
        os.mkfifo(PROBE[1:])
        os.chmod(PROBE[1:], 0o666)
    for name, text in ETC.items():
        with open(f"etc/{name}", "w") as file:
            file.write(text)
    for source, destination, mode, inside in view["show"]:
        _show(source, destination.lstrip("/"), mode, inside, view)
    for number, (source, mode, inside) in enumerate(view["waiting"]):
        _show(source, f"{WAITING[1:]}/{number}", mode, inside, view)
    for path in view["hide"]:
        _hide(path.lstrip("/"))
    # A new /proc may be mounted only where a whole one can be seen.
    syscalls.mount("/old/proc", "proc", None, _BIND)

    syscalls.pivot_root(".", ".")
    syscalls.umount(".")
    os.chdir("/")


def scratch() -> None:
    """A small place to write for modules that want one when they are imported."""
    syscalls.mount("tmpfs", RUN, "tmpfs", _QUIET, "size=64m,mode=755")
    for path in (WORK, TMP, SHM):
        os.mkdir(path, 0o700)


def own_proc() -> None:
    """Cover /proc with one that lists this pid namespace only, and close the root for writing."""
    syscalls.mount("proc", "/proc", "proc", _QUIET | syscalls.MS_NOEXEC)
    syscalls.mount_setattr("/", syscalls.MOUNT_ATTR_RDONLY | _HARMLESS, recursive=False)


def prepare_run(*, uid: int, disk: int, inodes: int, waiting: list[tuple[str, str]]) -> None:
    """In a run's own mount namespace: its private directories, and the mounts that go into them.

    All that the run can write is in one memory file system, so that one size holds it. `waiting` is
    a list of (path of the waiting mount, destination).
    """
    options = f"size={disk},nr_inodes={inodes},mode=755,uid={uid},gid={uid}"
    syscalls.mount("tmpfs", RUN, "tmpfs", _QUIET, options)
    for path in (WORK, TMP, SHM, HOME):
        os.mkdir(path, 0o700)
        if uid:
            os.chown(path, uid, uid)
    for source, destination in waiting:
        place = no_links.make_place(destination, directory=os.path.isdir(source))
        syscalls.mount(source, f"/proc/self/fd/{place}", None, _BIND)
        os.close(place)


def processes_only() -> None:
    """In a run's own namespaces: a /proc that lists its processes, and nothing of the host."""
    syscalls.mount("proc", "/proc", "proc", _PROC, "subset=pid,hidepid=ptraceable")


def processes_and(
    texts: dict[str, str],
    made: str = f"{RUN}/proc",
    options: str | None = "hidepid=ptraceable",
) -> None:
    """A /proc with the run's processes and these files, in place of what the kernel has there.

    The kernel offers processes alone, where nothing can be added, or everything: then all the rest
    is covered, whatever it is called. Links lead only to what can be seen anyway. `made` is a
    directory for the moment, on a file system of the run's own.
    """
    syscalls.mount("proc", "/proc", "proc", _PROC, options)
    os.mkdir(made, 0o700)
    empty = f"{made}/directory", f"{made}/file"
    os.mkdir(empty[0], 0o555)
    os.close(os.open(empty[1], os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    with os.scandir("/proc") as entries:
        found = [entry for entry in entries if not (entry.name.isdigit() or entry.is_symlink())]
    for entry in found:
        source = empty[not entry.is_dir(follow_symlinks=False)]
        if entry.name in texts:
            source = f"{made}/{entry.name}"
            with open(source, "wb", 0) as file:
                file.write(texts[entry.name].encode())
                os.fchmod(file.fileno(), 0o444)
        try:
            syscalls.mount(source, f"/proc/{entry.name}", None, syscalls.MS_BIND)
        except FileNotFoundError:  # the kernel has just taken it away
            continue
        if source not in empty:
            os.unlink(source)
    os.rmdir(empty[0])
    os.unlink(empty[1])
    os.rmdir(made)


def _show(
    source: str,
    destination: str,
    mode: str,
    inside: list[tuple[str, str]],
    view: dict[str, Any],
) -> None:
    """Bind a path of the host. `inside` is a list of (relative path, what): "ro" closes a part of
    it for writing, "rw" only nails a directory down so that it cannot be renamed, "hide" covers it.
    """
    asked = source in view["mapped"]
    if not asked and destination.startswith("etc/") and _copied("/old" + source, destination):
        return
    if source in view["resolved"]:
        original = no_links.open_path(source, "/old")
    else:
        original = os.open("/old" + source, os.O_PATH | os.O_CLOEXEC)
    tree = syscalls.detached_tree("", original)
    held = os.fstat(original)
    os.close(original)
    try:
        if asked and view["owner"] is not None:
            _belong_to(view["owner"], tree, held)
        directory = stat.S_ISDIR(held.st_mode)
        place = no_links.make_place(destination, directory=directory, root=".")
        syscalls.attach_tree(tree, "", place)
        os.close(place)
        _set_mode("", mode, tree)
    finally:
        os.close(tree)
    for name, what in sorted(inside):
        if what == "hide":
            _hide(os.path.normpath(os.path.join(destination, name)))
        else:
            _close(destination, name, what)


def _close(top: str, name: str, how: str) -> None:
    """Bind a part of a mount over itself. A link could be replaced beside that, and is an error."""
    try:
        place = no_links.open_path(name, top)
    except (FileNotFoundError, NotADirectoryError):
        return
    tree = syscalls.detached_tree("", place)
    syscalls.attach_tree(tree, "", place)
    _set_mode("", how, tree)
    os.close(tree)
    os.close(place)


def _copied(source: str, destination: str) -> bool:
    """What is small is copied: every mount is one more that each run has to duplicate and undo."""
    if os.path.isdir(source):
        return _copied_directory(source, destination)
    if not os.path.isfile(source) or os.path.getsize(source) > _SMALL:
        return False
    os.makedirs(os.path.dirname(destination) or ".", exist_ok=True)
    with open(source, "rb") as original, open(destination, "wb") as copy:
        copy.write(original.read(_SMALL))
    return True


def _copied_directory(source: str, destination: str) -> bool:
    """Only where everybody may read all of it: the copies belong to everybody."""
    found: list[tuple[str, os.stat_result]] = []
    for directory, names, files in os.walk(source):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            wanted = 0o005 if stat.S_ISDIR(status.st_mode) else 0o004
            if status.st_mode & wanted != wanted:
                return False
            found.append((path, status))
    if len(found) > _MOST_COPIED or sum(status.st_size for _, status in found) > _SMALL:
        return False
    os.makedirs(destination, exist_ok=True)
    for path, status in found:
        place = os.path.join(destination, os.path.relpath(path, source))
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(path), place)
        elif stat.S_ISDIR(status.st_mode):
            os.mkdir(place, 0o755)
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as original, open(place, "wb") as copy:
                copy.write(original.read(_SMALL))
    return True


def _belong_to(owner: int, tree: int, held: os.stat_result) -> None:
    """What belongs to the owner of the source in a tree belongs to `owner` in there, and back.

    Without effect where the file system cannot.
    """
    namespace = _id_namespace(held.st_uid, held.st_gid, owner)
    try:
        syscalls.mount_setattr("", syscalls.MOUNT_ATTR_IDMAP, userns=namespace, fd=tree)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.ENOSYS):
            raise
    finally:
        os.close(namespace)


def _id_namespace(uid: int, gid: int, owner: int) -> int:
    """A user namespace that is only a table: `uid` and `gid` there are `owner` here."""
    entered, entered_writer = os.pipe()
    written, written_writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(entered_writer, b"x")
            os.close(written_writer)
            os.read(written, 1)
        finally:
            os._exit(0)
    os.close(entered_writer)
    try:
        if not os.read(entered, 1):
            raise OSError(errno.EPERM, "no user namespace for mapping ids")
        # The host's /proc: this runs before the old root is gone.
        for name, inner in (("uid_map", uid), ("gid_map", gid)):
            fd = os.open(f"/old/proc/{child}/{name}", os.O_WRONLY)
            os.write(fd, b"%d %d 1" % (inner, owner))
            os.close(fd)
        return os.open(f"/old/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (entered, written, written_writer):
            os.close(fd)
        os.waitpid(child, 0)


def _set_mode(path: str, mode: str, fd: int = -100) -> None:
    read_only = syscalls.MOUNT_ATTR_RDONLY if mode == "ro" else 0
    syscalls.mount_setattr(path, _HARMLESS | read_only, fd=fd)


def _bind(source: str, destination: str) -> None:
    """Of a device, in a directory of ours."""
    os.close(os.open(destination, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    syscalls.mount(source, destination, None, _BIND)


def _hide(path: str) -> None:
    if os.path.isdir(path):
        flags = _QUIET | syscalls.MS_RDONLY
        syscalls.mount("tmpfs", path, "tmpfs", flags, "size=4k,mode=555")
    elif os.path.exists(path):
        syscalls.mount("/old/dev/null", path, None, syscalls.MS_BIND)

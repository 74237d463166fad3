"""The host as a guest finds it: canaries, secrets, listeners, a sentinel, and files to be shared.

Everything lives in one private temporary directory. A guest that breaks out finds canaries that
file modes alone would not protect, so that what holds is the sandbox and not `chmod`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .cases import Case, Suite, fill
from .listeners import Listeners, free_port
from .private import environment, remove, temporary_directory
from .sentinel import Sentinel

SECRET_NAMES = ("HOST_SECRET", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DATABASE_URL")
DOTFILES = (
    ".ssh/id_ed25519", ".aws/credentials", ".netrc", ".docker/config.json", ".kube/config",
    ".config/gh/hosts.yml", ".git-credentials", ".pypirc", ".npmrc",
)  # fmt: skip
# No hexadecimal digit among them: never part of a run's id or of a number by chance.
_LETTERS = "ghjkmnpqrstvwxyz"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def random_letters(length: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


class World:
    """The surroundings of a suite run; a context manager. `owner` is the user of a control arm."""

    def __init__(self, suite: Suite, *, owner: int | None = None, python: str = "") -> None:
        self.suite = suite
        self.owner = owner
        self.secret = "sk-" + random_letters(24)
        self.server_token = random_letters(24)
        self._python = python or sys.executable
        self._stack = contextlib.ExitStack()
        self._stages = 0

    def __enter__(self) -> World:
        with contextlib.ExitStack() as stack:
            self.root = Path(tempfile.mkdtemp(prefix="world-"))
            stack.callback(remove, self.root)
            self.root.chmod(0o711)
            self.home = self.root / "home"
            for name in DOTFILES:
                path = self.home / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"token={self.secret}\n")
            stack.enter_context(environment(dict.fromkeys(SECRET_NAMES, self.secret)))
            self.listeners = Listeners(self.root)
            stack.callback(self.listeners.close)
            self.sentinel = self._new_sentinel()
            stack.callback(lambda: self.sentinel.close())
            self.temporary.mkdir()
            stack.enter_context(temporary_directory(self.temporary))
            stack.enter_context(subreaper())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def temporary(self) -> Path:
        """Where the code under test makes its temporary directories."""
        return self.root / "tmp"

    @property
    def server_environment(self) -> dict[str, str]:
        """What a server of this host would be started with: secrets, but none that are real."""
        plain = {"PATH": os.defpath, "HOME": str(self.home), "LANG": "C.UTF-8"}
        return plain | dict.fromkeys(SECRET_NAMES, self.secret)

    def _new_sentinel(self) -> Sentinel:
        return Sentinel(self.root, self._python, self.server_environment, self.owner)

    def revive_sentinel(self) -> None:
        """A new sentinel, if a guest has ended the old one."""
        if not self.sentinel.alive:
            self.sentinel.close()
            self.sentinel = self._new_sentinel()

    def stage(self, case: Case, klass: str) -> Stage:
        """Fresh canaries and files for one run of one case."""
        self._stages += 1
        return Stage(self, case, klass, self.root / f"stage-{self._stages}")


class Stage:
    """What one run of one case can touch, and the values of its placeholders."""

    def __init__(self, world: World, case: Case, klass: str, root: Path) -> None:
        self.world, self.case, self.root = world, case, root
        self.token = "bj" + random_letters(14)
        self.canary_text = random_letters(40)
        root.mkdir(0o711)
        self.canary_dir = self._directory("canaries")
        self.canary = self._file(self.canary_dir / "canary.txt", self.canary_text)
        self.marker = self._directory("drop") / f"marker-{self.token}"
        self.read_only = self._directory("ro")
        for name in ("f.txt", "secret.txt"):
            self._file(self.read_only / name, f"read only {self.token}")
        self.read_write = self._directory("rw")
        self._file(self.read_write / "seed.txt", "seed")
        self.values = self._values(klass)
        for name, entry in case.files.items():
            # The only kind of entry that the case file knows: a link in the user's own project.
            os.symlink(self.fill(entry["symlink"]), self.read_write / name)
        if world.owner is not None:
            give_to(root, world.owner)
        self.canary_print = prints(self.canary_dir)
        self.read_only_print = prints(self.read_only)
        self.read_write_print = prints(self.read_write)

    def _directory(self, name: str) -> Path:
        path = self.root / name
        path.mkdir()
        path.chmod(0o777)
        return path

    def _file(self, path: Path, text: str) -> Path:
        path.write_text(text)
        path.chmod(0o666)
        return path

    def fill(self, text: str) -> str:
        return fill(text, self.values, self.world.suite.placeholders)

    def _values(self, klass: str) -> dict[str, str]:
        world = self.world
        heard = world.listeners
        closed = [str(free_port()) for _ in range(4)]
        values = {name: str(value) for name, value in world.suite.limits.items()}
        return values | {
            "CANARY": str(self.canary),
            "CANARY_DIR": str(self.canary_dir),
            "MARKER": str(self.marker),
            "MARKER_NAME": self.marker.name,
            "SECRET": world.secret,
            "SECRET_REV": world.secret[::-1],
            "TOKEN": self.token,
            "T7": self.token[-7:],
            # Relative names: every backend shows a relative mount below the work directory.
            "RO": "ro",
            "RW": "rw",
            "OUT": "out",
            "HOSTRW": str(self.read_write),
            "HOST_HOME": str(world.home),
            "HOST_TMPROOT": str(world.root),
            "HOSTNAME": socket.gethostname(),
            "MACHINE_ID": machine_id(),
            "PID": str(world.sentinel.pid),
            "SENTINEL_NAME": world.sentinel.name,
            "PORT": str(heard.port),
            "PORT2": closed[0],
            "PORT3": str(heard.vsock_port),
            "PORT6": str(heard.port6),
            "PROXY_PORT": closed[1],
            "SERVER_PORT": closed[2],
            "MCP_PORT": closed[3],
            "SERVER_SOCK": heard.unix_path,
            "SERVER_TOKEN": world.server_token,
            "SERVER_TOKEN_PREFIX": world.server_token[:8],
            "CONTROL_TOKEN": world.server_token,
            "CONTROL_TOKEN_REV": world.server_token[::-1],
            "ABS": heard.abstract,
            "EXPECT_NONROOT": str(klass not in ("process", "landlock") or os.geteuid() != 0),
        }

    def remove(self) -> None:
        remove(self.root)


@dataclass(frozen=True)
class Printed:
    """A fingerprint of one file: anything that a write, a link, a chmod or a chown would change."""

    kind: int
    inode: int
    mode: int
    owner: tuple[int, int]
    links: int
    modified: int
    content: str


def prints(top: Path) -> dict[str, Printed]:
    """Fingerprints of `top` and of everything below it, without following links."""
    found = {}
    for path in (top, *sorted(top.rglob("*"))):
        info = path.lstat()
        if path.is_symlink():
            content = os.readlink(path)
        elif stat.S_ISREG(info.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = ""
        found[str(path.relative_to(top))] = Printed(
            kind=stat.S_IFMT(info.st_mode),
            inode=info.st_ino,
            mode=stat.S_IMODE(info.st_mode),
            owner=(info.st_uid, info.st_gid),
            # A directory's own count and time change with every name in it: those are listed.
            links=0 if path.is_dir() else info.st_nlink,
            modified=0 if path.is_dir() else info.st_mtime_ns,
            content=content,
        )
    return found


def difference(before: Mapping[str, Printed], after: Mapping[str, Printed]) -> str:
    """What changed, in words; empty if nothing did."""
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    said = []
    for name in changed[:3]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            said.append(f"{name} {'appeared' if old is None else 'is gone'}")
            continue
        fields = [f for f in Printed.__dataclass_fields__ if getattr(old, f) != getattr(new, f)]
        said.append(f"{name}: {', '.join(fields)} changed")
    return "; ".join(said)


def machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        # Never the empty string: a guest without a machine id would then seem to have ours.
        return "no-machine-id-on-this-host"


def give_to(root: Path, uid: int) -> None:
    """Make a user the owner of everything below `root`."""
    for path in (root, *root.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Adopt every orphan of a run, so that a survivor is found wherever it fled in the tree."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)

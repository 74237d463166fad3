"""The trees of our images, taken from this host: its Python, its shell, its Node.js.

No registry and no package manager is asked. Python moves to /usr whatever its prefix here: where it
lies on this host is nobody's business (only `sysconfig` still tells how it was built).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache

from ..errors import BackendUnavailable
from .bytecode import add_bytecode
from .libraries import add_libraries
from .tree import MERGED, Tree

_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"

COMMANDS = (
    "[", "awk", "base64", "basename", "bash", "cat", "chmod", "cksum", "cmp", "comm", "cp",
    "csplit", "cut", "date", "dd", "df", "diff", "dirname", "du", "echo", "env", "expand", "expr",
    "factor", "false", "find", "fmt", "fold", "grep", "egrep", "fgrep", "gzip", "gunzip", "head",
    "hostname", "id", "install", "join", "kill", "ln", "ls", "md5sum", "mkdir", "mkfifo",
    "mktemp", "mv", "nice", "nl", "nohup", "nproc", "numfmt", "od", "paste", "pathchk", "pr",
    "printenv", "printf", "pwd", "readlink", "realpath", "rm", "rmdir", "sed", "seq", "sh",
    "sha1sum", "sha256sum", "sha512sum", "shuf", "sleep", "sort", "split", "stat", "stdbuf",
    "sum", "sync", "tac", "tail", "tar", "tee", "test", "timeout", "touch", "tr", "true",
    "truncate", "tsort", "tty", "uname", "unexpand", "uniq", "unlink", "wc", "which", "whoami",
    "xargs", "yes", "zcat",
)  # fmt: skip

# Parts of the standard library that no sandboxed program needs: tests, windows, installers.
_LEFT_OUT = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test",
    "tests", "tkinter", "turtledemo",
}  # fmt: skip

_ACCOUNTS = (("root", 0, "/root"), ("sandbox", 1000, "/workspace"), ("nobody", 65534, "/workspace"))


@dataclass(slots=True)
class Layer:
    """One layer of an image: its tree, and the versions of what is in it."""

    tree: Tree = field(default_factory=Tree)
    versions: dict[str, str] = field(default_factory=dict)


@cache
def base() -> Layer:
    """What every image has: directories, accounts, small commands and Python."""
    layer = Layer()
    tree = layer.tree
    for link, target in MERGED.items():
        tree.directory(target)
        tree.link(link, target)
    for path in ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "usr/local/bin", "var"):
        tree.directory(path)
    for path in ("tmp", "var/tmp", "workspace"):
        tree.directory(path, 0o1777)
    accounts = [f"{name}:x:{uid}:{uid}:{name}:{home}:/bin/bash" for name, uid, home in _ACCOUNTS]
    groups = [f"{name}:x:{uid}:" for name, uid, _ in _ACCOUNTS]
    tree.write("etc/passwd", ("\n".join(accounts) + "\n").encode())
    tree.write("etc/group", ("\n".join(groups) + "\n").encode())
    tree.write("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    _add_directory(tree, "/usr/share/zoneinfo", "usr/share/zoneinfo", {"posix", "right"})
    _add_commands(layer)
    _add_python(layer)
    return layer


def node() -> Layer:
    """Node.js as installed here; BackendUnavailable names the package where it is not."""
    path = shutil.which("node", path=_SYSTEM_PATH) or shutil.which("node")
    if path is None:
        raise BackendUnavailable(
            "Node.js is not installed here: an image cannot be made of it",
            fix="apt-get install nodejs, or belljar images build node --from-dockerfile",
        )
    layer = Layer()
    path = os.path.realpath(path)
    layer.tree.copy(path, "usr/bin/node")
    layer.tree.link("usr/bin/nodejs", "node")
    add_libraries(layer.tree, [path])
    # Debian's build reads parts of its own library from here.
    _add_directory(layer.tree, "/usr/share/nodejs", "usr/share/nodejs", set())
    layer.versions["node"] = _version(path)
    return layer


def _add_commands(layer: Layer) -> None:
    found = {name: shutil.which(name, path=_SYSTEM_PATH) for name in COMMANDS}
    paths = {name: path for name, path in found.items() if path is not None}
    if not {"bash", "sh", "cat"} <= paths.keys():
        raise BackendUnavailable(
            "this host has no bash or no coreutils: an image cannot be made from its files",
            fix="belljar images build --from-dockerfile",
        )
    for name, path in paths.items():
        layer.tree.copy(path, f"usr/bin/{name}")
    programs = [os.path.realpath(path) for path in paths.values()]
    add_libraries(layer.tree, programs)
    layer.versions["bash"] = _version(paths["bash"])
    layer.versions["coreutils"] = _version(paths["cat"])
    layer.versions["libc"] = " ".join(os.confstr("CS_GNU_LIBC_VERSION").split()[1:])  # type: ignore[union-attr]


def _add_python(layer: Layer) -> None:
    tree = layer.tree
    short = "{}.{}".format(*sys.version_info)
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    library = f"usr/lib/python{short}"
    tree.copy(executable, f"usr/bin/python{short}")
    tree.link("usr/bin/python3", f"python{short}")
    tree.link("usr/bin/python", "python3")
    source = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})
    _add_directory(tree, source, library, _LEFT_OUT)
    native = [entry.source or "" for _, entry in tree.files(below=library, suffix=".so")]
    add_libraries(tree, [executable, *native])
    # Loaded by name and not by need: threads that end themselves ask for it.
    unwinder = _loader_finds("libgcc_s.so.1", executable)
    if unwinder:
        tree.copy(unwinder, unwinder)
    add_bytecode(tree, executable, sys.implementation.cache_tag or "")
    layer.versions["python"] = ".".join(map(str, sys.version_info[:3]))


def _loader_finds(name: str, python: str) -> str | None:
    """Where the dynamic loader finds the library `name`: asked of a process that loads it."""
    code = (
        f"import ctypes; ctypes.CDLL({name!r})\n"
        "print(next(line.split()[-1] for line in open('/proc/self/maps') "
        f"if line.endswith({name + chr(10)!r})))"
    )
    done = subprocess.run(
        [python, "-I", "-S", "-c", code],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip() or None if done.returncode == 0 else None


def _add_directory(tree: Tree, source: str, path: str, left_out: set[str]) -> None:
    """Copy what lies below `source`, without the names in `left_out` and without build products."""
    for folder, names, files in os.walk(source):
        names[:] = sorted(n for n in names if n not in left_out and not n.startswith("config-"))
        inside = os.path.relpath(folder, source)
        for file in sorted(files):
            found = os.path.join(folder, file)
            if not file.endswith((".a", ".o", ".pyc")) and os.path.isfile(found):
                tree.copy(found, f"{path}/{inside}/{file}")


def _version(program: str) -> str:
    """The number in the first line that `program --version` prints."""
    done = subprocess.run(
        [program, "--version"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.search(r"\d+(\.\d+)+", done.stdout)
    return found.group() if found else "unknown"

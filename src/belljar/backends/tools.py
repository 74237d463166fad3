"""Other people's sandbox programs: where they are, which version, and whether they work here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from ..errors import BackendUnavailable
from ..records import record

# Not the caller's PATH: a program of this name in a directory of theirs is not the tool.
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@record
class Tool:
    """A sandbox program as it was found on this host."""

    path: str
    version: tuple[int, ...]
    setuid: bool


def find(program: str, version_flag: str | None, fix: str) -> Tool:
    """The installed tool and its version; BackendUnavailable says how to get it."""
    path = shutil.which(program, path=PATH)
    if path is None:
        if elsewhere := shutil.which(program):
            raise BackendUnavailable(
                f"{elsewhere} is not used: only system directories are trusted to hold {program}",
                fix=f"sudo install {elsewhere} /usr/local/bin/",
            )
        raise BackendUnavailable(f"{program} is not installed", fix=fix)
    setuid = bool(os.stat(path).st_mode & 0o4000)
    if version_flag is None:
        return Tool(path=path, version=(), setuid=setuid)
    try:
        asked = subprocess.run(
            [path, version_flag],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{path} does not run: {error}", fix=fix) from error
    match = _VERSION.search(asked.stdout + asked.stderr)
    version = tuple(int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    return Tool(path=path, version=version, setuid=setuid)


def tried(command: tuple[str, ...]) -> str:
    """Empty if a program started by `command` is in other namespaces than we are; else why not."""
    readlink = shutil.which("readlink", path=PATH) or "/bin/readlink"
    try:
        asked = subprocess.run(
            [*command, readlink, "/proc/self/ns/pid", "/proc/self/ns/net"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            env={"PATH": PATH, "HOME": os.path.expanduser("~")},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if asked.returncode:
        words = (asked.stderr or asked.stdout).strip().splitlines()
        return words[-1][:300] if words else f"exit code {asked.returncode}"
    # Firejail runs a program as it is where it takes itself to be in a sandbox already.
    ours = {os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")}
    same = ours.intersection(asked.stdout.split())
    return f"the program is not in namespaces of its own: {', '.join(sorted(same))}" if same else ""

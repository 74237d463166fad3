"""Backend `bubblewrap`: the namespaces and the root are bwrap's, the rest is the jail's.

Theory of operation: `launched.py`. Of bwrap we take user, pid, network, ipc, uts and cgroup
namespaces, an own root made of bind mounts on an empty read-only tmpfs, a new /proc with the host's
parts covered, a memory file system of the disk limit's size for all that the program writes, no
capabilities, and death with its parent. It installs the jail's base filter; our stage, pid 1 in
there, adds Landlock, rlimits and the jail's second filter.

Facts relied on, and how to check them again: `pytest tests/backends/test_launched.py`.
- As root bwrap keeps capabilities unless told to drop them all.
- A set-uid bwrap takes no `--size`, and may work where the kernel gives users no namespaces.

What it does not protect against: what the jail does not either. As root the guest is the host's
uid 0 without capabilities, in a user namespace where it is called 1000.
"""

from __future__ import annotations

from ..linux import root
from . import launched_plan
from .launched import LaunchedBackend
from .launched_plan import Ends, Sandbox
from .tools import Tool

_LEAST = (0, 5, 0)  # the first with --size's predecessor --perms; older ones are not tested


class BubblewrapBackend(LaunchedBackend):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers."""

    name = "bubblewrap"
    program = "bwrap"
    fix = "apt-get install bubblewrap"
    takes_filter = True
    overhead = 2  # bwrap and the stage

    def unusable(self, tool: Tool) -> tuple[str, str] | None:
        if tool.version < _LEAST:
            found = ".".join(map(str, tool.version))
            return f"bwrap {found} is too old: it must be 0.5 or later", self.fix
        if not self.facts.userns and not tool.setuid:
            return (
                f"bwrap is not set-uid and there are no user namespaces: "
                f"{self.facts.userns_problem}",
                "sysctl kernel.unprivileged_userns_clone=1, or chmod u+s on bwrap",
            )
        return None

    def oddities(self, tool: Tool) -> tuple[str, ...]:
        if not self.sized(tool):
            why = "set-uid" if tool.setuid else "older than 0.7"
            return (f"bwrap is {why}: the size of the work directory is held by a watchdog",)
        return ()

    def sized(self, tool: Tool) -> bool:
        return tool.version >= (0, 7, 0) and not (tool.setuid and not self.facts.root)

    def tool_user(self, tool: Tool) -> bool:
        return self.facts.userns

    def trial(self, tool: Tool) -> tuple[str, ...]:
        user = ("--unshare-user",) if self.facts.userns else ()
        words = ("--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--")
        return (tool.path, *user, *words)

    def data(self, sandbox: Sandbox) -> tuple[bytes, ...]:
        return tuple(text.encode() for text in root.ETC.values())

    def arguments(self, tool: Tool, sandbox: Sandbox, ends: Ends) -> tuple[str, ...]:
        return arguments(tool.path, sandbox, ends, sized=self.sized(tool))


def arguments(path: str, sandbox: Sandbox, ends: Ends, *, sized: bool) -> tuple[str, ...]:
    """The command line. Pure: the same sandbox and descriptors give the same words."""
    words = [path, "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    if sandbox.user is not None:
        user = str(sandbox.user)
        words += ["--unshare-user", "--uid", user, "--gid", user]
    if not sandbox.online:
        words.append("--unshare-net")
    words += ["--hostname", "belljar", "--die-with-parent", "--as-pid-1", "--new-session"]
    words += ["--cap-drop", "ALL", "--clearenv"]
    if ends.filter >= 0:
        words += ["--seccomp", str(ends.filter)]
    for link, target in sandbox.links:
        if not any(at == link for _, at, _, _ in sandbox.show):
            words += ["--symlink", target, link]
    for name in root.DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, fd in zip(root.ETC, ends.data, strict=True):
        words += ["--ro-bind-data", str(fd), f"/etc/{name}"]
    for directory in ("/run", "/var", "/home"):
        words += ["--dir", directory]
    words += ["--proc", "/proc"]
    for mask in sandbox.masks:
        words += _cover(mask, mask in sandbox.directories)
    words += [*(["--size", str(sandbox.disk)] if sized else []), "--tmpfs", root.RUN]
    for source, at, mode, inside in sandbox.show:
        words += [_BIND[mode], source, at]
        for part, what in sorted(inside):
            original, place = launched_plan.below(source, part), launched_plan.below(at, part)
            if what == "hide":
                words += _cover(place, original in sandbox.directories)
            else:
                words += [_BIND[what], original, place]
    for hidden in sandbox.hide:
        words += _cover(hidden, hidden in sandbox.directories)
    words += ["--remount-ro", "/", "--chdir", "/", "--"]
    return (*words, *launched_plan.stage_command(launched_plan.STAGE_DIR, ends))


_BIND = {"ro": "--ro-bind", "rw": "--bind"}


def _cover(path: str, is_directory: bool) -> list[str]:
    if is_directory:
        return ["--tmpfs", path, "--remount-ro", path]
    return ["--ro-bind", "/dev/null", path]

"""Backend `nsjail`: the namespaces and the root are nsjail's, the rest is the jail's.

Theory of operation: `launched.py`. Of nsjail we take user, pid, mount, network, ipc, uts and cgroup
namespaces, a read-only root made of bind mounts, a /proc of processes only, a memory file system of
the disk limit's size and number of files for all that the program writes, and no capabilities. Its
own limits, its control groups and its seccomp language are left alone: our stage, pid 1 in there,
adds Landlock, rlimits and the jail's two filters, and the supervisor holds the control group.

Facts relied on, and how to check them again: `pytest tests/backends/test_launched.py`.
- Mounts are made in the order of the command line; a colon separates, so no path may have one.
- `--bindmount_ro` takes the file systems below a directory with it and makes only the first of them
  read-only: each of the others is bound once more, and `stage.py` looks at all of them.
- It asks the kernel to kill its child when it dies itself.

nsjail is not in Debian: build it from its repository. It is tested where it is installed; its
command line is tested everywhere.
"""

from __future__ import annotations

from ..errors import BackendFailed
from ..linux import mounted, root
from ..policy import Policy
from ..types import Enforcement, Request
from . import launched_plan
from .base import absent
from .jail_plan import inside_any
from .launched import LaunchedBackend
from .launched_plan import Ends, Sandbox, Spec
from .tools import Tool

_BIND = {"ro": "--bindmount_ro", "rw": "--bindmount"}


class NsjailBackend(LaunchedBackend):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers."""

    name = "nsjail"
    program = "nsjail"
    fix = "build it: https://github.com/google/nsjail"
    version_flag = None
    overhead = 2  # nsjail and the stage

    def unusable(self, tool: Tool) -> tuple[str, str] | None:
        if not self.facts.userns:
            return (
                f"nsjail needs user namespaces: {self.facts.userns_problem}",
                "sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000",
            )
        return None

    def oddities(self, tool: Tool) -> tuple[str, ...]:
        return ()

    def sized(self, tool: Tool) -> bool:
        return True

    def tool_user(self, tool: Tool) -> bool:
        return True

    def trial(self, tool: Tool) -> tuple[str, ...]:
        return (tool.path, "-Mo", "--really_quiet", "--disable_rlimits", "--chroot", "/", "--")

    def arguments(self, tool: Tool, sandbox: Sandbox, ends: Ends) -> tuple[str, ...]:
        return arguments(tool.path, sandbox, ends, mounted.points())

    def amend(
        self, report: dict[str, Enforcement], policy: Policy, request: Request, spec: Spec
    ) -> None:
        files = policy.filesystem
        for path in (*files.read_only, *files.read_write, *files.hidden):
            if ":" in path:
                report["filesystem"] = absent(f"nsjail takes no path with a colon: {path!r}")
        for mount in request.mounts:
            if ":" in mount.src + mount.dst:
                report["mounts"] = absent(f"nsjail takes no path with a colon: {mount.src!r}")


def arguments(
    path: str, sandbox: Sandbox, ends: Ends, points: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The command line. Pure: the same sandbox, descriptors and mount points of the host give the
    same words."""
    words = [
        path, "--mode", "o", "--really_quiet", "--time_limit", "0", "--disable_rlimits",
        "--nice_level", "0", "--hostname", "belljar", "--cwd", "/", "--disable_proc",
    ]  # fmt: skip
    if sandbox.user is not None:
        words += ["--user", str(sandbox.user), "--group", str(sandbox.user)]
    if sandbox.online:
        words.append("--disable_clone_newnet")
    for fd in ends.stage:
        words += ["--pass_fd", str(fd)]
    options = "subset=pid,hidepid=ptraceable" if sandbox.masks else ""
    words += ["--mount", f"none:/proc:proc:{options}"]
    for link, target in sandbox.links:
        if not any(at == link for _, at, _, _ in sandbox.show):
            words += ["--symlink", f"{target}:{link}"]
    for name in root.DEVICES:
        words += ["--bindmount", f"/dev/{name}:/dev/{name}"]
    size = f"size={sandbox.disk},nr_inodes={sandbox.inodes},mode=755"
    words += ["--mount", f"none:{root.RUN}:tmpfs:{size}"]
    for source, at, mode, inside in sandbox.show:
        covered = tuple(
            launched_plan.below(source, part) for part, what in inside if what == "hide"
        )
        # A covered mount cannot be found by its path any more, and needs no protection.
        open_points = tuple(
            point for point in points if not inside_any(point, (*covered, *sandbox.hide))
        )
        words += _bind(mode, source, at, open_points)
        for part, what in sorted(inside):
            original, place = launched_plan.below(source, part), launched_plan.below(at, part)
            if what == "hide":
                words += _cover(place, original in sandbox.directories)
            else:
                words += _bind(what, original, place, open_points)
    for hidden in sandbox.hide:
        words += _cover(hidden, hidden in sandbox.directories)
    return (*words, "--", *launched_plan.stage_command(launched_plan.STAGE_DIR, ends))


def _bind(mode: str, source: str, at: str, points: tuple[str, ...]) -> list[str]:
    words = [_BIND[mode], f"{source}:{at}"]
    if mode == "ro":
        for point in points:
            if point.startswith(source.rstrip("/") + "/"):
                if ":" in point:
                    raise BackendFailed(f"nsjail takes no path with a colon: {point!r}")
                words += [_BIND[mode], f"{point}:{at}{point[len(source.rstrip('/')) :]}"]
    return words


def _cover(path: str, is_directory: bool) -> list[str]:
    if is_directory:
        # Read-only, because the guest owns it: no memory limit of a watchdog's counts its inodes.
        return ["--mount", f"none:{path}:tmpfs:ro,size=4096,nr_inodes=1,mode=555"]
    return ["--bindmount_ro", f"/dev/null:{path}"]

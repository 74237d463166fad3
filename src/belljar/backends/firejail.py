"""Backend `firejail`: namespaces and a thinned-out host tree from a set-uid program.

Theory of operation: `launched.py`. Of firejail we take pid, mount, network, ipc and uts namespaces
and its ways of hiding: all top directories but the system's are covered or emptied, of /etc only
names are left, /dev and /tmp are its own, the host's parts of /proc are covered, everything is
read-only but /tmp, /dev/shm and writable mounts, and there are no capabilities. It needs no user
namespaces: it is for hosts that forbid them. Our stage adds Landlock with the exact list of what
may be read, a user namespace where there can be one, rlimits and the jail's two seccomp filters.

Facts relied on, and how to check them again: `pytest tests/backends/test_launched.py`.
- Firejail cannot show a path elsewhere: mounts are links to the host's own paths. It can make /
  itself read-only only by a chroot, where there can be no user namespaces: Landlock holds that.
- Its memory file systems have no size: a watchdog looks at them, and a cgroup counts them.
- It cannot put its first process's place to us: our stage is not pid 1, and Landlock (ABI 6) or the
  end of the run is what a signal to it comes to.
- Where it believes to be in a sandbox already it runs programs with no protection, and exit code 0:
  the stage compares its namespaces with ours, and `probe` tries it.

What it does not protect against: what the jail does not either. Without Landlock the host's tree is
in sight, thinned out, and the floor `jail` is refused.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ..guest import protocol
from ..policy import Policy
from ..records import replace
from ..types import Enforcement, Request
from . import jail_plan, launched_plan, protect
from .base import absent, best_effort, enforced
from .launched import LaunchedBackend
from .launched_plan import LINUX_DIR, Ends, Places, Sandbox, Spec
from .tools import Tool

if TYPE_CHECKING:
    from ..linux.probe import HostFacts

_LEAST = (0, 9, 66)  # the first that can whitelist below any top directory
_ODD = re.compile(r"""[\\&!?"'<>%^(){};,*\[\]\s]""")  # it refuses these in a path, or expands them
# Shown as they are; everything else in / is covered unless something below it is asked for.
_KEPT = frozenset(("dev", "etc", "proc", "run", "tmp"))
_WORK, _HOME, _TMP, _SHM = "/tmp/.belljar", "/tmp/.belljar-home", "/tmp", "/dev/shm"


class FirejailBackend(LaunchedBackend):
    """See the module's docstring. `disable` names layers to leave out, for tests of the layers."""

    name = "firejail"
    program = "firejail"
    fix = "apt-get install firejail"
    overhead = 3  # firejail, its first process inside, and the stage

    def unusable(self, tool: Tool) -> tuple[str, str] | None:
        if tool.version < _LEAST:
            found = ".".join(map(str, tool.version))
            return f"firejail {found} is too old: it must be 0.9.66 or later", self.fix
        if not tool.setuid and not self.facts.root:
            return "firejail is not set-uid root", f"chmod u+s {tool.path}"
        return None

    def oddities(self, tool: Tool) -> tuple[str, ...]:
        notes = ["the size of what a run writes is held by a watchdog"]
        if 0 < self.facts.landlock_abi < 6:
            notes.append("Landlock before ABI 6: a program can end its own run by a signal")
        return tuple(notes)

    def sized(self, tool: Tool) -> bool:
        return False

    def tool_user(self, tool: Tool) -> bool:
        return False

    def trial(self, tool: Tool) -> tuple[str, ...]:
        return (tool.path, "--quiet", "--noprofile", "--net=none")

    def __init__(
        self,
        *,
        disable: frozenset[str] = frozenset(),
        facts: HostFacts | None = None,
        firejail_profile: str | None = None,
    ) -> None:
        """`firejail_profile` is a file with more rules, which may only make a sandbox stricter."""
        super().__init__(disable=disable, facts=facts)
        self._more_rules = ""
        if firejail_profile is not None:
            from .firejail_profile import load

            self._more_rules = load(firejail_profile)

    def data(self, sandbox: Sandbox) -> tuple[bytes, ...]:
        return (os.fsencode(profile(sandbox) + self._more_rules),)

    def arguments(self, tool: Tool, sandbox: Sandbox, ends: Ends) -> tuple[str, ...]:
        return arguments(tool.path, sandbox, ends)

    def arranged(self, spec: Spec, request: Request) -> Spec:
        """Firejail shows what it shows under its own name: no path is moved."""
        show = tuple(
            # Of what /etc links to, the link is shown, and what it leads to is in /usr.
            (*((at, at) if at.startswith("/etc/") else (source, source)), mode, inside)
            for source, at, mode, inside in spec.sandbox.show
        )
        links = tuple(
            (os.path.join(_WORK, mount.dst), mount.src)
            for mount in request.mounts
            if not os.path.isabs(mount.dst)
        )
        places = Places(
            work=_WORK,
            home=_HOME,
            scratch=(_TMP, _SHM),
            directories=(_WORK, _HOME),
            links=links,
            probe=("list", "/"),
            readable=(
                *jail_plan.SYSTEM, "/proc", *(source for source, _, mode, _ in show if mode == "ro")
            ),
            writable=(_TMP, _SHM, *(source for source, _, mode, _ in show if mode == "rw")),
        )  # fmt: skip
        moved = protocol.boot_code(jail_plan.GUEST_DIR, 3)
        boot = protocol.boot_code(protocol.GUEST_DIR, 3)
        return replace(
            spec,
            sandbox=replace(spec.sandbox, show=show, links=()),
            places=places,
            argv=tuple(boot if word == moved else word for word in spec.argv),
        )

    def amend(
        self, report: dict[str, Enforcement], policy: Policy, request: Request, spec: Spec
    ) -> None:
        if report["filesystem"].state == "absent":
            pass  # a reason that is the jail's, too
        elif "landlock" in spec.layers:
            parts = [
                f"firejail's read-only and emptied directories, Landlock ABI "
                f"{self.facts.landlock_abi} with a list of what may be read, no capabilities",
                *(["/proc thinned out"] if "proc_masks" in spec.layers else []),
                *protect.given_up(policy),
            ]
            if self._more_rules:
                parts.append("the rules of firejail_profile")
            report["filesystem"] = enforced(", ".join(parts))
        else:
            report["filesystem"] = best_effort(
                "firejail's read-only and emptied directories; without Landlock the names of the "
                "host's tree stay in sight"
            )
        for field, problem in _unshowable(policy, request):
            report[field] = absent(problem)
        if request.mounts and report["mounts"].state == "enforced":
            report["mounts"] = enforced(
                f"links to the host's own paths; {protect.promise(policy, request)}"
            )


def _unshowable(policy: Policy, request: Request) -> list[tuple[str, str]]:
    """What firejail cannot show as it was asked for: (policy field, why)."""
    files = policy.filesystem
    found = []
    for path in (*files.read_only, *files.read_write):
        if problem := _odd(path):
            found.append(("filesystem", problem))
        elif os.path.realpath(path) != os.path.normpath(path):
            found.append(("filesystem", f"{path!r} leads through a link, and firejail moves none"))
    for path in files.hidden:
        if _ODD.search(path):
            found.append(("filesystem", f"firejail takes no path such as {path!r}"))
    places = sorted(mount.dst for mount in request.mounts if not os.path.isabs(mount.dst))
    for mount in request.mounts:
        if os.path.isabs(mount.dst) and mount.dst != mount.src:
            why = f"{mount.dst!r}: firejail shows host paths; use a relative destination"
            found.append(("mounts", why))
        elif problem := _odd(mount.src):
            found.append(("mounts", problem))
        elif any(other.startswith(mount.dst + "/") for other in places):
            found.append(("mounts", f"{mount.dst!r} holds another mount, and a link cannot"))
        elif mount.mode == "rw" and mount.protect and (linked := protect.links(mount.src)):
            found.append(("mounts", f"{linked[0]!r} in {mount.src!r} is a link"))
    return found


def _odd(path: str) -> str:
    if _ODD.search(path):
        return f"firejail takes no path such as {path!r}"
    if path.rstrip("/").count("/") < 2:
        return f"{path!r} is a top directory, which firejail cannot show alone"
    return ""


def arguments(path: str, sandbox: Sandbox, ends: Ends) -> tuple[str, ...]:
    """The command line. Pure: the same sandbox and descriptors give the same words.

    It takes 128 words at most, so what grows with the run is in a profile, given as a descriptor.
    """
    (described,) = ends.data
    words = [
        path, "--quiet", f"--profile=/proc/self/fd/{described}", "--deterministic-exit-code",
        "--deterministic-shutdown", "--ipc-namespace", "--hostname=belljar", "--machine-id",
        "--nonewprivs", "--nogroups", "--private-dev", "--private-tmp", "--keep-var-tmp",
        "--dbus-user=none", "--dbus-system=none",
        "--caps.keep=setfcap" if sandbox.maps_root else "--caps.drop=all",
        f"--keep-fd={','.join(map(str, ends.stage))}",
    ]  # fmt: skip
    if not sandbox.online:
        words.append("--net=none")
    return (*words, "--", *launched_plan.stage_command(LINUX_DIR, ends))


def profile(sandbox: Sandbox) -> str:
    """What is shown, and how, in firejail's own words. Pure.

    Not `read-only /`: that is a chroot, in which nobody can have a user namespace.
    """
    lines = []
    shown = [*jail_plan.SYSTEM, *(source for source, _, _, _ in sandbox.show)]
    for source, _, mode, inside in sandbox.show:
        if not jail_plan.inside_any(source, jail_plan.SYSTEM):
            lines.append(f"whitelist {source}")
        lines.append(f"{_MODE[mode]} {source}")
        for name, what in sorted(inside):
            place = launched_plan.below(source, name)
            if what == "rw":  # only what changes becomes a mount, which cannot be renamed
                lines.append(f"read-only {place}")
            lines.append(f"{_MODE[what]} {place}")
    for name in sandbox.top:
        if name not in _KEPT and not any(jail_plan.inside_any(p, (f"/{name}",)) for p in shown):
            lines.append(f"blacklist /{name}")
    lines += [f"blacklist {covered}" for covered in (*sandbox.masks, *sandbox.hide)]
    return "".join(f"{line}\n" for line in lines)


_MODE = {"ro": "read-only", "rw": "read-write", "hide": "blacklist"}

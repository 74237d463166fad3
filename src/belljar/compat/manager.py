"""A sandbox manager for commands, as a Bash tool uses it.

manager = SandboxManager(SandboxConfig(type="firejail", enabled=True))
manager.execute("npm test", cwd="/home/me/project").exit_code
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .. import api
from ..config import Settings, load
from ..errors import BelljarError, NotBuiltYet, RequestError
from ..records import replace
from ..types import Mount, Request, Result
from . import _answers

if TYPE_CHECKING:
    from ..async_runs import Pool
    from ..backends.base import Cancel

TYPES = ("docker", "firejail", "nsjail")
_OWN = ("/", "/tmp")  # what every sandbox has of its own, read-only and writable
WORKSPACE = "/workspace"


class SandboxNotEnabled(BelljarError):
    """The manager's configuration does not enable the sandbox; nothing was run."""

    code = "sandbox_not_enabled"

    def __init__(self) -> None:
        super().__init__("Sandbox not enabled", fix="SandboxConfig(enabled=True)")


@dataclass
class ResourceLimits:
    cpu_percent: float = 50
    memory_mb: int = 512
    disk_mb: int = 1024
    timeout_seconds: float = 60
    max_processes: int = 50


@dataclass
class NetworkPolicy:
    enabled: bool = False
    allowed_hosts: tuple[str, ...] = ()
    blocked_ports: tuple[int, ...] = ()


@dataclass
class FilesystemPolicy:
    """Host paths. A sandbox has its own root and its own /tmp, so that `/` and `/tmp` show nothing
    of the host's; a `temp_dir` is writable, and where commands start."""

    read_only: tuple[str, ...] = ("/",)
    read_write: tuple[str, ...] = ("/tmp",)
    hidden: tuple[str, ...] = ("/etc/passwd", "/etc/shadow")
    temp_dir: str | None = None


@dataclass
class SandboxConfig:
    """Which sandbox, whether it is on, and what a command may use."""

    type: str = "docker"
    enabled: bool = False
    image: str | None = None
    profile: str | None = None  # a file for firejail
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    filesystem: FilesystemPolicy = field(default_factory=FilesystemPolicy)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SandboxConfig:
        """From names as here or in camelCase (`cpuPercent`, `memoryMB`). RequestError names an
        unknown one."""
        parts = {"limits": ResourceLimits, "network": NetworkPolicy, "filesystem": FilesystemPolicy}
        chosen = _snake("", given, cls)
        for name, part in parts.items():
            if isinstance(chosen.get(name), Mapping):
                inner = _snake(f"{name}.", chosen[name], part)
                chosen[name] = part(**{key: _frozen(value) for key, value in inner.items()})
        return cls(**chosen)


@dataclass(frozen=True)
class ResourceUsage:
    """Milliseconds of processor and wall time, and bytes; None where they were not counted."""

    cpu_time: float | None
    memory_peak: int | None
    wall_time: float


@dataclass(frozen=True)
class SandboxResult:
    success: bool
    stdout: str
    stderr: str
    exit_code: int
    resource_usage: ResourceUsage


class SandboxManager:
    """Runs commands in the sandbox that its configuration names."""

    def __init__(
        self,
        config: SandboxConfig | Mapping[str, Any] | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        """RequestError for an unknown type, NotBuiltYet for `vm`."""
        if isinstance(config, Mapping):
            config = SandboxConfig.from_dict(config)
        self.config = config or SandboxConfig()
        if self.config.type == "vm":
            raise NotBuiltYet("the sandbox type 'vm'", available=TYPES)
        if self.config.type not in TYPES:
            raise RequestError(
                "type",
                f"Unknown sandbox type: {self.config.type}",
                fix=f"one of {', '.join(TYPES)}",
            )
        settings = settings or load()
        if self.config.profile is not None:
            if self.config.type != "firejail":
                raise RequestError("profile", "is for the sandbox type firejail")
            settings = replace(settings, firejail_profile=self.config.profile)
        self._runner = api.create_runner(backend=self.config.type, settings=settings)
        self._pool: Pool | None = None

    def is_enabled(self) -> bool:
        return self.config.enabled

    def execute(
        self,
        command: str,
        *,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> SandboxResult:
        """Run `command` with a shell. SandboxNotEnabled, or a BelljarError if the sandbox fails.

        `cwd` is a directory of the host's: it is shown, writable only inside `read_write`, and the
        command starts there.
        """
        return self._run(command, cwd, timeout, None)

    def _run(
        self,
        command: str,
        cwd: str | os.PathLike[str] | None,
        timeout: float | None,
        cancel: Cancel | None,
    ) -> SandboxResult:
        if not self.config.enabled:
            raise SandboxNotEnabled
        result = self._runner.engine.run(
            self._request(command, cwd),
            wishes=self._wishes(timeout),
            backend=self.config.type,
            cancel=cancel,
        )
        return _answer(result)

    async def aexecute(
        self,
        command: str,
        *,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> SandboxResult:
        """`execute` for asyncio; cancelling the task kills the command."""
        if self._pool is None:
            from ..async_runs import Pool

            self._pool = Pool(api.MAX_CONCURRENCY)
        return await self._pool.run(lambda _, cancel: self._run(command, cwd, timeout, cancel), {})

    def close(self) -> None:
        self._runner.close()
        if self._pool is not None:
            self._pool.close()

    def _request(self, command: str, cwd: str | os.PathLike[str] | None) -> Request:
        config, mounts = self.config, list[Mount]()
        start: str | None = None
        moves = config.type != "firejail"  # it shows host paths under their own names only
        if config.filesystem.temp_dir is not None:
            place = os.path.realpath(config.filesystem.temp_dir)
            os.makedirs(place, exist_ok=True)
            start = WORKSPACE if moves else place
            mounts.append(Mount(place, start, "rw"))
        if cwd is not None:
            start = place = os.path.realpath(cwd)
            listed = (*config.filesystem.read_write, config.filesystem.temp_dir or "")
            inside = any(_is_inside(place, os.path.realpath(path)) for path in listed if path)
            mounts.append(Mount(place, place, "rw" if inside else "ro"))
        return api.build_request(
            command=["bash", "-c", command],
            image=config.image,
            mounts=mounts,
            workdir=start,
            settings=self._runner.engine.settings,
        )

    def _wishes(self, timeout: float | None) -> dict[str, Any]:
        limits, network, files = self.config.limits, self.config.network, self.config.filesystem
        reach = {
            "mode": ("hosts" if network.allowed_hosts else "any") if network.enabled else "off",
            "allow": list(network.allowed_hosts) if network.enabled else [],
            "blocked_ports": list(network.blocked_ports) if network.enabled else [],
        }
        memory = limits.memory_mb << 20
        return {
            "timeout": timeout if timeout is not None else limits.timeout_seconds,
            "memory": memory,
            "cpus": limits.cpu_percent / 100,
            "processes": limits.max_processes,
            # Files are kept in memory: more than that holds could not be kept.
            "disk": min(limits.disk_mb << 20, memory),
            "network": reach,
            "filesystem": {
                "read_only": [path for path in files.read_only if path not in _OWN],
                "read_write": [path for path in files.read_write if path not in _OWN],
                "hidden": list(files.hidden),
            },
        }


def _answer(result: Result) -> SandboxResult:
    usage = result.usage
    return SandboxResult(
        success=result.success,
        stdout=result.stdout,
        stderr=_answers.stderr(result),
        exit_code=_answers.exit_code(result),
        resource_usage=ResourceUsage(
            cpu_time=None if usage.cpu is None else usage.cpu * 1000,
            memory_peak=usage.peak_memory,
            wall_time=usage.wall * 1000,
        ),
    )


def _snake(where: str, given: Mapping[str, Any], part: Any) -> dict[str, Any]:
    known = {each.name for each in fields(part)}
    found = {}
    for key, value in given.items():
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key)).lower()
        if name not in known:
            raise RequestError(f"{where}{key}", f"unknown key; known: {', '.join(sorted(known))}")
        found[name] = value
    return found


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")

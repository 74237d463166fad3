"""What an engine can do, asked of the engine itself."""

from __future__ import annotations

import os
from typing import Any

from ..docker_api import Api, ApiError
from ..records import record
from .docker_usage import SOCKET_LIMIT

# Where else engines and their runtimes listen: none of these is ever shown to a guest.
ENGINE_SOCKETS = (
    "/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock",
    "/var/run/podman/podman.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock",
    "/run/buildkit/buildkitd.sock",
)  # fmt: skip


@record
class EngineFacts:
    """Everything `compile` needs to know about an engine."""

    socket: str
    name: str
    podman: bool
    rootless: bool
    remapped: bool
    machine: str
    cgroup_version: int
    memory: bool
    swap: bool
    cpu: bool
    pids: bool
    seccomp: bool
    cores: int
    bridge: bool
    runtimes: tuple[str, ...]
    # Whether something counts the buffers of sockets: version 2 of control groups does; for version
    # 1 Belljar sets the limit, if this is the engine's machine and Belljar may write there.
    sockets_counted: bool
    apparmor: bool = False
    selinux: bool = False
    here: bool  # whether this is the engine's machine

    @property
    def sockets(self) -> tuple[str, ...]:
        return (self.socket, *ENGINE_SOCKETS)


def ask(api: Api) -> EngineFacts:
    """The facts of the engine behind `api`. Raises what `Api.json` raises.

    Asked once for every life of an engine, which makes its socket anew: Podman takes its time.
    """
    socket = os.stat(api.path)
    life = (api.path, socket.st_dev, socket.st_ino, socket.st_ctime_ns)
    found = _known.get(life)
    if found is None:
        _known.clear()
        found = _known[life] = _ask(api)
    return found


_known: dict[tuple[str, int, int, int], EngineFacts] = {}


def _ask(api: Api) -> EngineFacts:
    info, version = api.json("GET", "/info"), api.json("GET", "/version")
    podman, rootless = _is_podman(version), _is_rootless(info)
    return read(
        api.path,
        info,
        version,
        controllers=_controllers(api) if podman and rootless else None,
        bridge=_has_bridge(api, podman),
        limits_sockets=_is_this_machine(info) and os.access(SOCKET_LIMIT, os.W_OK),
    )


def read(
    socket: str,
    info: dict[str, Any],
    version: dict[str, Any],
    *,
    controllers: tuple[str, ...] | None,
    bridge: bool,
    limits_sockets: bool,
) -> EngineFacts:
    """The facts in an engine's own words; `controllers` is what a rootless one may use, and
    `limits_sockets` whether Belljar can do that itself."""
    podman, rootless = _is_podman(version), _is_rootless(info)
    security = " ".join(_list(info, "SecurityOptions"))
    cgroup_version = 2 if str(info.get("CgroupVersion")) == "2" else 1
    # A rootless Podman says that it can limit what the kernel can limit; without cgroup version 2
    # and a delegated controller it starts the container anyway, without limits, and only warns.
    hollow = str(info.get("CgroupDriver")) == "none" or (rootless and cgroup_version == 1)

    def limits(flag: str, controller: str) -> bool:
        if hollow or (controllers is not None and controller not in controllers):
            return False
        return bool(info.get(flag, True))

    return EngineFacts(
        socket=socket,
        name=f"{'Podman' if podman else 'Docker'} {info.get('ServerVersion', '')}".strip(),
        podman=podman,
        rootless=rootless,
        remapped="name=userns" in security,
        machine={"amd64": "x86_64", "arm64": "aarch64"}.get(version["Arch"], version["Arch"]),
        cgroup_version=cgroup_version,
        memory=limits("MemoryLimit", "memory"),
        swap=limits("SwapLimit", "memory"),
        cpu=limits("CpuCfsQuota", "cpu"),
        pids=limits("PidsLimit", "pids"),
        seccomp="name=seccomp" in security,
        apparmor="name=apparmor" in security,
        selinux="name=selinux" in security,
        cores=int(info.get("NCPU") or 1),
        bridge=bridge,
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        sockets_counted=cgroup_version == 2 or limits_sockets,
        here=_is_this_machine(info),
    )


def _is_this_machine(info: dict[str, Any]) -> bool:
    """Whether the engine says of its machine what the kernel says of ours. If that is a mistake,
    the first container shows it: its agent reads the limit."""
    here = os.uname()
    return (info.get("Name"), info.get("KernelVersion")) == (here.nodename, here.release)


def _is_podman(version: dict[str, Any]) -> bool:
    return any("podman" in part.get("Name", "").lower() for part in _list(version, "Components"))


def _is_rootless(info: dict[str, Any]) -> bool:
    return bool(info.get("Rootless")) or "name=rootless" in " ".join(_list(info, "SecurityOptions"))


def _list(answer: dict[str, Any], key: str) -> list[Any]:
    found = answer.get(key)
    return found if isinstance(found, list) else []


def _controllers(api: Api) -> tuple[str, ...]:
    """What a rootless Podman may use; none if it does not say."""
    try:
        host = api.json("GET", "/libpod/info").get("host", {})
    except ApiError:
        return ()
    return tuple(_list(host, "cgroupControllers"))


def _has_bridge(api: Api, podman: bool) -> bool:
    try:
        api.json("GET", f"/networks/{'podman' if podman else 'bridge'}")
    except ApiError:
        return False
    return True

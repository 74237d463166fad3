"""Assertions about the host: what is left of a run, and what it took while it ran."""

from __future__ import annotations

import time

from .. import snapshot
from ..scene import Noise, Scene
from ..watch import level
from . import check

_MEBI = 1 << 20
_SLACK = 64 * _MEBI
_RETURN_SECONDS = 5.0
_INODES = 100_000


@check("no_leftovers")
def no_leftovers(scene: Scene, _: str) -> str | None:
    left = snapshot.leftovers(scene.before, scene.patience)
    if not left:
        return None
    why = f"{len(left)} left: {'; '.join(left[:3])}"
    return Noise(why) if snapshot.may_be_others(left) else why


@check("host_mem_delta_le")
def host_mem_delta_le(scene: Scene, _: str) -> str | None:
    """The host process, and the host as a whole, grew by no more than the sandbox's own limit."""
    most = _SLACK + scene.job.limits["MEM_MB"] * _MEBI
    for who, grown in (
        ("the host process", scene.seen.host_growth),
        ("memory in use on the host", scene.watch.peak.memory - scene.watch.start.memory),
    ):
        if grown > most:
            return Noise(f"{who} grew by {grown // _MEBI} MiB, not at most {most // _MEBI}")
    deadline = time.monotonic() + _RETURN_SECONDS
    while (kept := _memory_kept(scene)) > _SLACK:
        if time.monotonic() > deadline:
            return Noise(f"{kept // _MEBI} MiB did not come back")
        time.sleep(0.1)
    return None


def _memory_kept(scene: Scene) -> int:
    return level(scene.stage.root).memory - scene.watch.start.memory


@check("host_disk_delta_le")
def host_disk_delta_le(scene: Scene, _: str) -> str | None:
    most = _SLACK + scene.job.limits["DISK_MB"] * _MEBI
    grown = scene.watch.peak.disk - scene.watch.start.disk
    return None if grown <= most else Noise(f"the disk filled by {grown // _MEBI} MiB")


@check("host_inode_delta_le")
def host_inode_delta_le(scene: Scene, _: str) -> str | None:
    grown = scene.watch.peak.inodes - scene.watch.start.inodes
    return None if grown <= _INODES else Noise(f"{grown} inodes were taken")


@check("core_handler_not_invoked")
def core_handler_not_invoked(scene: Scene, _: str) -> str | None:
    return "the host's core handler ran" if scene.watch.handler_seen else None


@check("no_listener_hit")
def no_listener_hit(scene: Scene, _: str) -> str | None:
    hits = scene.stage.world.listeners.hits
    reached = [name for name, count in hits.items() if count != scene.hits_before[name]]
    return f"the guest reached the {', '.join(reached)} listener" if reached else None


@check("host_port_closed")
def host_port_closed(scene: Scene, port: str) -> str | None:
    return f"port {port} of the host answered" if scene.watch.port_answered else None


@check("sentinel_got_no_signal")
def sentinel_got_no_signal(scene: Scene, _: str) -> str | None:
    sentinel = scene.stage.world.sentinel
    if not sentinel.alive:
        return "the sentinel is dead"
    new = sentinel.signals[scene.signals_before :]
    return f"the sentinel got signal {new[0]}" if new else None


@check("still_in_cgroup")
def still_in_cgroup(scene: Scene, _: str) -> str | None:
    """A guest that says it wrote itself into another group has left its own."""
    stdout = scene.seen.result.stdout if scene.seen.result else ""
    return "the guest moved to another control group" if "cgroup.procs" in stdout else None

"""Backend `gvisor`: the `docker` backend with gVisor's `runsc`, a kernel of its own for each run.

Everything is as in `docker.py`, with these differences, all of them gVisor's:
- A program's system calls are answered by the sentry, an ordinary process on the host, and not by
  the host's kernel. Our seccomp profile is not applied inside; the sentry has one of its own.
- It does not count a program's processes or threads, and a pids limit crashes the sentry itself. So
  `processes` is bounded by memory only, and reported so; a request that sets it is refused.
- Memory is the whole sandbox's. Past it the host's kernel kills the sentry and all that is in it,
  and files are lost; where the engine misses why, the control group's event tells (version 1).
- What a program made set-id in a writable mount loses those bits after the run, not at once.
- The agent is another user than the program, because a process that is not dumpable is open here to
  its own user, and pid 1 is killed and stopped like any other. It is the sandbox's root with the
  capabilities to become the program's user and to kill it; those are the sentry's, not the host's.
- The network is gVisor's own and ends at its loopback; `network=any` is refused.
"""

from __future__ import annotations

from types import MappingProxyType

from ..policy import Isolation
from .docker import DockerBackend
from .docker_facts import EngineFacts


class GvisorBackend(DockerBackend):
    """See the module's docstring. `runtime` is the engine's name for runsc, found if not given."""

    name = "gvisor"
    isolation = Isolation.GVISOR
    least = MappingProxyType({"memory": 64 << 20})  # the same, and the kernel of the sandbox
    gvisor = True
    #: Limits that a request cannot set: see the module's docstring.
    unheld = frozenset({"processes"})

    def _runtime(self, facts: EngineFacts) -> str | None:
        if self.runtime is not None:
            return self.runtime
        found = [name for name in facts.runtimes if "runsc" in name or "gvisor" in name.lower()]
        return found[0] if found else "runsc"

    def _unfit(self, facts: EngineFacts) -> tuple[str, str] | None:
        runtime = self._runtime(facts)
        if facts.podman:
            return (
                f"{facts.name} at {facts.socket} is Podman, with which gVisor is not tested",
                "use Docker's engine",
            )
        if runtime not in facts.runtimes:
            return (
                f"{facts.name} at {facts.socket} has no runtime {runtime!r}",
                "apt-get install runsc, then `runsc install` and restart the engine",
            )
        return super()._unfit(facts)

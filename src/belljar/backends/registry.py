"""Backends by name, imported only when asked for; ours and other people's come through one door."""

from __future__ import annotations

import importlib
import sys

from .. import trusted_imports
from ..errors import BackendUnavailable, NotBuiltYet
from ..policy import Isolation
from .base import Backend

# The same lines stand in pyproject.toml's entry points. Reading installed metadata costs more than
# a run does, so the names we ship are known here; `test_registry` keeps the two equal.
BUILT_IN = {
    "bubblewrap": "belljar.backends.bubblewrap:BubblewrapBackend",
    "docker": "belljar.backends.docker:DockerBackend",
    "firejail": "belljar.backends.firejail:FirejailBackend",
    "gvisor": "belljar.backends.gvisor:GvisorBackend",
    "inprocess": "belljar.backends.inprocess:InProcessBackend",
    "jail": "belljar.backends.jail:JailBackend",
    "landlock": "belljar.backends.landlock:LandlockBackend",
    "nsjail": "belljar.backends.nsjail:NsjailBackend",
    "subprocess": "belljar.backends.subprocess:SubprocessBackend",
    "wasm": "belljar.backends.wasm:WasmBackend",
}
# `auto` tries these in order: the strongest that starts fast and is a whole Python comes first. A
# set-uid bubblewrap or firejail makes jails where users have no namespaces of their own. `wasm` is
# for what those cannot do: fuel, a higher floor, JavaScript without Node.js (docs/choosing.md). A
# container engine is only asked for where there is no jail: to ask takes longer than a run.
PREFERENCE: tuple[str, ...] = (
    "jail", "bubblewrap", "firejail", "wasm", "docker", "gvisor", "landlock", "subprocess",
)  # fmt: skip
# How strong each is, known without importing it; `test_registry` compares.
RUNGS = {
    "bubblewrap": Isolation.JAIL,
    "docker": Isolation.CONTAINER,
    "firejail": Isolation.JAIL,
    "gvisor": Isolation.GVISOR,
    "inprocess": Isolation.NONE,
    "jail": Isolation.JAIL,
    "landlock": Isolation.LANDLOCK,
    "nsjail": Isolation.JAIL,
    "subprocess": Isolation.PROCESS,
    "wasm": Isolation.WASM,
}
if sys.platform != "linux":
    BUILT_IN["subprocess"] = "belljar.backends.portable:PortableBackend"
    BUILT_IN["wasm"] = "belljar.backends.portable_wasm:PortableWasmBackend"
    for _name in ("bubblewrap", "firejail", "gvisor", "jail", "landlock", "nsjail"):
        del BUILT_IN[_name]
    if sys.platform == "win32":  # Python has no unix sockets there, the only way to an engine
        del BUILT_IN["docker"]
    PREFERENCE = tuple(name for name in ("wasm", "docker", "subprocess") if name in BUILT_IN)
GROUP = "belljar.backends"
# In the documents, and not built yet. A package that brings one of them is used as any other.
PLANNED = ("vm", "kubernetes", "e2b", "remote")


def names() -> tuple[str, ...]:
    """Every backend known here, ours first."""
    return (*BUILT_IN, *sorted(_foreign()))


def load(name: str, **options: object) -> Backend:
    """A new instance of the backend called `name`; BackendUnavailable lists those we know.

    Of `options` a backend gets those that its constructor names.
    """
    target = BUILT_IN.get(name) or _foreign().get(name)
    if target is None and name in PLANNED:
        raise NotBuiltYet(f"backend {name!r}", available=names())
    if target is None:
        raise BackendUnavailable(
            f"no backend is called {name!r}; known: {', '.join(names())}", fix="belljar backends"
        )
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported: {error}", fix=f"pip install 'belljar[{name}]'"
        ) from error
    given = {key: value for key, value in options.items() if value is not None}
    if given:
        import inspect

        accepted = inspect.signature(factory).parameters
        given = {key: value for key, value in given.items() if key in accepted}
    backend: Backend = factory(**given)
    return backend


def _foreign() -> dict[str, str]:
    found = trusted_imports.entry_points(GROUP)
    return {name: value for name, value in found.items() if name not in BUILT_IN}

"""The host's side of the fork servers of `landlock`: started when needed, replaced, ended.

One zygote a kind of preloading, whatever the policies: all that is a run's own is done after the
fork. A run is handed over in one message and from then on is its supervisor's. Called from many
threads.
"""

from __future__ import annotations

import marshal
import os
import socket
import subprocess
import sys
import threading

from ..errors import BackendFailed, SetupFailed
from ..guest import protocol
from . import run_directory

_LINUX_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "linux")
_BOOT = (
    "import sys;p=type(sys)('belljar_landlock');p.__path__=[{directory!r}];"
    "sys.modules['belljar_landlock']=p;from belljar_landlock.landlock_zygote import main;main({fd})"
)
# Libraries that would start threads, and a locale in which Python speaks UTF-8.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "MPLBACKEND": "agg",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_START_SECONDS = 60.0
_RUNS_A_ZYGOTE = 2000  # its children share address layout and hash seed: not for ever
_MOST_ZYGOTES = 8  # each is an interpreter with its libraries


class Zygote:
    """One process of `linux/landlock_zygote.py`."""

    def __init__(
        self, preload: tuple[str, ...], layers: tuple[str, ...], user: tuple[int, int] | None
    ) -> None:
        self.runs = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = _BOOT.format(directory=_LINUX_DIR, fd=theirs.fileno())
        with run_directory.made() as own:
            # Modules may want to write somewhere while they are imported.
            home = run_directory.fill(own, {}, (), user)
            if user is not None:
                os.chown(home, *user)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**_ENVIRONMENT, "HOME": home, "TMPDIR": home, "MPLCONFIGDIR": home},
                cwd="/",
                start_new_session=True,
            )
            theirs.close()
            spec = {
                "preload": preload,
                "layers": layers,
                "user": user,
                "guest": protocol.GUEST_DIR,
            }
            try:
                self._greet(marshal.dumps(spec))
            except BaseException:
                self.close()
                raise

    def _greet(self, spec: bytes) -> None:
        self._control.settimeout(_START_SECONDS)
        try:
            self._control.sendall(spec)
            word, _, rest = self._control.recv(1 << 12).decode("utf-8", "replace").partition(" ")
        except OSError as error:
            raise SetupFailed(f"the zygote did not start: {error}", retryable=True) from error
        if word != "ready":
            raise SetupFailed(f"the zygote could not be set up: {rest or 'it died'}")

    def start(self, fds: list[int], *, framed: bool) -> None:
        """Have a run's supervisor started with these descriptors. ZygoteDied if nobody is there."""
        from ..linux import in_flight

        try:
            in_flight.send(self._control, b"frames" if framed else b"plain", fds)
        except OSError as error:
            raise ZygoteDied(f"the zygote died: {error}", retryable=True) from error
        self.runs += 1

    def close(self) -> None:
        """End it; runs that are going on are not touched."""
        self._control.close()
        try:
            self.process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ZygoteDied(SetupFailed):
    """The warm process is gone; another one can be started."""


class Fleet:
    """The zygotes of one backend."""

    def __init__(self, layers: tuple[str, ...], user: tuple[int, int] | None) -> None:
        self.process = os.getpid()
        self._layers, self._user = layers, user
        self._lock = threading.Lock()
        self._zygotes: dict[tuple[str, ...], Zygote] = {}
        self._closed = False

    def start(self, preload: tuple[str, ...], fds: list[int], *, framed: bool) -> None:
        """Start a run from a warm zygote; one that died is replaced once."""
        with self._lock:
            for attempt in (1, 2):
                zygote = self._zygote(preload)
                try:
                    return zygote.start(fds, framed=framed)
                except ZygoteDied:
                    self._zygotes.pop(preload).close()
                    if attempt == 2:
                        raise

    def _zygote(self, preload: tuple[str, ...]) -> Zygote:
        if self._closed:
            raise BackendFailed("this backend is closed")
        zygote = self._zygotes.pop(preload, None)
        if zygote is not None and zygote.runs >= _RUNS_A_ZYGOTE:
            zygote.close()
            zygote = None
        if zygote is None:
            if len(self._zygotes) >= _MOST_ZYGOTES:
                self._zygotes.pop(next(iter(self._zygotes))).close()
            zygote = Zygote(preload, self._layers, self._user)
        self._zygotes[preload] = zygote  # the one that was used longest ago stands first
        return zygote

    def keep_only(self, preload: tuple[str, ...]) -> None:
        """End all but that one."""
        with self._lock:
            for other in [each for each in self._zygotes if each != preload]:
                self._zygotes.pop(other).close()

    def stats(self) -> dict[str, int]:
        from ..linux.tree import resident

        with self._lock:
            zygotes = list(self._zygotes.values())
        memory = sum(resident(zygote.process.pid) for zygote in zygotes)
        return {"fork_servers": len(zygotes), "memory": memory}

    def close(self) -> None:
        if os.getpid() != self.process:
            return  # a fork of the process that owns them
        with self._lock:
            self._closed = True
            zygotes = list(self._zygotes.values())
            self._zygotes.clear()
        for zygote in zygotes:
            zygote.close()

"""Sockets that nobody but a guest on the loose would connect to, counting who does."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
from pathlib import Path

_CID_LOCAL = 1


class Listeners:
    """Loopback, abstract, unix and vsock listeners. `hits` counts connections by name."""

    def __init__(self, root: Path) -> None:
        self.hits: dict[str, int] = {}
        self.abstract = "belljar-selftest-" + secrets.token_hex(6)
        self.unix_path = str(root / "server.sock")
        self.vsock_port = 50_000 + secrets.randbelow(10_000)
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            self._open()
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._count, name="selftest-listeners", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        self.port = self._listen("tcp", socket.AF_INET, ("127.0.0.1", 0))
        self.port6 = self._listen("tcp6", socket.AF_INET6, ("::1", 0)) or self.port
        self._listen("unix", socket.AF_UNIX, self.unix_path)
        os.chmod(self.unix_path, 0o777)
        if hasattr(socket, "AF_VSOCK"):
            self._listen("vsock", socket.AF_VSOCK, (_CID_LOCAL, self.vsock_port))
        self._listen("abstract", socket.AF_UNIX, "\0" + self.abstract)

    def _listen(self, name: str, family: int, address: object) -> int:
        """Open one listener; its port, or 0 where this host has no such family."""
        try:
            opened = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return 0
        try:
            opened.bind(address)  # type: ignore[arg-type]
            opened.listen(64)
        except OSError:
            opened.close()
            return 0
        opened.setblocking(False)
        self._sockets.append(opened)
        self.hits[name] = 0
        self._selector.register(opened, selectors.EVENT_READ, name)
        where = opened.getsockname()
        return where[1] if isinstance(where, tuple) else 0

    def _count(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self.hits[key.data] += 1
                try:
                    key.fileobj.accept()[0].close()
                except OSError:  # it hung up before we answered: it had still reached us
                    continue

    def close(self) -> None:
        self._wake.send(b"x")
        self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._selector.close()
        for opened in (*self._sockets, self._wake, self._woken):
            opened.close()


def free_port() -> int:
    """A loopback port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

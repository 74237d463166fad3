"""The process that runs guests: one instance a run, one run at a time, until its parent ends it.

Theory of operation

    parent ──socket──> worker (this file), descriptor 3: one setup message, then one message a run
           <──frames── what the guest says, passed on by us; after each run one DONE frame of ours
           <──pipes─── the guest's stdout and stderr are our own 1 and 2, written by the engine

The instance for the next run is made while nobody waits. It has everything but the program: the
same directories, streams and limits serve all runs of a worker, and its parent gives a run to a
worker only if they are what the run needs. If there is still nobody, it runs a program of ours that
leaves no trace and says nothing: pages that are written to are copied then, and not when somebody
waits. (Not where fuel is counted: every run must begin alike.) A Python run with input gets an
instance of its own, because the engine opens the input when it makes one. Whatever happens, an
instance sees one program of somebody else's, and then it is gone.

Threads: guests run on one thread, with the large stack that CPython wants. The main thread is the
clock: it raises the engine's epoch when a run's time is up. A guest in a blocking call of the
host's does not see that; our parent kills us then. Nothing here is started after a guest has run.

The engine's package passes text, and lists of bytes one by one. So binary data of a Python guest
goes through a file in its temporary directory: the engine copies between that and the guest's
memory. We pass on what the guest has written when its BUFFER frame, which is empty, says so.

Nothing a guest does is trusted here: `send` passes on only frames that guests may send, and a DONE
frame is made from what the engine says. Should a guest break out of the engine it is in this
process, which holds nothing, in the jail that our parent put around it.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
import stat
import sys
import threading
import time

import wasmtime
from wasmtime import component

from . import engine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

CHANNEL = 3
DONE = 0x10
READY = 0x11
_GUEST_KINDS = frozenset(range(0x81, 0x89))
_BUFFER = 0x89
# In a guest's own temporary directory: what crosses as bytes, a moment before or after.
_BUFFER_FILE = ".belljar-buffer"
# Not all of these are on every platform, where `plain_worker.py` runs.
_NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NOT_FOLLOWED |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MAX_FRAME = (3 << 29) + (1 << 16)  # as guest/protocol.py, which is not at hand here
_HEAD = 4
_PIECE, _LARGE_PIECE = 1 << 16, 1 << 20
_NEVER = 1 << 40
_TICK = 0.02
_ANSWER_MILLISECONDS = 1  # in which our parent takes an answer
_BUSY_MILLISECONDS = 10  # who is asked again within this time works under load


class Left(Exception):
    """The guest called `os._exit`."""


class Clock:
    """Raises the epoch at the deadline of the present run; runs on the main thread.

    A running clock looks 50 times a second, so that a run costs it no message; an idle one sleeps.
    """

    def __init__(self, raise_epoch: Any) -> None:
        self._raise = raise_epoch
        self._deadline = 0.0
        self._used = False  # since it looked last: most runs are shorter than a tick
        self._wake = threading.Event()
        self._asleep = False

    def start(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._used = True
        if self._asleep:
            self._wake.set()

    def stop(self) -> None:
        self._deadline = 0.0

    def run(self) -> NoReturn:
        idle = 0
        while True:
            deadline, now = self._deadline, time.monotonic()
            if deadline:
                idle = 0
                if now >= deadline:
                    self._raise()
                time.sleep(min(_TICK, deadline - now) if now < deadline else _TICK)
            elif self._used or idle < 10:
                idle = 0 if self._used else idle + 1
                self._used = False
                time.sleep(_TICK)
            else:
                self._wake.clear()
                self._asleep = True
                if not self._deadline:  # else it was started in between
                    self._wake.wait()
                self._asleep = False
                idle = 0


class Streams:
    """What a guest is connected to, and what its memory is measured by, in a jail on Linux.

    `plain_worker.py` has another one, for processes without a jail on every platform.
    """

    def __init__(self) -> None:
        self._stdin = os.memfd_create("stdin")
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page = os.sysconf("SC_PAGE_SIZE")

    def connect(self, wasi: wasmtime.WasiConfig) -> None:
        wasi.inherit_stdout()
        wasi.inherit_stderr()

    def write(self, number: int, data: bytes) -> None:
        """A JavaScript program's output; what it writes to any other number is dropped."""
        if number in (1, 2):
            _write_all(number, data)

    def stdin(self, data: bytes) -> str:
        """A file with the run's input, until `forget_stdin`."""
        os.ftruncate(self._stdin, 0)
        os.lseek(self._stdin, 0, os.SEEK_SET)
        _write_all(self._stdin, data)
        return f"/proc/self/fd/{self._stdin}"

    def forget_stdin(self) -> None:
        os.ftruncate(self._stdin, 0)

    def resident(self) -> int:
        """Memory never shrinks in WebAssembly: what is resident at the end was the most."""
        return int(os.pread(self._statm, 100, 0).split()[1]) * self._page


class PythonGuests:
    """Makes and runs instances of the Python component."""

    input_at_start = True  # it reads its input as a file, which an instance has from its beginning

    def __init__(
        self, setup: dict[str, Any], made: wasmtime.Engine, send: Any, streams: Streams
    ) -> None:
        self._component = component.Component.deserialize_file(made, setup["guest"])
        self._linker = component.Linker(made)
        self._linker.add_wasip2()
        self._directory, self._preopens = setup["directory"], setup["preopens"]
        self._streams = streams
        self._code = 0
        with self._linker.root() as root:
            root.add_func("send", lambda store, kind, payload: send(kind, payload))
            root.add_func("leave", self._leave)
        export = self._component.get_export_index("execute")
        assert export is not None
        self._export = export

    def wasi(self, stdin: bytes) -> wasmtime.WasiConfig:
        wasi = wasmtime.WasiConfig()
        self._streams.connect(wasi)
        if stdin:
            wasi.stdin_file = self._streams.stdin(stdin)
        for path, shown, mutable in self._preopens:
            wasi.preopen_dir(path, shown, mutable)
        return wasi

    def instantiate(self, store: wasmtime.Store) -> Any:
        return self._linker.instantiate(store, self._component).get_func(store, self._export)

    def rehearse(self, store: wasmtime.Store, function: Any) -> None:
        function(store, self._directory)

    def run(self, store: wasmtime.Store, function: Any, order: dict[str, Any]) -> int:
        try:
            code: int = function(store, order["request"])
        except Left:
            return self._code
        finally:
            if order["stdin"]:
                self._streams.forget_stdin()
        return code

    def _leave(self, store: Any, code: int) -> None:
        self._code = code
        raise Left


class JavaScriptGuests:
    """Makes and runs instances of QuickJS."""

    input_at_start = False

    def __init__(
        self, setup: dict[str, Any], made: wasmtime.Engine, send: Any, streams: Streams
    ) -> None:
        from . import calls, javascript

        self._library, self._streams = javascript, streams
        self._host = javascript.Host(streams.write, send)
        module = wasmtime.Module.deserialize_file(made, setup["guest"])
        self._before = self._host.link(made).instantiate_pre(module)
        self._signatures = calls.Signatures(module)
        self._parts = dict(setup["parts"])

    def wasi(self, stdin: bytes) -> wasmtime.WasiConfig:
        wasi = wasmtime.WasiConfig()  # without directories: there is no way to ask for a file
        self._streams.connect(wasi)
        return wasi

    def instantiate(self, store: wasmtime.Store) -> Any:
        instance = self._before.instantiate(store)
        return self._library.Instance(store, instance, self._signatures, self._parts)

    def rehearse(self, store: wasmtime.Store, instance: Any) -> None:
        self._library.rehearse(instance, self._host)

    def run(self, store: wasmtime.Store, instance: Any, order: dict[str, Any]) -> int:
        return self._library.run(instance, self._host, order["request"], order["stdin"])


class Worker:
    """Everything that is set up once."""

    def __init__(self, setup: dict[str, Any], channel: Any, streams: Streams) -> None:
        self._setup, self._channel, self._streams = setup, channel, streams
        private = [path for path, shown, _ in setup["preopens"] if shown == "/tmp"]
        self._buffer_file = os.path.join(*private, _BUFFER_FILE)
        self._fuel: bool = setup["fuel"]
        self._engine = engine.make(self._fuel)
        kind = JavaScriptGuests if setup["language"] == "javascript" else PythonGuests
        self._guests = kind(setup, self._engine, self._send, streams)
        self.clock = Clock(self._engine.increment_epoch)
        self._park()

    def serve(self) -> NoReturn:
        self._frame(READY, marshal.dumps({"cpu": time.process_time()}))
        arrived = select.poll()
        arrived.register(self._channel.fileno(), select.POLLIN)
        while True:
            idle = not arrived.poll(_BUSY_MILLISECONDS)
            if idle and not self._fuel:
                self._rehearse()
            order = _receive(self._channel)
            if order is None:
                os._exit(0)
            used = self._run(order)
            if idle:
                # Our parent may be waiting for this very processor, even if another has nothing to
                # do. First the parent, then what takes us a millisecond: removing and making an
                # instance. Under load this is no time to wait.
                arrived.poll(_ANSWER_MILLISECONDS)
            self._renew(used)

    def _instantiate(self, stdin: bytes) -> tuple[wasmtime.Store, Any]:
        store = wasmtime.Store(self._engine)
        store.set_wasi(self._guests.wasi(stdin))
        if self._setup["memory"]:
            store.set_limits(memory_size=self._setup["memory"])
        store.set_epoch_deadline(_NEVER)
        if self._fuel:
            store.set_fuel(1 << 62)
        return store, self._guests.instantiate(store)

    def _park(self) -> None:
        """Make the next instance; what it takes from here on is its own."""
        self._before = self._streams.resident()
        self._parked = self._instantiate(b"")
        self._untouched = True

    def _rehearse(self) -> None:
        """Once an instance: it may wait while runs with input have instances of their own."""
        if not self._untouched:
            return
        try:
            self._guests.rehearse(*self._parked)
        except (wasmtime.Trap, wasmtime.WasmtimeError):
            # Too little memory even for that, perhaps. The program is to find it out by itself.
            self._parked[0].close()
            self._park()
        self._untouched = False

    def _run(self, order: dict[str, Any]) -> wasmtime.Store:
        """Run a program and report it; gives what is to be removed then."""
        for name, data, stamp in order["files"]:
            _write(name, data, stamp)
        if order.get("buffers"):
            _write(self._buffer_file, order["buffers"], 0)
        apart = self._guests.input_at_start and order["stdin"]
        store, guest = self._instantiate(order["stdin"]) if apart else self._parked
        began = time.process_time()
        fuel = order["fuel"] if self._fuel else 0
        if self._fuel:
            store.set_fuel(fuel)
        if order["epoch"]:
            store.set_epoch_deadline(1)
            self.clock.start(order["seconds"])
        ending = self._call(store, guest, order)
        self.clock.stop()
        used = max(0, self._streams.resident() - self._before)
        left = store.get_fuel() if self._fuel else 0
        report = {
            **ending,
            "cpu": time.process_time() - began,
            "total_cpu": time.process_time(),
            "memory": used,
            "fuel": fuel - left if self._fuel else None,
        }
        self._frame(DONE, marshal.dumps(report))
        return store

    def _renew(self, used: wasmtime.Store) -> None:
        """Remove the instance that has served a run; if it was the prepared one, make another."""
        used.close()
        if used is self._parked[0]:
            self._park()

    def _call(self, store: wasmtime.Store, guest: Any, order: dict[str, Any]) -> dict[str, Any]:
        """How it ended: a code, or the engine's words for why it did not end by itself."""
        try:
            return {"code": self._guests.run(store, guest, order) & 0xFF, "trap": ""}
        except wasmtime.ExitTrap as ending:
            return {"code": ending.code & 0xFF, "trap": ""}
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            words = str(error).strip().splitlines()
            return {"code": 134, "trap": words[-1].strip() if words else "unknown"}

    def _send(self, kind: int, payload: str) -> None:
        if kind == _BUFFER:
            self._send_buffer()
            return
        data = payload.encode("utf-8")
        if kind in _GUEST_KINDS and len(data) <= _MAX_FRAME:
            self._frame(kind, data)

    def _send_buffer(self) -> None:
        """Pass on the file that the guest has written, which waits for us: nothing changes it now.

        What is no such file is not sent, and the host finds that a buffer is missing.
        """
        try:
            fd = os.open(self._buffer_file, os.O_RDONLY | _NOT_FOLLOWED)
        except OSError:
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FRAME:
                return
            self._send_file(fd, status.st_size)
        finally:
            os.close(fd)
        os.unlink(self._buffer_file)  # closed before, as Windows wants it

    def _send_file(self, fd: int, size: int) -> None:
        try:
            self._channel.sendall(bytes((_BUFFER,)) + size.to_bytes(4, "big"))
            while size:
                sent = os.sendfile(self._channel.fileno(), fd, None, size)
                if not sent:
                    os._exit(70)  # the frame cannot be finished
                size -= sent
        except OSError:
            os._exit(0)  # the host has closed its end

    def _frame(self, kind: int, payload: bytes) -> None:
        try:
            self._channel.sendall(bytes((kind,)) + len(payload).to_bytes(4, "big") + payload)
        except OSError:
            os._exit(0)  # the host has closed its end


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write(name: str, data: bytes, stamp: int) -> None:
    if "/" in name:
        os.makedirs(os.path.dirname(name), exist_ok=True)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOT_FOLLOWED, 0o600)
    try:
        _write_all(fd, data)
        if stamp:
            os.utime(fd, ns=(stamp, stamp))
    finally:
        os.close(fd)


def _receive(channel: Any) -> dict[str, Any] | None:
    """The parent's next message, of the same interpreter's marshal; None when it has gone.

    It sends the next one only when we have answered: what arrives belongs to this one.
    """
    data = bytearray(channel.recv(_PIECE))
    while len(data) < _HEAD or len(data) - _HEAD < int.from_bytes(data[:_HEAD], "big"):
        piece = channel.recv(_LARGE_PIECE)
        if not piece:
            return None
        data += piece
    message: dict[str, Any] = marshal.loads(memoryview(data)[_HEAD:])
    return message


def main() -> None:
    """Serve until the parent closes the channel, or ends this process."""
    channel = socket.socket(fileno=CHANNEL)
    setup = _receive(channel)
    if setup is None:
        return
    if setup["directory"]:
        os.chdir(setup["directory"])
    worker = Worker(setup, channel, Streams())
    threading.stack_size(engine.THREAD_STACK)
    threading.Thread(target=_serve, args=(worker,), daemon=True).start()
    worker.clock.run()


def _serve(worker: Worker) -> None:
    try:
        worker.serve()
    except BaseException as error:  # noqa: BLE001 - whatever it is: without this thread we are of no use
        sys.stderr.write(f"belljar: the wasm worker failed: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(70)

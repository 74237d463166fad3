"""JavaScript programs in QuickJS: making the snapshot, and running a program in an instance.

QuickJS is a module whose values are handles, numbers that its exported functions take and return.
`prelude.js` has everything that can be said in JavaScript; here is what only a host can do: write,
send a frame, sleep until the next timer, and carry text in and out. Programs get no object of the
host's: the functions that we give to the prelude are visible to nobody else.
"""

from __future__ import annotations

import json
import os
import struct
import time

import wasmtime

from . import calls, wizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PRELUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prelude.js")
_HOST_FUNCTIONS = ("write", "frame", "random")
_PARTS = ("begin", "succeed", "fail", "wait", "fire")
_USED = frozenset((
    "memory", "qjs_call", "qjs_eval", "qjs_execute_pending_job", "qjs_free_cstring",
    "qjs_get_exception", "qjs_get_float64", "qjs_get_prop_string", "qjs_get_string",
    "qjs_get_undefined", "qjs_is_exception", "qjs_is_job_pending", "qjs_is_promise",
    "qjs_new_number", "qjs_new_string", "qjs_promise_result", "qjs_promise_state", "strlen",
    "wasm_malloc",
))  # fmt: skip
_ASYNC, _BARRIER = 1 << 7, 1 << 6
_PENDING, _REJECTED = 0, 2
_STACK = 512 << 10
_SLICE = 0.02
_ADDRESS = 0xFFFF_FFFF
_ROOM_FOR_ARGUMENTS = 16


class Host:
    """The functions that QuickJS imports. `write` and `frame` are ours to fill in."""

    def __init__(self, write: Callable[[int, bytes], None], frame: Callable[[int, str], None]):
        self._write, self._frame = write, frame
        self.instance: Instance  # the one that runs
        self.unhandled: dict[bytes, int] = {}  # by promise: its reason

    def link(self, engine: wasmtime.Engine) -> wasmtime.Linker:
        linker = wasmtime.Linker(engine)
        linker.define_wasi()
        number = wasmtime.ValType.i32()

        def define(name: str, takes: int, gives: int, call: Callable[..., Any]) -> None:
            kind = wasmtime.FuncType([number] * takes, [number] * gives)
            linker.define_func("env", name, kind, call)

        define("host_get_timezone_offset", 2, 1, lambda *time: 0)
        define("host_interrupt", 0, 1, lambda: 0)
        define("host_promise_rejection", 3, 0, self._rejection)
        define("host_module_normalize", 2, 1, lambda *names: 0)
        define("host_module_load", 2, 1, lambda *names: 0)
        define("host_call", 5, 1, self._call)
        return linker

    def _call(self, name: int, size: int, this: int, count: int, arguments: int) -> int:
        """One of `_HOST_FUNCTIONS`: `random` without arguments, others with a number and a text."""
        instance = self.instance
        which = instance.read(name & _ADDRESS, size & _ADDRESS)
        if which == b"random":
            # Always of the same size, so that taking its last 32 bits costs equal fuel.
            bits = 1 << 48 | int.from_bytes(os.urandom(4))
            return _signed(instance.do("qjs_new_number", float(bits)))
        first, second = struct.unpack("<II", instance.read(arguments & _ADDRESS, 8))
        value = int(instance.number(first))
        text = instance.do("qjs_get_string", second)
        data = instance.read(text, instance.do("strlen", text))
        instance.do("qjs_free_cstring", text)
        if which == b"write":
            self._write(value, data)
        else:
            self._frame(value, data.decode("utf-8", "replace"))
        return _signed(instance.do("qjs_get_undefined"))

    def _rejection(self, promise: int, reason: int, handled: int) -> None:
        # A handle is new every time; the value that it points to is not.
        which = self.instance.read(promise & _ADDRESS, 8)
        if handled:
            self.unhandled.pop(which, None)
        else:
            self.unhandled[which] = reason & _ADDRESS


def _signed(number: int) -> int:
    """As the engine's package wants what a host's function gives."""
    return number - (1 << 32) if number >> 31 else number


class Instance(calls.Calls):
    """One QuickJS, for one program.

    `parts` are the handles of what the prelude returned, and what else was put into the snapshot so
    that no run has to: a handle of `undefined`, the name of a property, room for arguments.
    """

    def __init__(
        self,
        store: wasmtime.Store,
        instance: wasmtime.Instance,
        signatures: calls.Signatures,
        parts: dict[str, int],
    ) -> None:
        super().__init__(store, instance, signatures)
        self.parts = parts

    def put(self, text: str) -> tuple[int, int]:
        """The address and the length of `text` in the guest's memory."""
        data = text.encode("utf-8", "surrogatepass")
        place = self.room(len(data) + 1)
        self.write(place, data + b"\0")
        return place, len(data)

    def room(self, size: int) -> int:
        """The address of so many bytes in the guest's memory."""
        place: int = self.do("wasm_malloc", size)
        if not place:
            raise MemoryError
        return place

    def string(self, text: str) -> int:
        handle: int = self.do("qjs_new_string", *self.put(text))
        return handle

    def number(self, handle: int) -> float:
        value: float = self.do("qjs_get_float64", handle)
        return value

    def evaluate(self, code: str, name: str, flags: int) -> int:
        place, size = self.put(f"{name}\0{code}")
        skipped = len(name.encode("utf-8", "surrogatepass")) + 1
        handle: int = self.do("qjs_eval", place + skipped, size - skipped, place, flags)
        return handle

    def call(self, part: str, *arguments: int) -> int:
        """Call a function of the prelude's; Thrown if it, or what it called, threw."""
        parts, place = self.parts, self.parts["arguments"]
        self.write(place, struct.pack(f"<{len(arguments)}I", *arguments))
        result = self.do("qjs_call", parts[part], parts["undefined"], len(arguments), place)
        return self.checked(result)

    def checked(self, handle: int) -> int:
        if self.do("qjs_is_exception", handle):
            raise Thrown(self.do("qjs_get_exception"))
        return handle

    def run_jobs(self) -> None:
        while self.do("qjs_is_job_pending"):
            self.do("qjs_execute_pending_job")

    def settled(self, promise: int) -> int:
        """What a promise came to, once nothing is left to wait for. A pending one: undefined."""
        self.run_jobs()
        while (wait := self.number(self.call("wait"))) >= 0:
            end = time.monotonic() + wait / 1000
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, _SLICE))
                self.do("qjs_is_job_pending")  # notices that the run's time is up
            self.call("fire")
            self.run_jobs()
        # A script resolves to an object that holds its value, which may be a promise of its own.
        value: int = self.do("qjs_get_prop_string", self._outcome(promise), self.parts["value"])
        return self._outcome(value) if self.do("qjs_is_promise", value) else value

    def _outcome(self, promise: int) -> int:
        state = self.do("qjs_promise_state", promise)
        if state == _PENDING:
            return self.parts["undefined"]
        handle: int = self.do("qjs_promise_result", promise)
        if state == _REJECTED:
            raise Thrown(handle)
        return handle


_OUT_OF_MEMORY = '{"type":"InternalError","message":"out of memory","traceback":"","memory":true}'
_ROOM_TO_SPEAK = 1 << 16


class Thrown(Exception):
    """A JavaScript exception; its argument is the handle of what was thrown."""


def run(instance: Instance, host: Host, request: str, stdin: bytes) -> int:
    """Run the program of `request` (see wasm/worker.py); its exit code."""
    fields = json.loads(request)
    begin = {
        "args": fields["args"],
        "env": fields["env"],
        "context": fields["context"],
        "budget": fields.get("budget"),
        "stdin": stdin.decode("utf-8", "replace"),
    }
    host.instance = instance
    host.unhandled.clear()
    try:
        instance.call("begin", instance.string(json.dumps(begin)))
        flags = _ASYNC | _BARRIER
        program = instance.checked(instance.evaluate(fields["code"], fields["filename"], flags))
        value = instance.settled(program)
        if host.unhandled:
            raise Thrown(next(iter(host.unhandled.values())))
        instance.call("succeed", value)
    except Thrown as thrown:
        _failed(instance, host, thrown.args[0])
        return 1
    except MemoryError:
        host._frame(0x83, _OUT_OF_MEMORY)
        return 1
    return 0


def rehearse(instance: Instance, host: Host) -> None:
    """Go the way of every program, unheard. What it defines, the program's own run defines anew."""
    speaks = host._write, host._frame
    host._write, host._frame = (lambda stream, data: None), (lambda kind, text: None)
    try:
        run(instance, host, _REHEARSED, b"")
    finally:
        host._write, host._frame = speaks


_REHEARSED = (
    '{"args":[],"env":{"HOME":"/"},"context":{},"code":"console.log(1)","filename":"main.js"}'
)


def _failed(instance: Instance, host: Host, thrown: int) -> None:
    """What was thrown, in its own words; where there is no room for those, that is the reason."""
    try:
        instance.call("fail", thrown)
    except (Thrown, MemoryError):
        try:
            instance.room(_ROOM_TO_SPEAK)
        except MemoryError:
            host._frame(0x83, _OUT_OF_MEMORY)
        # Else it cannot be said, and stays unsaid.


def make_snapshot(engine: wasmtime.Engine, module: bytes) -> tuple[bytes, dict[str, int], int]:
    """QuickJS with the prelude run, the handles of the prelude's functions, its memory's size."""
    host = Host(lambda stream, data: None, lambda kind, text: None)
    readable, numbers = wizer.with_exported_globals(module)
    with wasmtime.Store(engine) as store:
        store.set_wasi(wasmtime.WasiConfig())
        store.set_epoch_deadline(1 << 40)
        compiled = wasmtime.Module(engine, readable)
        began = host.link(engine).instantiate(store, compiled)
        instance = host.instance = Instance(store, began, calls.Signatures(compiled), {})
        instance.do("_initialize")
        if instance.do("qjs_init") != 0:
            raise RuntimeError("QuickJS does not start")
        instance.do("qjs_set_max_stack_size", _STACK)
        instance.do("qjs_set_promise_rejection_handler", 1)
        parts = instance.parts
        parts["undefined"] = instance.do("qjs_get_undefined")
        parts["arguments"], parts["value"] = (
            instance.room(_ROOM_FOR_ARGUMENTS),
            instance.put("value")[0],
        )
        functions = instance.do("qjs_new_object")
        for name in _HOST_FUNCTIONS:
            place, size = instance.put(name)
            made = instance.do("qjs_new_host_function", place, size, 0)
            instance.do("qjs_set_prop_string", functions, place, made)
        with open(_PRELUDE, encoding="utf-8") as file:
            parts["prelude"] = instance.checked(instance.evaluate(file.read(), "belljar", 0))
        returned = instance.call("prelude", functions)
        for name in _PARTS:
            parts[name] = instance.do("qjs_get_prop_string", returned, instance.put(name)[0])
        exports: Any = began.exports(store)
        memory = bytes(exports["memory"].read(store, 0, exports["memory"].data_len(store)))
        values = {number: exports[wizer.GLOBAL.format(number)].value(store) for number in numbers}
    return wizer.snapshot(module, memory, values, _USED), parts, len(memory)

"""Calls into an instance of a WebAssembly module, without what the engine's Python package adds.

That package asks for the function's type at every call, converts each value by it and wraps what
comes back: some twenty microseconds, where a JavaScript run makes thirty calls. Here the types are
read once a module, and a call is packed by them; `struct` refuses what does not fit.

Addresses and sizes come from the guest. Nothing outside of its memory is read or written for it.
"""

from __future__ import annotations

import ctypes
import struct

import wasmtime
from wasmtime import _ffi, _func

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# How a value lies in the engine's array, which has sixteen bytes for each.
_PACKED = {"i32": "I12x", "f64": "d8x"}
_MOST_VALUES = 8
_Values = _ffi.wasmtime_val_raw_t * _MOST_VALUES
_Trap = ctypes.POINTER(_ffi.wasm_trap_t)


class Signatures:
    """How the functions that a module exports are packed, by name."""

    def __init__(self, module: wasmtime.Module) -> None:
        self.of: dict[str, tuple[struct.Struct, struct.Struct]] = {}
        for export in module.exports:
            kind = export.type
            if isinstance(kind, wasmtime.FuncType):
                takes, gives = (
                    [str(each) for each in types] for types in (kind.params, kind.results)
                )
                if set(takes + gives) <= set(_PACKED) and len(takes) <= _MOST_VALUES >= len(gives):
                    self.of[export.name] = _packing(takes), _packing(gives)


def _packing(kinds: list[str]) -> struct.Struct:
    return struct.Struct("<" + "".join(_PACKED[kind] for kind in kinds))


class Calls:
    """The functions and the memory of one instance. Whole numbers are unsigned, both ways."""

    def __init__(
        self, store: wasmtime.Store, instance: wasmtime.Instance, signatures: Signatures
    ) -> None:
        self._context: Any = store._context()
        self._instance = ctypes.byref(instance._instance)
        self._signatures = signatures.of
        self._found: dict[str, Any] = {}
        self._memory = ctypes.byref(self._export("memory").memory)

    def _export(self, name: str) -> Any:
        item, called = _ffi.wasmtime_extern_t(), name.encode()
        if not _ffi.wasmtime_instance_export_get(
            self._context, self._instance, ctypes.create_string_buffer(called), len(called),
            ctypes.byref(item),
        ):  # fmt: skip
            raise KeyError(name)
        return item.of

    def do(self, name: str, *arguments: float) -> Any:
        """Call a function; what it gives, or None. Raises what a host's function raised in it."""
        found = self._found.get(name)
        if found is None:
            function = ctypes.byref(self._export(name).func)
            found = self._found[name] = (function, *self._signatures[name])
        function, takes, gives = found
        values, trap = _Values(), _Trap()
        takes.pack_into(values, 0, *arguments)
        error = _ffi.wasmtime_func_call_unchecked(
            self._context, function, values, _MOST_VALUES, ctypes.byref(trap)
        )
        if error or trap:
            ending = (
                wasmtime.WasmtimeError._from_ptr(error) if error else wasmtime.Trap._from_ptr(trap)
            )
            _func.maybe_raise_last_exn()
            raise ending
        return gives.unpack_from(values)[0] if gives.size else None

    def read(self, start: int, size: int) -> bytes:
        return ctypes.string_at(self._place(start, size), size)

    def write(self, start: int, data: bytes) -> None:
        ctypes.memmove(self._place(start, len(data)), data, len(data))

    def _place(self, start: int, size: int) -> int:
        if (
            not 0
            <= start
            <= start + size
            <= _ffi.wasmtime_memory_data_size(self._context, self._memory)
        ):
            raise wasmtime.WasmtimeError("the guest named memory that it does not have")
        base = _ffi.wasmtime_memory_data(self._context, self._memory)
        return ctypes.addressof(base.contents) + start

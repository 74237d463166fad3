"""Compiles a guest to this machine's code, in a process of its own.

It takes some ten seconds of processor time and half a gigabyte, and a mistake in the engine's
configuration ends the process: no place for that in somebody's application. The last line on
stdout is a JSON object: the size of the guest's memory before it has run, in bytes, and where in it
is what.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import wasmtime
    from wasmtime import component

_PAGE = 1 << 16


def main(source: str, target: str, fuel: bool) -> None:
    from . import engine

    made = engine.make(fuel)
    if os.path.basename(source) == "javascript.wasm":
        code, noted = _javascript(made, source)
    else:
        code, noted = _python(made, source, fuel)
    with open(target, "wb") as file:
        file.write(code)
    print(json.dumps(noted), flush=True)
    os._exit(0)  # the engine's threads do not like an orderly end


def _python(made: wasmtime.Engine, source: str, fuel: bool) -> tuple[bytes, dict[str, Any]]:
    from wasmtime import component

    compiled = component.Component.from_file(made, source)
    return bytes(compiled.serialize()), {"memory": initial_memory(made, compiled, fuel)}


def _javascript(made: wasmtime.Engine, source: str) -> tuple[bytes, dict[str, Any]]:
    import wasmtime

    from . import engine, javascript

    with open(source, "rb") as file:
        # Started in an engine that counts nothing: what happens before the snapshot is no run's.
        snapshot, parts, memory = javascript.make_snapshot(engine.make(False), file.read())
    compiled = wasmtime.Module(made, snapshot)
    return bytes(compiled.serialize()), {"memory": memory, "parts": parts}


def initial_memory(made: wasmtime.Engine, compiled: component.Component, fuel: bool) -> int:
    """The least memory limit with which the guest can be instantiated: found by trying."""
    import wasmtime
    from wasmtime import component

    linker = component.Linker(made)
    linker.add_wasip2()
    with linker.root() as root:
        root.add_func("send", lambda store, kind, payload: None)
        root.add_func("leave", lambda store, code: None)

    def enough(pages: int) -> bool:
        with wasmtime.Store(made) as store:
            store.set_wasi(wasmtime.WasiConfig())
            store.set_limits(memory_size=pages * _PAGE)
            store.set_epoch_deadline(1)
            if fuel:
                store.set_fuel(1 << 60)
            try:
                linker.instantiate(store, compiled)
            except (wasmtime.WasmtimeError, wasmtime.Trap):
                return False
            return True

    low, high = 0, 1 << 14
    if not enough(high):
        raise RuntimeError("the guest does not start in a gigabyte of memory")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high * _PAGE

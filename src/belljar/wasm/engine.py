"""How the WebAssembly engine is set up: one place, because a compiled guest is bound to it.

Imported by the process that compiles a guest and by the one that runs it; nothing here imports
Belljar, whose files the latter does not see.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import wasmtime

# Earlier ones have known holes in their WASI file system and their compiler.
FLOOR = (50, 0, 1)
# Raised when `make` changes in a way that shows in compiled code.
REVISION = 1
# CPython's own recursion checks want this much; a thread that runs guests needs more than it.
WASM_STACK = 8 << 20
THREAD_STACK = 64 << 20


def make(fuel: bool) -> wasmtime.Engine:
    """An engine; `fuel` makes it count instructions, which costs a fifth of the speed.

    Epochs interrupt what computes. A guest inside a blocking call of the host does not see them:
    the worker's parent has a clock of its own.
    """
    import wasmtime
    from wasmtime import _ffi

    config = wasmtime.Config()
    config.epoch_interruption = True
    config.consume_fuel = fuel
    # In this order: a stack larger than the asynchronous one would end the process.
    _ffi.wasmtime_config_async_stack_size_set(config.ptr(), WASM_STACK + (1 << 20))
    config.max_wasm_stack = WASM_STACK
    return wasmtime.Engine(config)


def parse_version(text: str) -> tuple[int, ...]:
    """ "50.0.1" as numbers; whatever follows them does not count."""
    numbers = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)

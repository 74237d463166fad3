"""Calls into an instance, packed by us: what does not fit is refused, and memory has an end."""

from __future__ import annotations

import struct
from typing import Any

import pytest

wasmtime = pytest.importorskip("wasmtime")

from belljar.wasm import calls  # noqa: E402

PAGE = 1 << 16
MODULE = """
(module
  (import "env" "host" (func $host (param i32) (result i32)))
  (memory (export "memory") 1 2)
  (func (export "add") (param i32 i32) (result i32) (i32.add (local.get 0) (local.get 1)))
  (func (export "half") (param f64) (result f64) (f64.div (local.get 0) (f64.const 2)))
  (func (export "mixed") (param i32 f64 i32) (result f64)
    (f64.add (local.get 1) (f64.convert_i32_u (i32.sub (local.get 0) (local.get 2)))))
  (func (export "nothing"))
  (func (export "trap") unreachable)
  (func (export "grow") (drop (memory.grow (i32.const 1))))
  (func (export "ask") (param i32) (result i32) (call $host (local.get 0)))
  (func (export "wide") (param i64)))
"""


class Asked(Exception):
    """What the host's function raises when it is asked for nothing."""


@pytest.fixture
def made() -> Any:
    engine = wasmtime.Engine()
    linker = wasmtime.Linker(engine)
    number = wasmtime.ValType.i32()
    inside: list[calls.Calls] = []

    def host(value: int) -> int:
        if not value:
            raise Asked
        return int(inside[0].do("add", value, 1))  # a call while another one runs

    linker.define_func("env", "host", wasmtime.FuncType([number], [number]), host)
    module = wasmtime.Module(engine, MODULE)
    with wasmtime.Store(engine) as store:
        instance = linker.instantiate(store, module)
        inside.append(calls.Calls(store, instance, calls.Signatures(module)))
        yield inside[0]


def test_values_go_in_and_come_back(made: calls.Calls) -> None:
    assert made.do("add", 2, 3) == 5
    assert made.do("add", 0xFFFF_FFFE, 1) == 0xFFFF_FFFF
    assert made.do("half", 5.0) == 2.5
    assert made.do("mixed", 9, 0.5, 2) == 7.5
    assert made.do("nothing") is None
    assert made.do("ask", 41) == 42


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("add", (1,)), ("add", (1, 2, 3)), ("add", (-1, 2)), ("add", (1 << 32, 2)), ("add", (1.5, 2)),
     ("half", ("x",)), ("nothing", (1,))],
)  # fmt: skip
def test_what_does_not_fit_is_refused(made: calls.Calls, name: str, arguments: Any) -> None:
    with pytest.raises(struct.error):
        made.do(name, *arguments)


@pytest.mark.parametrize("name", ["absent", "memory", "wide"])
def test_what_is_no_function_that_we_can_call_is_refused(made: calls.Calls, name: str) -> None:
    with pytest.raises(KeyError):
        made.do(name, 1)


def test_a_trap_is_raised_and_so_is_what_the_host_raised(made: calls.Calls) -> None:
    with pytest.raises(wasmtime.Trap, match="unreachable"):
        made.do("trap")
    with pytest.raises(Asked):
        made.do("ask", 0)
    assert made.do("ask", 1) == 2  # and nothing is left of it


def test_memory_is_read_and_written_to_its_end(made: calls.Calls) -> None:
    made.write(PAGE - 3, b"end")
    assert made.read(PAGE - 3, 3) == b"end"
    assert made.read(PAGE, 0) == b""


@pytest.mark.parametrize(
    ("start", "size"),
    [(PAGE - 2, 3), (PAGE, 1), (0, PAGE + 1), (0xFFFF_FFFF, 0xFFFF_FFFF), (-1, 1), (0, -1)],
)
def test_nothing_outside_of_the_memory_is_touched(made: calls.Calls, start: int, size: int) -> None:
    with pytest.raises(wasmtime.WasmtimeError, match="does not have"):
        made.read(start, size)
    if size > 0 and size < 1 << 20:
        with pytest.raises(wasmtime.WasmtimeError, match="does not have"):
            made.write(start, bytes(size))


def test_memory_that_has_grown_can_be_used(made: calls.Calls) -> None:
    with pytest.raises(wasmtime.WasmtimeError):
        made.read(PAGE, 4)
    made.do("grow")
    made.write(PAGE, b"more")
    assert made.read(PAGE, 4) == b"more"

"""Freezes a running WebAssembly module into a new one that begins where the old one was.

The module must be a reactor (nothing of it is on the stack when its memory is read), have one
memory, and change no tables. `with_exported_globals` makes a module whose mutable globals can be
read; run that one, then `snapshot` writes the memory and the globals into the original. Works on
the binary format, of which it reads the sections that it changes.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_IMPORTS, _MEMORY, _GLOBALS, _EXPORTS, _START, _DATA, _DATA_COUNT = 2, 5, 6, 7, 8, 11, 12
_MAGIC = b"\0asm\1\0\0\0"
_PAGE, _WASM_PAGE = 4096, 65536
_I32, _I64, _F32, _F64 = 0x7F, 0x7E, 0x7D, 0x7C
GLOBAL = "belljar_global_{}"


class Reader:
    """A position in a module."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self) -> int:
        result = shift = 0
        while True:
            part = self.byte()
            result |= (part & 0x7F) << shift
            shift += 7
            if part < 0x80:
                return result

    def skip_name(self) -> bytes:
        size = self.number()
        self.at += size
        return self.data[self.at - size : self.at]

    def skip_limits(self) -> None:
        flags = self.number()
        self.number()
        if flags & 1:
            self.number()

    def skip_expression(self) -> None:
        """A constant expression, as globals are initialised with."""
        while (op := self.byte()) != 0x0B:
            if op in (0x41, 0x42, 0x23, 0xD2):
                self.number()
            elif op in (0x43, 0x44):
                self.at += 4 if op == 0x43 else 8
            elif op == 0xD0:
                self.at += 1
            else:
                raise ValueError(f"unknown instruction {op:#x} in a constant expression")


def sections(module: bytes) -> Iterator[tuple[int, int, int]]:
    """(kind, first byte, byte after the last) of every section."""
    if not module.startswith(_MAGIC):
        raise ValueError("not a WebAssembly module")
    reader = Reader(module, len(_MAGIC))
    while reader.at < len(module):
        kind, size = reader.byte(), reader.number()
        yield kind, reader.at, reader.at + size
        reader.at += size


def unsigned(number: int) -> bytes:
    out = bytearray()
    while True:
        part, number = number & 0x7F, number >> 7
        out.append(part | (0x80 if number else 0))
        if not number:
            return bytes(out)


def signed(number: int) -> bytes:
    out = bytearray()
    while True:
        part, number = number & 0x7F, number >> 7
        if (number == 0 and not part & 0x40) or (number == -1 and part & 0x40):
            out.append(part)
            return bytes(out)
        out.append(part | 0x80)


def _section(kind: int, body: bytes) -> bytes:
    return bytes((kind,)) + unsigned(len(body)) + body


def _globals(module: bytes, start: int) -> Iterator[tuple[int, int, int, int]]:
    """(type, mutable, first and last byte of the initial value) of every global of its own."""
    reader = Reader(module, start)
    for _ in range(reader.number()):
        kind, mutable, first = reader.byte(), reader.byte(), reader.at
        reader.skip_expression()
        yield kind, mutable, first, reader.at


def _imported_globals(module: bytes, start: int) -> int:
    reader, found = Reader(module, start), 0
    for _ in range(reader.number()):
        reader.skip_name()
        reader.skip_name()
        kind = reader.byte()
        if kind == 0:
            reader.number()
        elif kind in (1, 2):
            reader.at += kind == 1  # a table's limits come behind its type
            reader.skip_limits()
        elif kind == 3:
            reader.at += 2
            found += 1
        else:
            raise ValueError(f"unknown kind of import {kind}")
    return found


def with_exported_globals(module: bytes) -> tuple[bytes, list[int]]:
    """The module with its mutable globals exported, and the numbers of those."""
    places = {kind: (start, end) for kind, start, end in sections(module) if kind}
    before = _imported_globals(module, places[_IMPORTS][0]) if _IMPORTS in places else 0
    mutable = [n for n, each in enumerate(_globals(module, places[_GLOBALS][0])) if each[1]]
    out = bytearray(_MAGIC)
    for kind, start, end in sections(module):
        body = module[start:end]
        if kind == _EXPORTS:
            reader = Reader(module, start)
            count = reader.number()
            names = ((GLOBAL.format(number).encode(), number) for number in mutable)
            extra = b"".join(unsigned(len(name)) + name + b"\3" + unsigned(before + number)
                             for name, number in names)  # fmt: skip
            body = unsigned(count + len(mutable)) + module[reader.at : end] + extra
        out += _section(kind, body)
    return bytes(out), mutable


def snapshot(
    module: bytes, memory: bytes, values: dict[int, int | float], keep: Collection[str]
) -> bytes:
    """`module` with this memory and these globals from the start, exporting only `keep`."""
    out = bytearray(_MAGIC)
    for kind, start, end in sections(module):
        body = module[start:end]
        if kind == _MEMORY:
            reader = Reader(module, start)
            if reader.number() != 1:
                raise ValueError("more than one memory")
            flags = reader.number()
            reader.number()
            size = unsigned(len(memory) // _WASM_PAGE)
            body = b"\1" + unsigned(flags) + size + module[reader.at : end]
        elif kind == _GLOBALS:
            body = _with_values(module, start, values)
        elif kind == _EXPORTS:
            body = _only(module, start, keep)
        elif kind == _DATA:
            body = _segments(memory)
        elif kind in (_START, _DATA_COUNT):
            continue
        out += _section(kind, body)
    return bytes(out)


def _with_values(module: bytes, start: int, values: dict[int, int | float]) -> bytes:
    found = list(_globals(module, start))
    body = bytearray(unsigned(len(found)))
    for number, (kind, mutable, first, last) in enumerate(found):
        body += bytes((kind, mutable))
        if number not in values:
            body += module[first:last]
            continue
        value = values[number]
        if kind in (_I32, _I64):
            body += (b"\x41" if kind == _I32 else b"\x42") + signed(int(value))
        elif kind in (_F32, _F64):
            body += (
                b"\x43" + struct.pack("<f", value)
                if kind == _F32
                else b"\x44" + struct.pack("<d", value)
            )
        else:
            raise ValueError(f"a mutable global of type {kind:#x}")
        body += b"\x0b"
    return bytes(body)


def _only(module: bytes, start: int, keep: Collection[str]) -> bytes:
    reader, kept = Reader(module, start), []
    for _ in range(reader.number()):
        first = reader.at
        name = reader.skip_name().decode()
        reader.byte()
        reader.number()
        if name in keep:
            kept.append(module[first : reader.at])
    if len(kept) != len(set(keep)):
        raise ValueError("the module does not export all that is wanted")
    return unsigned(len(kept)) + b"".join(kept)


def _segments(memory: bytes) -> bytes:
    """The pages that are not zero."""
    zero, runs, first = bytes(_PAGE), [], -1
    for at in range(0, len(memory) + _PAGE, _PAGE):
        used = at < len(memory) and memory[at : at + _PAGE] != zero
        if used and first < 0:
            first = at
        elif not used and first >= 0:
            runs.append((first, min(at, len(memory))))
            first = -1
    body = bytearray(unsigned(len(runs)))
    for start, end in runs:
        body += b"\0\x41" + signed(start) + b"\x0b" + unsigned(end - start) + memory[start:end]
    return bytes(body)

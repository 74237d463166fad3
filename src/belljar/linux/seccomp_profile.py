"""A seccomp profile in Docker's format, as a filter program of the kernel's.

The filter is installed beside ours, never instead of it: of two filters the kernel obeys the
stricter answer, so a profile can close what ours opens and open nothing. Where several rules of a
profile fit a call, the strictest decides.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

from . import syscall_table, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_NAMES = {"x86_64": ("SCMP_ARCH_X86_64", "amd64"), "aarch64": ("SCMP_ARCH_AARCH64", "arm64")}
_X32_BIT = 0x4000_0000
_ERRNO = 0x0005_0000
# The strictest first: the order in which the rules of one call are asked.
_ACTIONS = {
    "SCMP_ACT_KILL_PROCESS": 0x8000_0000,
    "SCMP_ACT_KILL": 0x8000_0000,
    "SCMP_ACT_KILL_THREAD": 0x8000_0000,
    "SCMP_ACT_TRAP": 0x0003_0000,
    "SCMP_ACT_ERRNO": _ERRNO,
    "SCMP_ACT_LOG": 0x7FFC_0000,
    "SCMP_ACT_ALLOW": 0x7FFF_0000,
}
_STRICTNESS = {action: place for place, action in enumerate(_ACTIONS)}
_LOAD, _AND, _JUMP, _RETURN = 0x20, 0x54, 0x05, 0x06
_EQUAL, _ABOVE, _AT_LEAST = 0x15, 0x25, 0x35
_MOST = 4096  # instructions that the kernel takes
_KEYS = frozenset((
    "defaultAction", "defaultErrnoRet", "defaultErrno", "archMap", "architectures", "syscalls",
    "flags",
))  # fmt: skip
_RULE_KEYS = frozenset((
    "name", "names", "action", "args", "errnoRet", "errno", "comment", "includes", "excludes",
))  # fmt: skip
# (instruction, operand, target if true, target if false): "next", "true" and "false" are resolved
# when the length of the rule is known.
_Step = tuple[int, int, str, str]


def compile_profile(document: Any, machine: str = syscalls.MACHINE) -> bytes:
    """The filter program. ValueError says what of `document` is wrong or cannot be held here."""
    if machine not in _ARCH:
        raise ValueError(f"there is no table of system calls for {machine or 'this machine'}")
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")
    _known(document, _KEYS, "the profile")
    _check_architecture(document, machine)
    default = _action(document, "defaultAction", document.get("defaultErrnoRet"))
    rules: dict[int, list[tuple[int, tuple[Any, ...], int]]] = {}
    numbers = syscall_table.numbers(machine)
    anywhere = {name for each in _ARCH for name in syscall_table.numbers(each)}
    for rule in _list(document, "syscalls"):
        if not isinstance(rule, dict):
            raise ValueError("a rule is not an object")
        _known(rule, _RULE_KEYS, "a rule")
        if not _applies(rule, machine):
            continue
        action = _action(rule, "action", rule.get("errnoRet", document.get("defaultErrnoRet")))
        alternatives = _alternatives(_list(rule, "args"))
        for name in [*_list(rule, "names"), *([rule["name"]] if "name" in rule else [])]:
            if name not in anywhere:
                # Not allowing what nobody knows is what happens anyway; refusing it must be so.
                if rule["action"] in ("SCMP_ACT_ALLOW", "SCMP_ACT_LOG"):
                    continue
                raise ValueError(f"there is no system call {name!r} to refuse")
            if name in numbers:
                place = _STRICTNESS[rule["action"]]
                found = rules.setdefault(numbers[name], [])
                found += [(place, conditions, action) for conditions in alternatives]
    return _program(rules, default, machine)


def _program(
    rules: Mapping[int, list[tuple[int, tuple[Any, ...], int]]], default: int, machine: str
) -> bytes:
    steps = [_op(_LOAD, 4), _op(_EQUAL, _ARCH[machine], 1), _op(_RETURN, 0x8000_0000)]
    steps.append(_op(_LOAD, 0))
    if machine == "x86_64":
        steps += [_op(_AT_LEAST, _X32_BIT, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    for number, choices in sorted(rules.items()):
        body: list[bytes] = []
        for _, conditions, action in sorted(choices, key=lambda choice: choice[0]):
            body += _rule(conditions, action)
        body.append(_op(_RETURN, default))
        # A jump that may be longer than the 255 instructions of a comparison's.
        steps += [_op(_EQUAL, number, 1), _op(_JUMP, len(body)), *body]
    steps.append(_op(_RETURN, default))
    if len(steps) > _MOST:
        raise ValueError(f"needs {len(steps)} instructions, and the kernel takes {_MOST}")
    return b"".join(steps)


def _rule(conditions: tuple[Any, ...], action: int) -> list[bytes]:
    """Return `action` if all conditions hold, else go on behind."""
    parts = [_compare(*condition) for condition in conditions]
    ends, length = [], 0
    for part in parts:
        length += len(part)
        ends.append(length)
    whole = length + 1
    found, at = [], 0
    for part, end in zip(parts, ends, strict=True):
        for code, operand, if_true, if_false in part:
            places = {"next": 0, "true": end - at - 1, "false": whole - at - 1}
            found.append(_op(code, operand, places[if_true], places[if_false]))
            at += 1
    return [*found, _op(_RETURN, action)]


def _compare(index: int, operation: str, value: int, other: int) -> list[_Step]:
    """An argument of 64 bits, which the kernel's filters read in two halves."""
    high, low = value >> 32, value & 0xFFFF_FFFF
    load_low: _Step = (_LOAD, 16 + 8 * index, "next", "next")
    load_high: _Step = (_LOAD, 20 + 8 * index, "next", "next")
    match operation:
        case "SCMP_CMP_EQ":
            ask: list[_Step] = [(_EQUAL, high, "next", "false"), load_low]
            return [load_high, *ask, (_EQUAL, low, "true", "false")]
        case "SCMP_CMP_NE":
            ask = [(_EQUAL, high, "next", "true"), load_low]
            return [load_high, *ask, (_EQUAL, low, "false", "true")]
        case "SCMP_CMP_MASKED_EQ":
            return [
                load_high, (_AND, high, "next", "next"), (_EQUAL, other >> 32, "next", "false"),
                load_low, (_AND, low, "next", "next"),
                (_EQUAL, other & 0xFFFF_FFFF, "true", "false"),
            ]  # fmt: skip
        case "SCMP_CMP_GT" | "SCMP_CMP_GE":
            last = _ABOVE if operation == "SCMP_CMP_GT" else _AT_LEAST
            ask = [(_ABOVE, high, "true", "next"), (_EQUAL, high, "next", "false"), load_low]
            return [load_high, *ask, (last, low, "true", "false")]
        case "SCMP_CMP_LT" | "SCMP_CMP_LE":
            last = _AT_LEAST if operation == "SCMP_CMP_LT" else _ABOVE
            ask = [(_ABOVE, high, "false", "next"), (_EQUAL, high, "next", "true"), load_low]
            return [load_high, *ask, (last, low, "false", "true")]
    raise ValueError(f"{operation!r} is not a comparison")


def _alternatives(given: list[Any]) -> list[tuple[Any, ...]]:
    """Conditions that must all hold; as in runc, two on one argument are alternatives."""
    conditions = []
    for each in given:
        if not isinstance(each, dict):
            raise ValueError("a condition is not an object")
        _known(each, frozenset(("index", "value", "valueTwo", "op")), "a condition")
        index, value, other = (each.get(key, 0) for key in ("index", "value", "valueTwo"))
        for number, most in ((index, 5), (value, 2**64 - 1), (other, 2**64 - 1)):
            if type(number) is not int or not 0 <= number <= most:
                raise ValueError(f"{number!r} is not a number from 0 to {most}")
        _compare(index, str(each.get("op")), value, other)
        conditions.append((index, str(each["op"]), value, other))
    if len({condition[0] for condition in conditions}) < len(conditions):
        return [(condition,) for condition in conditions]
    return [tuple(conditions)]


def _applies(rule: Mapping[str, Any], machine: str) -> bool:
    """Whether a rule counts here, for programs that have no capabilities."""
    for key in ("includes", "excludes"):
        part = rule.get(key) or {}
        _known(part, frozenset(("caps", "arches", "minKernel")), key)
        verdicts = []
        if part.get("caps"):
            verdicts.append(False)
        if part.get("arches"):
            verdicts.append(not set(_NAMES[machine]).isdisjoint(part["arches"])
                            or machine in part["arches"])  # fmt: skip
        if part.get("minKernel"):
            verdicts.append(_kernel() >= _version(str(part["minKernel"])))
        if key == "includes" and not all(verdicts):
            return False
        if key == "excludes" and any(verdicts):
            return False
    return True


def _check_architecture(document: Mapping[str, Any], machine: str) -> None:
    named = [*_list(document, "architectures")]
    named += [entry.get("architecture") for entry in _list(document, "archMap")]
    if named and _NAMES[machine][0] not in named:
        raise ValueError(f"says nothing of {_NAMES[machine][0]}, which this machine is")


def _action(given: Mapping[str, Any], key: str, number: Any) -> int:
    name = given.get(key)
    if name not in _ACTIONS:
        known = ", ".join(_ACTIONS)
        raise ValueError(f"{key}: {name!r} is not one of {known}")
    if name != "SCMP_ACT_ERRNO":
        return _ACTIONS[name]
    number = errno.EPERM if number is None else number
    if type(number) is not int or not 0 <= number < 4096:
        raise ValueError(f"{number!r} is not a number of an error")
    return _ERRNO | number


def _known(given: Any, keys: frozenset[str], what: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{what} is not an object")
    for key in given:
        if key not in keys:
            raise ValueError(f"{what} has the key {key!r}, which is not known here")


def _list(given: Mapping[str, Any], key: str) -> list[Any]:
    found = given.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise ValueError(f"{key} is not a list")
    return found


def _kernel() -> tuple[int, ...]:
    return _version(os.uname().release if hasattr(os, "uname") else platform.release())


def _version(text: str) -> tuple[int, ...]:
    parts = text.split("-")[0].split(".")[:2]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"minKernel: {text!r} is not a version")
    return tuple(map(int, parts))


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)

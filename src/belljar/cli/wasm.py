"""`belljar wasm`: the WebAssembly guests, from their sources to machine code of this host."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..errors import BackendFailed, BackendUnavailable
from ..units import human_size
from ..wasm import build, cache, engine
from .arguments import add_common
from .failures import print_json
from .terminal import say, show

EPILOG = """\
examples:
  belljar wasm prepare          compile the guests for this host, so that no run has to wait
  belljar wasm prepare --fuel   and those that count instructions
  belljar wasm build            build the guests, where the package came without them
  belljar wasm status           what is there"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("prepare", "build", "status", "clear"))
    parser.add_argument("--fuel", action="store_true", help="also prepare guests that count fuel")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    if args.action == "build":
        _build()
    elif args.action == "prepare":
        _prepare(fuel=args.fuel)
    elif args.action == "clear":
        for path in cache.clear():
            say(f"removed {path}")
    found = _status()
    if args.json:
        print_json(found)
    else:
        show("\n".join(_lines(found)))
    return 0


def _build() -> None:
    for make in build.GUEST_BUILDERS:
        try:
            make(say)
        except build.CannotBuild as problem:
            raise BackendFailed(
                str(problem), fix=f"pip install componentize-py=={build.COMPONENTIZE}"
            ) from problem


def _prepare(*, fuel: bool) -> None:
    library = _library()
    there = [guest for guest in build.GUESTS.values() if build.description(guest)]
    if not there:
        raise BackendUnavailable("no guest has been built", fix="belljar wasm build")
    for guest in there:
        for counted in (False, True) if fuel else (False,):
            cache.prepare(guest, fuel=counted, installed=library, say=say)


def _library() -> cache.Library:
    library = cache.library()
    if library is None or engine.parse_version(library.version) < engine.FLOOR:
        floor = ".".join(map(str, engine.FLOOR))
        there = f"wasmtime {library.version} is too old" if library else "wasmtime is not installed"
        raise BackendUnavailable(f"{there}: {floor} is needed", fix="pip install 'belljar[wasm]'")
    return library


def _status() -> dict[str, Any]:
    library = cache.library()
    guests = {}
    for language, path in build.GUESTS.items():
        noted = build.description(path)
        compiled = []
        for fuel in (False, True) if noted and library else ():
            assert library is not None
            if found := cache.find(path, fuel=fuel, installed=library):
                compiled.append({"path": found.path, "fuel": fuel, "memory": found.memory})
        guests[language] = {
            "path": path if noted else None,
            "size": os.path.getsize(path) if noted else None,
            "current": bool(noted) and build.is_current(path),
            "compiled": compiled,
        }
    return {"wasmtime": library.version if library else None, "guests": guests}


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"wasmtime    {found['wasmtime'] or 'not installed: pip install belljar[wasm]'}"]
    for language, guest in found["guests"].items():
        if guest["path"] is None:
            lines.append(f"{language:<11} not built: belljar wasm build")
            continue
        old = "" if guest["current"] else ", older than its sources: belljar wasm build"
        lines.append(f"{language:<11} {guest['path']} ({human_size(guest['size'])}){old}")
        if not guest["compiled"]:
            lines.append(f"{'':<11} not compiled for this host: belljar wasm prepare")
        for compiled in guest["compiled"]:
            kind = "counting fuel" if compiled["fuel"] else "compiled"
            lines.append(f"{'':<11} {kind}: {compiled['path']}")
    return lines

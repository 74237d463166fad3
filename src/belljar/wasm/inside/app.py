"""The component's one export: runs one program in an interpreter that was started at build time.

Everything at the top level of this module has happened before the snapshot was taken; an instance
begins in `execute`. It uses the same worker as every other backend, over a channel that is a
function of the host's instead of a descriptor.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import io
import os
import random
import sys

import wit_world

from ...guest import (
    arrow,
    displays,
    drops,
    extensions,
    failures,
    protocol,
    tables,
    values,
    worker,
)
from . import stdlib, world

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

# Imported beforehand: the most used, which cost nobody anything until they are written to.
_PRELOADED = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bdb", "bisect", "calendar",
    "collections.abc", "concurrent.futures", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "dis", "encodings.ascii", "encodings.cp437",
    "encodings.idna", "encodings.latin_1", "enum", "fractions", "functools", "glob", "graphlib",
    "hashlib", "heapq", "hmac", "html", "inspect", "io", "itertools", "json", "keyword",
    "linecache", "locale", "logging", "math", "numbers", "operator", "pathlib", "pickle",
    "pprint", "queue", "random", "re", "reprlib", "secrets", "shutil", "statistics", "string",
    "struct", "subprocess", "tempfile", "textwrap", "threading", "time", "timeit", "tokenize",
    "traceback", "types", "typing", "unicodedata", "unittest", "urllib.parse", "uuid",
    "warnings", "weakref", "zipfile", "zlib", "zoneinfo", "_strptime",
)  # fmt: skip
# Freed when a program has used up all the rest, so that there is room to say so.
_BALLAST = 2 << 20


class Channel:
    """The host's function as the worker's channel; `close` is for good.

    The function takes text, because the engine's package copies lists of bytes one by one. So a
    buffer goes through a file, which the engine writes from this instance's memory; where there is
    no room for the file, `raw` becomes False, and binary data is base64.
    """

    def __init__(self, send: Any) -> None:
        self._host = send
        self.usable = self.raw = True

    def send(self, kind: int, payload: bytes = b"") -> bool:
        if not self.usable or len(payload) > protocol.MAX_FRAME:
            return False
        self._host(kind, payload.decode("utf-8"))
        return True

    def send_encoded(self, *pieces: Any) -> bool:
        """A frame, after the buffers that it refers to: see `protocol.encode_all`."""
        *before, frame = pieces
        if not self.usable:
            return False
        for buffer in before[1::2]:
            try:
                _write_buffer(buffer)
            except OSError:
                self.raw = False
                return False
            self._host(protocol.BUFFER, "")
        return self.send(frame[0], frame[protocol.HEADER :])

    def close(self) -> None:
        self.usable = False


# The host's worker knows the place, too: wasm/worker.py.
_BUFFER_FILE = "/tmp/.belljar-buffer"
# The program may replace them in their module.
_open, _close, _write_some, _unlink = os.open, os.close, os.write, os.unlink


def _write_buffer(data: Any) -> None:
    """Put `data` where the host's worker takes it from; OSError without a file left behind."""
    fd = _open(_BUFFER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[_write_some(fd, view) :]
    except OSError:
        _close(fd)
        _unlink(_BUFFER_FILE)
        raise
    _close(fd)


def _read_buffers(sizes: list[int]) -> list[io.BytesIO]:
    """The context's binary data, which is in one file."""
    found = []
    with open(_BUFFER_FILE, "rb", buffering=0) as file:
        for size in sizes:
            buffer = io.BytesIO(bytes(size))
            with buffer.getbuffer() as room:
                at = 0
                while at < size:
                    with room[at:] as rest:
                        came = file.readinto(rest)
                    if not came:
                        raise EOFError
                    at += came
            found.append(buffer)
    _unlink(_BUFFER_FILE)
    return found


class Interpreter(worker.Interpreter):
    """The worker's, with the memory that it keeps back taken from the snapshot."""

    def _failed(
        self,
        error: BaseException,
        trace: TracebackType | None,
        filename: str,
        code: str,
        memory: bool = True,
    ) -> worker.Outcome:
        _kept.clear()
        return super()._failed(error, trace, filename, code, memory)


class WitWorld:
    """The world's export, under the name that componentize-py looks for."""

    def execute(self, request: str) -> int:
        if request.startswith("/"):
            return _rehearse_run(request)
        # The host's own words: no check. Every page that is touched here has to be copied.
        fields: dict[str, Any] = protocol._scan(request, 0)[0]
        os.environ.update(fields["env"])
        if fields["directory"] not in _settled:
            _settle(fields["directory"])
        if fields.get("sizes"):
            fields["buffers"] = _read_buffers(fields["sizes"])
        return _run(_interpreter, _channel, fields)


def _settle(directory: str) -> None:
    """What every program finds done: the rehearsal does it, or else the run."""
    os.chdir(directory)  # the host opens it, on another thread
    # Of a fixed length from the first byte on: leading zeros would take fewer instructions.
    random.seed(int.from_bytes(b"\1" + os.urandom(32), "big"))
    _settled[:] = [directory]


def _run(interpreter: worker.Interpreter, channel: Any, fields: dict[str, Any]) -> int:
    code = 0
    try:
        outcome = interpreter.run(fields)
        channel.close()  # without an END, which would take long to send: our return says the same
        outcome.leave()
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    return _finish(code)


def _exit_code(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _finish(code: int) -> int:
    """Exit handlers run, and files that the program left open are flushed."""
    try:
        atexit._run_exitfuncs()
        _forget()
        _flush()
    except BaseException:
        return code or 120  # as CPython says when it cannot flush
    return code


def _forget() -> None:
    main = sys.modules.get("__main__")
    for name in [name for name in vars(main) if name != "__builtins__"] if main else ():
        vars(main)[name] = None


def _flush() -> None:
    # Only what is younger than the snapshot: the rest is frozen.
    for thing in gc.get_objects():
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter)) and not thing.closed:
            thing.flush()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _input() -> io.TextIOWrapper:
    return io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8", errors="strict")


def _output(number: int) -> io.TextIOWrapper:
    """Written line by line, as in worker.py; componentize-py starts it without buffers."""
    errors = "backslashreplace" if number == 2 else "strict"
    raw = open(number, "wb", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


# WASI's numbers, and the host's for the same. There are no pipes: EPIPE is a file whose last write
# failed.
_HOST_NUMBERS = {
    errno.EAGAIN: 11, errno.EDQUOT: 122, errno.EFBIG: 27, errno.EIO: 5, errno.EMFILE: 24,
    errno.ENFILE: 23, errno.ENOSPC: 28, errno.EPIPE: 5,
}  # fmt: skip
_describe = failures.describe


def _describe_for_host(
    error: BaseException, trace: TracebackType | None, filename: str, lines: list[str]
) -> dict[str, Any]:
    """What failed, with the host's number for it, where the host would want to know."""
    wire = _describe(error, trace, filename, lines)
    number = wire.pop("errno", 0)
    if number == errno.EIO and _named(error, "filename") and not _named(error, "filename2"):
        number = errno.EMFILE  # WASI has no word for it; nothing else fails so at an open
    if number in _HOST_NUMBERS:
        wire["errno"] = _HOST_NUMBERS[number]
    return wire


def _named(error: BaseException, attribute: str) -> bool:
    return OSError.__dict__[attribute].__get__(error) is not None


class _Nobody:
    """A channel to nobody, for the rehearsal."""

    usable = raw = False

    def send(self, kind: int, payload: bytes = b"") -> bool:
        return False

    send_encoded = send

    def close(self) -> None:
        return None


def _rehearse_run(directory: str) -> int:
    """Go the way of every program without leaving a trace: see wasm/worker.py."""
    fields: dict[str, Any] = protocol._scan(_EMPTY, 0)[0]
    os.environ.update(fields["env"])
    os.environ.clear()
    _settle(directory)
    names = _interpreter.module.__dict__
    before = dict(names)
    _channel.close()
    _interpreter.run(fields).leave()
    _forget()
    _flush()
    _channel.usable = True
    names.clear()
    names.update(before)
    _forget_place()
    return 0


def _forget_place() -> None:
    """What depends on the directory that a program starts in, which each run says for itself."""
    sys.argv = ["main.py"]
    sys.path[:] = [""]
    failures.of_program.clear()
    failures.work = ""


_EMPTY = (
    '{"env":{"HOME":"/","TMPDIR":"/","LANG":"C.UTF-8","USER":"user"},"code":"print(end=\\"\\")",'
    '"args":[],"filename":"main.py","context":{}}'
)


def _rehearse() -> None:
    """Run programs that do a little of everything: no instance does it for the first time then."""
    for program in ("import json\nprint(end='')\n[1, {'a': 2.5}]", "def f(): 1 / 0\nf()"):
        stderr, sys.stderr = sys.stderr, io.StringIO()
        nobody = _Nobody()
        fields: dict[str, Any] = {"code": program, "filename": "main.py", "args": []}
        _run(Interpreter(nobody), nobody, fields)  # type: ignore[arg-type]
        sys.stderr = stderr
    values.encode([1, "a", {"b": b"c"}])


stdlib.freeze("/python")
stdlib.install()
for _name in _PRELOADED:
    importlib.import_module(_name)
world.change(wit_world.leave)
failures.describe = _describe_for_host
worker._BALLAST = 0
_kept = [bytes(_BALLAST)]
_system: Any = sys
_system.stdin = _system.__stdin__ = _input()
_system.stdout = _system.__stdout__ = _output(1)
_system.stderr = _system.__stderr__ = _output(2)
sys.path[:] = [""]
sys.argv = sys.orig_argv = ["main.py"]
os.environ.clear()
_rehearse()
_forget_place()
_kept[:] = [bytes(_BALLAST)]
_channel = Channel(wit_world.send)
_interpreter = Interpreter(_channel)  # type: ignore[arg-type]
_settled: list[str] = []
# At the end there may be nothing left to import with.
_LOADED = (arrow, displays, drops, extensions, failures, tables)
importlib.invalidate_caches()
sys.path_importer_cache.clear()
gc.collect()
gc.freeze()

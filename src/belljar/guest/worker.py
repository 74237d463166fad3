"""Runs programs inside the sandbox and reports over one descriptor what became of them.

The host learns from here only what the program itself could tell: its value, its exception, what it
showed. How it ended, how long it took and what it used up the host asks the kernel. So nothing here
is a boundary, and a program that attacks the worker can only spoil its own report.

One `Interpreter` serves many programs; `main` gives it one and then ends as CPython would have,
with threads joined and exit handlers run. Imports are few and late: they are most of the start-up.
"""

from __future__ import annotations
import __future__

import _thread
import builtins
import faulthandler
import io
import os
import sys

# Now, because at the end there may be no descriptor left to import with.
from . import failures, protocol, shows, values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType
    from typing import Any

    Send = Callable[[int, bytes], bool]

_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without importing ast
_TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_COROUTINE = 0x80  # inspect.CO_COROUTINE
_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
# Address space to give back when a program has used up all the rest.
_BALLAST = 4 << 20
# What the host keeps, where a request does not say. `copy` bounds what is copied to be sent.
_BUDGET = {"value": protocol.DEFAULT_VALUE, "copy": protocol.DEFAULT_VALUE, "displays": 16 << 20}
_OUT_OF_MEMORY = b'{"type":"MemoryError","message":"","traceback":"","memory":true}'
_ANONYMOUS = "<belljar>"
# How many objects without a typed form a value may have: each of them is asked for its `repr`.
_MOST_OBJECTS = 1000
# Read through the base class: an exception's own attributes are the program's.
_TRACEBACK = BaseException.__dict__["__traceback__"]
_EXIT_CODE = SystemExit.__dict__["code"]


class Channel:
    """The descriptor to the host: whole frames, from this process only, never in the way.

    The program may close the descriptor, put a file of its own in its place, or fork. Then there is
    nobody to tell, and `send` says so by returning False; it does not raise.
    """

    raw = True  # whether it carries buffers

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        for fd in {read_fd, write_fd}:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, True)
        self._decoder = protocol.Decoder(protocol.FROM_HOST, protocol.MAX_HOST_FRAME)
        self._frames: list[protocol.Frame] = []
        self._pid = os.getpid()
        self._identity = self._identify()
        self._lock = _thread.RLock()
        # The program may replace these in their module.
        self._write, self._getpid = os.write, os.getpid

    def _identify(self) -> tuple[int, int]:
        status = os.fstat(self._write_fd)
        return status.st_dev, status.st_ino

    @property
    def usable(self) -> bool:
        try:
            return self._getpid() == self._pid and self._identify() == self._identity
        except OSError:
            return False

    def receive(self) -> protocol.Frame | None:
        """The next frame from the host, or None at the end of the stream."""
        while not self._frames:
            room = self._decoder.wanted
            if room is not None and hasattr(os, "readv"):
                size = os.readv(self._read_fd, [room])
                self._frames = self._decoder.filled(size) if size else []
            else:
                data = os.read(self._read_fd, 1 << 16)
                size = len(data)
                self._frames = self._decoder.feed(data)
            if not size:
                return None
        return self._frames.pop(0)

    def send(self, kind: int, payload: bytes = b"") -> bool:
        return len(payload) <= protocol.MAX_FRAME and self.send_encoded(
            protocol.encode(kind, payload)
        )

    def send_encoded(self, *pieces: Any) -> bool:
        """Send one or several whole frames, in pieces, without those of another thread between."""
        return self.usable and self._put(*pieces)

    def _put(self, *pieces: Any) -> bool:
        with self._lock:
            try:
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[self._write(self._write_fd, view) :]
            except OSError:
                return False
        return True

    def end(self, frame: bytes) -> None:
        """Send `frame` and say nothing more, so that what runs at exit cannot either."""
        if self.usable:
            self._put(frame)
            os.close(self._write_fd)
        self._pid = -1


class Source:
    """The loader of `__main__`: gives tracebacks and `inspect` the lines of a file that is not."""

    def __init__(self, code: str) -> None:
        self._code = code

    def get_source(self, name: str) -> str:
        return self._code


class Outcome:
    """How a program ended: `error` is what it raised and did not catch, if anything."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    @property
    def code(self) -> int:
        """The exit code that this will come to, if nothing goes wrong on the way out."""
        if self.error is None:
            return 0
        if not issubclass(type(self.error), SystemExit):
            return 1
        code = _EXIT_CODE.__get__(self.error)
        if code is None:
            return 0
        return code & 0xFF if type(code) is int else 1

    def leave(self) -> None:
        """Go the way CPython goes after such an end; returns only if the program did."""
        if self.error is None:
            return
        if issubclass(type(self.error), SystemExit):
            raise self.error
        if issubclass(type(self.error), KeyboardInterrupt):
            sys.excepthook = lambda *told_already: None
            raise self.error
        raise SystemExit(1)


class Interpreter:
    """One `__main__` and the programs that run in it, one after another."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._ballast: bytes | None = None
        self._memory_frame = protocol.encode(protocol.ERROR, _OUT_OF_MEMORY)
        self._figures: list[object] = []
        self._displays = 0
        self._budget, self._display_room = _BUDGET, 0
        self.module = type(sys)("__main__")
        self.module.__dict__.update(__builtins__=builtins, __spec__=None, __cached__=None)
        if sys.version_info < (3, 14):
            self.module.__annotations__ = {}
        sys.modules["__main__"] = self.module
        builtins.display = self.display  # type: ignore[attr-defined]

    def run(self, request: dict[str, Any]) -> Outcome:
        """Run `code` of a RUN request in `__main__`, and send what there is to say of it."""
        code, filename = request["code"], request.get("filename", "main.py")
        self._budget = request.get("budget") or _BUDGET
        self._displays, self._display_room = 0, self._budget["displays"]
        self.claim_ballast()
        try:
            self._prepare(code, filename, request)
        except BaseException as problem:
            self._ballast = None
            return self._failed(problem, None, filename, code)
        try:
            body, last = compile_program(code, filename)
        except BaseException as problem:
            # Here MemoryError means a parser that overflowed its stack, not a limit.
            return self._failed(problem, None, filename, code, memory=False)
        try:
            value = _execute(body, last, self.module.__dict__)
        except SystemExit as problem:
            self._succeeded(self.module.__dict__.get("result"))
            return Outcome(problem)
        except BaseException as problem:
            self._ballast = None  # before any call: a call may need memory of its own
            return self._failed(problem, _of_program(problem), filename, code)
        self._succeeded(self.module.__dict__.get("result") if value is None else value)
        return Outcome(None)

    def claim_ballast(self) -> None:
        if self._ballast is None:
            self._ballast = bytes(_BALLAST)  # calloc: claimed, not touched

    def display(self, *objects: object) -> None:
        """Show objects to whoever reads the result; a builtin of every program."""
        from . import displays

        for obj in objects:
            if self._displays <= displays.MAX_DISPLAYS and self.channel.usable:
                more = self._displays < displays.MAX_DISPLAYS
                self._send_display(obj, displays.bundle(obj) if more else {})

    def _prepare(self, code: str, filename: str, request: dict[str, Any]) -> None:
        sys.argv = [filename, *request.get("args", ())]
        where = os.getcwd()
        if sys.path[:1] == [""]:
            sys.path[:1] = own = [where, *_named_by_caller(where)]
            failures.of_program.update(own)
            failures.work = where
            if sys.prefix == sys.base_prefix:  # in a virtual environment pip does not install there
                version = "python%d.%d" % sys.version_info[:2]
                sys.path.append(os.path.expanduser(f"~/.local/lib/{version}/site-packages"))
        path = os.path.join(where, filename)
        self.module.__dict__.update(__file__=path, __loader__=Source(code))
        context, buffers = request.get("context") or {}, request.get("buffers")
        for name, wire in context.items():
            try:
                self.module.__dict__[name] = values.decode(wire, buffers=buffers)
            except ValueError as problem:
                raise ImportError(f"context variable {name!r}: {problem}") from None

    def _succeeded(self, value: object) -> None:
        """Send the value and what it looks like, as far as it has a form that may cross."""
        try:
            _restore_recursion()
            self._send_value(value)
            self._send_figures()
        except BaseException:
            return  # the program succeeded; what could not be said about it stays unsaid

    def _send_value(self, value: object) -> None:
        if value is None or not self.channel.usable:
            return
        crossed = table = False
        field, reason = "memory", "there was no memory left to send it"
        try:
            crossed, table = self._send_wire(value)
        except MemoryError:
            pass  # what was made for sending is freed with the frame that made it
        except values.TooLarge as problem:
            field, reason = problem.field, str(problem)
        except protocol.TooMuch as problem:
            field, reason = "value", str(problem)
        except BaseException as problem:
            field, reason = "", failures.message(problem)
        if crossed and type(value).__module__ == "builtins" and not table:
            return
        from . import displays

        if not crossed:
            from . import drops

            notice = protocol.dumps(drops.notice(value, field, reason))
            self.channel.send(protocol.DROPPED, notice)
        shown = displays.bundle(value)
        if not crossed or len(shown) > 1 or table:
            self._send_display(value, shown)

    def _send_wire(self, value: object) -> tuple[bool, bool]:
        """Whether the value was sent, and whether it is shown besides."""
        budget, copy = self._budget["value"], self._budget["copy"]
        buffers: list[Any] | None = [] if self.channel.raw else None
        wire = values.encode(
            value, copy, protocol.MAX_NODES, budget, buffers, objects=_MOST_OBJECTS
        )
        payload = protocol.dumps(wire)
        protocol.check_shape(payload, protocol.nodes(budget))
        if len(payload) + sum(map(len, buffers or ())) > protocol.room(budget):
            raise values.TooLarge("its JSON is too large")
        if not buffers:
            return self.channel.send(protocol.VALUE, payload), _is_shown(wire)
        pieces = protocol.encode_all(protocol.VALUE, payload, buffers)
        if self.channel.send_encoded(*pieces):
            return True, _is_shown(wire)
        # The channel may have no room for buffers, and says so; others have failed for good.
        return (False, False) if self.channel.raw else self._send_wire(value)

    def _send_figures(self) -> None:
        """What pyplot drew and the program neither showed nor closed."""
        if "matplotlib.pyplot" in sys.modules and self.channel.usable:
            from . import displays

            for shown in displays.figures(self._figures):
                self._send_display(None, shown)

    def _send_display(self, obj: object, shown: dict[str, str]) -> None:
        from . import displays

        if self._displays > displays.MAX_DISPLAYS:
            return
        self._displays += 1
        size = displays.cost(shown)
        if self._displays > displays.MAX_DISPLAYS or size > self._display_room:
            self.channel.send(protocol.DROPPED, b'{"what":"display"}')
            return
        self._display_room -= size
        self.channel.send(protocol.DISPLAY, protocol.dumps(shown))
        if displays.is_figure(obj):
            self._figures.append(obj)

    def _failed(
        self,
        error: BaseException,
        trace: TracebackType | None,
        filename: str,
        code: str,
        memory: bool = True,
    ) -> Outcome:
        """Send the error and print it, as well as the state of the interpreter allows."""
        out_of_memory = memory and issubclass(type(error), MemoryError)
        try:
            if out_of_memory:
                _forget_locals(trace)
            _restore_recursion()
            wire = failures.describe(error, trace, filename, _lines(code))
            if not memory:
                wire.pop("memory", None)
            sent = self.channel.send(protocol.ERROR, protocol.dumps(wire))
            text = wire["traceback"]
        except BaseException:
            sent, text = False, ""
        if not sent and out_of_memory:
            self.channel.send_encoded(self._memory_frame)
        try:
            if not out_of_memory:
                self._send_figures()
            _print(error, trace, text)
        except SystemExit as replaced:  # an exception hook may choose another exit code
            return Outcome(replaced)
        except BaseException:
            return Outcome(error)
        return Outcome(error)


def compile_program(code: str, filename: str) -> tuple[CodeType, CodeType | None]:
    """The program, and apart from it its last statement if that is an expression.

    Both come from one parse, so line numbers, errors and `from __future__` are those of the whole.
    """
    flags = _TOP_LEVEL_AWAIT
    try:
        tree: Any = compile(code, filename, "exec", flags | _ONLY_AST, dont_inherit=True)
    except (RecursionError, MemoryError):
        # A syntax tree in Python objects may nest less deeply than the compiler's own.
        return compile(code, filename, "exec", flags, dont_inherit=True), None
    tail: Any = tree.body[-1] if tree.body else None
    if type(tail).__name__ != "Expr":
        return compile(tree, filename, "exec", flags, dont_inherit=True), None
    if len(tree.body) > 1 or type(tail.value).__name__ != "Constant":  # else it may be `__doc__`
        del tree.body[-1]
    body = compile(tree, filename, "exec", flags, dont_inherit=True)
    try:  # `ast` takes milliseconds to import
        from _ast import Expression
    except ImportError:
        from ast import Expression

    expression: Any = Expression(body=tail.value)
    flags |= body.co_flags & _FUTURES
    return body, compile(expression, filename, "eval", flags, dont_inherit=True)


def _execute(body: CodeType, last: CodeType | None, namespace: dict[str, Any]) -> object:
    if (body.co_flags | (last.co_flags if last is not None else 0)) & _COROUTINE:
        import asyncio

        return asyncio.run(_execute_async(body, last, namespace))
    exec(body, namespace)
    return None if last is None else eval(last, namespace)


async def _execute_async(
    body: CodeType, last: CodeType | None, namespace: dict[str, Any]
) -> object:
    """A program with `await` outside of functions, in one event loop, as in a notebook."""
    value: Any = eval(body, namespace)
    if body.co_flags & _COROUTINE:
        await value
    if last is None:
        return None
    value = eval(last, namespace)
    return await value if last.co_flags & _COROUTINE else value


def _lines(code: str) -> list[str]:
    """The lines as the compiler counts them: form feeds and the like do not end one."""
    if not code.endswith("\n"):
        code += "\n"  # or Python 3.11 and 3.12 put the carets below its last line one column off
    return list(io.StringIO(code, newline=None))


def _of_program(error: BaseException) -> TracebackType | None:
    """The traceback from the program's own first frame on."""
    trace: TracebackType | None = _TRACEBACK.__get__(error)
    trace = _below(trace, _execute_async) or trace  # the event loop's frames are not its own
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return trace


def _below(trace: TracebackType | None, function: Any) -> TracebackType | None:
    """From the first frame of `function` on; None if it has none."""
    while trace is not None and trace.tb_frame.f_code is not function.__code__:
        trace = trace.tb_next
    return trace


def _forget_locals(trace: TracebackType | None) -> None:
    """Free what the frames of the failed calls hold: it may be all of the memory."""
    while trace is not None:
        try:
            trace.tb_frame.clear()
        except RuntimeError:
            return  # still running, as a generator's may be
        trace = trace.tb_next


def _restore_recursion() -> None:
    """A program may have left too few frames for us to report it."""
    if sys.getrecursionlimit() < 1000:
        sys.setrecursionlimit(1000)


def _is_shown(wire: object) -> bool:
    """Whether what a value looks like says something that its typed form does not."""
    return type(wire) is dict and (wire.get("$") in values.TABLES or wire.get("$") == "object")


def _print(error: BaseException, trace: TracebackType | None, text: str) -> None:
    """Tell the program's stderr, through its own exception hook if it has set one."""
    BaseException.with_traceback(error, trace)
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)
    elif sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _named_by_caller(where: str) -> list[str]:
    """The directories of PYTHONPATH: the interpreter was told to ignore what the host's says."""
    named = os.environ.get("PYTHONPATH", "")
    return [os.path.normpath(os.path.join(where, each)) for each in named.split(":") if each]


def _hide_boot() -> None:
    """Forget the command line that started us: it says where the host keeps its files."""
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = [sys.executable, "main.py"]
    # From 3.13 on, tracebacks know the source of `-c`.
    linecache = sys.modules.get("linecache")
    for name in ("cache", "_interactive_cache"):
        getattr(linecache, name, {}).clear()


def _set_up_streams() -> None:
    """UTF-8, which the host reads, whatever the locale; and each line is written when it ends,
    because what is in a buffer when the program is killed or crashes is lost."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is not None and stream.encoding.lower() != "utf-8":
            stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    if sys.stdout is not None and not sys.stdout.line_buffering:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _explain_crashes() -> None:
    """Have a fatal signal print on stderr where the program was."""
    if sys.stderr is not None and not faulthandler.is_enabled():
        faulthandler.enable()


def main(
    read_fd: int,
    write_fd: int | None = None,
    request: dict[str, Any] | None = None,
    given: Callable[[list[int]], list[Any]] | None = None,
) -> None:
    """Serve one RUN from the host over a socket (or two pipes), then end as the program did.

    `request` is what the RUN frame would say, where it has come some other way. `given` makes the
    buffers of so many bytes each, where they do not come as frames.
    """
    interpreter = ready(read_fd, write_fd)
    if request is None:
        request = _requested(interpreter.channel)
        if given is not None and request is not None and "mapped" in request:
            request["buffers"] = given(request["mapped"])
    if write_fd is not None:
        os.close(read_fd)  # nothing more comes; later it may be a file of the program's
    if request is not None:
        serve(interpreter, request)


def ready(read_fd: int, write_fd: int | None = None) -> Interpreter:
    """All that can be done before there is a program."""
    channel = Channel(read_fd, read_fd if write_fd is None else write_fd)
    _hide_boot()
    _set_up_streams()
    _explain_crashes()
    sys.path.insert(0, "")
    interpreter = Interpreter(channel)
    shows.install(interpreter.display)
    interpreter.claim_ballast()
    return interpreter


def serve(interpreter: Interpreter, request: dict[str, Any]) -> None:
    """Run the program, say how it ended, and end so."""
    outcome = interpreter.run(request)
    interpreter.channel.end(protocol.encode(protocol.END, b"%d" % outcome.code))
    outcome.leave()


def _requested(channel: Channel) -> dict[str, Any] | None:
    ready = {"protocol": 1, "python": sys.version.split()[0]}
    channel.send(protocol.READY, protocol.dumps(ready))
    buffers: list[Any] = []
    frame = channel.receive()
    while frame is not None and frame.kind == protocol.GIVEN:
        buffers.append(io.BytesIO(frame.payload))
        frame = channel.receive()
    if frame is None or frame.kind != protocol.RUN:
        return None
    request: dict[str, Any] = protocol.loads(frame.payload, max_nodes=sys.maxsize)
    request["buffers"] = buffers
    return request


# These stay on the stack below the program, whose tracebacks must not show where we are installed.
for _function in (main, serve, Interpreter.run, _execute, _execute_async):
    _function.__code__ = _function.__code__.replace(co_filename=_ANONYMOUS)

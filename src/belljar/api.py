"""The public calls: `run`, `arun` and `create_runner`, over one engine."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from . import languages, libraries, units
from .backends.base import Cancel, Plan
from .config import Settings, load
from .engine import Engine
from .errors import RequestError
from .events import Emit, Event, Output, RunFailed, RunFinished
from .files.names import checked_name
from .policy import Policy
from .policy_fields import checked_path, normal_path, parse_mount
from .records import plain, replace
from .resolve import POLICY_KEYS
from .trusted_imports import calls_application
from .types import Language, Mount, Request, Result, new_id

if TYPE_CHECKING:
    from .async_runs import Pool

OnText = Callable[[str], object]

# What a request may say, apart from the policy.
REQUEST_KEYS = (
    "language", "stdin", "args", "env", "files", "outputs", "outputs_to", "outputs_each",
    "outputs_total", "context", "mounts", "workdir", "python", "image", "settle",
    "require_libraries", "retry", "fallback", "prefer",
)  # fmt: skip
_CALLBACKS = ("on_stdout", "on_stderr")
MAX_CONCURRENCY = 64
RESERVED = ("functions", "secrets")


class _Default(str):
    """A default that configuration may replace; the same word given by a caller may not be."""


_AUTO, _STANDARD = _Default("auto"), _Default("standard")


def run(
    code: str,
    *,
    language: str = "python",
    backend: str | None = _AUTO,
    level: str | None = _STANDARD,
    policy: Policy | Mapping[str, Any] | None = None,
    timeout: float | str | None = None,
    memory: int | str | None = None,
    cpus: float | str | None = None,
    processes: int | None = None,
    disk: int | str | None = None,
    output: int | str | None = None,
    value: int | str | None = None,
    displays: int | str | None = None,
    open_files: int | None = None,
    fuel: int | None = None,
    stdin: bytes | str = b"",
    args: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    files: Mapping[str, bytes | str | os.PathLike[str]] | Iterable[os.PathLike[str]] | None = None,
    outputs: Iterable[str] = (),
    outputs_to: str | os.PathLike[str] | None = None,
    outputs_each: int | str | None = None,
    outputs_total: int | str | None = None,
    context: Mapping[str, Any] | None = None,
    mounts: Iterable[Mount | str] = (),
    workdir: str | os.PathLike[str] | None = None,
    network: Any = None,
    modules: Any = None,
    min_isolation: str | None = None,
    python: str | None = None,
    image: str | None = None,
    on_stdout: OnText | None = None,
    on_stderr: OnText | None = None,
    settle: str | None = None,
    require_libraries: Iterable[str] = (),
    retry: bool | None = None,
    fallback: bool | None = None,
    prefer: str | None = None,
) -> Result:
    """Run `code` where it cannot hurt anything, and return what it did.

    A program that fails, overruns a limit or is refused by the lint is a Result; BelljarError is
    raised only when the request is malformed or the sandbox itself cannot do its work.

    `outputs` are patterns of files to bring back in `result.files`, and `result.changes` lists what
    was created, changed and deleted. With `outputs_to` the files (all that are new or changed, if
    `outputs` is empty) are written below that directory piece by piece instead, and never replace
    what is there. `outputs_each` and `outputs_total` bound their bytes.

    `workdir` is where the program starts: a directory in one of the `mounts`, or of `files`.
    Outputs are collected from the run's own work directory all the same.

    `settle="later"` answers on the program's own word that it has ended, where a backend can; the
    result is then marked (`settled`), and the run keeps its place until the kernel confirms.

    `require_libraries` names what the program must be able to import: a backend that lacks one is
    passed over. `retry=True` runs a program that failed for want of a module once more on another
    backend at or above the floor, if nothing that it did can have been seen (`result.retried`).

    `prefer="isolation"` has `auto` take the strongest backend that can run the program, which is
    WebAssembly for pure Python; "speed", the default, takes the fastest one that holds the policy.

    A backend that is named and missing is replaced by one that isolates as well or better, and
    `result.fallback` says so; `fallback=False` refuses instead.

    >>> run("6 * 7").value
    42
    """
    given = dict(locals())
    return shared_runner().execute(given.pop("code"), **given)


async def arun(code: str, **options: Any) -> Result:
    """`run` for asyncio. Cancelling the task kills the guest before the cancellation goes on.

    `on_stdout` and `on_stderr` may be coroutine functions: they are awaited in order, and what one
    raises ends the run and is raised here. At most 64 runs go on at a time, the others wait; a
    runner made with `create_runner(max_concurrency=...)` has its own number.
    """
    return await shared_runner().aexecute(code, **options)


def create_runner(level: str | None = None, **settings: Any) -> Runner:
    """A reusable runner. `settings` are `backend` and any keyword of `run`, as its defaults, and
    `max_concurrency`: how many of its asynchronous runs go on at a time (64)."""
    return Runner(level=level, **settings)


class Runner:
    """Runs many programs under the same defaults. Thread-safe; close it, or use it in `with`."""

    def __init__(
        self,
        *,
        level: str | None = None,
        backend: str | None = None,
        engine: Engine | None = None,
        settings: Settings | None = None,
        max_concurrency: int | None = None,
        **defaults: Any,
    ) -> None:
        if max_concurrency is not None:
            from .async_runs import checked_concurrency

            checked_concurrency(max_concurrency)
        self._max_concurrency = max_concurrency or MAX_CONCURRENCY
        self._pool: Pool | None = None
        _check_keys(defaults)
        self._engine = engine if engine is not None else Engine(settings)
        self._defaults = {"level": level, "backend": backend, **defaults}
        self._usual: _Usual | None = None
        self._closed = False

    @property
    def engine(self) -> Engine:
        return self._engine

    def execute(
        self, code: str, context: Mapping[str, Any] | None = None, **overrides: Any
    ) -> Result:
        """Run one program; `overrides` are the keywords of `belljar.run`."""
        return self._run(code, context, overrides, None)

    async def aexecute(
        self, code: str, context: Mapping[str, Any] | None = None, **overrides: Any
    ) -> Result:
        """`execute` for asyncio; cancelling the task kills the guest.

        `on_stdout` and `on_stderr` may be coroutine functions: they are awaited on the caller's
        loop, in order, before the result is returned.
        """
        if self._pool is None:
            from .async_runs import Pool

            with _runner_lock:
                self._pool = self._pool or Pool(self._max_concurrency)
        options = {**self._defaults, **_chosen(overrides)}
        callbacks = {name: options[name] for name in _CALLBACKS if options.get(name) is not None}
        return await self._pool.run(
            lambda given, cancel: self._run(code, context, {**overrides, **given}, cancel),
            callbacks,
        )

    def _run(
        self,
        code: str,
        context: Mapping[str, Any] | None,
        overrides: Mapping[str, Any],
        cancel: Cancel | None,
    ) -> Result:
        if self._closed:
            raise RequestError("runner", "is closed")
        if not overrides and context is None:
            usual = self._usual
            if usual is None:
                usual = self._usual = _Usual(self._defaults, self._engine.settings)
            if usual.plain:
                request = replace(usual.request, code=_checked_code(code), id=new_id())
                return self._engine.run(
                    request,
                    level=usual.level,
                    backend=usual.backend,
                    wishes=usual.wishes,
                    cancel=cancel,
                )
        given = {**self._defaults, **_chosen(overrides)}
        if context is not None:
            given["context"] = context
        return self._engine.run(
            self._request(code, given),
            level=given.get("level"),
            backend=given.get("backend"),
            wishes=wishes_from(given),
            emit=_text_callbacks(given.get("on_stdout"), given.get("on_stderr")),
            cancel=cancel,
        )

    def plan(self, code: str, **overrides: Any) -> Plan:
        """What `execute` would do, without doing it; raises what `execute` would raise."""
        given = {**self._defaults, **_chosen(overrides)}
        return self._engine.plan(
            self._request(code, given),
            level=given.get("level"),
            backend=given.get("backend"),
            wishes=wishes_from(given),
        )

    def _request(self, code: str, given: Mapping[str, Any]) -> Request:
        _check_keys(given)
        return build_request(
            code=code,
            settings=self._engine.settings,
            **{key: given[key] for key in REQUEST_KEYS if given.get(key) is not None},
        )

    def stats(self) -> dict[str, dict[str, int]]:
        """What each backend keeps warm for this runner, as numbers: see `Engine.stats`."""
        return self._engine.stats()

    def close(self) -> None:
        """End what the runner keeps warm; later calls are errors."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        self._engine.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _chosen(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a call itself says; configuration may replace the rest."""
    return {
        key: value
        for key, value in overrides.items()
        if value is not None and not isinstance(value, _Default)
    }


class _Usual:
    """What a call without options of its own comes to, for a runner whose own cannot change."""

    def __init__(self, defaults: Mapping[str, Any], settings: Settings) -> None:
        given = {key: value for key, value in defaults.items() if value is not None}
        self.plain = all(type(value) in _PLAIN for value in given.values())
        if self.plain:
            options = {key: given[key] for key in REQUEST_KEYS if key in given}
            self.request = build_request(code="", settings=settings, **options)
            self.level, self.backend = given.get("level"), given.get("backend")
            self.wishes = wishes_from(given)


_PLAIN = frozenset({str, int, float, bool})
_KNOWN = {
    *REQUEST_KEYS, *POLICY_KEYS, "policy", "level", "backend", "on_stdout", "on_stderr",
}  # fmt: skip


def _check_keys(given: Mapping[str, Any]) -> None:
    for key in given:
        if key in RESERVED:
            raise RequestError(key, "is reserved for a later version")
        if key not in _KNOWN:
            raise RequestError(key, f"unknown option; known: {', '.join(sorted(_KNOWN))}")


def wishes_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """The policy keys of a call: those of `policy`, under the call's own keywords."""
    policy = given.get("policy")
    base: Mapping[str, Any] = {}
    if isinstance(policy, Policy):
        base = {
            **plain(policy.limits),
            "network": policy.network,
            "filesystem": policy.filesystem,
            "modules": policy.modules,
            "min_isolation": policy.min_isolation,
        }
    elif isinstance(policy, Mapping):
        base = policy
    elif policy is not None:
        raise RequestError("policy", f"cannot be a {type(policy).__name__}")
    own = {key: given[key] for key in POLICY_KEYS if given.get(key) is not None}
    return {**base, **own}


def build_request(
    *,
    code: str | None = None,
    command: Iterable[str] = (),
    language: str = "python",
    stdin: bytes | str = b"",
    args: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    files: Mapping[str, bytes | str | os.PathLike[str]] | Iterable[os.PathLike[str]] | None = None,
    outputs: Iterable[str] = (),
    outputs_to: str | os.PathLike[str] | None = None,
    outputs_each: int | str | None = None,
    outputs_total: int | str | None = None,
    context: Mapping[str, Any] | None = None,
    mounts: Iterable[Mount | str] = (),
    workdir: str | os.PathLike[str] | None = None,
    python: str | None = None,
    image: str | None = None,
    settle: str = "now",
    require_libraries: Iterable[str] = (),
    retry: bool = False,
    fallback: bool = True,
    prefer: str = "",
    filename: str | None = None,
    settings: Settings | None = None,
) -> Request:
    """Check everything about a program that can be checked before choosing where it runs.

    Without the engine's `settings` only the built-in languages are known. `filename` is what the
    program is called where it runs, if its language and the files beside it allow that.
    """
    if (code is None) == (not command):
        raise RequestError("code", "give either code or a command")
    if code is not None:
        _checked_code(code)
    spoken = languages.find(language, settings)
    named = _named_files(files)
    filename = _filename(filename, spoken, named) if code is not None else None
    if filename is not None:
        spoken = replace(spoken, file=filename)
    name = spoken.file if code is not None else None
    contents: dict[str, bytes] = {}
    for clean, data in _expanded(named):
        if name is not None and _overlap(clean, name):
            raise RequestError("files", f"{clean!r} is where the program itself is written")
        if clean in contents:
            raise RequestError("files", f"{clean!r} is given twice")
        contents[clean] = _bytes(f"files[{clean!r}]", data)
    _refuse_files_below_files(contents)
    shown = tuple(parse_mount(mount) for mount in _listed("mounts", mounts))
    variables = _environment(_mapping("env", env))
    if code is not None and spoken.family == "python" and "PYTHONHASHSEED" in variables:
        raise RequestError(
            "env",
            "PYTHONHASHSEED has no effect: the interpreter has started before the program comes",
            fix="set it in the program, for an interpreter that it starts: "
            "subprocess.run([sys.executable, ...], env={'PYTHONHASHSEED': '0'})",
        )
    return Request(
        code=code,
        workdir=_workdir(workdir),
        command=_words("command", command),
        language=spoken.name,
        stdin=_bytes("stdin", stdin),
        args=_words("args", args),
        env=variables,
        files=contents,
        outputs=_globs(outputs),
        outputs_to=_directory("outputs_to", outputs_to),
        outputs_each=_size("outputs_each", outputs_each),
        outputs_total=_size("outputs_total", outputs_total),
        context=_variables(_mapping("context", context)),
        mounts=_distinct(shown, {*contents, *([name] if name is not None else [])}),
        python=_word("python", python),
        image=_word("image", image),
        settle=_settle(settle),
        require_libraries=libraries.checked(_listed("require_libraries", require_libraries)),
        retry=_flag("retry", retry),
        fallback=_flag("fallback", fallback),
        prefer=_prefer(prefer),
        filename=filename,
        resolved=spoken if code is not None else None,
    )


def _filename(given: str | None, language: Language, files: Iterable[str]) -> str | None:
    """`given` if the program may have that name, else None, which leaves it the language's.

    Not the name of a module that the worker or the interpreter imports, because the program's
    directory is searched first; nor one that a command line would take for an option.
    """
    if given is None:
        return None
    name = os.path.basename(given)
    stem, suffix = os.path.splitext(name)
    known = (os.path.splitext(language.file)[1], *language.extensions)
    plain = name.isascii() and name.isprintable() and not name.startswith(("-", "."))
    if not plain or suffix not in known or stem in sys.stdlib_module_names:
        return None
    if stem in ("belljar", "sitecustomize", "usercustomize") or len(name) > 100:
        return None
    if any(str(path).removeprefix("./").split("/")[0] == name for path in files):
        return None
    return name


def _checked_code(code: object) -> str:
    if not isinstance(code, str):
        raise RequestError("code", f"is text, not {type(code).__name__}")
    if "\0" in code:
        raise RequestError("code", "contains a NUL byte")
    return code


def _settle(given: object) -> Literal["now", "later"]:
    if given == "now":
        return "now"
    if given == "later":
        return "later"
    raise RequestError("settle", f"is 'now' or 'later', not {given!r}")


def _prefer(given: object) -> Literal["", "speed", "isolation"]:
    match given:
        case "" | "speed" | "isolation":
            return given
    raise RequestError("prefer", f"is 'speed' or 'isolation', not {given!r}")


def _workdir(given: str | os.PathLike[str] | None) -> str:
    """A guest path without `..`; "" is the work directory."""
    if given is None:
        return ""
    path = normal_path(checked_path("workdir", given))
    return "" if path == "." else path


def _flag(where: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise RequestError(where, f"is true or false, not {given!r}")
    return given


def _named_files(given: Any) -> Mapping[Any, Any]:
    """Name in the work directory -> content or path. A list of paths keeps their last parts.

    A path is a `pathlib.Path`, never a text: a request that came as JSON cannot name host files.
    """
    if given is None or isinstance(given, Mapping):
        return _mapping("files", given)
    paths = _listed("files", given)
    for path in paths:
        if not isinstance(path, os.PathLike):
            raise RequestError(
                "files",
                f"{path!r} is not a path",
                fix="write files=[pathlib.Path(...)], or files={'name': content}",
            )
    named = {os.path.basename(os.path.normpath(os.fspath(path))): path for path in paths}
    if len(named) != len(paths):
        raise RequestError("files", "two of the paths have the same name", fix="name them: {...}")
    return named


def _expanded(named: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Name and content of every file, with directories replaced by what is in them."""
    for path, data in named.items():
        clean = checked_name("files", path)
        if isinstance(data, os.PathLike) and os.path.isdir(data):
            from .files import given

            yield from given.tree(clean, os.fspath(data))
        else:
            yield clean, data


def _directory(where: str, given: str | os.PathLike[str] | None) -> str:
    return "" if given is None else os.path.abspath(checked_path(where, given))


def _size(where: str, given: int | str | None) -> int | None:
    return None if given is None else units.size(where, given)


def _globs(given: Iterable[str]) -> tuple[str, ...]:
    """Patterns of files in the work directory; those that cannot match one are refused."""
    globs = _words("outputs", given)
    for glob in globs:
        if glob.startswith("/") or ".." in glob.split("/"):
            raise RequestError(
                "outputs",
                f"{glob!r} is outside of the work directory, from which files are collected",
                fix=f"have the program write to its current directory, and ask for "
                f"{glob.rsplit('/', 1)[-1]!r}",
            )
    return globs


def _refuse_files_below_files(names: Iterable[str]) -> None:
    ordered = sorted(names, key=lambda name: name.split("/"))
    for name, following in itertools.pairwise(ordered):
        if following.startswith(name + "/"):
            raise RequestError("files", f"{name!r} is a file and a directory")


def _overlap(one: str, other: str) -> bool:
    """Whether two paths below the work directory are the same, or one is inside the other."""
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def _mapping(where: str, given: Any) -> Mapping[Any, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(where, f"is a mapping, not {type(given).__name__}")
    return given


def _bytes(where: str, given: object) -> bytes:
    if isinstance(given, str):
        try:
            return given.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise RequestError(where, "has characters that UTF-8 cannot hold") from None
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, os.PathLike) and where.startswith("files["):
        try:
            with open(given, "rb") as file:
                return file.read()
        except OSError as error:
            raise RequestError(where, f"cannot be read: {error}") from error
    raise RequestError(where, f"is bytes or text, not {type(given).__name__}")


def _listed(where: str, given: Any) -> tuple[Any, ...]:
    if isinstance(given, str | bytes):
        raise RequestError(where, "is a list", fix=f"write {where}=[{given!r}]")
    if not isinstance(given, Iterable):
        raise RequestError(where, f"is a list, not {type(given).__name__}")
    return tuple(given)


def _words(where: str, given: Iterable[str]) -> tuple[str, ...]:
    words = _listed(where, given)
    for word in words:
        if word is None:
            raise RequestError(where, "None is not text")
        _word(where, word)
    return words


def _word(where: str, given: Any) -> str | None:
    """Text as it can stand on a command line, or None."""
    if given is None:
        return None
    if not isinstance(given, str):
        raise RequestError(where, f"{given!r} is not text")
    if "\0" in given:
        raise RequestError(where, "contains a NUL byte")
    _bytes(where, given)
    return given


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    for name, text in given.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise RequestError("env", f"{name!r} is not a variable name")
        _bytes("env", name)
        if text is None:
            raise RequestError(f"env[{name!r}]", "None is not text")
        _word(f"env[{name!r}]", text)
    return dict(given)


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in given:
        if not isinstance(name, str) or not name.isidentifier():
            raise RequestError("context", f"{name!r} is not a variable name")
    return dict(given)


def _distinct(mounts: tuple[Mount, ...], files: set[str]) -> tuple[Mount, ...]:
    seen: set[str] = set()
    for mount in mounts:
        if mount.dst in seen:
            raise RequestError("mounts", f"{mount.dst!r} is the destination of two mounts")
        seen.add(mount.dst)
        for name in files:
            if _overlap(mount.dst, name):
                raise RequestError("mounts", f"{mount.dst!r} is also where {name!r} goes")
    return mounts


def _text_callbacks(on_stdout: OnText | None, on_stderr: OnText | None) -> Emit | None:
    """An emit that decodes as it goes: a character split over two pieces arrives whole."""
    if on_stdout is None and on_stderr is None:
        return None
    import codecs
    import inspect

    make = codecs.getincrementaldecoder("utf-8")
    streams = {
        name: (make("replace"), call)
        for name, call in (("stdout", on_stdout), ("stderr", on_stderr))
        if call is not None
    }

    @calls_application
    def tell(stream: str, text: str) -> None:
        if text and inspect.iscoroutine(answer := streams[stream][1](text)):
            answer.close()
            raise RequestError(
                f"on_{stream}",
                "gives a coroutine, which is awaited by arun only, from an `async def` function",
            )

    def emit(event: Event) -> None:
        if isinstance(event, Output) and event.stream in streams:
            tell(event.stream, streams[event.stream][0].decode(event.data))
        elif isinstance(event, RunFinished | RunFailed):
            for stream, (decoder, _) in streams.items():
                tell(stream, decoder.decode(b"", final=True))

    return emit


_runner: Runner | None = None
_runner_lock = threading.Lock()


def shared_runner() -> Runner:
    """The runner behind `belljar.run`, made on first use from the configuration."""
    global _runner
    with _runner_lock:
        if _runner is None:
            _runner = Runner(settings=load())
        return _runner

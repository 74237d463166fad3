"""The body of `POST /v1/run`: strict JSON in, a Request and its policy out.

The options are those of `belljar.run`, by the tables of `api`; OPTIONS says how each is written in
JSON. One that has no line there is not offered, so a new option of the library is closed until its
meaning for remote callers has been decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ...api import REQUEST_KEYS, build_request, wishes_from
from ...engine import Engine
from ...errors import RequestError
from ...guest import values
from ...policy_fields import LIMITS
from ...records import record
from ...resolve import POLICY_KEYS
from ...types import Request
from .. import remote
from . import strict_json


class Bytes(BaseModel):
    """Bytes that are no text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    base64: str = Field(description="standard base64 with padding, no line breaks")


_CONTEXT = 128 << 20  # memory for all variables: a few bytes can say "a million empty cells"
# How many of each one request may have, because every one of them is work for the server.
_MOST: Mapping[str, int] = {
    "args": 10_000, "env": 1000, "files": 10_000, "outputs": 1000, "context": 1000,
    "require_libraries": 1000, "mounts": 100,
}  # fmt: skip
_MOST_OTHERS = 1000
_LONGEST_NAME = 4096  # bytes, as of a path
# The kernel's own bounds for a program's start: of one variable, and about half of all of them.
_LONGEST_VARIABLE, _ENVIRONMENT = 128 << 10, 1 << 20
_LIMIT = int | float | str
_LIMIT_TEXT: Mapping[str, str] = {
    "timeout": 'wall time: seconds, or "1.5s", "2m"',
    "memory": 'memory of all processes together: bytes, or "256M"',
    "cpus": "processors, fractions allowed",
    "processes": "processes and threads",
    "disk": "bytes in the work directory",
    "output": "bytes of stdout and of stderr that the result keeps",
    "value": "memory for the value that comes back",
    "displays": "memory for all displays together",
    "open_files": "open files of a process",
    "fuel": "instructions, where the backend counts them",
}

# Each option's form in JSON, and what it means. Limits have the form of _LIMIT unless listed here.
OPTIONS: Mapping[str, tuple[Any, str]] = {
    "code": (str, "the program"),
    "language": (str, "python (default), javascript, bash, a version such as python3.12, ..."),
    "stdin": (str | Bytes, "standard input: text, or bytes"),
    "args": (list[str], "words for the program"),
    "env": (dict[str, str], "environment variables of the program"),
    "files": (
        dict[str, str | Bytes],
        "files in the work directory before the program starts: name to text or bytes",
    ),
    "outputs": (list[str], "patterns of files to bring back, as *.csv"),
    "outputs_to": (str, "always refused: it names a directory of the server's host"),
    "outputs_each": (int | str, "bytes of one file that comes back"),
    "outputs_total": (int | str, "bytes of all files that come back; at most and by default 64M"),
    "context": (
        dict[str, Any],
        "variables of the program; a value has the form that `value` of a result has",
    ),
    "settle": (str, '"now" (default), or "later": answer before the kernel confirms the end'),
    "require_libraries": (list[str], "Python libraries that must be there to import"),
    "retry": (bool, "on a missing module, before any effect, try once more on another backend"),
    "fallback": (bool, "false: refuse instead of replacing a missing backend by an equal one"),
    "prefer": (str, '"speed" (default), or "isolation": the strongest backend that can run it'),
    "level": (str, "permissive, standard or strict; never below the server's isolation floor"),
    "backend": (str, "auto, or a name of GET /v1/backends"),
    "min_isolation": (str, "refuse weaker backends: process, landlock, jail, wasm, vm, ..."),
    "network": (
        str | list[str] | dict[str, Any],
        '"off" (default), "any", or a list of hosts; more than off needs --allow-network',
    ),
    "modules": (
        str | list[str] | dict[str, Any],
        'import lint: "any", "level", "safe", or a list of names; it is no boundary',
    ),
    "policy": (dict[str, Any], "any of the limits and rules, in one object"),
    "mounts": (list[str], "SRC:DST[:ro|rw] on the server's host; needs --allow-mounts"),
    "workdir": (str, "where the program starts: a directory of `mounts` or `files`"),
    "filesystem": (dict[str, Any], "always refused: it names paths of the server's host"),
    "python": (str, "an interpreter that ceiling.interpreters of the server lists"),
    "image": (str, "a container image that ceiling.images of the server lists"),
}
OFFERED = tuple(
    name
    for name in ("code", *REQUEST_KEYS, "level", "backend", "policy", *POLICY_KEYS)
    if name in OPTIONS or name in LIMITS
)


def _field(name: str) -> Any:
    kind, text = OPTIONS.get(name) or (_LIMIT, _LIMIT_TEXT.get(name, f"the limit {name}"))
    if name == "code":
        return kind, Field(description=text)
    return kind | None, Field(default=None, description=text)


RunRequest = create_model(
    "RunRequest",
    __config__=ConfigDict(extra="forbid", strict=True, title="RunRequest"),
    **{name: _field(name) for name in OFFERED},
)


@record
class Job:
    """What to hand to `Engine.run`."""

    request: Request
    level: str | None
    backend: str | None
    wishes: Mapping[str, Any]


def parse(body: bytes, engine: Engine, rights: remote.Rights) -> Job:
    """The run that `body` asks for. Raises BelljarError with the field that is wrong."""
    given = strict_json.loads(body)
    if not isinstance(given, dict):
        raise strict_json.Malformed("body", 'is not a JSON object, as {"code": "print(1)"}')
    _countable(given)
    try:
        read = RunRequest.model_validate(given)
    except ValidationError as error:
        raise _named(error) from None
    options = {
        name: value for name in read.model_fields_set if (value := getattr(read, name)) is not None
    }
    _bounded(options)
    options = remote.check(options, engine, rights)
    if "stdin" in options:
        options["stdin"] = _content("stdin", options["stdin"])
    if "files" in options:
        options["files"] = {
            name: _content(f"files.{name}", content) for name, content in options["files"].items()
        }
    if "context" in options:
        options["context"] = _context(options["context"])
    return Job(
        request=build_request(
            code=options["code"],
            settings=engine.settings,
            **{name: options[name] for name in REQUEST_KEYS if name in options},
        ),
        level=options.get("level"),
        backend=options.get("backend"),
        wishes=wishes_from(options),
    )


def _content(where: str, given: str | Bytes) -> bytes:
    if isinstance(given, str):
        return given.encode()
    try:
        return values.from_base64(given.base64)
    except ValueError as error:
        raise RequestError(f"{where}.base64", f"is not base64: {error}") from None


def _countable(given: Mapping[str, object]) -> None:
    """RequestError for more than anything may have: a validator would describe each one."""
    for name, value in given.items():
        if name not in OFFERED:
            raise _unknown(name)
        most = _MOST.get(name, _MOST_OTHERS)
        if isinstance(value, list | dict) and len(value) > most:
            raise RequestError(name, f"has {len(value)} entries, and {most} is the most here")
    files = given.get("files")
    contents = {"stdin": given.get("stdin"), **(files if isinstance(files, dict) else {})}
    for value in contents.values():
        if isinstance(value, list | dict) and len(value) > _MOST_OTHERS:
            raise RequestError("files", 'is text, or {"base64": ...}')


def _bounded(options: Mapping[str, Any]) -> None:
    """RequestError for names and variables that are too long."""
    for where in _MOST:
        for name in options.get(where) or ():
            if where not in ("args", "mounts") and len(name.encode()) > _LONGEST_NAME:
                raise RequestError(where, f"a name is longer than {_LONGEST_NAME} bytes")
    sizes = [
        len(name.encode()) + len(text.encode()) for name, text in options.get("env", {}).items()
    ]
    if sizes and (max(sizes) >= _LONGEST_VARIABLE or sum(sizes) > _ENVIRONMENT):
        raise RequestError(
            "env",
            f"a variable may have {_LONGEST_VARIABLE} bytes, and all together {_ENVIRONMENT}",
            fix="send larger data in `files` or `stdin`",
        )


def _context(given: Mapping[str, object]) -> dict[str, Any]:
    """All variables under one budget: each alone could be as large as the budget is."""
    reader, found = values.Reader(_CONTEXT), {}
    for name, wire in given.items():
        try:
            found[name] = reader.read(wire, 0)
        except (ValueError, ImportError) as error:
            raise RequestError(f"context.{name}", f"has no value: {error}") from None
        except (TypeError, ArithmeticError, LookupError, AttributeError, BufferError) as error:
            raise RequestError(
                f"context.{name}", f"has no value: it is malformed ({type(error).__name__})"
            ) from None
    return found


def _unknown(name: str) -> RequestError:
    known = ", ".join(OFFERED)
    return RequestError(name[:100], f"is not an option; known: {known}", fix="see /docs")


def _named(error: ValidationError) -> RequestError:
    """The first field that is wrong, with all that is said about it. Its content is not repeated:
    it may be large, or a secret."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    where = str(found[0]["loc"][0])
    if found[0]["type"] == "extra_forbidden":
        return _unknown(where)
    problems = dict.fromkeys(each["msg"] for each in found if str(each["loc"][0]) == where)
    return RequestError(where, "; ".join(problems))

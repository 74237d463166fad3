"""Every setting by its dotted key: how its value is read, what the environment calls it, and what
a belljar.toml that was merely found may do to it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from . import policy_fields, units
from .errors import ConfigError
from .policy import Isolation, Level, level_policy

StoreCode = Literal["on_error", "always", "never"]
Prefer = Literal["speed", "isolation"]

LEVELS: tuple[str, ...] = get_args(Level)  # loosest first
REACH = ("off", "hosts", "any")  # strictest first
RIGHTS = ("none", "ro", "rw", "unprotected")  # strictest first
TABLES = ("defaults", "ceiling", "fallback", "sandbox")


def from_text(key: str, text: str) -> Any:
    """The value that `text`, from a variable or a flag, means for `key`: commas make a list."""
    name = key.rpartition(".")[2]
    if key in _SWITCHES:
        return _BOOLEANS.get(text.strip().lower(), text)
    if key in (
        "fallback.allow",
        "ceiling.interpreters",
        "ceiling.images",
        "defaults.network",
        "defaults.modules",
    ):
        if text.strip() in _WHOLE_WORDS.get(name, ()):
            return text.strip()
        return [word.strip() for word in text.split(",") if word.strip()]
    return text.strip()


_SWITCHES = (
    "block_dangerous_imports", "fallback.enabled", "sandbox.enabled", "sandbox.allow_direct",
)  # fmt: skip
_WHOLE_WORDS = {
    "network": ("off", "any"),
    "modules": ("any", "level", "safe"),
    "interpreters": ("none",),
}
_BOOLEANS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


# A reader takes the key and the raw value; it raises PolicyError or ConfigError.


def _one_of(*choices: str) -> Callable[[str, object], Any]:
    def read(key: str, given: object) -> Any:
        if given not in choices:
            raise ConfigError(key, f"{given!r} is not one of {', '.join(choices)}")
        return given

    return read


def _text(key: str, given: object) -> str:
    if not isinstance(given, str) or not given or "\0" in given:
        raise ConfigError(key, f"{given!r} is not a text")
    return given


def _backend(key: str, given: object) -> str:
    if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", given, re.ASCII):
        raise ConfigError(key, f"{given!r} is not a backend's name", fix="see `belljar backends`")
    return given


def _backends(key: str, given: object) -> tuple[str, ...]:
    if not isinstance(given, list | tuple):
        raise ConfigError(key, f"{given!r} is not a list of backend names")
    return tuple(_backend(key, name) for name in given)


def _interpreters(key: str, given: object) -> tuple[str, ...]:
    """Absolute paths; "none" is the empty list: only the interpreter that runs Belljar."""
    if given == "none":
        return ()
    if not isinstance(given, list | tuple):
        raise ConfigError(key, f"{given!r} is not a list of paths", fix='write [...] or "none"')
    paths = tuple(policy_fields.checked_path(key, path) for path in given)
    for path in paths:
        if not os.path.isabs(path):
            raise ConfigError(key, f"{path!r} is not absolute")
    return tuple(dict.fromkeys(map(os.path.normpath, paths)))


def _images(key: str, given: object) -> tuple[tuple[str, ...], ...]:
    if not isinstance(given, list | tuple):
        raise ConfigError(key, f"{given!r} is not a list of images", fix='as in ["belljar/*"]')
    return (tuple(dict.fromkeys(_text(key, name) for name in given)),)


def _bool(key: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(key, f"{given!r} is not true or false")
    return given


def _user(key: str, given: object) -> str:
    if isinstance(given, str) and (match := re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", given)):
        return f"{match[1]}:{match[2] or match[1]}"
    if isinstance(given, str) and re.fullmatch(r"[a-z_][a-z0-9_-]*", given) and given != "root":
        try:
            import pwd

            entry = pwd.getpwnam(given)
        except (ImportError, KeyError):
            problem = f"this host has no user {given!r}"
            raise ConfigError(key, problem, fix="write uid:gid") from None
        if entry.pw_uid:
            return f"{entry.pw_uid}:{entry.pw_gid or entry.pw_uid}"
    raise ConfigError(key, f"{given!r} is not uid:gid", fix='write numbers, as in "1000:1000"')


def _docker_host(key: str, given: object) -> str:
    host = _text(key, given)
    if host.startswith("/"):
        return f"unix://{host}"
    if "://" not in host:
        raise ConfigError(
            key, f"{host!r} is not an address", fix="write unix:///var/run/docker.sock"
        )
    return host


def _checked(read: Callable[[object], object]) -> Callable[[str, object], Any]:
    """A reader that keeps the raw value: resolve() reads it again, with the level at hand."""

    def check(_key: str, given: object) -> Any:
        read(given)
        return given

    return check


KEYS: Mapping[str, Callable[[str, object], Any]] = {
    "backend": _backend,
    "level": _one_of(*LEVELS),
    **{f"defaults.{name}": read for name, read in policy_fields.LIMITS.items()},
    "defaults.network": _checked(policy_fields.parse_network),
    "defaults.filesystem": _checked(policy_fields.parse_filesystem),
    "defaults.modules": _checked(lambda given: policy_fields.parse_modules(given, "standard")),
    "defaults.min_isolation": lambda key, given: Isolation.parse(given, key),
    **{f"ceiling.{name}": read for name, read in policy_fields.LIMITS.items()},
    "ceiling.network": _one_of(*REACH),
    "ceiling.mounts": _one_of(*RIGHTS),
    "ceiling.interpreters": _interpreters,
    "ceiling.images": _images,
    "ceiling.min_isolation": lambda key, given: Isolation.parse(given, key),
    "fallback.allow": _backends,
    "fallback.enabled": _bool,
    "sandbox.enabled": _bool,
    "sandbox.allow_direct": _bool,
    "block_dangerous_imports": _bool,
    "prefer": _one_of(*get_args(Prefer)),
    "store_code": _one_of(*get_args(StoreCode)),
    "artifacts": _text,
    "data_directory": policy_fields.absolute,
    "language_file": _text,
    "user": _user,
    "docker_host": _docker_host,
    "firejail_profile": _text,
}


def _variable(key: str) -> str:
    """`ceiling.timeout` is BELLJAR_CEILING_TIMEOUT; `defaults.timeout` is plain BELLJAR_TIMEOUT."""
    return "BELLJAR_" + key.removeprefix("defaults.").replace(".", "_").upper()


VARIABLES: Mapping[str, str] = {_variable(key): key for key in KEYS if key != "defaults.filesystem"}


def _sandbox_type(_key: str, text: str) -> str:
    return {"local": "subprocess", "hybrid": "auto"}.get(text.lower(), text)


def _percent_of_a_core(key: str, text: str) -> float:
    return units.cores(key, text.removesuffix("%")) / 100


def _mebibytes(key: str, text: str) -> int:
    return units.count(key, text) << 20


# What other sandboxes call the same things, in their own units; the later line wins.
ALIASES: tuple[tuple[str, str, Callable[[str, str], Any]], ...] = (
    ("SANDBOX_TYPE", "backend", _sandbox_type),
    ("SANDBOX_DEFAULT_TIMEOUT_SECONDS", "defaults.timeout", from_text),
    ("SANDBOX_TIMEOUT_SEC", "defaults.timeout", from_text),
    ("SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS", "ceiling.timeout", from_text),
    ("SANDBOX_DEFAULT_MEMORY_LIMIT_MB", "defaults.memory", _mebibytes),
    ("SANDBOX_DEFAULT_CPU_QUOTA_PERCENT", "defaults.cpus", _percent_of_a_core),
    ("SANDBOX_PID_LIMIT", "defaults.processes", from_text),
    ("SANDBOX_BLOCK_DANGEROUS_IMPORTS", "block_dangerous_imports", from_text),
    ("SANDBOX_STORE_CODE", "store_code", from_text),
    ("SANDBOX_LANGUAGE_CONFIG_FILE", "language_file", from_text),
    ("SANDBOX_DEFAULT_USER_UID_GID", "user", from_text),
    ("DOCKER_HOST", "docker_host", from_text),
    ("DOCKER_SOCKET_PATH", "docker_host", from_text),
)  # fmt: skip


def strictest(key: str) -> Callable[[Any, Any], Any] | None:
    """How two sources' values of a key become the one that holds; None: the later source wins."""
    if key in ("ceiling.min_isolation", "defaults.min_isolation"):
        return lambda one, other: other if other.rank > one.rank else one
    if key == "ceiling.interpreters":
        return lambda one, other: tuple(path for path in one if path in other)
    if key == "ceiling.images":  # an image has to be in the list of every source
        return lambda one, other: tuple(dict.fromkeys((*one, *other)))
    if key in ("fallback.enabled", "sandbox.allow_direct"):
        return min  # an operator's refusal stands
    if key == "ceiling.network":
        return lambda one, other: min(one, other, key=REACH.index)
    if key == "ceiling.mounts":
        return lambda one, other: min(one, other, key=RIGHTS.index)
    if key.startswith("ceiling."):
        return min
    return None


# What a belljar.toml that was merely found may do.


class Found(NamedTuple):
    """What a found belljar.toml may do to one key.

    `loosens` takes its value and the one that holds without the file (None: not set), and says
    whether to refuse the file. Where that depends on the request, the value is only noted here, and
    `found.tightened` or `Selection` lets it make a run stricter, never looser. `note` marks those.
    """

    may: str
    loosens: Callable[[Any, Any], bool]
    note: bool = False


def _never(value: Any, _holds: Any) -> bool:
    return bool(value)


def _accepted(_value: Any, _holds: Any) -> bool:
    return False


def _lower_level(value: Any, holds: Any) -> bool:
    """By what the levels consist of: `permissive` has a list of modules, and `standard` none."""
    new, old = level_policy(value), level_policy(holds)
    limits = (
        (getattr(new.limits, name), getattr(old.limits, name)) for name in policy_fields.LIMITS
    )
    return (
        any(least is not None and (n is None or n > least) for n, least in limits)
        or not new.min_isolation.at_least(old.min_isolation)
        or not _no_wider(new.modules.allow, old.modules.allow)
    )


def _no_wider(new: tuple[str, ...] | None, old: tuple[str, ...] | None) -> bool:
    return old is None or (new is not None and set(new) <= set(old))


def _more_files(value: Any, _holds: Any) -> bool:
    files = policy_fields.parse_filesystem(value)
    return bool(files.read_only or files.read_write or not files.protect or not files.private_tmp)


def _past_ceiling(key: str) -> Found:
    """Of a ceiling that some source sets the strictest value holds; else it may not be above the
    built-in one."""
    order = strictest(key)
    if order is None:
        raise KeyError(key)

    def loosens(value: Any, holds: Any) -> bool:
        return holds is not None and order(holds, value) != value

    return Found("the strictest value of all sources holds", loosens)


# A key without a line here is refused in a found file: forgetting one closes it.
FOUND: Mapping[str, Found] = {
    "backend": Found(
        "one of Belljar's own that isolates at least as well as the one `auto` would choose",
        lambda value, holds: holds not in (None, "auto", value),
        note=True,
    ),
    "level": Found("a level that is looser in nothing", _lower_level),
    **{
        f"defaults.{name}": Found("the smaller number counts", _accepted, note=True)
        for name in policy_fields.LIMITS
    },
    "defaults.network": Found(
        "`off`",
        lambda value, _: policy_fields.parse_network(value).mode != "off",
        note=True,
    ),
    "defaults.filesystem": Found("more hidden paths", _more_files, note=True),
    "defaults.modules": Found("a shorter list of modules", _accepted, note=True),
    "defaults.min_isolation": Found("the higher floor counts", _accepted, note=True),
    **{key: _past_ceiling(key) for key in KEYS if key.startswith("ceiling.") and strictest(key)},
    "fallback.allow": Found(
        "fewer backends", lambda value, holds: not set(value) <= set(holds or ())
    ),
    "fallback.enabled": Found(
        "the refusal counts", lambda value, holds: bool(value) and holds is False
    ),
    "sandbox.enabled": Found(
        "only a trusted source may set it", lambda value, holds: value != holds
    ),
    "sandbox.allow_direct": Found("`false`", _never),
    "block_dangerous_imports": Found("`true`", lambda value, holds: bool(holds) and not value),
    "prefer": Found("`isolation`", lambda value, holds: value != "isolation" and value != holds),
    "store_code": Found(
        "only a trusted source may set it", lambda value, holds: value != (holds or "never")
    ),
    "artifacts": Found("only a trusted source may set it", _never),
    "data_directory": Found("only a trusted source may set it", _never),
    "language_file": Found("only a trusted source may set it", _never),
    "user": Found("only a trusted source may set it", _never),
    "docker_host": Found("only a trusted source may set it", _never),
    "firejail_profile": Found("only a trusted source may set it", _never),
}

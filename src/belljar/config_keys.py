"""Every setting by its dotted key: how its value is read, and what the environment calls it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from . import policy_fields, units
from .errors import ConfigError
from .policy import Isolation, Level

StoreCode = Literal["on_error", "always", "never"]

LEVELS: tuple[str, ...] = get_args(Level)  # loosest first
REACH = ("off", "hosts", "any")  # strictest first
RIGHTS = ("none", "ro", "rw", "unprotected")  # strictest first
TABLES = ("defaults", "ceiling", "fallback")


def from_text(key: str, text: str) -> Any:
    """The value that `text`, from a variable or a flag, means for `key`: commas make a list."""
    name = key.rpartition(".")[2]
    if key == "block_dangerous_imports":
        return _BOOLEANS.get(text.strip().lower(), text)
    if key == "fallback.allow" or (key in ("defaults.network", "defaults.modules")):
        if text.strip() in _WHOLE_WORDS.get(name, ()):
            return text.strip()
        return [word.strip() for word in text.split(",") if word.strip()]
    return text.strip()


_WHOLE_WORDS = {"network": ("off", "any"), "modules": ("any", "level", "safe")}
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


def _bool(key: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(key, f"{given!r} is not true or false")
    return given


def _user(key: str, given: object) -> str:
    if isinstance(given, str) and (match := re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", given)):
        return f"{match[1]}:{match[2] or match[1]}"
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
    "ceiling.min_isolation": lambda key, given: Isolation.parse(given, key),
    "fallback.allow": _backends,
    "block_dangerous_imports": _bool,
    "store_code": _one_of(*get_args(StoreCode)),
    "language_file": _text,
    "user": _user,
    "docker_host": _docker_host,
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


def strictness(key: str) -> Callable[[Any], Any] | None:
    """How to order the values of a key of which the strictest holds (least first), else None."""
    if key in ("ceiling.min_isolation", "defaults.min_isolation"):
        return lambda floor: -floor.rank
    if key == "ceiling.network":
        return REACH.index
    if key == "ceiling.mounts":
        return RIGHTS.index
    if key.startswith("ceiling."):
        return float
    return None

"""Where Belljar's settings come from: belljar.toml files, the environment, then the caller.

Sources, weakest first:

1. `/etc/belljar/belljar.toml`, the operator's
2. `$XDG_CONFIG_HOME/belljar/belljar.toml` (or `~/.config/...`), the user's
3. the file that `load(path=...)` or `$BELLJAR_CONFIG` names, else `./belljar.toml`
4. the environment: the aliases of `ALIASES`, then `BELLJAR_*`
5. `overrides`, which the command line fills from its flags

The later source wins, with two exceptions. Of `[ceiling]`, `defaults.min_isolation`,
`fallback.enabled` and `sandbox.allow_direct` the strictest value of all sources holds, so that no
source raises what the operator bounded. And a `./belljar.toml` that was merely found, and may have
come with the very code that is to be run, only tightens: `config_keys.FOUND` says for each key what
that means. `BELLJAR_CONFIG` names the file, and so trusts it.

An empty variable counts as unset. Unknown keys and unknown `BELLJAR_*` names are errors.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from . import units
from .config_keys import (
    ALIASES,
    FOUND,
    KEYS,
    TABLES,
    VARIABLES,
    Prefer,
    StoreCode,
    from_text,
    strictest,
)
from .errors import ConfigError, PolicyError
from .policy import Ceiling, Level
from .policy_fields import LIMITS
from .records import field, plain, record

OPERATOR_FILE = "/etc/belljar/belljar.toml"
FOUND_FILE = "belljar.toml"
_MOST_BYTES = 1 << 20


@record
class Settings:
    """What the operator and the user decided before any request.

    `defaults` are policy keys laid over the level's own; `sources` says where each value came from.
    `found` are the policy keys of a belljar.toml that was merely found, and `found_backend` the
    backend that it names: both can make a run stricter, and not looser.
    """

    backend: str = "auto"
    level: Level = "standard"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ceiling: Ceiling = field(default_factory=Ceiling)
    fallback_allow: tuple[str, ...] = ()
    fallback_enabled: bool = True
    sandbox_enabled: bool = True
    sandbox_allow_direct: bool = False
    block_dangerous_imports: bool = False
    prefer: Prefer = "speed"
    store_code: StoreCode = "never"
    artifacts: str = "artifacts/executions"
    data_directory: str | None = None
    language_file: str | None = None
    user: str | None = None
    docker_host: str | None = None
    firejail_profile: str | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    found_backend: str | None = None
    # Fields of a plan's report that must be enforced, also where the floor accepts best_effort.
    demanded: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Every setting by its dotted key, as plain JSON values: what `belljar settings` prints."""
        flat: dict[str, Any] = {"backend": self.found_backend or self.backend, "level": self.level}
        from .found import smaller  # late: a run needs it only where a file was found

        shown = {**self.found, **self.defaults}
        for name in (name for name in self.found if name in LIMITS):
            shown[name] = smaller(self.found[name], self.defaults.get(name))
        flat |= {f"defaults.{name}": value for name, value in shown.items()}
        flat |= {f"ceiling.{name}": value for name, value in plain(self.ceiling).items()}
        flat["fallback.allow"] = list(self.fallback_allow)
        flat["fallback.enabled"] = self.fallback_enabled
        flat["sandbox.enabled"] = self.sandbox_enabled
        flat["sandbox.allow_direct"] = self.sandbox_allow_direct
        for name in (
            "block_dangerous_imports", "prefer", "store_code", "artifacts", "data_directory",
            "language_file", "user", "firejail_profile",
        ):  # fmt: skip
            flat[name] = getattr(self, name)
        flat["docker_host"] = self.docker_host
        return flat


class _Value(NamedTuple):
    value: Any
    source: str


_Layer = dict[str, _Value]


def load(
    *,
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from every source, in the order of the module's docstring.

    `overrides` has the shape of belljar.toml (nested tables or dotted keys); None means "not set".
    Raises ConfigError, which names the key and the source.
    """
    environ = os.environ if environ is None else environ
    merged: _Layer = {}
    for trusted in (OPERATOR_FILE, _own_file(environ)):
        if trusted and (table := _read(trusted)) is not None:
            _merge(merged, _file_layer(trusted, table))

    noted: _Layer = {}
    named = path or environ.get("BELLJAR_CONFIG")
    if named:
        table = _read(named)
        if table is None:
            origin = "BELLJAR_CONFIG" if not path else "config"
            raise ConfigError(origin, f"there is no file {named!r}", fix="correct the path")
        _merge(merged, _file_layer(named, table))
    elif (table := _read(FOUND_FILE, found=True)) is not None:
        layer = _file_layer(os.path.join(".", FOUND_FILE), table)
        _refuse_loosening(layer, merged)
        noted = {key: value for key, value in layer.items() if FOUND[key].note}
        _merge(merged, {key: value for key, value in layer.items() if key not in noted})

    later = [_alias_layer(environ), _environment_layer(environ)]
    if overrides:
        later.append(_table_layer(overrides, "override"))
    for layer in later:
        _merge(merged, layer)
        for key in layer:
            noted.pop(key, None)  # a trusted source that is read later says otherwise
    return _settings(merged, noted)


# Reading one source.


def _own_file(environ: Mapping[str, str]) -> str | None:
    """The user's file, unless it is in a home that is another user's.

    `sudo -u` and services keep HOME=/root, which may not be entered: the file there is not this
    user's. One that can be reached and not read is an error, as anywhere.
    """
    path = user_file(environ)
    try:
        if path:
            os.stat(path)
    except PermissionError as error:
        import logging

        logging.getLogger("belljar").warning(
            "%s is passed over, because this user may not enter its directory (%s); set HOME or"
            " XDG_CONFIG_HOME to this user's own",
            path,
            error.strerror,
        )
        return None
    except (OSError, ValueError):
        return path  # to read it says what is wrong
    return path


def user_file(environ: Mapping[str, str]) -> str | None:
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative path is ignored
        home = environ.get("HOME") or environ.get("USERPROFILE")
        if not home:
            return None
        base = os.path.join(home, ".config")
    return os.path.join(base, "belljar", "belljar.toml")


def _read(path: str, *, found: bool = False) -> dict[str, Any] | None:
    """The file's table; None if there is no such file. A file that cannot be read is an error,
    because passing over it would lift the bounds it sets."""
    raw = read_bytes(path, found=found)
    if raw is None:
        return None

    import tomllib

    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, f"is not valid TOML: {error}") from None


def read_bytes(path: str, *, found: bool = False) -> bytes | None:
    """A regular file of reasonable size, whole; None if there is no such file."""
    try:
        # O_NONBLOCK: a named pipe in the current directory must not hang us before the check below.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(path, f"cannot be read: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(path, "is not a regular file")
        if found:
            _refuse_foreign(path, status)
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(raw) > _MOST_BYTES:
        raise ConfigError(path, f"is larger than {units.human_size(_MOST_BYTES)}")
    return raw


def _refuse_foreign(path: str, status: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            path,
            f"belongs to another user (uid {status.st_uid})",
            fix=f"run `chown {os.geteuid()} {path}` if you trust it, or leave this directory",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(path, "others may write to it", fix=f"run `chmod go-w {path}`")


def _file_layer(path: str, table: Mapping[str, Any]) -> _Layer:
    layer = _table_layer(table, f"file {path}")
    for key in ("language_file", "firejail_profile"):
        if key in layer:  # relative to the file that names it, not to wherever we stand
            value, source = layer[key]
            layer[key] = _Value(os.path.join(os.path.dirname(path), value), source)
    return layer


def _table_layer(table: Mapping[str, Any], source: str) -> _Layer:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key in TABLES:
            if not isinstance(value, Mapping):
                raise ConfigError(key, f"is a table, not {value!r} (from {source})")
            flat |= {f"{key}.{inner}": given for inner, given in value.items()}
        else:
            flat[key] = value
    for key in flat:
        if key not in KEYS:
            raise _unknown("key", key, KEYS, source)
    return {
        key: _read_value(KEYS[key], key, value, source)
        for key, value in flat.items()
        if value is not None
    }


def _alias_layer(environ: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for name, key, convert in ALIASES:
        if text := environ.get(name, "").strip():
            source = f"env {name}"
            converted = _read_value(convert, key, text, source).value
            layer[key] = _read_value(KEYS[key], key, converted, source)
    return layer


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for name, text in environ.items():
        if not name.startswith("BELLJAR_") or name == "BELLJAR_CONFIG":
            continue
        if name not in VARIABLES:
            raise _unknown("variable", name, VARIABLES, "the environment")
        if text.strip():
            key = VARIABLES[name]
            layer[key] = _read_value(KEYS[key], key, from_text(key, text), f"env {name}")
    return layer


def _read_value(read: Callable[[str, Any], Any], key: str, given: object, source: str) -> _Value:
    try:
        return _Value(read(key, given), source)
    except (ConfigError, PolicyError) as error:
        # The policy's parsers name their own field ("network.allow"): show it within the table.
        where = error.field if error.field.startswith(key) else f"{key.split('.')[0]}.{error.field}"
        problem = error.message.removeprefix(f"{error.field}: ")
        raise ConfigError(where, f"{problem} (from {source})", fix=error.fix) from None


def _unknown(what: str, name: str, known: Iterable[str], source: str) -> ConfigError:
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if not near:  # `timeout` at the top level means `defaults.timeout`
        near = [key for key in known if key.rpartition(".")[2] == name]
    hint = f"did you mean {' or '.join(near)}?" if near else "`belljar settings` lists them all"
    return ConfigError(name, f"unknown {what} in {source}", fix=hint)


# Putting the sources together.


def _merge(merged: _Layer, layer: _Layer) -> None:
    for key, new in layer.items():
        combine, old = strictest(key), merged.get(key)
        if old is None or combine is None:
            merged[key] = new
            continue
        value = combine(old.value, new.value)
        if value == new.value != old.value:
            merged[key] = new
        elif value != old.value:
            merged[key] = _Value(value, f"{old.source} and {new.source}")


def _refuse_loosening(layer: _Layer, below: _Layer) -> None:
    """A belljar.toml that was found, not named, may come from the author of the code to be run."""
    defaults = Settings().to_dict()
    for key, (value, source) in layer.items():
        rule = FOUND.get(key)
        if key in below:
            # Of these the strictest holds anyway: a file that asks for more changes nothing.
            if rule is not None and key.startswith("ceiling."):
                continue
            holds = below[key].value
        else:
            holds = defaults.get(key)
        if rule is None or rule.loosens(value, holds):
            allowed = f"; for this key: {rule.may}" if rule is not None else ""
            raise ConfigError(
                key,
                f"a belljar.toml found in the current directory cannot loosen this{allowed}"
                f" ({source})",
                fix="if you wrote that file, set BELLJAR_CONFIG=belljar.toml or give --config; "
                "else remove the key or the file",
            )


def _settings(merged: _Layer, noted: _Layer) -> Settings:
    values = {key: entry.value for key, entry in merged.items()}
    sources = {key: "default" for key in KEYS if not key.startswith("defaults.")}
    sources |= {key: entry.source for key, entry in merged.items()}
    found_backend = noted["backend"].value if "backend" in noted else None
    if found_backend == values.get("backend", "auto"):
        found_backend = None
    found = {
        key.removeprefix("defaults."): entry.value
        for key, entry in noted.items()
        if key.startswith("defaults.")
    }
    for key, entry in noted.items():
        if key != "backend" or found_backend:
            sources[key] = entry.source

    def below(table: str) -> dict[str, Any]:
        return {
            key.removeprefix(table): value for key, value in values.items() if key.startswith(table)
        }

    plain = {key: value for key, value in values.items() if "." not in key}
    return Settings(
        **cast(Any, plain),
        defaults=below("defaults."),
        ceiling=Ceiling(**below("ceiling.")),
        fallback_allow=values.get("fallback.allow", ()),
        fallback_enabled=values.get("fallback.enabled", True),
        sandbox_enabled=values.get("sandbox.enabled", True),
        sandbox_allow_direct=values.get("sandbox.allow_direct", False),
        found=found,
        found_backend=found_backend,
        sources=sources,
    )

"""Where settings come from, who wins, and that nobody raises the operator's ceiling."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import unprivileged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from belljar import config
from belljar.config import Settings
from belljar.config_keys import ALIASES, FOUND, KEYS, VARIABLES
from belljar.errors import ConfigError
from belljar.minima import LEAST
from belljar.policy import DANGEROUS_MODULES, Isolation
from belljar.policy_fields import LIMITS
from belljar.resolve import resolve


class Host:
    """An empty host: no operator's file, no user's file, an empty current directory."""

    def __init__(self, root: Path) -> None:
        self.operator_file = root / "etc" / "belljar.toml"
        self.home = root / "home"
        self.here = root / "here"
        self.operator_file.parent.mkdir()
        (self.home / ".config" / "belljar").mkdir(parents=True)
        self.here.mkdir()

    def operator(self, text: str) -> None:
        self.operator_file.write_text(text)

    def user(self, text: str) -> None:
        (self.home / ".config" / "belljar" / "belljar.toml").write_text(text)

    def found(self, text: str) -> Path:
        path = self.here / "belljar.toml"
        path.write_text(text)
        path.chmod(0o644)
        return path

    def load(self, *, path: str | None = None, overrides: Any = None, **environ: str) -> Settings:
        return config.load(
            path=path, environ={"HOME": str(self.home), **environ}, overrides=overrides
        )


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    monkeypatch.setattr(config, "OPERATOR_FILE", str(made.operator_file))
    monkeypatch.chdir(made.here)
    return made


def refusal(load: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load()
    return caught.value


# Order


def test_without_any_source_every_setting_is_the_default(host: Host) -> None:
    loaded = host.load()
    assert loaded == Settings(sources=loaded.sources)
    assert set(loaded.sources.values()) == {"default"}


def test_each_source_wins_over_the_one_before_it(host: Host) -> None:
    host.operator("[defaults]\ntimeout = 1\nmemory = '8M'\ncpus = 1\nprocesses = 1\ndisk = '1M'")
    host.user("[defaults]\nmemory = '9M'\ncpus = 2\nprocesses = 2\ndisk = '2M'")
    host.found("[defaults]\ncpus = 3\nprocesses = 3\ndisk = '3M'\nmemory = '8M'")
    loaded = host.load(
        BELLJAR_PROCESSES="4", BELLJAR_DISK="4M", overrides={"defaults": {"disk": "5M"}}
    )
    limits = resolve(loaded.level, {}, defaults=loaded.defaults, found=loaded.found).policy.limits
    assert (limits.timeout, limits.memory, limits.cpus) == (1, 8 << 20, 2)
    assert (limits.processes, limits.disk) == (4, 5 << 20)
    assert loaded.to_dict()["defaults.memory"] == 8 << 20
    assert loaded.to_dict()["defaults.cpus"] == 2
    assert loaded.sources["defaults.timeout"] == f"file {host.operator_file}"
    assert loaded.sources["defaults.memory"] == "file ./belljar.toml"
    assert loaded.sources["defaults.processes"] == "env BELLJAR_PROCESSES"
    assert loaded.sources["defaults.disk"] == "override"


def test_a_named_file_replaces_the_found_one(host: Host, tmp_path: Path) -> None:
    host.found("[defaults]\ntimeout = 1")
    named = tmp_path / "named.toml"
    named.write_text("[defaults]\nmemory = '8M'")
    assert host.load(BELLJAR_CONFIG=str(named)).defaults == {"memory": 8 << 20}
    assert host.load(path=str(named)).defaults == {"memory": 8 << 20}
    assert host.load().found == {"timeout": 1}


def test_a_named_file_that_is_not_there_is_an_error(host: Host) -> None:
    assert "nowhere.toml" in str(refusal(lambda: host.load(BELLJAR_CONFIG="nowhere.toml")))


def test_the_xdg_directory_is_used_only_if_absolute(host: Host, tmp_path: Path) -> None:
    (tmp_path / "xdg" / "belljar").mkdir(parents=True)
    (tmp_path / "xdg" / "belljar" / "belljar.toml").write_text("backend = 'docker'")
    assert host.load(XDG_CONFIG_HOME=str(tmp_path / "xdg")).backend == "docker"
    assert host.load(XDG_CONFIG_HOME="../xdg").backend == "auto"


def test_an_empty_variable_counts_as_unset(host: Host) -> None:
    assert host.load(BELLJAR_BACKEND="", BELLJAR_CONFIG="", SANDBOX_TYPE=" ").backend == "auto"


# Values


def test_a_whole_file_is_read(host: Host) -> None:
    host.operator(
        """
        backend = "docker"
        level = "strict"
        block_dangerous_imports = true
        store_code = "never"
        language_file = "languages.toml"
        user = "1000"
        docker_host = "/run/docker.sock"
        [defaults]
        timeout = "1.5s"
        network = ["pypi.org", "*.example.org:443"]
        modules = "safe"
        min_isolation = "jail"
        filesystem = { read_only = ["/data"] }
        [ceiling]
        memory = "1G"
        network = "hosts"
        mounts = "ro"
        [fallback]
        allow = ["subprocess"]
        """
    )
    loaded = host.load()
    assert (loaded.backend, loaded.level, loaded.store_code) == ("docker", "strict", "never")
    assert loaded.block_dangerous_imports is True
    assert loaded.language_file == str(host.operator_file.parent / "languages.toml")
    assert loaded.user == "1000:1000"
    assert loaded.docker_host == "unix:///run/docker.sock"
    assert loaded.fallback_allow == ("subprocess",)
    assert loaded.ceiling.memory == 1 << 30
    assert (loaded.ceiling.network, loaded.ceiling.mounts) == ("hosts", "ro")
    resolved = resolve(loaded.level, {}, ceiling=loaded.ceiling, defaults=loaded.defaults).policy
    assert resolved.limits.timeout == 1.5
    assert resolved.network.allow == ("pypi.org", "*.example.org:443")
    assert resolved.modules.deny == DANGEROUS_MODULES
    assert resolved.filesystem.read_only == ("/data",)
    assert set(loaded.to_dict()) <= set(KEYS)


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("BELLJAR_BACKEND", "docker", "backend", "docker"),
        ("BELLJAR_LEVEL", "strict", "level", "strict"),
        ("BELLJAR_TIMEOUT", "2m", "defaults.timeout", 120),
        ("BELLJAR_NETWORK", "any", "defaults.network", "any"),
        ("BELLJAR_NETWORK", "a.org, b.org", "defaults.network", ["a.org", "b.org"]),
        ("BELLJAR_MODULES", "level", "defaults.modules", "level"),
        ("BELLJAR_MODULES", "json,math", "defaults.modules", ["json", "math"]),
        ("BELLJAR_CEILING_TIMEOUT", "60", "ceiling.timeout", 60),
        ("BELLJAR_CEILING_MIN_ISOLATION", "jail", "ceiling.min_isolation", "jail"),
        ("BELLJAR_FALLBACK_ALLOW", "docker,jail", "fallback.allow", ["docker", "jail"]),
        ("BELLJAR_BLOCK_DANGEROUS_IMPORTS", "yes", "block_dangerous_imports", True),
        ("SANDBOX_TYPE", "local", "backend", "subprocess"),
        ("SANDBOX_TYPE", "docker", "backend", "docker"),
        ("SANDBOX_TIMEOUT_SEC", "7", "defaults.timeout", 7),
        ("SANDBOX_DEFAULT_TIMEOUT_SECONDS", "8", "defaults.timeout", 8),
        ("SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS", "600", "ceiling.timeout", 600),
        ("SANDBOX_DEFAULT_MEMORY_LIMIT_MB", "256", "defaults.memory", 256 << 20),
        ("SANDBOX_DEFAULT_CPU_QUOTA_PERCENT", "50", "defaults.cpus", 0.5),
        ("SANDBOX_PID_LIMIT", "20", "defaults.processes", 20),
        ("SANDBOX_BLOCK_DANGEROUS_IMPORTS", "true", "block_dangerous_imports", True),
        ("SANDBOX_STORE_CODE", "always", "store_code", "always"),
        ("SANDBOX_LANGUAGE_CONFIG_FILE", "l.yaml", "language_file", "l.yaml"),
        ("SANDBOX_DEFAULT_USER_UID_GID", "1000:1001", "user", "1000:1001"),
        ("DOCKER_SOCKET_PATH", "/s", "docker_host", "unix:///s"),
        ("DOCKER_HOST", "tcp://h:1", "docker_host", "tcp://h:1"),
    ],
)
def test_a_variable_sets_its_key(host: Host, name: str, text: str, key: str, value: object) -> None:
    loaded = host.load(**{name: text})
    assert loaded.to_dict()[key] == value
    assert loaded.sources[key] == f"env {name}"


def test_belljar_variables_win_over_aliases(host: Host) -> None:
    loaded = host.load(
        BELLJAR_BACKEND="jail", SANDBOX_TYPE="local", BELLJAR_TIMEOUT="1", SANDBOX_TIMEOUT_SEC="2"
    )
    assert (loaded.backend, loaded.defaults["timeout"]) == ("jail", 1)


def test_every_key_but_the_filesystem_table_has_a_variable() -> None:
    assert set(KEYS) - set(VARIABLES.values()) == {"defaults.filesystem"}
    assert {key for _, key, _ in ALIASES} <= set(KEYS)


# Errors name the key and the source


@pytest.mark.parametrize(
    ("text", "field", "part"),
    [
        ("backedn = 'x'", "backedn", "backend"),
        ("timeout = 3", "timeout", "defaults.timeout"),
        ("[defaults]\ntimeuot = 3", "defaults.timeuot", "defaults.timeout"),
        ("[defaults]\ntimeout = 'soon'", "defaults.timeout", "not a time"),
        ("[defaults]\ntimeout = -1", "defaults.timeout", "positive"),
        ("[defaults]\ntimeout = nan", "defaults.timeout", "finite"),
        ("[defaults]\nmemory = true", "defaults.memory", "expected a number"),
        ("[defaults]\nmin_isolation = 'brick'", "defaults.min_isolation", "brick"),
        ("[defaults]\nnetwork = 'sometimes'", "defaults.network", "sometimes"),
        ("[defaults.network]\nmode = 'x'", "defaults.network.mode", "off, hosts, any"),
        ("[defaults.network]\nallow = 5", "defaults.network.allow", "list"),
        ("[defaults]\nmodules = 5", "defaults.modules", "5"),
        ("[defaults.filesystem]\nread_only = ['a']", "defaults.filesystem.read_only", "absolute"),
        ("[ceiling]\nnetwork = 'x'", "ceiling.network", "off, hosts, any"),
        ("ceiling = 3", "ceiling", "table"),
        ("level = 'lax'", "level", "permissive, standard, strict"),
        ("backend = 'a b'", "backend", "a b"),
        ("backend = 5", "backend", "5"),
        ("block_dangerous_imports = 'yes'", "block_dangerous_imports", "true or false"),
        ("user = 'root'", "user", "uid:gid"),
        ("docker_host = 'socket'", "docker_host", "socket"),
        ("fallback = { allow = 'docker' }", "fallback.allow", "list"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_key_and_file(
    host: Host, text: str, field: str, part: str
) -> None:
    host.operator(text)
    error = refusal(host.load)
    assert error.field == field
    assert part in str(error)
    assert str(host.operator_file) in error.message


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("BELLJAR_TIMEUOT", "3", "BELLJAR_TIMEOUT"),
        ("BELLJAR_", "3", "unknown variable"),
        ("BELLJAR_TIMEOUT", "soon", "BELLJAR_TIMEOUT"),
        ("BELLJAR_BLOCK_DANGEROUS_IMPORTS", "perhaps", "perhaps"),
        ("SANDBOX_DEFAULT_MEMORY_LIMIT_MB", "lots", "SANDBOX_DEFAULT_MEMORY_LIMIT_MB"),
        ("SANDBOX_DEFAULT_CPU_QUOTA_PERCENT", "half", "SANDBOX_DEFAULT_CPU_QUOTA_PERCENT"),
        ("SANDBOX_PID_LIMIT", "9" * 5000, "SANDBOX_PID_LIMIT"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(
    host: Host, name: str, text: str, part: str
) -> None:
    assert part in str(refusal(lambda: host.load(**{name: text})))


def test_an_unknown_override_is_an_error(host: Host) -> None:
    assert refusal(lambda: host.load(overrides={"colour": "red"})).field == "colour"


@pytest.mark.parametrize("text", ["a = ", "\ufeff", "[" * 100_000, "x = 1\0"])
def test_a_file_that_is_not_toml_is_an_error_that_names_it(host: Host, text: str) -> None:
    host.operator(text)
    assert str(host.operator_file) in str(refusal(host.load))


def test_a_file_that_is_not_utf8_or_far_too_large_is_refused(host: Host) -> None:
    host.operator_file.write_bytes(b"backend = '\xff'")
    assert "TOML" in str(refusal(host.load))
    host.operator("#" * (2 << 20))
    assert "larger" in str(refusal(host.load))


def test_an_operators_file_that_cannot_be_opened_is_an_error_not_an_absence(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.operator_file.mkdir()
    assert "regular" in str(refusal(host.load))
    monkeypatch.setattr(config, "OPERATOR_FILE", str(host.home / ("x" * 300)))
    assert "cannot be read" in str(refusal(host.load))


# The strictest ceiling holds


def test_no_later_source_raises_the_operators_ceiling(host: Host) -> None:
    host.operator("[ceiling]\ntimeout = 60\nnetwork = 'off'\nmounts = 'ro'\nmin_isolation = 'jail'")
    loaded = host.load(
        BELLJAR_CEILING_TIMEOUT="600",
        BELLJAR_CEILING_NETWORK="any",
        SANDBOX_GLOBAL_MAX_TIMEOUT_SECONDS="900",
        overrides={"ceiling": {"mounts": "rw", "min_isolation": "none"}},
    )
    ceiling = loaded.ceiling
    assert (ceiling.timeout, ceiling.network, ceiling.mounts) == (60, "off", "ro")
    assert ceiling.min_isolation is Isolation.JAIL
    assert loaded.sources["ceiling.timeout"] == f"file {host.operator_file}"


def test_without_an_operator_the_same_variables_do_set_the_ceiling(host: Host) -> None:
    assert host.load(BELLJAR_CEILING_TIMEOUT="600").ceiling.timeout == 600


def test_a_later_source_may_lower_the_ceiling(host: Host) -> None:
    host.operator("[ceiling]\ntimeout = 60")
    loaded = host.load(BELLJAR_CEILING_TIMEOUT="5")
    assert loaded.ceiling.timeout == 5
    assert loaded.sources["ceiling.timeout"] == "env BELLJAR_CEILING_TIMEOUT"


def test_the_highest_isolation_floor_holds_wherever_it_stands(host: Host) -> None:
    host.operator("[defaults]\nmin_isolation = 'jail'")
    assert host.load(BELLJAR_MIN_ISOLATION="process").defaults["min_isolation"] is Isolation.JAIL
    assert host.load(BELLJAR_MIN_ISOLATION="vm").defaults["min_isolation"] is Isolation.VM


_CEILINGS = st.fixed_dictionaries(
    {},
    optional={
        "timeout": st.floats(0.1, 1e6),
        "memory": st.integers(4 << 20, 1 << 40),
        "processes": st.integers(1, 1 << 20),
        "network": st.sampled_from(["off", "hosts", "any"]),
        "mounts": st.sampled_from(["none", "ro", "rw"]),
        "min_isolation": st.sampled_from([rung.value for rung in Isolation]),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(operator=_CEILINGS, environment=_CEILINGS, caller=_CEILINGS)
def test_whatever_the_others_say_the_ceiling_is_never_past_the_operators(
    host: Host, operator: dict[str, Any], environment: dict[str, Any], caller: dict[str, Any]
) -> None:
    host.operator("[ceiling]\n" + "".join(f"{k} = {v!r}\n" for k, v in operator.items()))
    variables = {f"BELLJAR_CEILING_{k.upper()}": str(v) for k, v in environment.items()}
    ceiling = host.load(overrides={"ceiling": caller}, **variables).ceiling
    for name, bound in operator.items():
        holds = getattr(ceiling, name)
        match name:
            case "network":
                assert ["off", "hosts", "any"].index(holds) <= ["off", "hosts", "any"].index(bound)
            case "mounts":
                assert ["none", "ro", "rw"].index(holds) <= ["none", "ro", "rw"].index(bound)
            case "min_isolation":
                assert holds.at_least(Isolation(bound))
            case _:
                assert holds <= bound


# A belljar.toml that was merely found


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_found_file_that_others_may_write_is_refused(host: Host, mode: int) -> None:
    path = host.found("backend = 'docker'")
    assert host.load().found_backend == "docker"
    path.chmod(mode)
    assert refusal(host.load).fix == "run `chmod go-w belljar.toml`"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs to give a file away")
def test_a_found_file_of_another_user_is_refused(host: Host) -> None:
    path = host.found("backend = 'docker'")
    os.chown(path, 12345, 12345)
    assert "12345" in str(refusal(host.load))
    os.chown(path, 0, 0)
    assert host.load().found_backend == "docker"


def test_a_found_pipe_or_directory_is_refused_without_waiting(host: Host) -> None:
    os.mkfifo(host.here / "belljar.toml")
    assert "regular" in str(refusal(host.load))
    (host.here / "belljar.toml").unlink()
    (host.here / "belljar.toml").mkdir()
    assert "regular" in str(refusal(host.load))


@pytest.mark.parametrize(
    "text",
    [
        "level = 'permissive'",
        "language_file = 'l.toml'",
        "user = '0:0'",
        "docker_host = 'tcp://elsewhere:2375'",
        "[fallback]\nallow = ['inprocess']",
        "[defaults]\nnetwork = 'any'",
        "[defaults]\nnetwork = ['exfil.example']",
        "[defaults.filesystem]\nread_only = ['/home']",
        "[defaults.filesystem]\nread_write = ['/home']",
        "[defaults.filesystem]\nprotect = false",
        "[defaults.filesystem]\nprivate_tmp = false",
        "[ceiling]\ntimeout = 3600",
        "store_code = 'on_error'",
        "store_code = 'always'",
        "artifacts = '/tmp'",
        "data_directory = '/home'",
    ],
)
def test_a_found_file_cannot_loosen_the_sandbox_but_a_named_one_can(host: Host, text: str) -> None:
    host.found(text)
    error = refusal(host.load)
    assert "BELLJAR_CONFIG" in str(error)
    assert host.load(BELLJAR_CONFIG="belljar.toml").sources[error.field] == "file belljar.toml"


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ("level = 'strict'", "level = 'standard'"),
        ("backend = 'docker'", "backend = 'subprocess'"),
        ("block_dangerous_imports = true", "block_dangerous_imports = false"),
        ("level = 'permissive'", "level = 'standard'"),
    ],
)
def test_a_found_file_cannot_undo_what_the_user_chose(host: Host, chosen: str, text: str) -> None:
    host.found(text)
    host.load()
    host.user(chosen)
    assert "BELLJAR_CONFIG" in str(refusal(host.load))


@pytest.mark.parametrize(
    "text",
    [
        "level = 'strict'",
        "backend = 'docker'",
        "block_dangerous_imports = true",
        "[defaults]\ntimeout = 120\nnetwork = 'off'\nmin_isolation = 'vm'\nmodules = 'level'",
        "[defaults.filesystem]\nhidden = ['/srv']",
        "[ceiling]\ntimeout = 5\nmemory = '1G'\nnetwork = 'off'\ninterpreters = []",
    ],
)
def test_a_found_file_may_tune_and_tighten(host: Host, text: str) -> None:
    host.found(text)
    assert "file ./belljar.toml" in host.load().sources.values()


# For each key the loosest value that a file can give it.
LOOSEST: dict[str, Any] = {
    "backend": "inprocess",
    "level": "permissive",
    **dict.fromkeys(
        (f"{table}.{name}" for table in ("defaults", "ceiling") for name in LIMITS), 300
    ),
    **dict.fromkeys(
        (f"{table}.{name}" for table in ("defaults", "ceiling") for name in ("memory", "disk")),
        1 << 40,
    ),
    "defaults.network": "any",
    "defaults.filesystem": {"read_only": ["/"], "protect": False, "private_tmp": False},
    "defaults.modules": "any",
    "defaults.min_isolation": "none",
    "ceiling.network": "any",
    "ceiling.mounts": "unprotected",
    "ceiling.min_isolation": "none",
    "ceiling.interpreters": ["/usr/bin/python3", "/tmp/python"],
    "ceiling.images": ["**"],
    "prefer": "speed",
    "fallback.allow": ["inprocess", "subprocess"],
    "fallback.enabled": True,
    "sandbox.enabled": False,
    "sandbox.allow_direct": True,
    "block_dangerous_imports": False,
    "store_code": "always",
    "artifacts": "/tmp/artifacts",
    "data_directory": "/srv",
    "language_file": "l.toml",
    "user": "0:0",
    "docker_host": "tcp://elsewhere:2375",
    "firejail_profile": "f.profile",
}


def test_the_documentation_says_what_a_found_file_may_do_to_each_key() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    for key, rule in FOUND.items():
        assert f"| `{key}` | {rule.may} |" in text


# What holds without the file: tighter than `LOOSEST` in every key.
TIGHT = """
    level = "strict"
    block_dangerous_imports = true
    [defaults]
    timeout = 2
    network = "off"
    modules = ["math"]
    min_isolation = "jail"
    filesystem = { hidden = ["/srv"] }
    [ceiling]
    network = "off"
    mounts = "none"
    min_isolation = "jail"
    interpreters = ["/usr/bin/python3"]
    images = ["belljar/*"]
"""


def test_every_key_states_what_a_found_file_may_do_to_it() -> None:
    assert set(FOUND) == set(KEYS)
    assert set(LOOSEST) == set(KEYS), "a new key needs its loosest value here"


@pytest.mark.parametrize("key", sorted(KEYS))
@pytest.mark.parametrize("operator", ["", TIGHT], ids=["nothing set", "all set"])
def test_no_key_of_a_found_file_loosens_anything(host: Host, key: str, operator: str) -> None:
    """Whatever the file says: it is refused, or nothing is looser than without it."""
    operator += "".join(
        f"    {name} = {int(LEAST.get(name, 3)) or 3}\n"
        for name in LIMITS
        if operator and f"{name} =" not in operator
    )
    host.operator(operator)
    without = host.load()
    given: Any = LOOSEST[key]
    for part in reversed(key.split(".")):
        given = {part: given}
    host.found(_toml(given))
    try:
        loaded = host.load()
    except ConfigError as error:
        assert "BELLJAR_CONFIG" in str(error)
        return
    for level in ("permissive", "standard", "strict", None):
        old, new = (
            resolve(
                level or each.level, {}, ceiling=each.ceiling, defaults=each.defaults,
                found=each.found,
            ).policy
            for each in (without, loaded)
        )  # fmt: skip
        for name in LIMITS:
            before, now = getattr(old.limits, name), getattr(new.limits, name)
            assert before is None or now <= before
        assert new.min_isolation.at_least(old.min_isolation)
        assert (new.network, new.filesystem) == (old.network, old.filesystem)
        assert new.modules == old.modules
    assert (loaded.backend, loaded.level) == (without.backend, without.level)
    for name in (
        "fallback_allow", "block_dangerous_imports", "store_code", "language_file",
        "sandbox_enabled", "sandbox_allow_direct",
    ):  # fmt: skip
        assert getattr(loaded, name) == getattr(without, name)
    assert (loaded.user, loaded.docker_host) == (without.user, without.docker_host)
    if operator or key != "ceiling.interpreters":
        bounds = [name for name in LIMITS if getattr(without.ceiling, name) is not None]
        assert all(
            getattr(loaded.ceiling, name) <= getattr(without.ceiling, name) for name in bounds
        )
        assert loaded.ceiling.interpreters == without.ceiling.interpreters
    images = ("belljar/python:1", "elsewhere/python:1")
    assert all(without.ceiling.allows_image(i) for i in images if loaded.ceiling.allows_image(i))


@pytest.mark.parametrize("key", sorted(KEYS))
def test_the_same_value_in_a_named_file_is_obeyed(host: Host, key: str) -> None:
    given: Any = LOOSEST[key]
    for part in reversed(key.split(".")):
        given = {part: given}
    host.found(_toml(given))
    loaded = host.load(BELLJAR_CONFIG="belljar.toml")
    assert loaded.sources[key] == "file belljar.toml"
    assert (loaded.found, loaded.found_backend) == ({}, None)


def test_a_key_without_an_entry_is_refused_in_a_found_file(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.found("level = 'strict'")
    assert host.load().level == "strict"
    monkeypatch.setattr(config, "FOUND", {k: v for k, v in FOUND.items() if k != "level"})
    assert refusal(host.load).field == "level"


def test_a_found_limit_is_not_above_the_level_that_a_request_names(host: Host) -> None:
    host.found("[defaults]\ntimeout = 20\nmemory = '20G'\nfuel = 1000")
    loaded = host.load()
    limits = resolve("strict", {}, defaults=loaded.defaults, found=loaded.found).policy.limits
    assert (limits.timeout, limits.memory, limits.fuel) == (10, 256 << 20, 1000)
    limits = resolve("standard", {}, defaults=loaded.defaults, found=loaded.found).policy.limits
    assert limits.timeout == 20
    asked = {"timeout": 25}  # the caller's own
    assert resolve("standard", asked, found=loaded.found).policy.limits.timeout == 25


def test_a_found_file_hides_more_paths_and_shows_those_of_the_operator(host: Host) -> None:
    host.operator("[defaults.filesystem]\nread_only = ['/data']\nhidden = ['/data/keys']")
    host.found("[defaults.filesystem]\nhidden = ['/data/more']")
    loaded = host.load()
    files = resolve("standard", {}, defaults=loaded.defaults, found=loaded.found).policy.filesystem
    assert files.read_only == ("/data",)
    assert set(files.hidden) == {"/data/keys", "/data/more"}


@pytest.mark.parametrize(
    ("trusted", "asked", "allow", "deny"),
    [
        (["math", "json"], ["json.decoder", "os"], ("json.decoder",), ()),
        (["json.decoder"], ["json"], ("json.decoder",), ()),
        ("any", ["json"], ("json",), ()),
        ("safe", ["posix", "os", "runpy", "math"], ("math",), DANGEROUS_MODULES),
        ({"allow": ["math"], "deny": ["json"]}, "any", ("math",), ("json",)),
    ],
)
def test_a_found_list_of_modules_only_narrows(
    trusted: Any, asked: Any, allow: Any, deny: Any
) -> None:
    given = {"defaults": {"modules": trusted}, "found": {"modules": asked}}
    modules = resolve("standard", {}, **given).policy.modules
    assert (modules.allow, modules.deny) == (allow, deny)


def _toml(given: Any) -> str:
    """`given` as TOML, all in one line: inline tables."""

    def value(each: Any) -> str:
        if isinstance(each, dict):
            return "{ " + ", ".join(f"{k} = {value(v)}" for k, v in each.items()) + " }"
        if isinstance(each, bool):
            return str(each).lower()
        return repr(each)

    return "\n".join(f"{name} = {value(each)}" for name, each in given.items())


@pytest.mark.skipif(sys.platform == "win32", reason="modes of directories")
def test_a_home_that_may_not_be_entered_has_no_file_of_this_user(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """As `sudo -u` and services leave HOME: every call ended with a ConfigError."""
    host.user("level = 'strict'")
    closed = host.home / ".config"
    host.home.parent.chmod(0o755)
    for directory in (host.here, *host.here.parents):
        if directory.stat().st_uid == os.geteuid():
            directory.chmod(directory.stat().st_mode | 0o055)
    closed.chmod(0o700 if os.geteuid() == 0 else 0)
    try:
        assert unprivileged.call(lambda: host.load().level) == "standard"
    finally:
        closed.chmod(0o755)
    assert unprivileged.call(lambda: host.load().level) == "strict"
    path = closed / "belljar" / "belljar.toml"
    path.chmod(0o600 if os.geteuid() == 0 else 0)  # it can be reached, and not read

    def refused() -> bool:
        try:
            host.load()
        except ConfigError:
            return True
        return False

    assert unprivileged.call(refused)

"""Policy resolution: no request gets past the ceiling or below the floor, whatever it says."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from belljar.errors import PolicyError
from belljar.policy import Ceiling, Filesystem, Isolation, Modules, Network, level_policy
from belljar.policy_fields import LIMITS
from belljar.resolve import POLICY_KEYS, resolve
from belljar.types import Language, Mount

LEVELS = ["permissive", "standard", "strict"]
REACH = ("off", "hosts", "any")
RIGHTS = ("none", "ro", "rw", "unprotected")

anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=12),
        st.binary(max_size=4),
        st.sampled_from(["any", "off", "level", "safe", "128M", "1.5s", "vm", "/etc", "..", "\0"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=8), inner, max_size=3),
    ),
    max_leaves=6,
)

amounts = st.one_of(
    st.integers(min_value=1, max_value=2**62),
    st.floats(min_value=1e-6, max_value=1e15),
    st.sampled_from(["1", "128M", "1.5G", "2T", "1.5s", "10m", "500ms", "0.5", "64"]),
)
hosts = st.sampled_from(["example.com", "*.example.com", "example.com:443", "192.0.2.1"])
networks = st.one_of(
    st.sampled_from([False, "off", "any"]),
    st.lists(hosts, max_size=3),
    st.builds(
        Network,
        mode=st.sampled_from(REACH),
        allow=st.lists(hosts, max_size=2).map(tuple),
        blocked_ports=st.lists(st.integers(0, 70000), max_size=2).map(tuple),
    ),
)
paths = st.sampled_from(["/etc", "/usr/share", "/etc/", "//etc", "/nowhere", "relative", "/a/../b"])
filesystems = st.fixed_dictionaries(
    {},
    optional={
        "read_only": st.lists(paths, max_size=2),
        "read_write": st.lists(paths, max_size=2),
        "hidden": st.lists(paths, max_size=2),
        "private_tmp": st.booleans(),
        "protect": st.booleans(),
    },
)
modules = st.one_of(
    st.sampled_from(["any", "level", "safe"]),
    st.lists(st.sampled_from(["os", "os.path", "math", "no-module"]), max_size=3),
    st.builds(Modules, allow=st.none(), deny=st.just(("os",))),
)
sensible: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(LIMITS, amounts),
    "network": networks,
    "filesystem": filesystems,
    "modules": modules,
    "min_isolation": st.sampled_from([*Isolation]),
}
# Most wishes make sense, some are absurd, and some name no field at all.
wishes = st.one_of(
    st.fixed_dictionaries({}, optional=sensible),
    st.fixed_dictionaries(
        {}, optional={key: st.one_of(sensible[key], anything) for key in sensible}
    ),
    st.dictionaries(
        st.one_of(st.sampled_from(POLICY_KEYS), st.text(min_size=1, max_size=9)),
        anything,
        max_size=4,
    ),
)
ceilings = st.builds(
    Ceiling,
    timeout=st.one_of(st.none(), st.floats(min_value=0.1, max_value=1e4)),
    memory=st.one_of(st.none(), st.integers(1, 2**40)),
    cpus=st.one_of(st.none(), st.floats(min_value=0.01, max_value=64)),
    processes=st.one_of(st.none(), st.integers(1, 1000)),
    disk=st.one_of(st.none(), st.integers(1, 2**40)),
    output=st.one_of(st.none(), st.integers(1, 2**30)),
    open_files=st.one_of(st.none(), st.integers(1, 10000)),
    fuel=st.one_of(st.none(), st.integers(1, 2**40)),
    network=st.sampled_from(REACH),
    mounts=st.sampled_from(RIGHTS),
    min_isolation=st.sampled_from([*Isolation]),
)
mounts = st.lists(
    st.one_of(
        st.builds(Mount, st.just("/etc"), st.just("data"), st.sampled_from(["ro", "rw"])),
        st.just(Mount("/etc", "data", "rw", protect=False)),
    ),
    max_size=2,
).map(tuple)


@given(level=st.sampled_from(LEVELS), asked=wishes, ceiling=ceilings, mounts=mounts)
def test_no_request_gets_past_the_ceiling_or_below_the_floor(
    level: Any, asked: dict[str, Any], ceiling: Ceiling, mounts: tuple[Mount, ...]
) -> None:
    try:
        resolved = resolve(level, asked, mounts=mounts, ceiling=ceiling)
    except PolicyError as refusal:
        assert refusal.field  # a refusal says where
        assert str(refusal).startswith(refusal.field)
        return
    policy = resolved.policy
    for name in LIMITS:
        most = getattr(ceiling, name)
        if most is not None:
            assert getattr(policy.limits, name) is not None, name
            assert getattr(policy.limits, name) <= most, name
    assert REACH.index(policy.network.mode) <= REACH.index(ceiling.network)
    allowed = RIGHTS.index(ceiling.mounts)
    assert all(RIGHTS.index(mount.mode) <= allowed for mount in resolved.mounts)
    assert allowed >= 3 or all(mount.protect for mount in resolved.mounts)
    assert allowed >= 3 or policy.filesystem.protect or not policy.filesystem.read_write
    assert not policy.filesystem.read_only or allowed >= 1
    assert not policy.filesystem.read_write or allowed >= 2
    floors = [level_policy(level).min_isolation, ceiling.min_isolation]
    if asked.get("min_isolation") is not None:
        floors.append(Isolation.parse(asked["min_isolation"]))
    assert policy.min_isolation.rank == max(floor.rank for floor in floors)


@given(level=st.sampled_from(LEVELS), defaults=wishes, asked=wishes, ceiling=ceilings)
def test_operator_defaults_lower_no_floor_and_pass_no_ceiling(
    level: Any, defaults: dict[str, Any], asked: dict[str, Any], ceiling: Ceiling
) -> None:
    try:
        policy = resolve(level, asked, defaults=defaults, ceiling=ceiling).policy
    except PolicyError as refusal:
        assert refusal.field
        return
    for name in LIMITS:
        most = getattr(ceiling, name)
        assert most is None or getattr(policy.limits, name) <= most
    assert policy.min_isolation.at_least(level_policy(level).min_isolation)
    assert policy.min_isolation.at_least(ceiling.min_isolation)


languages = st.builds(
    Language,
    name=st.just("ruby"),
    family=st.just("ruby"),
    file=st.just("main.rb"),
    limits=st.fixed_dictionaries({}, optional={k: v for k, v in sensible.items() if k in LIMITS}),
    allow_network=st.sampled_from([None, True, False]),
)


@given(
    level=st.sampled_from(LEVELS), language=languages, defaults=wishes, asked=wishes,
    ceiling=ceilings,
)  # fmt: skip
def test_no_language_lowers_the_floor_or_passes_the_ceiling(
    level: Any,
    language: Language,
    defaults: dict[str, Any],
    asked: dict[str, Any],
    ceiling: Ceiling,
) -> None:
    try:
        plain = resolve(level, asked, defaults=defaults, ceiling=ceiling).policy
    except PolicyError:
        plain = None
    try:
        policy = resolve(level, asked, defaults=defaults, ceiling=ceiling, language=language).policy
    except PolicyError as refusal:
        assert refusal.field
        return
    for name in LIMITS:
        most = getattr(ceiling, name)
        assert most is None or getattr(policy.limits, name) <= most
    assert REACH.index(policy.network.mode) <= REACH.index(ceiling.network)
    assert language.allow_network is not False or policy.network.mode == "off"
    assert policy.min_isolation.at_least(level_policy(level).min_isolation)
    assert policy.min_isolation.at_least(ceiling.min_isolation)
    if plain is not None:  # everything else is as it would be in any other language
        assert policy.min_isolation == plain.min_isolation
        assert (policy.filesystem, policy.modules) == (plain.filesystem, plain.modules)
        assert policy.explicit == plain.explicit
        for name in LIMITS:
            if name not in language.limits or asked.get(name) is not None:
                assert getattr(policy.limits, name) == getattr(plain.limits, name)


def test_the_request_comes_before_the_language_and_that_before_the_general_defaults() -> None:
    ruby = Language(name="ruby", family="ruby", file="r", limits={"memory": 64 << 20})
    general = {"memory": "256M", "timeout": 7}

    def memory(asked: dict[str, Any], language: Language | None) -> int:
        return resolve("strict", asked, defaults=general, language=language).policy.limits.memory

    assert memory({"memory": "32M"}, ruby) == 32 << 20
    assert memory({}, ruby) == 64 << 20
    assert memory({}, None) == 256 << 20
    assert resolve("strict", {}, defaults=general, language=ruby).policy.limits.timeout == 7
    low = resolve("strict", {}, language=ruby, ceiling=Ceiling(memory=1 << 20))
    assert low.policy.limits.memory == 1 << 20
    assert low.warnings == ()  # nobody asked for more


def test_a_language_has_the_network_only_within_the_ceiling() -> None:
    curl = Language(name="curl", family="curl", file="c", allow_network=True)
    assert resolve("standard", {}, language=curl).policy.network.mode == "any"
    assert resolve("standard", {"network": "off"}, language=curl).policy.network.mode == "off"
    for reach in ("off", "hosts"):
        held = resolve("standard", {}, language=curl, ceiling=Ceiling(network=reach))  # type: ignore[arg-type]
        assert held.policy.network.mode == "off"
        assert "ceiling" in held.warnings[0]


def test_a_language_without_the_network_cannot_be_asked_for_it() -> None:
    mute = Language(name="mute", family="mute", file="m", allow_network=False)
    with pytest.raises(PolicyError, match="mute") as refusal:
        resolve("standard", {"network": "any"}, language=mute)
    assert refusal.value.field == "network"
    assert resolve("standard", {"network": "any"}).policy.network.mode == "any"
    opened = {"network": "any"}
    assert resolve("standard", {}, defaults=opened, language=mute).policy.network.mode == "off"


@given(level=st.sampled_from(LEVELS), asked=st.fixed_dictionaries({}, optional=sensible))
def test_what_is_asked_within_the_ceiling_is_what_is_given(
    level: Any, asked: dict[str, Any]
) -> None:
    boundless = Ceiling(timeout=None)
    try:
        resolved = resolve(level, asked, ceiling=boundless)
    except PolicyError:
        reject()
    assert resolved.warnings == ()
    for name, read in LIMITS.items():
        if name in asked:
            assert getattr(resolved.policy.limits, name) == read(name, asked[name])
        else:
            default = getattr(level_policy(level).limits, name)
            assert getattr(resolved.policy.limits, name) == default
    assert resolved.policy.explicit == frozenset(asked)


@given(asked=wishes, key=st.text(min_size=1, max_size=12), value=anything)
def test_an_unknown_key_is_never_ignored(asked: dict[str, Any], key: str, value: object) -> None:
    assume(key not in POLICY_KEYS)
    with pytest.raises(PolicyError):
        resolve("standard", {**asked, key: value})


def test_unknown_keys_are_refused_by_name_and_known_ones_are_not() -> None:
    with pytest.raises(PolicyError) as refusal:
        resolve("standard", {"memroy": "128M"})
    assert refusal.value.field == "memroy"
    assert "memory" in str(refusal.value)
    assert resolve("standard", {"memory": "128M"}).policy.limits.memory == 128 << 20


def test_keys_that_are_not_even_text_are_refused() -> None:
    odd: dict[Any, Any] = {1: 2, "x": 3}
    with pytest.raises(PolicyError):
        resolve("standard", odd)


@pytest.mark.parametrize(
    ("where", "wish"),
    [
        ("network.modes", {"network": {"modes": "any"}}),
        ("filesystem.write", {"filesystem": {"write": ["/tmp"]}}),
        ("modules.allowed", {"modules": {"allowed": ["os"]}}),
    ],
)
def test_unknown_keys_inside_a_field_are_refused_by_name(where: str, wish: dict[str, Any]) -> None:
    with pytest.raises(PolicyError) as refusal:
        resolve("standard", wish)
    assert refusal.value.field == where


@pytest.mark.parametrize("level", ["", "STANDARD", "paranoid", None, 3, []])
def test_an_unknown_level_is_refused(level: Any) -> None:
    with pytest.raises(PolicyError) as refusal:
        resolve(level, {})
    assert refusal.value.field == "level"


@pytest.mark.parametrize(
    ("level", "floor", "timeout", "memory", "cpus"),
    [
        ("permissive", "none", 60, 1 << 30, os.cpu_count()),
        ("standard", "process", 30, 512 << 20, 1),
        ("strict", "jail", 10, 256 << 20, 0.5),
    ],
)
def test_each_level_has_the_documented_defaults(
    level: str, floor: str, timeout: float, memory: int, cpus: float
) -> None:
    policy = resolve(level, {}).policy
    limits = policy.limits
    assert (limits.timeout, limits.memory, limits.cpus) == (timeout, memory, cpus)
    assert (limits.disk, limits.processes, limits.output) == (1 << 30, 50, 1 << 20)
    assert policy.min_isolation == floor
    assert policy.network.mode == "off"


def test_a_number_past_the_ceiling_is_lowered_and_said() -> None:
    resolved = resolve("standard", {"timeout": 1000})
    assert resolved.policy.limits.timeout == 300
    assert any("timeout" in warning for warning in resolved.warnings)
    unbounded = resolve("standard", {"timeout": 1000}, ceiling=Ceiling(timeout=None))
    assert unbounded.policy.limits.timeout == 1000
    assert unbounded.warnings == ()


def test_a_level_default_past_the_ceiling_is_lowered_without_a_word() -> None:
    resolved = resolve("standard", {}, ceiling=Ceiling(timeout=5))
    assert resolved.policy.limits.timeout == 5
    assert resolved.warnings == ()


def test_a_ceiling_on_fuel_binds_a_request_that_named_none() -> None:
    assert resolve("standard", {}, ceiling=Ceiling(fuel=1000)).policy.limits.fuel == 1000
    assert resolve("standard", {}).policy.limits.fuel is None


@pytest.mark.parametrize("mode", ["any", "hosts"])
def test_a_network_past_the_ceiling_is_refused_not_halved(mode: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        resolve("standard", {"network": {"mode": mode}}, ceiling=Ceiling(network="off"))
    assert refusal.value.field == "network"
    assert refusal.value.fix
    assert resolve("standard", {"network": {"mode": mode}}).policy.network.mode == mode


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"mode": "off", "allow": ["example.com"]}, "network.allow"),
        ({"mode": "any", "allow": ["example.com"]}, "network.allow"),
        ({"mode": "sometimes"}, "network.mode"),
        ({"allow": ["exa mple.com"]}, "network.allow"),
        ({"allow": ["a\0b"]}, "network.allow"),
        ({"allow": ["http://example.com/"]}, "network.allow"),
        ({"allow": "example.com"}, "network.allow"),
        ({"allow": 5}, "network.allow"),
        ({"allow": [5]}, "network.allow"),
        ({"mode": "any", "blocked_ports": 22}, "network.blocked_ports"),
        ({"mode": "any", "blocked_ports": [65536]}, "network.blocked_ports"),
        ("example.com", "network"),
        (True, "network"),
        (5, "network"),
    ],
)
def test_a_contradictory_or_malformed_network_is_refused(wish: object, field: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        resolve("standard", {"network": wish})
    assert refusal.value.field == field


def test_a_list_of_hosts_is_a_network() -> None:
    network = resolve("standard", {"network": ["Example.com:443"]}).policy.network
    assert network == Network(mode="hosts", allow=("example.com:443",))


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"read_only": ["data"]}, "filesystem.read_only"),
        ({"read_write": ["/srv/../etc"]}, "filesystem.read_write"),
        ({"hidden": ["/a\0b"]}, "filesystem.hidden"),
        ({"hidden": ["/\ud800"]}, "filesystem.hidden"),
        ({"read_only": "/srv"}, "filesystem.read_only"),
        ({"read_only": [b"/srv"]}, "filesystem.read_only"),
        ({"read_only": ["/srv"], "read_write": ["/srv"]}, "filesystem.read_write"),
        ({"read_only": ["/srv"], "read_write": ["/srv/"]}, "filesystem.read_write"),
        ({"read_only": ["//srv"], "read_write": ["/./srv"]}, "filesystem.read_write"),
        ({"private_tmp": "yes"}, "filesystem.private_tmp"),
        (["/srv"], "filesystem"),
    ],
)
def test_a_contradictory_or_malformed_filesystem_is_refused(wish: object, field: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        resolve("standard", {"filesystem": wish})
    assert refusal.value.field == field


def test_a_filesystem_that_makes_sense_is_kept() -> None:
    wish = {"read_only": ["/srv/"], "read_write": ["/srv/scratch"], "hidden": ["/srv/secret"]}
    assert resolve("standard", {"filesystem": wish}).policy.filesystem == Filesystem(
        read_only=("/srv",), read_write=("/srv/scratch",), hidden=("/srv/secret",)
    )


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("any", Modules()),
        ("level", Modules(allow=("pandas", "math", "statistics", "json"))),
        ("safe", Modules(deny=("os", "subprocess", "shutil", "socket"))),
        (["math", "os.path"], Modules(allow=("math", "os.path"))),
        ({"deny": ["socket"]}, Modules(deny=("socket",))),
        ([], Modules(allow=())),
    ],
)
def test_module_lists_are_read(wish: object, expected: Modules) -> None:
    assert resolve("standard", {"modules": wish}).policy.modules == expected


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ("math", "modules"),
        ({"math"}, "modules"),
        ({"allow": "os"}, "modules.allow"),
        ({"deny": 5}, "modules.deny"),
        ({"allow": ["not a module"]}, "modules.allow"),
        (Modules(allow=("a b",)), "modules.allow"),
        ([""], "modules.allow"),
        ([3], "modules.allow"),
    ],
)
def test_malformed_module_lists_are_refused(wish: object, field: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        resolve("standard", {"modules": wish})
    assert refusal.value.field == field


def test_the_floor_can_be_raised_but_not_lowered() -> None:
    assert resolve("strict", {"min_isolation": "none"}).policy.min_isolation is Isolation.JAIL
    assert resolve("strict", {"min_isolation": "vm"}).policy.min_isolation is Isolation.VM
    with pytest.raises(PolicyError) as refusal:
        resolve("strict", {"min_isolation": "fort"})
    assert refusal.value.field == "min_isolation"


def test_the_ladder_has_the_documented_order() -> None:
    ranks = {rung.value: rung.rank for rung in Isolation}
    assert ranks["none"] < ranks["process"] < ranks["landlock"] < ranks["jail"]
    assert ranks["jail"] == ranks["container"] < ranks["wasm"] == ranks["gvisor"] < ranks["vm"]


def test_a_policy_is_plain_json() -> None:
    wishes = {"network": ["example.com"], "modules": "level", "min_isolation": "vm", "fuel": 10}
    shown = resolve("standard", wishes).policy.to_dict()
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert shown["limits"]["fuel"] == 10
    assert shown["network"]["allow"] == ["example.com"]

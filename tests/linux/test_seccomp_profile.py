"""A profile in Docker's format: what it says is what the kernel answers, and nothing is opened."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER, Engine

from belljar import Settings
from belljar.backends import registry
from belljar.config import load
from belljar.engine import Engine as Belljar
from belljar.errors import ConfigError, PolicyUnenforceable
from belljar.linux.seccomp_profile import compile_profile
from belljar.types import Request

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no table"),
    pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's"),
]

ALLOW, REFUSE = {"defaultAction": "SCMP_ACT_ALLOW"}, "SCMP_ACT_ERRNO"
BIG = 0x1_0000_0005


def with_rules(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**ALLOW, **more, "syscalls": list(rules)}


def refusing(*names: str, error: int = 77, **more: Any) -> dict[str, Any]:
    return {"names": list(names), "action": REFUSE, "errnoRet": error, **more}


# lseek on no file says EBADF (9), if it is asked at all; its second argument has 64 bits.
ASK = """
import ctypes, json, sys
program, values = bytes.fromhex(sys.argv[1]), json.loads(sys.argv[2])
class Wrapped(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))
wrapped = Wrapped(len(program) // 8, program)
libc = ctypes.CDLL(None, use_errno=True)
libc.lseek.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_int)
assert libc.prctl(38, 1, 0, 0, 0) == 0
pointer = ctypes.c_void_p(ctypes.addressof(wrapped))
assert libc.prctl(22, ctypes.c_ulong(2), pointer, 0, 0) == 0, ctypes.get_errno()
answers = []
for value in values:
    libc.lseek(-1, value, 0)
    answers.append(ctypes.get_errno())
print(json.dumps(answers))
"""


def answers(document: Any, values: list[int]) -> list[int]:
    """What the kernel answers to lseek with each of `values`, under the profile."""
    words = [sys.executable, "-c", ASK, compile_profile(document).hex(), json.dumps(values)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    found: list[int] = json.loads(done.stdout)
    return found


VALUES = [0, 4, 5, 6, BIG - 1, BIG, BIG + 1, 0x2_0000_0000]


@pytest.mark.parametrize(
    ("operation", "holds"),
    [
        ("EQ", lambda v: v == BIG), ("NE", lambda v: v != BIG), ("LT", lambda v: v < BIG),
        ("LE", lambda v: v <= BIG), ("GT", lambda v: v > BIG), ("GE", lambda v: v >= BIG),
    ],
)  # fmt: skip
def test_comparisons_are_of_64_bits(operation: str, holds: Any) -> None:
    condition = {"index": 1, "value": BIG, "op": f"SCMP_CMP_{operation}"}
    found = answers(with_rules(refusing("lseek", args=[condition])), VALUES)
    assert found == [77 if holds(value) else 9 for value in VALUES]


def test_a_mask_is_compared_under_the_mask() -> None:
    condition = {"index": 1, "value": 0x1_0000_000F, "valueTwo": BIG, "op": "SCMP_CMP_MASKED_EQ"}
    found = answers(with_rules(refusing("lseek", args=[condition])), [5, BIG, BIG + 16, BIG + 1])
    assert found == [9, 77, 77, 9]


def test_all_conditions_of_a_rule_hold_but_two_on_one_argument_are_alternatives() -> None:
    both = [{"index": 1, "value": 5, "op": "SCMP_CMP_EQ"},
            {"index": 2, "value": 1, "op": "SCMP_CMP_EQ"}]  # fmt: skip
    assert answers(with_rules(refusing("lseek", args=both)), [5]) == [9]  # the third one is 0
    either = [{"index": 1, "value": v, "op": "SCMP_CMP_EQ"} for v in (5, 6)]
    assert answers(with_rules(refusing("lseek", args=either)), [4, 5, 6]) == [9, 77, 77]


def test_the_strictest_rule_that_fits_decides() -> None:
    condition = {"index": 1, "value": 5, "op": "SCMP_CMP_EQ"}
    allowed = {"names": ["lseek"], "action": "SCMP_ACT_ALLOW"}
    rules = with_rules(allowed, refusing("lseek", args=[condition]))
    assert answers(rules, [4, 5]) == [9, 77]


def test_rules_for_capabilities_other_machines_and_later_kernels_do_not_count() -> None:
    for part in ({"caps": ["CAP_SYS_ADMIN"]}, {"arches": ["s390"]}, {"minKernel": "99.0"}):
        assert answers(with_rules(refusing("lseek", includes=part)), [1]) == [9]
        assert answers(with_rules(refusing("lseek", excludes=part)), [1]) == [77]
    assert answers(with_rules(refusing("lseek", includes={"minKernel": "3.0"})), [1]) == [77]


@pytest.mark.parametrize(
    "document",
    [
        [], {}, {"defaultAction": "SCMP_ACT_NOTIFY"}, {"defaultAction": "SCMP_ACT_TRACE"},
        {**ALLOW, "listenerPath": "/x"}, {**ALLOW, "architectures": ["SCMP_ARCH_S390X"]},
        {**ALLOW, "syscalls": {}}, with_rules(refusing("no_such_call")), with_rules({"names": 1}),
        with_rules(refusing("lseek", error=5000)), with_rules(refusing("lseek", colour=1)),
        with_rules(refusing("lseek", args=[{"index": 6, "value": 0, "op": "SCMP_CMP_EQ"}])),
        with_rules(refusing("lseek", args=[{"index": 0, "value": -1, "op": "SCMP_CMP_EQ"}])),
        with_rules(refusing("lseek", args=[{"index": 0, "value": 0, "op": "SCMP_CMP_IN"}])),
        with_rules(refusing(*["lseek"] * 5000)),
    ],
    ids=lambda document: json.dumps(document)[:60],
)  # fmt: skip
def test_a_profile_that_cannot_be_held_as_it_stands_is_refused(document: Any) -> None:
    with pytest.raises(ValueError):
        compile_profile(document)


# -- languages


@pytest.fixture
def languages(tmp_path: Path) -> Any:
    """A language file that gives Python and Bash a profile, and the settings with it."""

    def make(document: object) -> Settings:
        (tmp_path / "mine.json").write_text(json.dumps(document))
        entry = {"seccomp_profile": "mine.json", "default_memory_mb": 192}
        file = tmp_path / "languages.json"
        file.write_text(json.dumps({"python": entry, "bash": entry}))
        environ = {"SANDBOX_LANGUAGE_CONFIG_FILE": str(file), "XDG_CONFIG_HOME": str(tmp_path)}
        return load(environ=environ, path=None)

    return make


OPENS = "import os, errno\ntry:\n    os.mkdir('made'); word = 'made'\nexcept OSError as e:\n"
OPENS += "    word = errno.errorcode[e.errno]\nword"
BACKENDS = ("jail", "subprocess", "landlock", "bubblewrap", "firejail", "docker")


@TOGETHER
@pytest.mark.parametrize("name", BACKENDS)
def test_the_profile_of_a_language_closes_what_it_names_and_opens_nothing(
    name: str, languages: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "docker":
        engine: Engine = request.getfixturevalue("docker_engine")
        engine.images("bash")
        monkeypatch.setenv("DOCKER_HOST", engine.host)
    found = registry.load(name).probe()
    if not found.available:
        pytest.skip(f"{found.reason}; fix: {found.fix}")
    closes = languages(with_rules(refusing("mkdir", "mkdirat", error=74)))
    with Belljar(closes) as jar:
        python = jar.run(Request(code=OPENS), backend=name)
        assert (python.value, python.success) == ("EBADMSG", True), python
        assert "profile of the language file" in python.enforcement["seccomp"].by
        bash = jar.run(Request(code="mkdir made && echo made", language="bash"), backend=name)
        assert bash.stdout == "" and "Bad message" in bash.stderr
        assert jar.plan(Request(code="1"), backend=name).policy.limits.memory == 192 << 20
    unshare = "import ctypes; ctypes.CDLL(None).unshare(0x10000000)"  # a new user namespace
    with Belljar(languages(ALLOW)) as jar:
        assert jar.run(Request(code=OPENS), backend=name).value == "made"  # the control arm
        assert jar.run(Request(code=unshare), backend=name).value == -1


@pytest.mark.parametrize("name", ["wasm", "inprocess"])
def test_a_backend_without_filters_refuses_the_language(name: str, languages: Any) -> None:
    with Belljar(languages(ALLOW)) as jar:
        if not jar.backend(name).probe().available:
            pytest.skip(f"{name} is not available here")
        with pytest.raises(PolicyUnenforceable) as refusal:
            jar.run(Request(code="1"), level="permissive", backend=name)
        assert "seccomp" in refusal.value.fields


def test_a_profile_that_is_not_there_or_wrong_names_its_place(
    languages: Any, tmp_path: Path
) -> None:
    settings = languages(with_rules(refusing("no_such_call")))
    with pytest.raises(ConfigError, match="no_such_call") as refusal:
        Belljar(settings).run(Request(code="1"))
    assert refusal.value.field == "python.seccomp_profile"
    (tmp_path / "mine.json").unlink()
    (tmp_path / "languages.json").touch()
    with pytest.raises(ConfigError, match="there is no file"):
        Belljar(settings).run(Request(code="1"))

"""The case file: it loads, placeholders are filled, no assertion in it is without a check."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest

from belljar.testing import hostile
from belljar.testing.hostile import cases, checks, pending
from belljar.testing.hostile.judge import PROCESS_CLAIMS


@pytest.fixture(scope="module")
def suite() -> hostile.Suite:
    return hostile.load()


def test_every_case_that_was_received_is_there(suite: hostile.Suite) -> None:
    assert len(suite.cases) >= 219
    assert {case.side for case in suite.cases} == {"guest", "client", "harness"}


def test_every_assertion_is_implemented_or_waits_for_a_named_surface(suite: hostile.Suite) -> None:
    for case in suite.cases:
        if pending.missing_surface(case) is None:
            checks.require(case.expect.asserts)


def test_every_pending_surface_says_why(suite: hostile.Suite) -> None:
    waiting = {pending.missing_surface(case) for case in suite.cases} - {None}
    assert waiting <= set(pending.SURFACES)
    assert all(pending.why(surface) for surface in waiting if surface)


def test_nothing_pending_is_also_implemented() -> None:
    assert not set(pending._BY_ASSERTION) & set(checks.CHECKS)


def test_the_process_class_claims_what_the_header_says(suite: hostile.Suite) -> None:
    told = suite.meta["isolation_classes"]["process"]
    groups = re.search(r"groups (.*?) must hold", told)
    assert groups is not None
    assert set(groups[1].split(", ")) == PROCESS_CLAIMS


def test_placeholders_are_filled_once_and_other_braces_stay() -> None:
    names = frozenset({"A", "B"})
    text = cases.fill("{A} {} {lower} {UNKNOWN} {'x': {B}}", {"A": "{B}", "B": "2"}, names)
    assert text == "{B} {} {lower} {UNKNOWN} {'x': 2}"


def test_a_placeholder_without_a_value_is_refused() -> None:
    with pytest.raises(hostile.CasesInvalid, match=r"\{A\}"):
        cases.fill("{A}", {}, frozenset({"A"}))


def test_every_guest_case_can_be_filled(suite: hostile.Suite) -> None:
    with hostile.World(suite) as world:
        for case in suite.cases:
            if case.side != "guest":
                continue
            stage = world.stage(case, "process")
            filled = stage.fill(case.code)
            left = set(re.findall(r"\{([A-Z][A-Z0-9_]*)\}", filled)) & suite.placeholders
            assert not left, case.id
            stage.remove()


def test_wall_times_are_sums() -> None:
    names = frozenset({"TIMEOUT_S", "GRACE_S"})
    values = {"TIMEOUT_S": "3", "GRACE_S": "2"}
    assert cases.seconds("{TIMEOUT_S}+{GRACE_S}", values, names) == 5
    assert cases.seconds("10", values, names) == 10
    with pytest.raises(hostile.CasesInvalid):
        cases.seconds("__import__('os')", values, names)


def document() -> dict[str, Any]:
    return {
        "meta": {"suggested_test_limits": {"MEM_MB": 1}, "placeholders": "{MEM_MB}"},
        "preludes": {"p": "import os\n"},
        "cases": [
            {
                "id": "x-1",
                "group": "g",
                "language": "python",
                "side": "guest",
                "tier": "fast",
                "control": "safe",
                "prelude": "p",
                "code": "print(1)",
                "expect": {"classes": {}, "asserts": []},
            }
        ],
    }


def test_the_prelude_comes_first() -> None:
    assert cases.parse(document())["x-1"].code == "import os\nprint(1)"


def test_a_doubled_id_is_refused() -> None:
    doubled = document()
    doubled["cases"].append(copy.deepcopy(doubled["cases"][0]))
    with pytest.raises(hostile.CasesInvalid, match="x-1"):
        cases.parse(doubled)


@pytest.mark.parametrize("lost", ["meta", "cases"])
def test_a_file_without_its_parts_is_refused(lost: str) -> None:
    broken = document()
    del broken[lost]
    with pytest.raises(hostile.CasesInvalid):
        cases.parse(broken)


def test_an_unknown_group_lists_the_known_ones(suite: hostile.Suite) -> None:
    with pytest.raises(hostile.CasesInvalid, match="cpu-time"):
        suite.select(groups=("cpu",))


def test_without_pyyaml_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(hostile.CasesInvalid, match=r"pip install 'belljar\[selftest\]'"):
        hostile.load()


def test_pairs_are_run_together_and_the_writer_leads(suite: hostile.Suite) -> None:
    from belljar.testing.hostile.runner import units

    found = units(suite.select(groups=("ipc",)))
    assert len(found) == 6
    assert all(writer.id.endswith("-w") and reader.id.endswith("-r") for writer, reader in found)

"""The hostile programs as data: loading them, and filling their placeholders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...errors import BelljarError

Side = Literal["guest", "client", "harness"]
Tier = Literal["fast", "slow", "soak"]
Control = Literal["safe", "vm", "skip"]

TIERS: tuple[Tier, ...] = ("fast", "slow", "soak")
BUNDLED = Path(__file__).with_name("cases.yaml")
_TOKEN = re.compile(r"\{([A-Z][A-Z0-9_]*)\}")


class CasesInvalid(BelljarError):
    """The case file cannot be used; the message says which case and why."""

    code = "cases_invalid"


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What must be seen for a case to be held."""

    classes: Mapping[str, str]
    asserts: tuple[str, ...]
    verdict_any: tuple[str, ...] = ()
    status_in: tuple[str, ...] = ()
    max_wall_s: str | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hostile program and its expected outcome. `code` already has its prelude in front."""

    id: str
    group: str
    language: str
    side: Side
    tier: Tier
    control: Control
    code: str
    expect: Expect
    files: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def mentions(self, *names: str) -> bool:
        """Whether the program or its expectation uses one of these placeholders."""
        text = self.code + (self.expect.max_wall_s or "") + " ".join(self.expect.asserts)
        return any("{" + name + "}" in text for name in names)

    @property
    def pair(self) -> str | None:
        """The id of the other half, for a case that is one half of a writer and a reader."""
        stem, _, half = self.id.rpartition("-")
        return {"w": f"{stem}-r", "r": f"{stem}-w"}.get(half)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A whole case file."""

    cases: tuple[Case, ...]
    limits: Mapping[str, int]
    placeholders: frozenset[str]
    meta: Mapping[str, Any]

    def __getitem__(self, case_id: str) -> Case:
        for case in self.cases:
            if case.id == case_id:
                return case
        raise KeyError(case_id)

    def select(
        self,
        *,
        groups: tuple[str, ...] = (),
        ids: tuple[str, ...] = (),
        tier: Tier = "soak",
    ) -> tuple[Case, ...]:
        """The cases of these groups and ids (all if none are named) up to `tier`."""
        allowed = TIERS[: TIERS.index(tier) + 1]
        unknown = set(groups) - {case.group for case in self.cases}
        unknown |= set(ids) - {case.id for case in self.cases}
        if unknown:
            known = ", ".join(sorted({case.group for case in self.cases}))
            raise CasesInvalid(
                f"no group or case is called {', '.join(sorted(unknown))}", fix=f"groups: {known}"
            )
        return tuple(
            case
            for case in self.cases
            if case.tier in allowed
            and (not groups or case.group in groups)
            and (not ids or case.id in ids)
        )


def load(path: str | Path | None = None) -> Suite:
    """The suite in `path`, or the one that Belljar ships. Needs PyYAML."""
    try:
        import yaml
    except ImportError:
        raise CasesInvalid(
            "the hostile cases are YAML, and PyYAML is not installed",
            fix="pip install 'belljar[selftest]'",
        ) from None
    source = Path(path) if path else BUNDLED
    try:
        document = yaml.safe_load(source.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CasesInvalid(f"{source}: {error}") from error
    return parse(document, str(source))


def parse(document: Any, where: str = "cases") -> Suite:
    """A suite from its parsed YAML. Whatever is missing or doubled is CasesInvalid."""
    try:
        meta, preludes = document["meta"], document.get("preludes", {})
        limits = {name: int(value) for name, value in meta["suggested_test_limits"].items()}
        placeholders = frozenset(_TOKEN.findall(meta["placeholders"]))
        cases = tuple(_case(entry, preludes) for entry in document["cases"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CasesInvalid(f"{where}: {type(error).__name__}: {error}") from error
    ids = [case.id for case in cases]
    doubled = sorted({name for name in ids if ids.count(name) > 1})
    if doubled:
        raise CasesInvalid(f"{where}: more than one case is called {', '.join(doubled)}")
    return Suite(cases=cases, limits=limits, placeholders=placeholders, meta=meta)


def _case(entry: Mapping[str, Any], preludes: Mapping[str, str]) -> Case:
    expect = entry["expect"]
    code = entry["code"]
    if "prelude" in entry:
        code = preludes[entry["prelude"]] + code
    return Case(
        id=entry["id"],
        group=entry["group"],
        language=entry["language"],
        side=entry["side"],
        tier=entry["tier"],
        control=entry["control"],
        code=code,
        files=entry.get("files", {}),
        params=entry.get("params", {}),
        note=entry.get("note", ""),
        expect=Expect(
            classes=expect["classes"],
            asserts=tuple(expect["asserts"]),
            verdict_any=tuple(expect.get("verdict_any", ())),
            status_in=tuple(expect.get("status_in", ())),
            max_wall_s=expect.get("max_wall_s"),
        ),
    )


def fill(text: str, values: Mapping[str, str], placeholders: frozenset[str]) -> str:
    """`text` with every placeholder replaced, in one pass, so that no value is filled again.

    A known placeholder without a value is CasesInvalid: a program that still holds the token would
    test nothing. Braces that are not placeholders stay as they are.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name not in placeholders:
            return match[0]
        if name not in values:
            raise CasesInvalid(f"nothing is known to put in the place of {{{name}}}")
        return values[name]

    return _TOKEN.sub(replacement, text)


def seconds(expression: str, values: Mapping[str, str], placeholders: frozenset[str]) -> float:
    """`{TIMEOUT_S}+{GRACE_S}` as a number of seconds: a sum of plain numbers and placeholders."""
    filled = fill(str(expression), values, placeholders)
    try:
        return sum(float(part) for part in filled.split("+"))
    except ValueError:
        raise CasesInvalid(f"{expression!r} is not a sum of seconds") from None

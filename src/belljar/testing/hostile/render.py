"""Scorecards for people: on a terminal, and as a page. They are read as data, whoever made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .control import ENOUGH
from .judge import Verdict
from .scorecard import COLUMNS, key

Data = Mapping[str, Any]

NO_ISOLATION = "no isolation: a hostile program has the rights of the program that runs it"

_HEAD = """# Scorecard

Every backend against the same hostile programs. A case is *held* only if it was held every time.
*Not claimed* cases are outside what the backend's isolation class promises; where they are harmless
they ran all the same, for information. *Pending* cases need a part of Belljar that is not built
yet. *Controls* run the same programs without a sandbox: a detector that cannot fire proves nothing.
*Layers* are switched off one by one: how many of them some case needs.
"""


def text(card: Data) -> str:
    """A scorecard for a terminal."""
    width = max(len(name) for name in (*card["groups"], "total"))
    head = f"{'':<{width}}" + "".join(f"  {column.value:>11}" for column in COLUMNS)
    lines = [f"backend {card['backend']}, class {card['class']}: {summary(card)}", "", head]
    for name, counts in (*card["groups"].items(), ("total", card["totals"])):
        row = "".join(f"  {counts[key(column)] or '.':>11}" for column in COLUMNS)
        lines.append(f"{name:<{width}}{row}")
    for title, items in (*_details(card), *_ablation(card)):
        lines += ["", title, *(f"  {item}" for item in items)]
    if card.get("seconds"):
        lines += ["", f"it took {duration(card['seconds'])}"]
    return "\n".join(lines)


def page(cards: Sequence[Data]) -> str:
    """A whole document: all backends in one table, then each of them."""
    return "\n".join([_HEAD, *_overview(cards), "", *(_section(card) for card in cards)])


def summary(card: Data) -> str:
    if card["class"] == "inproc":
        return NO_ISOLATION
    breached, errors = (card["totals"][key(verdict)] for verdict in (*_BAD,))
    if breached or errors:
        return f"{breached} claimed cases breached, {errors} could not be judged"
    return "every claimed case held"


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 10 s`, `12 s`: no more than anybody wants to know."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"


_BAD = (Verdict.BREACHED, Verdict.ERROR)


def _overview(cards: Sequence[Data]) -> Iterable[str]:
    names = ["backend", "class", "user", *(column.value for column in COLUMNS)]
    names += ["controls that fire", "layers needed", "runs of a case", "made", "belljar", "took"]
    yield "| " + " | ".join(names) + " |"
    yield "|---|---|---|" + "---:|" * (len(COLUMNS) + 3) + "---|---|---:|"
    for card in cards:
        counts = [str(card["totals"][key(column)]) for column in COLUMNS]
        row = [
            f"`{card['backend']}`",
            card["class"],
            card["host"].get("user", ""),
            *counts,
            _share(card["controls"], "fired", "of"),
            _needed(card["ablation"]),
            str(card["repeat"]),
            card["date"],
            card["version"],
            duration(card["seconds"]) if card.get("seconds") else "",
        ]
        yield "| " + " | ".join(row) + " |"


def _share(found: Data | None, part: str, whole: str) -> str:
    return f"{found[part]} of {found[whole]}" if found and found[whole] else ""


def _needed(layers: Sequence[Data] | None) -> str:
    return f"{sum(bool(each['breached']) for each in layers)} of {len(layers)}" if layers else ""


def _section(card: Data) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in sorted(card["host"].items()))
    lines = [
        f"## `{card['backend']}` (class {card['class']}): {summary(card)}",
        "",
        f"{card['date']}, belljar {card['version'] or 'unknown'}; {facts}; each case ran "
        f"{card['repeat']} times.",
        "",
    ]
    if card["command"]:
        lines += ["    " + card["command"], ""]
    lines += [
        "| group | " + " | ".join(column.value for column in COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, counts in (*card["groups"].items(), ("**total**", card["totals"])):
        row = " | ".join(str(counts[key(column)] or "") for column in COLUMNS)
        lines.append(f"| {name} | {row} |")
    for title, items in _details(card):
        lines += ["", f"**{title[:1].upper()}{title[1:]}**", "", *(f"- {item}" for item in items)]
    return "\n".join([*lines, *_matrix(card), ""])


def _matrix(card: Data) -> Iterable[str]:
    if not card["ablation"]:
        return
    yield from ("", "| layer | off too | cases that breach without it |", "|---|---|---|")
    for each in card["ablation"]:
        cases = ", ".join(each["breached"]) or "no case needs it"
        yield f"| {each['layer']} | {', '.join(each['also_off'])} | {cases} |"


Block = tuple[str, list[str]]


def _details(card: Data) -> Iterable[Block]:
    """What a table cannot say: a title and its lines."""
    for title, verdict in (("breached:", Verdict.BREACHED), ("errors:", Verdict.ERROR)):
        if found := [case for case in card["cases"] if case["verdict"] == verdict]:
            yield title, [_told(case) for case in found]
    looked = [
        case for case in card["cases"] if case["verdict"] == Verdict.NOT_CLAIMED and case["saw"]
    ]
    if looked:
        breached = [case["id"] for case in looked if case["saw"] == Verdict.BREACHED]
        told = f"{len(looked)} ran, {len(looked) - len(breached)} held, {len(breached)} breached"
        yield f"not claimed, for information: {told}", list(_wrapped(breached))
    waiting = [case for case in card["cases"] if case["verdict"] == Verdict.PENDING]
    if waiting:
        reasons = Counter(reason for case in waiting for reason in case["reasons"])
        yield "pending:", [f"{count:>3}  {reason}" for reason, count in reasons.most_common()]
    yield from _controls(card)


def _controls(card: Data) -> Iterable[Block]:
    told = card["controls"]
    if not told or not told["of"]:
        return
    few = "" if told["fired"] >= ENOUGH * told["of"] else f": fewer than {ENOUGH:.0%}"
    silent = [arm for arm in told["arms"] if not arm["fired"]]
    yield (
        f"control arms: {told['fired']} of {told['of']} detectors fire without a sandbox{few}",
        [
            f"{arm['id']} cannot fire: {'; '.join(arm['reasons']) or 'it ends by itself'}"
            for arm in silent
        ],
    )


def _ablation(card: Data) -> Iterable[Block]:
    if not card["ablation"]:
        return
    lines = []
    for each in card["ablation"]:
        off = f" (with {', '.join(each['also_off'])} off too)" if each["also_off"] else ""
        lines.append(f"{each['layer']}{off}: {', '.join(each['breached']) or 'no case needs it'}")
    yield "layers, and the cases that breach without each:", lines


def _told(case: Data) -> str:
    """A case with its first reasons; the data has them all."""
    often = f" ({case['held']} of {case['runs']} held)" if case["runs"] > 1 else ""
    reasons = case["reasons"]
    shown = "; ".join(reason[:140] for reason in reasons[:2])
    more = f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""
    return f"{case['id']}{often}: {shown}{more}"


def _wrapped(names: list[str], width: int = 96) -> Iterable[str]:
    line = ""
    for name in names:
        if line and len(line) + len(name) + 2 > width:
            yield line
            line = ""
        line += (", " if line else "") + name
    if line:
        yield line

"""The published scorecards: a page and its data, in which a new examination replaces its own.

The JSON file is what counts: a card stays in it until the same backend is examined again by the
same kind of user, and the page is made from it. Cards made on another machine come in the same way.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cases import CasesInvalid
from .render import page
from .scorecard import Card

_ORDER = ("vm", "wasm", "gvisor", "container", "jail", "landlock", "process", "inproc")
# Where the host that was examined keeps its things is nobody's business.
_HOST_PATH = re.compile(
    r"(?<![\w.])/(?!(?:usr|etc|proc|dev|sys|run|lib|bin|sandbox)/)(?:[^\s/'\",;:()]+/)+(?=[^\s/])"
)
# Cards of the first format did not say these: it knew one host a file, and no more.
_SINCE_THEN = {"command": "", "version": "", "seconds": 0.0, "controls": None, "ablation": None}


def write(path: Path, cards: Iterable[Card]) -> None:
    """Put `cards` into the page `path` and the JSON beside it, among those that are there."""
    merge(path, (card.to_dict() for card in cards))


def merge(path: Path, cards: Iterable[dict[str, Any]]) -> None:
    """The same for cards that somebody `read`."""
    data = path.with_suffix(".json")
    merged = {_identity(card): card for card in read(data)} if data.exists() else {}
    merged.update((_identity(card), _discreet(card)) for card in cards)
    found = sorted(merged.values(), key=_place)
    # What promises nothing is shown to break, and breaks no promise.
    failed = any(card["failed"] for card in found if card["class"] != "inproc")
    told = {"failed": failed, "backends": found}
    _replace(data, json.dumps(told, indent=1, sort_keys=True) + "\n")
    _replace(path, page(found))


def read(path: Path) -> list[dict[str, Any]]:
    """The cards in a JSON file of any format that `belljar selftest` ever wrote."""
    try:
        told = json.loads(path.read_text("utf-8"))
        written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date()
        common = {
            "date": written.isoformat(), "host": told.get("host", {}), **_SINCE_THEN
        }  # fmt: skip
        cards = [{**common, **card} for card in told["backends"]]
        for card in cards:
            card["host"].setdefault("user", "root")
            page([card])  # whatever is missing is noticed here, before anything is written
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CasesInvalid(
            f"{path} is not a scorecard: {type(error).__name__}: {error}",
            fix="name another file, or remove it",
        ) from error
    return cards


def _discreet(told: Any) -> Any:
    """The same with the last part only of every path of the host."""
    if isinstance(told, dict):
        return {name: _discreet(each) for name, each in told.items()}
    if isinstance(told, list):
        return [_discreet(each) for each in told]
    return _HOST_PATH.sub(".../", told) if isinstance(told, str) else told


def _identity(card: dict[str, Any]) -> tuple[str, str]:
    return card["backend"], card["host"]["user"]


def _place(card: dict[str, Any]) -> tuple[int, str, str]:
    """The strongest class first; what promises nothing comes last."""
    known = _ORDER.index(card["class"]) if card["class"] in _ORDER else len(_ORDER)
    return known, card["backend"], card["host"]["user"]


def _replace(path: Path, text: str) -> None:
    """The whole new text, or the old one: never a part."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise

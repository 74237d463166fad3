"""The published scorecards: an examination replaces its own card, and every other one stays."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from belljar.backends import registry
from belljar.backends.registry import BUILT_IN
from belljar.cli import main
from belljar.testing import hostile
from belljar.testing.hostile import Card, Outcome, Verdict, published, render
from belljar.testing.hostile.ablation import Ablated
from belljar.testing.hostile.control import Controls, Fired
from belljar.testing.hostile.subject import class_of

SUITE = hostile.load()
EXAMINE = importlib.import_module("belljar.testing.hostile.examine")  # its function has its name
CASE = SUITE["cp-001-busy"]
ROOT = {"system": "Linux 6", "user": "root"}
OTHER = {"system": "Linux 5", "user": "ordinary"}


def card(
    backend: str,
    verdict: Verdict = Verdict.HELD,
    host: Mapping[str, str] = ROOT,
    **more: Any,
) -> Card:
    outcomes = (Outcome(case=CASE, verdict=verdict, reasons=("seen so",)),)
    fields: dict[str, Any] = {"klass": "process", "host": host, "command": f"make {backend}"}
    return Card(backend=backend, outcomes=outcomes, **{**fields, **more})


def cards_in(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    told = json.loads(path.with_suffix(".json").read_text())
    return {(each["backend"], each["host"]["user"]): each for each in told["backends"]}


def test_a_new_card_replaces_its_own_and_the_others_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    published.write(path, [card("one", date="2020-01-01", version="0.0.1", repeat=20)])
    published.write(path, [card("two", Verdict.BREACHED)])
    published.write(path, [card("two", repeat=3)])
    found = cards_in(path)
    assert set(found) == {("one", "root"), ("two", "root")}
    one, two = found["one", "root"], found["two", "root"]
    assert (one["date"], one["version"], one["repeat"]) == ("2020-01-01", "0.0.1", 20)
    assert (one["command"], one["host"]) == ("make one", ROOT)
    assert (two["repeat"], two["totals"]["breached"]) == (3, 0)
    assert json.loads(path.with_suffix(".json").read_text())["failed"] is False


def test_a_published_card_names_no_place_of_the_host_that_was_examined(tmp_path: Path) -> None:
    seen = f"1 left: file {tmp_path}/a/canary.txt (3), '/home/me/x/y', /etc/passwd and /proc/1/maps"
    outcomes = (Outcome(case=CASE, verdict=Verdict.BREACHED, reasons=(seen,)),)
    one = Card(backend="one", klass="process", outcomes=outcomes, host=ROOT)
    published.write(tmp_path / "card.md", [one])
    (told,) = cards_in(tmp_path / "card.md").values()
    assert told["cases"][0]["reasons"] == [
        "1 left: file .../canary.txt (3), '.../y', /etc/passwd and /proc/1/maps"
    ]
    assert str(tmp_path) not in (tmp_path / "card.md").read_text()


def test_root_and_an_ordinary_user_have_a_card_each(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    published.write(path, [card("one")])
    published.write(path, [card("one", Verdict.BREACHED, host=OTHER)])
    assert set(cards_in(path)) == {("one", "root"), ("one", "ordinary")}


def test_the_page_begins_with_a_table_of_all_and_goes_on_with_each(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    arms = Controls(
        arms=(
            Fired(case=CASE, fired=True, reasons=("it ran on",)),
            Fired(case=SUITE["cp-002-sleep"], fired=False, reasons=()),
        )
    )
    layers = (
        Ablated(layer="wall", reasons={CASE.id: ("open",)}, also_off=("door",)),
        Ablated(layer="paint", reasons={}),
    )
    published.write(path, [card("weak", klass="inproc"), card("plain")])
    published.write(
        path, [card("strong", klass="jail", controls=arms, ablation=layers, seconds=90)]
    )
    text = path.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["strong", "plain", "weak"]
    assert "1 of 2 | 1 of 2" in rows[0] and "1 min 30 s" in rows[0]
    assert text.index(rows[-1]) < text.index("## `strong`") < text.index("## `plain`")
    assert "| wall | door | cp-001-busy |" in text
    assert "| paint |  | no case needs it |" in text
    assert "cp-002-sleep cannot fire" in text
    assert "## `weak` (class inproc): no isolation" in text


def test_a_file_of_the_first_format_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    old = card("old", repeat=20).to_dict()
    for name in ("date", "version", "host", "command", "seconds"):
        del old[name]
    told = {"host": {"system": "Linux 4"}, "failed": False, "backends": [old]}
    path.with_suffix(".json").write_text(json.dumps(told))
    published.write(path, [card("new")])
    found = cards_in(path)
    assert set(found) == {("old", "root"), ("new", "root")}
    assert found["old", "root"]["host"]["system"] == "Linux 4"
    assert found["old", "root"]["repeat"] == 20
    assert "`old`" in path.read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"backends": [{"backend": "x"}]}', '{"backends": 3}'])
def test_what_is_no_scorecard_is_refused_before_the_cases_run(
    tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(text)
    words = ["selftest", "--backend", "subprocess", "--case", CASE.id]
    assert main([*words, "--write", str(tmp_path / "x.md")]) == 125
    assert "is not a scorecard" in capfd.readouterr().err
    assert (tmp_path / "x.json").read_text() == text
    assert not (tmp_path / "x.md").exists()


def test_the_command_keeps_what_other_runs_wrote(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "card.md"
    published.write(path, [card("elsewhere", klass="vm")])
    words = ["selftest", "--backend", "subprocess", "--case", "se-005-metadata-files"]
    assert main([*words, "--write", str(path)]) == 0
    assert {name for name, _ in cards_in(path)} == {"elsewhere", "subprocess"}
    assert path.read_text().index("`elsewhere`") < path.read_text().index("`subprocess`")
    assert path.read_text() == render.page(published.read(path.with_suffix(".json")))


def test_a_card_is_there_before_its_ablation_begins_and_again_after_it(tmp_path: Path) -> None:
    """Whoever ends the command in the midst of an ablation has what was known before."""
    path = tmp_path / "card.md"
    words = ["selftest", "--backend", "subprocess", "--case", "se-005-metadata-files"]
    seen: list[Any] = []

    def end_ourselves(*args: object, **more: object) -> tuple[Ablated, ...]:
        seen.append(cards_in(path)["subprocess", "root" if os.geteuid() == 0 else "ordinary"])
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal came too late")

    def find(*args: object, **more: object) -> tuple[Ablated, ...]:
        return (Ablated(layer="wall", reasons={CASE.id: ("open",)}),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXAMINE, "ablate", end_ourselves)
        assert main([*words, "--ablation", "--write", str(path)]) == 128 + signal.SIGTERM
    (card,) = cards_in(path).values()
    assert seen == [card]
    assert card["totals"]["held"] == 1 and card["ablation"] is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXAMINE, "ablate", find)
        assert main([*words, "--ablation", "--write", str(path)]) == 0
    (card,) = cards_in(path).values()
    assert card["ablation"][0]["layer"] == "wall"
    assert [name.name for name in tmp_path.iterdir() if name.name.startswith(".")] == []


def test_cards_of_several_files_are_merged_without_examining_anything(tmp_path: Path) -> None:
    page, parts = tmp_path / "all.md", [tmp_path / "a.md", tmp_path / "b.md"]
    published.write(page, [card("one", repeat=3), card("stays")])
    published.write(parts[0], [card("one", repeat=20)])
    published.write(parts[1], [card("weak", Verdict.BREACHED, klass="inproc")])
    words = [word for part in parts for word in ("--merge", str(part.with_suffix(".json")))]
    assert main(["selftest", *words, "--write", str(page)]) == 0
    found = cards_in(page)
    assert [name for name, _ in found] == ["one", "stays", "weak"]
    assert found["one", "root"]["repeat"] == 20
    # It is shown to breach, and promised nothing.
    assert json.loads(page.with_suffix(".json").read_text())["failed"] is False


def test_merging_needs_a_page_and_scorecards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.json").write_text("[]")
    assert main(["selftest", "--merge", str(tmp_path / "no.json")]) == 125
    words = ["--merge", str(tmp_path / "no.json"), "--write", str(tmp_path / "all.md")]
    assert main(["selftest", *words]) == 125
    assert "is not a scorecard" in capfd.readouterr().err
    assert not (tmp_path / "all.md").exists()


SCORECARD = Path(__file__).resolve().parents[2] / "docs" / "scorecard.md"


def test_our_own_page_is_made_of_its_data() -> None:
    cards = published.read(SCORECARD.with_suffix(".json"))
    assert SCORECARD.read_text("utf-8") == render.page(cards)


def test_on_our_own_page_every_claim_is_held_and_no_isolation_is_shown_to_be_none() -> None:
    cards = {each["backend"]: each for each in published.read(SCORECARD.with_suffix(".json"))}
    # nsjail is no part of Debian: whoever has it adds its card.
    assert set(BUILT_IN) - {"nsjail"} <= set(cards)
    assert [name for name, each in cards.items() if each["failed"]] == ["inprocess"]
    assert cards["inprocess"]["totals"]["breached"] > 0
    for name, each in cards.items():
        assert each["class"] == class_of(registry.load(name).isolation), name
        assert each["totals"]["error"] == 0, name

"""`belljar selftest`: the scorecard, its exit code, its files, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from belljar.cli import main, selftest

CASE = "se-005-metadata-files"


def test_a_held_case_exits_zero(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--backend", "subprocess", "--case", CASE]) == 0
    shown = capfd.readouterr().out
    assert "every claimed case held" in shown
    assert "not claimed" in shown and "pending" in shown


def test_a_breach_exits_one_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--backend", "inprocess", "--case", "pj-001-importlib"]) == 1
    shown = capfd.readouterr()
    assert "pj-001-importlib" in shown.out and "R:BREACH" in shown.out
    assert "no isolation" in shown.err


def test_json_has_every_case(capfd: pytest.CaptureFixture[str]) -> None:
    main(["selftest", "--backend", "subprocess", "--group", "secrets", "--json"])
    told = json.loads(capfd.readouterr().out)
    (card,) = told["backends"]
    assert card["totals"]["held"] == len(card["cases"]) == 8
    assert {case["verdict"] for case in card["cases"]} == {"held"}


def test_the_scorecard_is_written_as_text_and_as_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["selftest", "--backend", "subprocess", "--case", CASE, "--write", "scorecard.md"]
    assert main(words) == 0
    page = (tmp_path / "scorecard.md").read_text()
    assert "| secrets | 1 |" in page
    assert f"belljar selftest --backend subprocess --case {CASE}" in page
    told = json.loads((tmp_path / "scorecard.json").read_text())
    assert told["backends"][0]["totals"]["held"] == 1


def test_a_case_file_of_the_users_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        """
meta:
  placeholders: '{CANARY}'
  suggested_test_limits: {MEM_MB: 128, DISK_MB: 16, OUT_MB: 1, PIDS: 64, FDS: 256, TIMEOUT_S: 3}
cases:
- id: own-1
  group: secrets
  language: python
  side: guest
  tier: fast
  control: safe
  code: "print('R:HELD')"
  expect: {classes: {jail: held}, verdict_any: ['R:HELD'], asserts: [no_breach, made_up]}
"""
    )
    assert main(["selftest", "--backend", "subprocess", "--cases", str(own)]) == 1
    assert "the assertion made_up is not implemented" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--backend", "nothing"], 127),
        (["--group", "nothing"], 125),
        (["--case", "nothing"], 125),
        (["--cases", "/nowhere.yaml"], 125),
        (["--repeat", "0"], 125),
        (["--write", "scorecard.txt"], 125),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", *words]) == code
    assert capfd.readouterr().err.startswith("belljar: ")


def test_a_pipe_sees_which_case_it_is_at_and_the_card_how_long_it_took(
    capfd: pytest.CaptureFixture[str],
) -> None:
    main(["selftest", "--backend", "subprocess", "--case", CASE])
    shown = capfd.readouterr()
    (line,) = shown.err.splitlines()
    assert line.endswith(f"s  subprocess 1/1 {CASE}")
    assert "it took" in shown.out


def test_a_pipe_is_told_every_few_seconds_and_not_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 3.0, 9.9, 10.0, 12.0])
    monkeypatch.setattr(selftest.time, "monotonic", lambda: next(clock))
    progress = selftest._Progress()
    with progress.about("x"):
        for number in range(1, 6):
            progress(f"case-{number}")
    assert [line.split()[-1] for line in capfd.readouterr().err.splitlines()] == [
        "case-1",
        "case-4",
    ]

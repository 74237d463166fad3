"""Every example of docs/languages.md is run as it stands there, where its command is installed."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from belljar import create_runner
from belljar.config import Settings
from belljar.language_file import KEYS, read

PAGE = (Path(__file__).parent.parent / "docs" / "languages.md").read_text(encoding="utf-8")
SECTIONS = {
    part.partition("\n")[0]: dict(re.findall(r"^```(\w+)\n(.*?)^```$", part, re.M | re.S))
    for part in PAGE.partition("## Examples\n")[2].split("\n### ")[1:]
}


def test_the_promised_examples_are_there() -> None:
    assert {"Ruby", "Perl", "Go"} <= SECTIONS.keys()
    assert all(len(blocks) == 3 for blocks in SECTIONS.values())


@pytest.mark.parametrize("backend", ["subprocess", "jail"])
@pytest.mark.parametrize("title", SECTIONS)
def test_the_example_runs_as_written(title: str, backend: str, tmp_path: Path) -> None:
    configuration, program, expected = SECTIONS[title].values()
    ((name, entry),) = tomllib.loads(configuration).items()
    commands = {"C": "cc"}.get(title, entry["command"][0])
    if shutil.which(commands) is None:
        pytest.skip(f"{commands} is not installed: {entry.get('install', '')}")
    file = tmp_path / "languages.toml"
    file.write_text(configuration)
    with create_runner(backend=backend, settings=Settings(language_file=str(file))) as runner:
        result = runner.execute(program, language=name, args=["factorial"])
    assert (result.stdout, result.stderr, result.backend) == (expected, "", backend)
    assert result.success


def test_the_page_names_every_key() -> None:
    table = PAGE.partition("| key |")[2].partition("\n\n")[0]
    assert [key for key in KEYS if f"`{key}`" not in table] == []
    with pytest.raises(ValueError, match="unknown key"):
        read({"x": {"keys": 1}}, "here")

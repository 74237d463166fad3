"""`belljar languages`, and how `belljar run` finds out what a program is written in."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import pytest
from real_command import Process

FILE = """
[perl]
command = ["perl"]
file = "main.pl"
extensions = [".pl"]
[cobol]
command = ["no-such-cobol"]
file = "main.cob"
install = "apt-get install gnucobol"
"""


def listed(cli: Process, **extra: str) -> dict[str, Any]:
    done = cli("languages", "--json", **extra)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["languages"]}


def test_the_languages_are_listed_with_what_runs_them(cli: Process) -> None:
    found = listed(cli)
    own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for name in ("python", own):
        assert found[name]["version"] == ".".join(map(str, sys.version_info[:3]))
        assert found[name]["command"] == sys.executable
        assert found[name]["installed"] is True
        assert "subprocess" in found[name]["backends"]
    assert found["bash"]["extensions"] == [".sh", ".bash"]
    assert "inprocess" not in found["bash"]["backends"]
    assert "python3.8" not in found


def test_what_is_not_installed_says_how_to_get_it(cli: Process) -> None:
    (cli.directory / "languages.toml").write_text(FILE)
    found = listed(cli, BELLJAR_LANGUAGE_FILE="languages.toml")
    assert (found["cobol"]["installed"], found["cobol"]["backends"]) == (False, [])
    assert found["cobol"]["fix"] == "apt-get install gnucobol"
    assert found["cobol"]["source"] == "languages.toml"
    table = cli("languages", BELLJAR_LANGUAGE_FILE="languages.toml").stdout.decode()
    (row,) = [line for line in table.splitlines() if line.startswith("cobol ")]
    assert row.split(maxsplit=1)[1].split("  ")[-1].strip() == "apt-get install gnucobol"
    assert "language file: languages.toml" in table


def test_a_wrong_language_file_is_named(cli: Process) -> None:
    (cli.directory / "languages.toml").write_text("[ruby]\nfile = \n")
    for words in (("languages",), ("run", "-c", "1")):
        done = cli(*words, BELLJAR_LANGUAGE_FILE="languages.toml")
        assert done.returncode == 125
        assert b"languages.toml" in done.stderr
        assert b"line 2" in done.stderr


@pytest.mark.skipif(shutil.which("perl") is None, reason="perl is not installed")
def test_a_file_is_run_by_its_extension_or_its_first_line(cli: Process) -> None:
    (cli.directory / "languages.toml").write_text(FILE)
    settings = {"BELLJAR_LANGUAGE_FILE": "languages.toml"}
    program = 'print "perl @ARGV\\n";'
    (cli.directory / "a.pl").write_text(program)
    (cli.directory / "tool").write_text(f"#!/usr/bin/env perl\n{program}")
    (cli.directory / "tool.cgi").write_text(f"#!/usr/bin/perl -w\n{program}")
    for name in ("a.pl", "tool", "tool.cgi"):
        assert cli("run", name, "x", **settings).stdout == b"perl x\n"
    piped = cli("run", "-", input=f"#!/usr/bin/perl\n{program}".encode(), **settings)
    assert piped.stdout == b"perl \n"
    refused = cli("run", "a.pl")  # nobody told it of Perl
    assert (refused.returncode, refused.stdout) == (127, b"")
    assert b"known: bash" in refused.stderr


@pytest.mark.parametrize(
    ("language", "told"),
    [
        ("cobol", b"known: bash, javascript, python"),
        ("python3.98", b"uv python install 3.98"),
        ("python3.8", b"needs Python 3.9"),
    ],
)
def test_a_language_that_cannot_be_had_is_exit_code_127(
    cli: Process, language: str, told: bytes
) -> None:
    done = cli("run", "-c", "1", "--lang", language)
    assert (done.returncode, done.stdout) == (127, b"")
    assert told in done.stderr

"""Languages by name and by file, and their interpreters on this host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from belljar import language_host, languages
from belljar.config import Settings
from belljar.errors import LanguageMissing, LanguageUnknown, RequestError
from belljar.types import Request

OWN = ".".join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize(
    ("name", "found", "family"),
    [
        ("python", "python", "python"), ("py", "python", "python"), ("python3", "python", "python"),
        ("bash", "bash", "bash"), ("sh", "bash", "bash"),
        ("javascript", "javascript", "javascript"),
        ("js", "javascript", "javascript"), ("node", "javascript", "javascript"),
        ("nodejs", "javascript", "javascript"), ("python3.9", "python3.9", "python"),
        ("python3.12", "python3.12", "python"), ("python3.13.2", "python3.13.2", "python"),
        ("nodejs18", "nodejs18", "javascript"), ("node20", "nodejs20", "javascript"),
        ("node18.19", "nodejs18.19", "javascript"),
    ],
)  # fmt: skip
def test_a_language_has_several_names(name: str, found: str, family: str) -> None:
    language = languages.find(name)
    assert (language.name, language.family) == (found, family)


@pytest.mark.parametrize(
    "name",
    [
        "", "cobol", "PYTHON\n", "../python", None, ["python"], b"py", "python3.", "python3.12\n",
        "pythonx", "bash5", "node-18", "python3.1234", "python٣.١٢",
    ],
)  # fmt: skip
def test_an_unknown_language_is_answered_with_the_known_ones(name: object) -> None:
    with pytest.raises(LanguageUnknown) as refusal:
        languages.find(name)  # type: ignore[arg-type]
    assert refusal.value.field == "language"
    assert all(known in str(refusal.value) for known in languages.BUILT_IN)


def test_the_answer_says_what_is_known_but_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bash").write_text("")
    (tmp_path / "bash").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LanguageUnknown) as refusal:
        languages.find("cobol")
    assert "not installed: javascript (apt-get install nodejs)" in str(refusal.value)
    assert "bash (" not in str(refusal.value)


@pytest.mark.parametrize("name", ["python2", "python2.7", "python3.8", "python3.0", "python4"])
def test_a_python_that_the_worker_cannot_run_on_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(LanguageUnknown, match=r"needs Python 3\.9"):
        languages.find(name)
    assert languages.find("python3.9").version == (3, 9)  # the control arm


def test_every_language_has_a_file_of_its_own_below_the_work_directory() -> None:
    files = [language.file for language in languages.BUILT_IN.values()]
    assert len(set(files)) == len(files)
    assert not any("/" in file for file in files)


def test_a_request_that_came_past_the_engine_has_the_built_in_language() -> None:
    assert languages.of(Request(code="", language="sh")).name == "bash"
    other = languages.find("python")
    assert languages.of(Request(code="", language="sh", resolved=other)) is other


# -- what is installed


def test_a_missing_interpreter_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bash = languages.find("bash")
    assert language_host.installed(bash).endswith("/bash")  # the control arm
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LanguageMissing) as refusal:
        language_host.installed(bash)
    assert refusal.value.fix == "apt-get install bash"


def program(directory: Path, name: str, text: str) -> str:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_version_of_node_is_matched_against_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_host, "_DIRECTORIES", ())
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    old = program(tmp_path / "a", "node", "echo v18.19.1")
    new = program(tmp_path / "b", "node", "echo v20.2.0")
    assert language_host.installed(languages.find("javascript")) == old
    assert language_host.installed(languages.find("nodejs18")) == old
    assert language_host.installed(languages.find("nodejs18.19")) == old
    assert language_host.installed(languages.find("nodejs20")) == new
    for wanted in ("nodejs1", "nodejs18.1", "nodejs22"):
        with pytest.raises(LanguageMissing, match=r"18\.19\.1") as refusal:
            language_host.installed(languages.find(wanted))
        assert "nodejs.org" in str(refusal.value.fix)


def test_our_own_version_of_python_is_our_own_interpreter() -> None:
    assert language_host.python_of(languages.find("python"), None) is None
    assert language_host.python_of(languages.find(f"python{OWN}"), None) is None


def test_another_version_of_python_is_looked_for_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called python3.99 must be it; a shim that does not work is passed over."""
    monkeypatch.setattr(language_host, "_DIRECTORIES", ())
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / each) for each in "abc"))
    program(tmp_path / "a", "python3.99", "echo 'not selected' >&2; exit 127")
    program(tmp_path / "b", "python3.99", f'exec {sys.executable} "$@"')
    answer = "\\n".join([*(["/opt/python"] * 3), "/opt/python/bin/python3.99", "3.99.1"])
    there = program(tmp_path / "c", "python3.99", f"printf '{answer}\\n'")
    assert language_host.python_of(languages.find("python3.99"), None) == there
    assert language_host.python_of(languages.find("python3.99.1"), None) == there
    with pytest.raises(LanguageMissing, match=r"python3\.98"):
        language_host.python_of(languages.find("python3.98"), None)
    assert "python3.99" in language_host.pythons()


def test_an_interpreter_that_contradicts_the_language_is_refused() -> None:
    mine = languages.find(f"python{OWN}")
    assert language_host.python_of(mine, sys.executable) == sys.executable
    with pytest.raises(RequestError, match=r"not python3\.98") as refusal:
        language_host.python_of(languages.find("python3.98"), sys.executable)
    assert refusal.value.field == "python"


def test_an_interpreter_that_is_too_old_is_refused(tmp_path: Path) -> None:
    answer = "\\n".join([*(["/opt/python"] * 3), "/opt/python/bin/python3", "3.8.20"])
    old = program(tmp_path, "python3", f"printf '{answer}\\n'")
    with pytest.raises(RequestError, match=r"3\.8\.20.*needs 3\.9"):
        language_host.python_of(languages.find("python"), old)


# -- what a file says


@pytest.mark.parametrize(
    ("file", "code", "found"),
    [
        ("a.py", "", "python"), ("a.b.JS", "", "javascript"), ("a.mjs", "", "javascript"),
        ("a.bash", "", "bash"), ("a.sh", "#!/usr/bin/env python3\n", "bash"),
        ("tool", "#!/usr/bin/env python3\n", "python"), ("tool", "#! /bin/sh -e\nx", "bash"),
        ("tool", "#!/usr/bin/python3.12\n", "python3.12"),
        ("x.txt", "#!/usr/bin/node\n", "javascript"),
        ("tool", "#!/usr/bin/env -S A=b node --flag\n", "javascript"), ("a.rb", "", None),
        ("tool", "print(1)", None), ("tool", "#!", None), ("tool", "#!/usr/bin/env\n", None),
        ("tool", "#!/usr/bin/awk\n", None), (".py", "", None),
    ],
)  # fmt: skip
def test_a_file_tells_its_language(file: str, code: str, found: str | None) -> None:
    language = languages.of_file(file, code)
    assert (language.name if language else None) == found


def test_the_language_file_has_the_first_word(tmp_path: Path) -> None:
    file = tmp_path / "languages.toml"
    file.write_text(
        '[deno]\ncommand = ["deno", "run"]\nfile = "main.ts"\nextensions = [".ts", ".js"]\n'
        '[python]\nlimits = { memory = "1G" }\n'
    )
    settings = Settings(language_file=str(file))
    for name, code, found in (
        ("a.ts", "", "deno"), ("a.js", "", "deno"), ("a.mjs", "", "javascript"),
        ("x", "#!/usr/bin/env deno\n", "deno"), ("a.py", "", "python"),
    ):  # fmt: skip
        language = languages.of_file(name, code, settings)
        assert language is not None and language.name == found
    for python in ("python", "py", "python3.12"):
        assert languages.find(python, settings).limits == {"memory": 1 << 30}
        assert languages.find(python).limits == {}


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "languages.json"
    settings = Settings(language_file=str(file))
    for turn, word in enumerate(("lua", "luajit")):
        file.write_text(f'{{"lua": {{"command": ["{word}"], "file": "main.lua"}}}}')
        os.utime(file, ns=(turn, turn))
        assert languages.find("lua", settings).command == (word,)

"""Languages by name, and their interpreters on this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar import languages
from belljar.errors import BackendUnavailable, LanguageUnknown


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("python", "python"), ("py", "python"), ("python3", "python"), ("bash", "bash"),
        ("sh", "bash"), ("javascript", "javascript"), ("js", "javascript"), ("node", "javascript"),
    ],
)  # fmt: skip
def test_a_language_has_several_names(name: str, found: str) -> None:
    assert languages.find(name).name == found


@pytest.mark.parametrize("name", ["", "cobol", "PYTHON\n", "../python", None, ["python"], b"py"])
def test_an_unknown_language_is_answered_with_the_known_ones(name: object) -> None:
    with pytest.raises(LanguageUnknown) as refusal:
        languages.find(name)  # type: ignore[arg-type]
    assert refusal.value.field == "language"
    assert all(known in str(refusal.value) for known in languages.LANGUAGES)


def test_every_language_has_a_file_of_its_own_below_the_work_directory() -> None:
    files = [language.file for language in languages.LANGUAGES.values()]
    assert len(set(files)) == len(files)
    assert not any("/" in file for file in files)
    assert set(languages.ALIASES.values()) <= set(languages.LANGUAGES)
    assert not set(languages.ALIASES) & set(languages.LANGUAGES)


def test_a_missing_interpreter_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bash = languages.find("bash")
    assert languages.installed(bash).endswith("/bash")  # the control arm
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable) as refusal:
        languages.installed(bash)
    assert refusal.value.fix == "apt-get install bash"

"""The operator's language file: what it may say, and what is answered when it is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import belljar
from belljar import language_file, languages
from belljar.config import Settings, load
from belljar.errors import ConfigError, LanguageMissing
from belljar.language_host import installed
from belljar.types import Place

RUBY: dict[str, Any] = {
    "command": ["ruby", "-w"],
    "file": "main.rb",
    "extensions": [".rb"],
    "aliases": ["rb"],
    "install": "apt-get install ruby",
    "paths": ["/opt/ruby"],
    "env": {"RUBYOPT": "-W0"},
    "image": "ruby:3",
    "seccomp": "strict",
    "limits": {"memory": "64M", "timeout": 5},
    "allow_network": False,
    "docker": {"image": "ruby:3.3", "command": ["/usr/local/bin/ruby"]},
    "jail": {"command": ["/opt/ruby/bin/ruby"]},
}
YAML = """
ruby:
  command: [ruby, -w]
  file: main.rb
  limits: {memory: 64M}
"""
TOML = """
[ruby]
command = ["ruby", "-w"]
file = "main.rb"
limits.memory = "64M"
"""


def test_everything_that_a_file_can_say() -> None:
    ruby = language_file.read({"ruby": RUBY}, "here")["ruby"]
    assert (ruby.name, ruby.family, ruby.file) == ("ruby", "ruby", "main.rb")
    assert ruby.limits == {"memory": 64 << 20, "timeout": 5}
    assert (ruby.seccomp, ruby.allow_network, ruby.env) == ("strict", False, {"RUBYOPT": "-W0"})
    assert ruby.command_on("subprocess") == ("ruby", "-w")
    assert ruby.command_on("jail") == ("/opt/ruby/bin/ruby",)
    assert ruby.places["docker"] == Place(image="ruby:3.3", command=("/usr/local/bin/ruby",))
    assert [ruby.image_on(name) for name in ("docker", "gvisor")] == ["ruby:3.3", "ruby:3"]
    assert (ruby.paths, ruby.extensions, ruby.aliases) == (("/opt/ruby",), (".rb",), ("rb",))


@pytest.mark.parametrize(
    ("suffix", "text"), [("toml", TOML), ("yaml", YAML), ("yml", YAML), ("json", None)]
)
def test_the_same_file_in_three_notations(tmp_path: Path, suffix: str, text: str | None) -> None:
    plain = {"command": ["ruby", "-w"], "file": "main.rb", "limits": {"memory": "64M"}}
    path = tmp_path / f"languages.{suffix}"
    path.write_text(text or json.dumps({"ruby": plain}))
    settings = load(environ={"BELLJAR_LANGUAGE_FILE": str(path)})
    expected = language_file.read({"ruby": plain}, "here")["ruby"]
    assert languages.find("ruby", settings) == expected


@pytest.mark.parametrize(
    ("entry", "field", "told"),
    [
        ({"comand": ["x"]}, "ruby.comand", "known: extends, command"),
        ({"comand": {"command": ["x"]}}, "ruby.comand", "docker"),
        ({"docker": "ruby:3"}, "ruby.docker", "unknown key"),
        ({"docker": {"imgae": "x"}}, "ruby.docker.imgae", "known: command, image"),
        ({"jail": {"image": "x"}}, "ruby.jail.image", "no images"),
        ({"command": "ruby"}, "ruby.command", "list"),
        ({"command": []}, "ruby.command", "empty"),
        ({"command": ["ruby", 1]}, "ruby.command", "not a text"),
        ({"command": ["ru\0by"]}, "ruby.command", "not a text"),
        ({"file": "../main.rb"}, "ruby.file", "work directory"),
        ({"file": "a/main.rb"}, "ruby.file", "plain"),
        ({"file": ""}, "ruby.file", "not a file name"),
        ({"extensions": ["rb"]}, "ruby.extensions", "extension"),
        ({"aliases": ["Ru by"]}, "ruby.aliases", "name"),
        ({"paths": ["opt"]}, "ruby.paths", "absolute"),
        ({"paths": ["/"]}, "ruby.paths", "below /"),
        ({"paths": ["/opt/../etc"]}, "ruby.paths", "'..'"),
        ({"env": {"A B": "x"}}, "ruby.env.A B", "variable"),
        ({"env": {"A": 1}}, "ruby.env.A", "not a text"),
        ({"seccomp": "none"}, "ruby.seccomp", "known: default, strict"),
        ({"limits": {"ram": 1}}, "ruby.limits.ram", "known: timeout, memory"),
        ({"limits": {"memory": -1}}, "ruby.limits.memory", "positive"),
        ({"limits": {"memory": "much"}}, "ruby.limits.memory", "size"),
        ({"limits": 5}, "ruby.limits", "table"),
        ({"allow_network": "yes"}, "ruby.allow_network", "true or false"),
        ({"extends": "cobol"}, "ruby.extends", "known: bash"),
        ({"extends": "ruby"}, "ruby.extends", "known: bash"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    entry: dict[str, Any], field: str, told: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        language_file.read({"ruby": {**RUBY, **entry}}, "/etc/languages.toml")
    assert refusal.value.field == field
    assert told in str(refusal.value)
    assert "(from /etc/languages.toml)" in str(refusal.value)
    language_file.read({"ruby": RUBY}, "here")  # the control arm


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"ruby": {"file": "main.rb"}}, "ruby.command"),
        ({"ruby": {"command": ["ruby"]}}, "ruby.file"),
        ({"ruby": []}, "ruby"),
        ({"Ruby!": RUBY}, "Ruby!"),
        ({3: RUBY}, "3"),
        ({"python3.8": {"command": ["python3.8"]}}, "python3.8"),
        ({"python": {"command": ["python3", "-O"]}}, "python.command"),
        ({"ruby": RUBY, "other": {**RUBY, "aliases": ["rb"]}}, "other.aliases"),
    ],
)
def test_a_language_that_is_not_whole_is_refused(table: dict[Any, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        language_file.read(table, "here")
    assert refusal.value.field == field


def test_a_forgotten_quote_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "languages.toml"
    path.write_text("[python3.12]\nlimits.memory = '1G'\n")
    with pytest.raises(ConfigError, match=r'quoted: \["python3\.12"\]'):
        language_file.load(str(path))
    path.write_text('["python3.12"]\nlimits.memory = "1G"\n')
    assert language_file.load(str(path))["python3.12"].version == (3, 12)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("l.toml", "[ruby]\ncommand = [\n!", "line 3"),
        ("l.json", '{"ruby":\n {"command": }}', "line 2"),
        ("l.json", '{"a": {}, "a": {}}', "twice"),
        ("l.json", "[" * 100_000, "nested"),
        ("l.yaml", "ruby:\n  command: [\n", "line 3"),
        ("l.yaml", "ruby: !!python/object/apply:os.getpid []", "line 1"),
        ("l.yaml", "- ruby", "no tables"),
        ("l.toml", "\xff", "UTF-8"),
        ("l.ini", "", ".toml, .json or .yaml"),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as refusal:
        language_file.load(str(path))
    assert str(path) in str(refusal.value)
    assert told in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = Settings(language_file=str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        languages.find("python", settings)


def test_yaml_without_pyyaml_names_the_command_to_install_it(tmp_path: Path) -> None:
    path = tmp_path / "languages.yaml"
    path.write_text(YAML)
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from belljar import language_file\n"
        f"try: language_file.load({str(path)!r})\n"
        "except language_file.ConfigError as error: print(error.fix)"
    )
    source = str(Path(belljar.__file__).parent.parent)
    env = {"PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "pip install 'belljar[yaml]'\n", done.stderr


def test_a_built_in_language_keeps_what_the_file_does_not_change() -> None:
    (bash,) = language_file.read({"bash": {"limits": {"processes": 5}}}, "here").values()
    assert bash == languages.replace(languages.find("bash"), limits={"processes": 5})
    (js,) = language_file.read({"javascript": {"command": ["bun"]}}, "here").values()
    assert (js.family, js.file, js.command) == ("javascript", "main.js", ("bun",))
    assert "js" in js.aliases


def test_extending_a_language_takes_its_family_and_its_values() -> None:
    table = {
        "science": {"extends": "python", "limits": {"memory": "1G"}},
        "bigger": {"extends": "science", "limits": {"memory": "2G"}},
        "old": {"extends": "python3.9"},
    }
    found = language_file.read(table, "here")
    assert [each.family for each in found.values()] == ["python"] * 3
    assert found["bigger"].limits == {"memory": 2 << 30}
    assert found["old"].version == (3, 9)
    assert found["science"].aliases == ()
    assert languages.look_up("py", found) == languages.find("python")


def test_a_language_with_only_an_image_says_where_it_runs() -> None:
    entry = {"file": "main.rb", "docker": {"image": "ruby:3.3"}}
    (ruby,) = language_file.read({"ruby": entry}, "here").values()
    with pytest.raises(LanguageMissing, match="no command for backend 'jail'") as refusal:
        installed(ruby, "jail")
    assert refusal.value.fix == "use backend docker"


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3),
    ),
    max_leaves=5,
)
keys = st.sampled_from([*language_file.KEYS, "docker", "jail", "nonsense", "12"])


@given(table=st.dictionaries(st.sampled_from(["ruby", "python", "bash", "x y"]),
                             st.one_of(anything, st.dictionaries(keys, anything, max_size=6)),
                             max_size=3))  # fmt: skip
def test_any_table_is_read_or_refused_by_name(table: dict[str, Any]) -> None:
    try:
        found = language_file.read(table, "here")
    except ConfigError as refusal:
        assert refusal.field
        return
    for name, language in found.items():
        assert language.name == name
        assert language.file

"""Changes to files that are the user's: `settings sandbox` and `mcp --install`."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from real_command import Process

from belljar.cli import edits, mcp_clients

TABLE = ("mcp_servers", "belljar")
ENTRY = {"command": "/bin/belljar", "args": ["mcp", "--level", "strict"]}
CODEX = """\
# my settings
model = "gpt"   # the good one

[mcp_servers.docs]
command = "docs"

[mcp_servers.docs.env]
KEY = "[mcp_servers.belljar]"
"""


@pytest.mark.parametrize(
    "text",
    [
        "",
        CODEX,
        CODEX.replace("\n", "\r\n"),
        CODEX + '\n[mcp_servers.belljar]\ncommand = "old" # mine\nenabled = true\n\n[z]\na = 1\n',
        CODEX
        + "\n[ mcp_servers . \"belljar\" ]  # here\nargs = []\n[mcp_servers.belljar.env]\nA = 'b'",
    ],
)
def test_toml_keeps_comments_and_everything_else(text: str) -> None:
    after = edits.toml_with(text, TABLE, ENTRY)
    wanted = tomllib.loads(text)
    own = wanted.setdefault("mcp_servers", {}).setdefault("belljar", {})
    own |= ENTRY
    assert tomllib.loads(after) == wanted
    for line in text.splitlines():
        assert line in after.splitlines() or line.startswith(("command = ", "args = ")), line
    assert edits.toml_with(after, TABLE, ENTRY) == after


@pytest.mark.parametrize(
    "text",
    [
        "mcp_servers.belljar.command = 'old'\n",
        "mcp_servers = { belljar = { command = 'old' } }\n",
        "mcp_servers = 3\n",
        "[mcp_servers.belljar]\nargs = [\n  'a',\n]\n",
        "[mcp_servers]\nbelljar = { command = 'old' }\n",
        "[[mcp_servers.belljar]]\ncommand = 'old'\n",
        'x = """\n[mcp_servers.belljar]\n"""\n',
        "not toml",
    ],
)
def test_toml_that_cannot_be_changed_as_lines_is_left_alone(text: str) -> None:
    with pytest.raises(ValueError):
        edits.toml_with(text, TABLE, ENTRY)


@pytest.mark.parametrize("value", ['"', "\\", "\n\t", "\x7f\x00", "ü€😀", "a # b", ""])
def test_toml_texts_survive(value: str) -> None:
    written = edits.toml_with("", ("a",), {"b": value, "c": [value, value]})
    assert tomllib.loads(written) == {"a": {"b": value, "c": [value, value]}}


def test_json_keeps_everything_else() -> None:
    before = {"theme": "dark", "mcpServers": {"x": {"url": "ü"}, "belljar": {"env": {"A": "b"}}}}
    after = edits.json_with(json.dumps(before, indent=4), ("mcpServers", "belljar"), ENTRY)
    before["mcpServers"]["belljar"] |= ENTRY  # type: ignore[index]
    assert json.loads(after) == before
    assert list(json.loads(after)) == ["theme", "mcpServers"]
    assert '\n    "theme"' in after and "ü" in after


@pytest.mark.parametrize("text", ["// comment\n{}", "[]", '{"mcpServers": []}', "{", "\ufeff{}"])
def test_json_that_would_lose_something_is_left_alone(text: str) -> None:
    with pytest.raises(ValueError):
        edits.json_with(text, ("mcpServers", "belljar"), ENTRY)


def test_a_replaced_file_keeps_its_mode_its_link_and_its_past(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    kept = edits.replace_file(str(link), "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert kept is not None and Path(kept).read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 3


# Which file, below which keys, and what else a client wants in the entry.
CLIENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "claude": (".claude.json", "mcpServers", {"type": "stdio"}),
    "claude-desktop": (".config/Claude/claude_desktop_config.json", "mcpServers", {}),
    "cursor": (".cursor/mcp.json", "mcpServers", {}),
    "vscode": (".config/Code/User/mcp.json", "servers", {"type": "stdio"}),
    "codex": (".codex/config.toml", "mcp_servers", {}),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_install_adds_the_server_to_the_clients_file(
    cli: Process, tmp_path: Path, client: str
) -> None:
    name, key, fields = CLIENTS[client]
    path = tmp_path / name
    (tmp_path / "data").mkdir()
    words = ("mcp", "--install", client, "--level", "strict", "--mount", "data:d:ro", "--no-files")
    shown = cli(*words, "--print", HOME=str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert str(path).encode() in shown.stdout and not path.exists()

    path.parent.mkdir(parents=True, exist_ok=True)
    toml = path.suffix == ".toml"
    path.write_text('theme = "dark" # mine\n' if toml else '{"theme": "dark"}')
    done = cli(*words, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    read = tomllib.loads if toml else json.loads
    told: Any = read(path.read_text())
    entry = told[key]["belljar"]
    assert told["theme"] == "dark" and entry.items() >= fields.items()
    assert os.path.isabs(entry["command"]) and os.access(entry["command"], os.X_OK)
    given = ["--level", "strict", "--mount", f"{tmp_path}/data:d:ro", "--no-files"]
    assert entry["args"][-6:] == ["mcp", *given]
    kept = [one for one in path.parent.iterdir() if ".before-belljar-" in one.name]
    assert len(kept) == 1 and "belljar" not in kept[0].read_text()
    again = cli(*words, HOME=str(tmp_path))
    assert b"nothing to change" in again.stdout
    assert [one for one in path.parent.iterdir() if ".before-belljar-" in one.name] == kept


def test_install_leaves_a_file_with_comments_alone_and_shows_the_entry(
    cli: Process, tmp_path: Path
) -> None:
    path = tmp_path / ".cursor" / "mcp.json"
    path.parent.mkdir()
    path.write_text("// mine\n{}")
    done = cli("mcp", "--install", "cursor", HOME=str(tmp_path))
    assert done.returncode == 125 and path.read_text() == "// mine\n{}"
    assert b"was not changed" in done.stderr and b'"belljar"' in done.stderr


@pytest.mark.parametrize("flags", [("--level", "lax"), ("--timeout", "soon"), ("--languages", "x")])
def test_install_writes_no_entry_that_could_not_start(
    cli: Process, tmp_path: Path, flags: tuple[str, str]
) -> None:
    done = cli("mcp", "--install", "codex", *flags, HOME=str(tmp_path))
    assert done.returncode in (125, 127) and not (tmp_path / ".codex").exists()


@pytest.mark.parametrize(
    ("client", "platform", "expected"),
    [
        (
            "claude-desktop",
            "darwin",
            "Library/Application Support/Claude/claude_desktop_config.json",
        ),
        ("vscode", "darwin", "Library/Application Support/Code/User/mcp.json"),
        ("codex", "linux", "C/config.toml"),
        ("claude", "linux", "D/.claude.json"),
    ],
)
def test_locations_elsewhere(client: str, platform: str, expected: str) -> None:
    environ = {"CODEX_HOME": "/C", "CLAUDE_CONFIG_DIR": "/D"}
    assert mcp_clients.location(client, environ, platform).endswith(expected)


def test_the_sandbox_switch_is_kept_in_the_users_file(cli: Process, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    path = tmp_path / ".config" / "belljar" / "belljar.toml"
    before = cli("settings", "sandbox", **home)
    assert before.stdout.startswith(b"Sandbox mode enabled.") and not path.exists()
    off = cli("settings", "sandbox", "disable", **home)
    assert off.returncode == 0, off.stderr
    assert json.loads(cli("settings", "sandbox", "--json", **home).stdout)["enabled"] is False
    assert off.stdout.startswith(b"Sandbox mode disabled.") and b"are refused" in off.stdout
    assert tomllib.loads(path.read_text()) == {"sandbox": {"enabled": False}}

    path.write_text("# mine\n" + path.read_text() + "allow_direct = true\n")
    still = cli("settings", "sandbox", "disable", **home)
    assert b"directly on this host" in still.stdout
    on = cli("settings", "sandbox", "enable", **home)
    assert on.returncode == 0, on.stderr
    text = on.stdout.decode()
    assert text.startswith("Sandbox mode enabled.\n  Backend: ")
    for line in ("Memory limit: 512 MiB", "CPU limit: 100% of a core", "Network: disabled",
                 "Timeout: 30 s"):  # fmt: skip
        assert f"  {line}\n" in text
    assert path.read_text().startswith("# mine\n[sandbox]\nenabled = true\n")
    told = json.loads(cli("settings", "--json", **home).stdout)
    assert told["settings"]["sandbox.enabled"] is True

    over = cli("settings", "sandbox", "disable", BELLJAR_SANDBOX_ENABLED="true", **home)
    assert over.returncode == 125 and b"env BELLJAR_SANDBOX_ENABLED says otherwise" in over.stderr


@pytest.mark.parametrize("words", [("sandbox", "on"), ("sandbox", "enable", "x"), ("surplus",)])
def test_other_words_after_settings_are_refused(cli: Process, words: tuple[str, ...]) -> None:
    done = cli("settings", *words)
    assert done.returncode == 125 and words[0].encode() in done.stderr

"""The tokens of the servers: shown once, kept as hashes in a file of one's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from http_server import COMMAND, environment, serving

from belljar.errors import ConfigError, RequestError
from belljar.servers.auth import Tokens, TokenUnknown, default_path


def command(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "token", *words],
        capture_output=True, text=True, timeout=60, env=environment(state), cwd=state,
    )  # fmt: skip


def test_create_prints_the_token_once_and_keeps_its_hash(tmp_path: Path) -> None:
    told = json.loads(command(tmp_path, "create", "--name", "laptop", "--json").stdout)
    assert set(told) == {"token"}
    kept = tmp_path / "belljar" / "tokens.json"
    assert told["token"] not in kept.read_text()
    assert told["token"] not in command(tmp_path, "list", "--json").stdout
    assert len(told["token"]) > 40
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700


def test_created_tokens_are_listed_and_revoked_by_name_or_id(tmp_path: Path) -> None:
    assert re.fullmatch(r"bj_\S+\n", command(tmp_path, "create", "--name", "one").stdout)
    command(tmp_path, "create", "--name", "two")
    tokens = json.loads(command(tmp_path, "list", "--json").stdout)["tokens"]
    assert [token["name"] for token in tokens] == ["one", "two"]
    assert all("sha256" not in token for token in tokens)
    assert command(tmp_path, "revoke", "one").returncode == 0
    assert command(tmp_path, "revoke", tokens[1]["id"]).returncode == 0
    assert json.loads(command(tmp_path, "list", "--json").stdout)["tokens"] == []
    failed = command(tmp_path, "revoke", "one")
    assert failed.returncode == 125
    assert "belljar token list" in failed.stderr


@pytest.mark.parametrize("words", [("revoke",), ("create", "x"), ("list", "x"), ("show",)])
def test_words_that_do_not_belong_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert command(tmp_path, *words).returncode == 125


def test_a_name_of_two_tokens_revokes_neither(tmp_path: Path) -> None:
    tokens = Tokens(str(tmp_path / "tokens"))
    tokens.create("same")
    tokens.create("same")
    with pytest.raises(TokenUnknown, match="2 tokens"):
        tokens.revoke("same")
    assert len(tokens.all()) == 2


def test_only_the_token_itself_is_accepted(tmp_path: Path) -> None:
    tokens = Tokens(str(tmp_path / "tokens"))
    token = tokens.create("mine")
    assert token is not None
    found = tokens.check(token)
    assert found is not None
    assert found.name == "mine"
    for wrong in ("", token[:-1], token + "x", token.lower(), found.sha256, found.id, "\udcff"):
        assert tokens.check(wrong) is None


def test_creators_at_the_same_time_lose_no_token(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens")
    made: list[str | None] = []

    def create() -> None:
        for _ in range(5):
            made.append(Tokens(path).create())

    threads = [threading.Thread(target=create) for _ in range(4)]
    processes = [
        subprocess.Popen(
            [*COMMAND, "token", "create", "--tokens", path],
            env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        made.append(process.communicate(timeout=60)[0].strip())
    tokens = Tokens(path)
    assert len(tokens.all()) == 23
    assert all(token is not None and tokens.check(token) for token in made)
    assert sorted(os.listdir(tmp_path)) == ["tokens", "tokens.lock"]


def test_the_first_token_is_made_once_however_many_ask(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens")
    made: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: made.append(Tokens(path).create(only_first=True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(token is not None for token in made) == [False] * 7 + [True]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_open_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tokens"
    tokens = Tokens(str(path))
    tokens.create()
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        tokens.all()
    path.chmod(0o600)
    assert len(tokens.all()) == 1


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    Tokens(str(path)).create()
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="another user"):
        Tokens(str(path)).all()


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"version": 2, "tokens": []}', '{"version": 1, "tokens": [{}]}',
        '{"version": 1, "tokens": 7}', "[" * 5000, "\xff",
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_an_error_not_an_open_door(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content.encode("latin-1"))
    path.chmod(0o600)
    for act in (lambda: Tokens(str(path)).all(), lambda: Tokens(str(path)).create()):
        with pytest.raises(ConfigError):
            act()
    assert path.read_bytes() == content.encode("latin-1")


def test_a_directory_and_a_pipe_are_no_file_of_tokens(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "."):
        with pytest.raises(ConfigError):
            Tokens(str(tmp_path / name)).all()


def test_names_are_printable_and_short(tmp_path: Path) -> None:
    for name in ("a\nb", "\x1b[2J", "x" * 101):
        with pytest.raises(RequestError):
            Tokens(str(tmp_path / "tokens")).create(name)


def test_the_place_follows_the_environment() -> None:
    assert default_path({"XDG_STATE_HOME": "/s"}) == "/s/belljar/tokens.json"
    assert default_path({"HOME": "/h"}) == "/h/.local/state/belljar/tokens.json"
    assert default_path({"XDG_STATE_HOME": "s", "HOME": "/h"}).startswith("/h/.local")
    with pytest.raises(ConfigError, match="--tokens"):
        default_path({})


def test_a_running_server_sees_new_and_revoked_tokens_and_logs_none(tmp_path: Path) -> None:
    first = json.loads(command(tmp_path, "create", "--json").stdout)["token"]
    with serving(tmp_path) as server:
        assert server.token == "", "there was one already: none is made, none is printed"
        second = json.loads(command(tmp_path, "create", "--name", "b", "--json").stdout)["token"]

        def status(token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            return httpx.get(f"{server.url}/v1/backends?token={token}", headers=headers).status_code

        assert (status(first), status(second)) == (200, 200)
        assert command(tmp_path, "revoke", "b").returncode == 0
        assert (status(first), status(second)) == (200, 401)
        server.stop()
        log = server.log.read_text()
        assert "GET /v1/backends 401" in log
        assert first not in log
        assert second not in log


def test_a_server_without_tokens_makes_one_and_prints_it(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.run("6 * 7")["value"] == 42
        assert server.token not in server.log.read_text()
    with serving(tmp_path) as again:
        assert again.token == ""


def test_a_file_that_breaks_under_a_running_server_closes_it(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        (tmp_path / "belljar" / "tokens.json").chmod(0o666)
        with server.client() as client:
            answer = client.post("/v1/run", json={"code": "1"})
        assert answer.status_code == 500
        assert answer.json()["code"] == "internal_error"
        assert str(tmp_path) not in answer.text, "the caller has not proved anything yet"
        assert "chmod 600" in server.log.read_text()

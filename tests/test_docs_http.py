"""Every console block of docs/http.md is run against a real server and prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
sys.path.insert(0, str(Path(__file__).parent / "servers"))

from http_server import Server, environment, serving

from belljar.policy_fields import LIMITS
from belljar.servers.http.options import Options
from belljar.servers.http.wire import OFFERED

PAGE = (Path(__file__).parent.parent / "docs" / "http.md").read_text(encoding="utf-8")


def sessions() -> Iterator[tuple[str, str]]:
    """Each command of the page's console blocks, with the output that the page shows for it."""
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S):
        for command in re.split(r"^\$ ", block, flags=re.M)[1:]:
            lines = command.splitlines(keepends=True)
            end = 0
            while lines[end].endswith("\\\n") or "".join(lines[: end + 1]).count("'") % 2:
                end += 1
            yield "".join(lines[: end + 1]), "".join(lines[end + 1 :])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def test_the_page_is_true(server: Server) -> None:
    """In one shell, from top to bottom: later commands use what earlier ones made."""
    bin = str(Path(sys.executable).parent)
    env = environment(server.directory)
    env["PATH"] = f"{bin}{os.pathsep}{env['PATH']}"
    marker = "---- next ----"
    found = list(sessions())
    assert len(found) >= 10
    script = "".join(
        f"{command.replace('8765', str(server.port))}\necho '{marker}'\n" for command, _ in found
    )
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        capture_output=True, text=True, timeout=200, env=env, cwd=server.directory,
    )  # fmt: skip
    for (command, expected), shown in zip(found, done.stdout.split(f"{marker}\n"), strict=False):
        pattern = ".*?".join(map(re.escape, expected.strip("\n").split("...")))
        assert re.fullmatch(pattern, shown.strip("\n"), re.S), f"{command}\n{shown}\n{expected}"


def test_the_page_names_every_option_and_the_defaults() -> None:
    assert [name for name in OFFERED if name not in LIMITS and f"`{name}`" not in PAGE] == []
    standard = Options()
    assert f"| {standard.queue}, {standard.queue_time:g} s |" in PAGE
    assert f"| {standard.max_body >> 20} MiB, {standard.body_time:g} s |" in PAGE
    assert f"| {standard.header_time:g} s, {standard.max_headers >> 10} KiB |" in PAGE
    assert f"| `--connections` | {standard.connections} |" in PAGE

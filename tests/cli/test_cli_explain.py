"""`belljar explain`: the choice of a backend, told and not made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from belljar.cli import main, running
from belljar.config import Settings
from belljar.engine import Engine
from belljar.policy import Isolation
from belljar.testing import FakeBackend

Explain = Callable[..., tuple[int, str]]


@pytest.fixture
def explain(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Explain:
    monkeypatch.chdir(tmp_path)
    backends = {
        name: FakeBackend(name=name, isolation=Isolation(rung))
        for name, rung in (("jail", "jail"), ("wasm", "wasm"), ("gvisor", "gvisor"))
    }

    def open_engine(args: Any, **overrides: Any) -> Engine:
        return Engine(Settings(**overrides), backends=backends)

    monkeypatch.setattr(running, "open_engine", open_engine)

    def call(*words: str) -> tuple[int, str]:
        status = main(["explain", *words])
        assert not any(backend.plans for backend in backends.values())
        return status, capfd.readouterr().out

    return call


def test_it_names_the_backend_and_says_why_not_each_other(explain: Explain) -> None:
    status, text = explain("-c", "import numpy", "--min-isolation", "wasm")
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if line)
    assert lines["backend"] == "gvisor"
    assert lines["imports"] == "numpy"
    assert lines["jail"] == "cannot reach the floor wasm"
    assert lines["wasm"] == "could, but cannot offer module 'numpy'"


def test_a_file_is_read_and_json_is_one_object(explain: Explain, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import json\nexec(input())\n")
    status, text = explain("job.py", "--json")
    assert status == 0
    told = json.loads(text)
    assert told["backend"] == "jail"
    assert told["program"]["imports"] == ["json"]
    assert "exec" in told["program"]["unreadable"]
    assert {other["name"]: other["able"] for other in told["others"]} == {
        "gvisor": True, "wasm": True,
    }  # fmt: skip


def test_what_nobody_would_run_is_126(explain: Explain) -> None:
    status, text = explain("-c", "1", "--min-isolation", "vm")
    assert (status, text.splitlines()[0].split()) == (126, ["backend", "none"])
    status, text = explain("-c", "1", "--require", "json,no_such_library", "--backend", "jail")
    assert status == 126
    assert "no_such_library" in text
    assert explain("-c", "1", "--require", "json", "--backend", "jail")[0] == 0

"""Fixtures for the real `belljar` command; see real_command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_command import Process, Terminal


@pytest.fixture
def cli(tmp_path: Path) -> Process:
    return Process(tmp_path)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*words: str, **extra: str) -> Terminal:
        opened.append(Terminal(words, tmp_path, extra))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()

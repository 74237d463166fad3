"""Tests that ask for `python` run once in every interpreter that a guest may be."""

from __future__ import annotations

import pytest
from worker_process import interpreters


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        known = interpreters()
        metafunc.parametrize("python", known.values(), ids=known.keys())

"""Tests that ask for `python` run once in every interpreter that a guest may be.

Those that ask for `edge_python` run in the oldest, the newest and our own.
"""

from __future__ import annotations

import pytest
from worker_process import interpreters


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        known = interpreters()
        metafunc.parametrize("python", known.values(), ids=known.keys())
    if "edge_python" in metafunc.fixturenames:
        known = interpreters()
        age = sorted(known, key=lambda version: int(version.split(".")[1]))
        names = sorted({age[0], age[-1], next(iter(known))})
        metafunc.parametrize("edge_python", [known[name] for name in names], ids=names)

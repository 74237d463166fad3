"""One server for the tests of a file that change nothing about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_server import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running

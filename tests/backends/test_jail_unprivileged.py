"""The jail where the host has no privilege at all: no root, no control groups, one user id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from unprivileged_answers import EXPECTED, answers_of

from belljar.backends.jail import JailBackend

pytestmark = pytest.mark.skipif(
    not JailBackend().probe().available, reason=JailBackend().probe().reason
)


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Any]]:
    with answers_of("jail", user=63990) as answers:
        yield answers


@pytest.mark.parametrize(("question", "answer"), [*EXPECTED, ("identity", [2, 1000])])
def test_without_privilege(answers: dict[str, Any], question: str, answer: object) -> None:
    assert answers[question] == answer

"""The launchers where the host has no privilege: firejail is set-uid, the others need user
namespaces. Firejail serves accounts only, so one that exists is borrowed."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from typing import Any

import pytest
from unprivileged_answers import EXPECTED, NOBODY, answers_of

from belljar.backends import registry


def user_of(backend: str) -> int:
    if backend != "firejail" or os.geteuid() != 0:
        return NOBODY
    accounts = [user.pw_uid for user in pwd.getpwall() if 1000 <= user.pw_uid < 60000]
    if not accounts:
        pytest.skip("no account here that firejail would serve")
    return accounts[0]


@pytest.fixture(scope="module", params=["bubblewrap", "firejail", "nsjail"])
def answers(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    found = registry.load(request.param).probe()
    if not found.available:
        pytest.skip(found.reason)
    with answers_of(request.param, user_of(request.param)) as answers:
        yield answers


# Of the buffers of TCP sockets, which a stricter floor does not have, a watchdog sees nothing.
LAUNCHED = [*(each for each in EXPECTED if each[0] != "states"),
            ("states", ["best_effort", "enforced"])]  # fmt: skip


@pytest.mark.parametrize(("question", "answer"), LAUNCHED)
def test_without_privilege(answers: dict[str, Any], question: str, answer: object) -> None:
    assert answers[question] == answer

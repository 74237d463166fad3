"""Many clients at the same time: no answer is lost, and none is another client's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from http_server import Server, serving


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("busy"), "--queue-time", "5m") as server:
        yield server


@pytest.mark.parametrize(
    ("clients", "rounds"), [(32, 5), pytest.param(32, 50, marks=pytest.mark.soak)]
)
def test_clients_at_the_same_time_get_their_own_answers(
    busy: Server, clients: int, rounds: int
) -> None:
    before = busy.metric("sandbox_executions_total")
    wrong: list[str] = []
    ids: list[str] = []

    def client(number: int) -> None:
        with httpx.Client(base_url=busy.url, timeout=300) as own:
            own.headers["Authorization"] = f"Bearer {busy.token}"
            for round in range(rounds):
                word = f"{number}-{round}"
                body = {
                    "code": "print(word); open('f').read() + input()",
                    "context": {"word": word},
                    "files": {"f": word},
                    "stdin": f"{word}\n",
                }
                answer = own.post("/v1/run", json=body)
                told = answer.json()
                if answer.status_code != 200 or told["value"] != word + word:
                    wrong.append(f"{word}: {answer.text[:300]}")
                elif told["stdout"] != f"{word}\n":
                    wrong.append(f"{word}: {told['stdout']!r}")
                else:
                    ids.append(told["id"])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(set(ids)) == clients * rounds
    assert busy.metric("sandbox_executions_total") - before == clients * rounds
    assert busy.metric("belljar_runs_in_progress") == 0

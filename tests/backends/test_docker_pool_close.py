"""A pool that is closed by its own thread: the garbage collector runs finalizers in any of them."""

from __future__ import annotations

import threading
from typing import Any

from belljar.backends import docker_pool


def test_a_pool_can_be_closed_in_its_own_thread() -> None:
    never: Any = None
    pool = docker_pool.Pool(never, never, 1, 1.0)
    said: list[Any] = []

    def close() -> None:
        try:
            said.append(pool.close())
        except RuntimeError as error:
            said.append(error)

    thread = threading.Thread(target=close)
    pool._threads.append(thread)
    thread.start()
    thread.join(30)
    assert said == [[]]

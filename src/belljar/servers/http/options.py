"""What `belljar serve` can be told, with defaults that hold for a server on loopback."""

from __future__ import annotations

import os

from ...records import field, record
from ..remote import Rights

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8765


@record
class Options:
    """Sizes in bytes, times in seconds."""

    rights: Rights = field(default_factory=Rights)
    allow_hosts: tuple[str, ...] = ()  # names, beside localhost and plain addresses
    allow_origins: tuple[str, ...] = ()
    concurrency: int = max(4, 2 * (os.cpu_count() or 1))  # runs at the same time
    queue: int = 256  # runs that wait for one of these
    queue_time: float = 30.0
    max_body: int = 32 << 20
    body_time: float = 30.0
    header_time: float = 10.0
    max_headers: int = 64 << 10
    connections: int = 1000
    keep_alive: float = 10.0  # between comments in a stream without events

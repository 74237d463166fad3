"""Descriptors reach a fork server although the same user has too many on their way."""

from __future__ import annotations

import _socket
import errno
import os
import resource
from typing import Any

import unprivileged

from belljar.linux import in_flight


def both_ways() -> list[Any]:
    """What a plain send does, and ours, when 80 are on their way and the soft limit is 64."""
    kept = []
    for _ in range(4):
        pair = _socket.socketpair()
        kept.append(pair)
        in_flight.send(pair[0], b"x", [0] * 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    here, there = _socket.socketpair()
    try:
        here.sendmsg([b"plain"], [(1, _socket.SCM_RIGHTS, b"\0\0\0\0")])
        plain = "sent"
    except OSError as error:
        plain = errno.errorcode[error.errno]
    in_flight.send(here, b"ours", [0])
    message, ancillary, _, _ = there.recvmsg(10, _socket.CMSG_SPACE(4))
    return [plain, message, len(ancillary), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]


def test_a_full_quota_of_the_user_refuses_a_plain_send_and_not_ours() -> None:
    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 100:
        return
    assert unprivileged.call(both_ways) == ["ETOOMANYREFS", b"ours", 1, 64]

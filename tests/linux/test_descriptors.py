"""Descriptors in messages: whoever reads drops those that came along, however long that takes."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from belljar.linux import syscalls

LINGER = 1  # seconds; the kernel takes whole ones
SO_PASSRIGHTS = 83  # since Linux 6.16

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The host's end and the guest's, which can be one process: a queue has no owner."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def lingering() -> Iterator[socket.socket]:
    """A connection with more to send than its peer takes: its last owner waits when closing it."""
    with socket.socket() as sender, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender.connect(listener.getsockname())
        with listener.accept()[0]:  # whose end, before ours, is the end of the waiting
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 16))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER))
            yield sender


def knows_the_option(end: socket.socket) -> bool:
    try:
        end.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
    except OSError as error:
        assert error.errno == errno.ENOPROTOOPT
        return False
    return True


def test_whoever_reads_waits_for_a_connection_that_came_along(
    pair: Pair, lingering: socket.socket
) -> None:
    """The control arm: a plain pair."""
    ours, theirs = pair
    socket.send_fds(theirs, [b"x"], [lingering.fileno()])
    lingering.close()  # not the last one: the message has another
    began = time.monotonic()
    assert os.read(ours.fileno(), 100) == b"x"
    assert time.monotonic() - began > LINGER / 2


def test_an_end_that_refuses_descriptors_gets_bytes_only(
    pair: Pair, lingering: socket.socket
) -> None:
    ours, theirs = pair
    if not knows_the_option(ours):
        pytest.skip("this kernel is older than 6.16: no socket can refuse descriptors")
    syscalls.refuse_descriptors(ours)
    with pytest.raises(PermissionError):
        socket.send_fds(theirs, [b"x"], [lingering.fileno()])
    theirs.send(b"y")
    assert os.read(ours.fileno(), 100) == b"y"
    # What we send is our own business.
    socket.send_fds(ours, [b"z"], [ours.fileno()])
    words, fds, _, _ = socket.recv_fds(theirs, 100, 1)
    os.close(*fds)
    assert words == b"z"


class Kernel:
    """A socket of a kernel that answers with this error."""

    def __init__(self, code: int) -> None:
        self.code = code

    def setsockopt(self, *_: int) -> None:
        raise OSError(self.code, os.strerror(self.code))


def test_only_a_kernel_that_does_not_know_the_option_may_refuse_it() -> None:
    syscalls.refuse_descriptors(Kernel(errno.ENOPROTOOPT))  # type: ignore[arg-type]
    for code in (errno.EPERM, errno.EOPNOTSUPP):
        with pytest.raises(OSError):
            syscalls.refuse_descriptors(Kernel(code))  # type: ignore[arg-type]

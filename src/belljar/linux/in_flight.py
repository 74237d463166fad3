"""Sending descriptors to a fork server, whatever a run of the same user has on their way.

The kernel counts descriptors that were sent and not received yet for the user, and compares them
with the sender's limit of open files. The runs of an ordinary user are that user to it.
"""

from __future__ import annotations

import errno
import resource
import struct
import threading

from .bare import socket

_raised = threading.Lock()


def send(sender: socket.socket, message: bytes, fds: list[int]) -> None:
    """One message with descriptors. OSError if the other end is gone.

    If the limit is in the way it is raised for that moment only: it is the whole process's, whose
    own programs and libraries may depend on it.
    """
    data = struct.pack(f"{len(fds)}i", *fds)
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)]
    try:
        sender.sendmsg([message], passed)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        with _raised:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            try:
                sender.sendmsg([message], passed)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

"""A first program to run in a sandbox: it computes something, then tries what it should not."""

import os
import socket
from pathlib import Path

print("2 ** 64 =", 2**64)

try:
    print(Path("/etc/shadow").read_text())
except OSError as error:
    print("reading the password file:", error.strerror)

try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError as error:
    print("opening a connection:", error.strerror or error)

print("environment:", ", ".join(sorted(os.environ)))

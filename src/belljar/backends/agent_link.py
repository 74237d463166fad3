"""The host's side of `guest/agent.py`: its boot, its packets, and an engine's way of mixing them.

The agent and the worker are sent in over the container's own input, as source. So any image with a
Python will do, nothing is mounted, the engine may be anywhere, and gVisor needs no door to a host
socket. Why not a unix socket in a mounted directory: gVisor opens none unless told to for all its
containers, and a directory that the guest can write to is one more thing to clean up after it.
"""

from __future__ import annotations

import marshal
import os
from functools import cache
from typing import Any

from ..guest import agent, protocol

# What an engine puts before every piece of a container's output when there is no terminal.
_HEADER = 8
_STDOUT, _STDERR = 1, 2
_MOST_COMPLAINT = 8192
_MODULES = (
    "agent", "agent_facts", "agent_files", "agent_guest", "agent_identity", "arrow", "displays",
    "drops", "extensions", "failures", "marked", "protocol", "shows", "tables", "values", "worker",
)  # fmt: skip
_BOOT = """
import marshal, os, sys
try:
    from _frozen_importlib import ModuleSpec
except ImportError:
    from importlib.machinery import ModuleSpec
def take(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
class Sources:
    held = marshal.loads(take(int.from_bytes(take(4), "big")))
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.held:
            return ModuleSpec(name, cls)
    @staticmethod
    def create_module(spec):
        return None
    @classmethod
    def exec_module(cls, module):
        module.__file__ = "<belljar>"
        exec(compile(cls.held[module.__name__], "<belljar>", "exec"), module.__dict__)
package = type(sys)("belljar_guest")
package.__path__ = []
sys.modules["belljar_guest"] = package
sys.meta_path.insert(0, Sources)
from belljar_guest.agent import main
ids = tuple(int(each) for each in sys.argv[2].split(":")) if len(sys.argv) > 2 else None
main(float(sys.argv[1]), ids)
from belljar_guest.worker import main
main(3, 4)
"""


def command(idle: float) -> list[str]:
    """The container's command: an agent that waits at most `idle` seconds for its program.

    One more word, "uid:gid", makes the program another user than the agent.
    """
    return ["python3", "-I", "-B", "-c", _BOOT, str(idle)]


@cache
def boot() -> bytes:
    """What the command reads first: the agent and the worker."""
    sources = {}
    for name in _MODULES:
        with open(os.path.join(protocol.GUEST_DIR, f"{name}.py"), encoding="utf-8") as file:
            sources[f"belljar_guest.{name}"] = file.read()
    data = marshal.dumps(sources, 2)
    return len(data).to_bytes(4, "big") + data


class EngineMalformed(protocol.ProtocolError):
    """What no engine sends around an agent's output, whatever that is: Podman may do so when it
    cannot pass on what it has for an agent that has ended."""


class Incoming:
    """From an engine's mixed stream to the agent's packets, whatever the pieces it arrives in.

    `feed` raises ProtocolError for what no agent of ours sends, EngineMalformed for what no engine
    does. `complaint` is the beginning of
    what came on the agent's own stderr: a Python that does not start says why there.
    """

    def __init__(self) -> None:
        self.complaint = b""
        self._decoder = protocol.Decoder(agent.FROM_AGENT, agent.MAX_PACKET)
        self._head = b""
        self._stream, self._left = 0, 0

    def feed(self, data: bytes) -> list[protocol.Frame]:
        packets: list[protocol.Frame] = []
        while data:
            if self._left == 0:
                missing = _HEADER - len(self._head)
                self._head, data = self._head + data[:missing], data[missing:]
                if len(self._head) < _HEADER:
                    break
                self._stream, self._left = self._head[0], int.from_bytes(self._head[4:], "big")
                self._head = b""
                continue
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            if self._stream == _STDOUT:
                packets += self._decoder.feed(piece)
            elif self._stream == _STDERR:
                self.complaint = (self.complaint + piece)[:_MOST_COMPLAINT]
            else:
                raise EngineMalformed("the engine's stream is malformed")
        return packets


def packets(kind: int, data: bytes) -> list[bytes]:
    """`data` as packets of one kind, each within the agent's bound."""
    size = agent.MAX_PACKET
    return [protocol.encode(kind, data[at : at + size]) for at in range(0, len(data), size)]


def start_packets(message: Any, files: list[bytes]) -> list[bytes]:
    """START, and the contents of the files that it lists."""
    data = marshal.dumps(message, 2)
    found = packets(agent.START, len(data).to_bytes(4, "big") + data)
    for content in files:
        found += packets(agent.FILE, content)
    return found

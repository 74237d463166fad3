"""What a guest in a root of its own reads first: how to start, its files, and the program."""

from __future__ import annotations

import marshal
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .. import languages
from ..errors import RequestError
from ..files import collect
from ..files.names import checked_name
from ..guest.protocol import MAX_HOST_FRAME
from ..linux import root
from ..report import Budgets, run_fields, run_pieces
from ..types import Request
from . import memory_file, working_directory
from .guest_env import search_path
from .jail_plan import GUEST_ENV
from .pieces import Pieces, gathered

_NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


def start_message(
    request: Request,
    *,
    argv: tuple[str, ...],
    file: str | None,
    worker: bool,
    room: int,
    home: str = root.HOME,
    cores: tuple[int, ...] = (),
    env: Mapping[str, str] = _NOTHING_MORE,
    budgets: Budgets | None = None,
    work: str = root.WORK,
) -> tuple[Pieces, dict[str, collect.Stamp]]:
    """What to send to `linux/run_guest.py`, and the state of the work directory that it makes of
    them. `file` is what the program is called in the work directory `work`, which can hold `room`
    bytes; `env` are variables that the request may replace. `cores`, if any, are those that the
    program may use.
    """
    files = {checked_name("files", name): data for name, data in request.files.items()}
    # A worker that is started by a command reads its own frame; one that is there already gets the
    # program with the rest, in a form that takes no time to read.
    called = working_directory.program_file(request, file or "", work)
    program = run_pieces(request, called, budgets) if worker and argv else []
    buffers: list[Any] = []
    run = run_fields(request, called, budgets, buffers) if worker and not argv else None
    if file and request.code is not None:  # also for the worker: multiprocessing reads it
        files[file] = request.code.encode("utf-8", "surrogatepass")
    if sum(map(len, files.values())) > room:
        raise RequestError("files", f"do not fit into a disk of {room} bytes", fix="raise `disk`")
    # An interpreter of the request's own comes first.
    own = {"PATH": search_path(argv[0])} if worker and argv else {}
    stamp = time.time_ns()
    start: dict[str, Any] = {
        "argv": list(working_directory.command_line(argv, request, file, work)),
        "cwd": working_directory.start_in(request, work) if request.workdir else "",
        "filter": languages.seccomp_filter(request),
        "run": run,
        "frames": worker,
        "cores": cores,
        "later": request.settle == "later",
        "env": {
            **GUEST_ENV,
            "HOME": home,
            **own,
            **env,
            **working_directory.environment(request, work),
        },
        "files": [(name, len(data), stamp) for name, data in files.items()],
        "buffers": [len(data) for data in buffers],
    }
    head = marshal.dumps(start)
    if len(head) > MAX_HOST_FRAME:
        raise RequestError("context", "is larger than a start message can be")
    before: dict[str, collect.Stamp] = {n: (stamp, len(data), 0) for n, data in files.items()}
    start_bytes = len(head).to_bytes(4, "big") + head
    small = gathered([start_bytes, *files.values()])
    passed = memory_file.of(buffers)
    return Pieces([*small, *(buffers if passed < 0 else ()), *program], passed), before

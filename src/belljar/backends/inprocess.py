"""Backend `inprocess`: the program runs in our own interpreter, on a thread. It is no boundary.

For development on a machine whose code you trust: it starts at once, a debugger sees into it, and it
needs nothing. It is the rung `none`; every level but `permissive` refuses it.

Theory of operation
- `run` waits for its turn: streams, working directory, environment and `sys` exist once in a process,
  so one program has them at a time (`inprocess_world.py`), whatever backend object it came through.
- The program runs on one new thread, and on threads that this one starts. The thread that called
  `run` is the watchdog: it hands out output, reads the clock, memory, files (`inprocess_watch.py`)
  and the cancel switch every hundredth of a second.
- To end a program, an exception is thrown into its threads, again and again until they are gone
  (`inprocess_guard.py`). It arrives between two steps of Python. A thread that is inside native code
  or swallows the exception for longer than the grace period is abandoned: it stays, guarded, until it
  comes back to Python, and the result says so.
- One audit hook for the process refuses processes, network and writing outside the work directory to
  the program's threads. The guest worker's own `Interpreter` runs the program, so values, errors and
  displays are those of every other backend.
- Stop, then wait, then collect, then delete; and then everything is put back, whatever happened.

What it does not protect against: anything that does not want to be held. The program can read all
memory of this process and all files of its user, change any module, hold the interpreter's lock in
native code for ever (`7 ** 10 ** 8`), or crash the process. What it leaves in imported modules, and
its `atexit` handlers, stay.

Facts relied on: `pytest tests/backends/test_inprocess.py` checks each of them.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from .. import collect, languages
from ..errors import BackendUnavailable, LanguageUnknown, RequestError
from ..events import Displayed, Emit, Output
from ..policy import Isolation, Policy
from ..types import Display, Enforcement, KillProof, Request, Result, Status, Usage
from .base import (
    Availability,
    Cancel,
    Plan,
    absent,
    best_effort,
    enforced,
    refuse_unless_held,
)

NO_BOUNDARY = (
    "backend inprocess is no boundary: the program shared Belljar's own process and could do"
    " whatever that may do; use it for development only"
)
LAYERS = ("audit", "watchdog", "output_cap")
_TICK = 0.01
_GRACE = 1.0
_NO_CAP = 1 << 40
_NOISE = 1 << 20  # growth of memory below this is the allocator's, not the program's

# Streams, directory, environment: there is one of each for all backends of this kind together.
_turn = threading.Lock()

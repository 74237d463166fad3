"""Whether a run's large data goes in a sealed memory file, and the message that says so."""

from __future__ import annotations

from typing import Any

from ..report import Budgets, encode_run, run_fields
from ..types import Request
from .pieces import Pieces


def of(buffers: list[Any]) -> int:
    """A sealed file of all `buffers`; -1 where a pipe takes less time, or there can be none."""
    if not buffers:  # most runs: without the import, which takes longer than the rest of this
        return -1
    from ..linux import sealed  # which is not for other systems

    if sum(map(len, buffers)) < sealed.LEAST:
        return -1
    try:
        return sealed.write([memoryview(data).cast("B") for data in buffers])
    except (OSError, AttributeError):  # a Python of an old C library lacks these functions
        return -1


def run_message(request: Request, filename: str, budgets: Budgets) -> Pieces:
    """The RUN frame for a worker in a fork, which may be given a descriptor with its first byte."""
    buffers: list[Any] = []
    fields = run_fields(request, filename, budgets, buffers)
    passed = of(buffers)
    if passed < 0:
        return Pieces(encode_run(fields, buffers))
    try:
        fields["mapped"] = [len(each) for each in buffers]
        return Pieces(encode_run(fields, []), passed)
    except BaseException:
        Pieces((), passed).close()
        raise

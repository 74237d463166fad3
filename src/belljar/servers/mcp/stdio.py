"""Serves MCP on standard input and output until the client closes its end or a signal comes."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal

from .calls import Calls
from .tools import Server

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def serve(server: Server, calls: Calls) -> None:
    """Returns after the end of standard input, when no guest is left; BrokenPipeError if the client
    does not read any more."""
    asyncio.run(_serve(server, calls))


async def _serve(server: Server, calls: Calls) -> None:
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    def stop(number: int) -> None:
        if not ending:
            ending.append(asyncio.create_task(_exit(calls, number)))

    for name in _SIGNALS:
        number = getattr(signal, name, None)
        if number is not None:
            try:
                loop.add_signal_handler(number, stop, number)
            except NotImplementedError:  # Windows: Ctrl-C interrupts asyncio.run itself
                break
    vanished = False
    try:
        await server.run_stdio_async()
    except* BrokenPipeError:
        vanished = True
    await calls.end_all()
    if vanished:
        raise BrokenPipeError


async def _exit(calls: Calls, number: int) -> None:
    """The SDK's thread that reads standard input cannot be interrupted: leave without it."""
    await calls.end_all()
    calls.runner.close()
    atexit._run_exitfuncs()
    os._exit(128 + number)

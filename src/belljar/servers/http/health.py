"""Whether programs really run here: one through each backend that can hold the server's policy."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from ... import doctor
from ...api import build_request
from ...engine import Engine
from ...errors import BelljarError, PolicyUnenforceable
from .runs import Runs
from .wire import Job

_FRESH_SECONDS = 5.0
_TIMEOUT = 30

logger = logging.getLogger("belljar.http")


class Health:
    """Checks at most once in _FRESH_SECONDS: callers that ask more often get the last answer."""

    def __init__(self, engine: Engine, runs: Runs) -> None:
        self._engine, self._runs = engine, runs
        self._lock = asyncio.Lock()
        self._last: dict[str, Any] | None = None
        self._at = 0.0

    async def check(self) -> dict[str, Any]:
        """`status` is ok, degraded (a backend fails) or failing (none works), and why."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._at > _FRESH_SECONDS:
                self._last = await self._checked()
                self._at = time.monotonic()
            return self._last

    async def _checked(self) -> dict[str, Any]:
        reports = await asyncio.to_thread(doctor.backend_reports, self._engine)
        usable = [report.name for report in reports if report.usable]
        asked = {name: await self._one(name) for name in usable}
        found = {name: each for name, each in asked.items() if each is not None}
        failed = [name for name, each in found.items() if not each["ok"]]
        status = "failing" if len(failed) == len(found) else "degraded" if failed else "ok"
        return {"status": status, "backends": found}

    async def _one(self, name: str) -> dict[str, Any] | None:
        """None: the backend cannot hold this server's policy, so no caller's program runs there."""
        request = build_request(code='print("OK")', fallback=False, settings=self._engine.settings)
        job = Job(request=request, level=None, backend=name, wishes={"timeout": _TIMEOUT})
        began = time.monotonic()
        try:
            result = json.loads(await self._runs.start(job, None, {}))
        except PolicyUnenforceable:
            return None
        except BelljarError as error:
            logger.error("health: %s cannot run a program: %s", name, error)
            return {"ok": False, "problem": error.message}
        seconds = round(time.monotonic() - began, 4)
        if result["status"] == "success" and result["stdout"] == "OK\n":
            return {"ok": True, "seconds": seconds}
        logger.error("health: %s ended a program with %s", name, result["status"])
        return {"ok": False, "problem": result["explanation"] or result["status"]}

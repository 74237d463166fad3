"""The routes of the HTTP server, as one ASGI application."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from ... import doctor
from ...engine import Engine
from ...errors import BelljarError
from ...stores.metrics import CONTENT_TYPE, Metrics, single
from ..auth import Tokens
from . import description
from .guard import TOKEN, Guard, of_status
from .health import Health
from .options import Options
from .problems import HttpError, encoded, failure
from .runs import Runs


def create_app(engine: Engine, tokens: Tokens, options: Options) -> tuple[ASGIApp, Runs]:
    """The application, and the runs that whoever serves it stops and closes.

    `engine` has settings that `remote.bounded` made; it is given a sink that counts its runs.
    """
    metrics = Metrics()
    engine.sinks.add(metrics)
    runs = Runs(engine, options)
    health = Health(engine, runs)
    app = FastAPI(
        title="Belljar", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )

    @app.post("/v1/run", **description.RUN)
    async def run(request: Request) -> Response:
        return await runs.answer(request)

    @app.get("/v1/backends", **description.BACKENDS)
    async def backends() -> Response:
        reports = await asyncio.to_thread(doctor.backend_reports, engine)
        settings = engine.settings
        return _json(
            {
                "backends": [report.to_dict() for report in reports],
                "default": settings.found_backend or settings.backend,
                "level": settings.level,
            }
        )

    @app.get("/healthz", **description.HEALTH)
    async def healthz(request: Request) -> Response:
        if "backends" not in request.query_params:
            return _json({"status": "ok"})
        if request.scope[TOKEN] is None:
            raise HttpError(
                401,
                "token_missing",
                "a run through each backend needs a token",
                headers={"WWW-Authenticate": 'Bearer realm="belljar"'},
            )
        found = await health.check()
        return _json(found, 200 if found["status"] == "ok" else 503)

    @app.get("/metrics", **description.METRICS)
    async def metrics_text() -> Response:
        own = (
            *single("belljar_runs_in_progress", "gauge", "Runs now.", runs.admission.running),
            *single("belljar_runs_queued", "gauge", "Runs that wait.", runs.admission.waiting),
            *single(
                "belljar_runs_refused_total",
                "counter",
                "Runs refused because the server was full.",
                runs.admission.refused,
            ),
        )
        text = metrics.text() + "".join(f"{line}\n" for line in own)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    document = encoded(description.openapi(app))
    page = description.page(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def docs() -> Response:
        return Response(page, media_type="text/html", headers=description.PAGE_HEADERS)

    @app.exception_handler(BelljarError)
    async def failed(_request: Request, error: Exception) -> Response:
        assert isinstance(error, BelljarError)
        return failure(error)

    @app.exception_handler(HTTPException)
    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = of_status(error.status_code)
        told.headers.update(error.headers or {})
        return failure(told)

    return Guard(app, tokens, options), runs


def _json(body: Any, status: int = 200) -> Response:
    return Response(encoded(body), status, media_type="application/json")

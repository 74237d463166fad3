"""The OpenAPI description of the HTTP server, and a page that shows it without anything external.

Both are the same on every server of a version: they tell nothing about the host.
"""

from __future__ import annotations

import html
import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ..._version import __version__
from ...types import Result, Status
from .problems import MEDIA_TYPE
from .wire import RunRequest

_REF = "#/components/schemas/"
_EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "value": ("The last expression comes back", {"code": "6 * 7"}),
    "limits": (
        "Limits and a stricter level",
        {"code": "print(sum(range(10)))", "level": "strict", "timeout": "2s", "memory": "64M"},
    ),
    "files": (
        "Files in and out, bytes as base64",
        {
            "code": "open('out.bin', 'wb').write(open('in.bin', 'rb').read()[::-1])",
            "files": {"in.bin": {"base64": "AAEC"}, "notes.txt": "plain text"},
            "outputs": ["*.bin"],
        },
    ),
    "variables": ("Variables of the program", {"code": "a + b", "context": {"a": 1, "b": 2}}),
}

_NULLABLE_TEXT = {"type": ["string", "null"]}
_NULLABLE_INT = {"type": ["integer", "null"]}
_MAP = {"type": "object"}
# Result.to_dict, field by field; the rest of its fields have no constraint.
_RESULT_FIELDS: dict[str, Any] = {
    "id": {"type": "string"},
    "status": {"enum": [status.value for status in Status]},
    "exit_code": _NULLABLE_INT,
    "signal": _NULLABLE_INT,
    "limit_hit": _NULLABLE_TEXT,
    "explanation": {"type": "string"},
    "stdout": {"type": "string"},
    "stderr": {"type": "string"},
    "truncated": {"type": "boolean"},
    "value": {"description": "what the program returned; typed values are {'$': type, 'v': ...}"},
    "error": {"type": ["object", "null"]},
    "displays": {"type": "array", "items": _MAP},
    "files": _MAP,
    "changes": {"type": "array", "items": _MAP},
    "usage": _MAP,
    "timings": _MAP,
    "enforcement": _MAP,
    "kill": {"type": ["object", "null"]},
    "settled": {"type": "boolean"},
    "backend": {"type": "string"},
    "isolation": {"type": "string"},
    "warnings": {"type": "array", "items": {"type": "string"}},
}
_RESULT = {
    "type": "object",
    "title": "Result",
    "description": "What `Result.to_dict` gives.",
    "required": sorted(Result(status=Status.SUCCESS).to_dict()),
    "properties": _RESULT_FIELDS,
}
_PROBLEM = {
    "type": "object",
    "title": "Problem",
    "description": "RFC 9457, with Belljar's stable `code`.",
    "required": ["type", "title", "status", "detail", "code", "retryable", "fix"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "retryable": {"type": "boolean"},
        "fix": _NULLABLE_TEXT,
        "field": {"type": "string", "description": "which option is wrong"},
    },
}


def _problems(**texts: str) -> dict[int | str, dict[str, Any]]:
    return {
        int(status[1:]): {
            "description": text,
            "content": {MEDIA_TYPE: {"schema": {"$ref": f"{_REF}Problem"}}},
        }
        for status, text in texts.items()
    }


def _json(schema: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema, **rest}}


_EVERYWHERE = _problems(
    _401="no token, or one that is not valid",
    _403="a page of a foreign origin",
    _421="the Host header names another server",
)
_SECURED: list[dict[str, list[str]]] = [{"bearer": []}]

RUN: dict[str, Any] = {
    "operation_id": "run",
    "summary": "Run a program and answer its result",
    "description": (
        "A program that fails, runs out of time or is refused by the lint has a result like any "
        "other: see its `status`. With `Accept: text/event-stream` the answer is a stream of the "
        "events `started`, `stdout`, `stderr`, `display`, then `result` or `error`. Closing the "
        "connection ends the program."
    ),
    "responses": {
        200: {
            "description": "the result",
            "content": {
                **_json({"$ref": f"{_REF}Result"}),
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": (
                        'event: stdout\ndata: {"text":"hi\\n"}\n\n'
                        'event: result\ndata: {"status":"success", ...}\n\n'
                    ),
                },
            },
        },
        **_EVERYWHERE,
        **_problems(
            _400="not strict JSON",
            _403="a foreign origin, or an option that the operator does not allow",
            _408="the body came too slowly",
            _413="the body is too large",
            _415="the body is not JSON",
            _422="an option is wrong, or no backend holds the policy",
            _500="the sandbox failed",
            _503="too many runs, or no backend: see Retry-After",
            _504="the backend does not answer",
        ),
    },
    "openapi_extra": {
        "security": _SECURED,
        "requestBody": {
            "required": True,
            "content": _json(
                {"$ref": f"{_REF}RunRequest"},
                examples={
                    name: {"summary": text, "value": value}
                    for name, (text, value) in _EXAMPLES.items()
                },
            ),
        },
    },
}
BACKENDS: dict[str, Any] = {
    "operation_id": "backends",
    "summary": "The backends, how strongly each isolates, and whether it works on this host",
    "responses": {200: {"description": "a report", "content": _json(_MAP)}, **_EVERYWHERE},
    "openapi_extra": {"security": _SECURED},
}
HEALTH: dict[str, Any] = {
    "operation_id": "health",
    "summary": "Whether the server answers; with `?backends`, whether each backend runs a program",
    "responses": {
        200: {"description": "healthy", "content": _json(_MAP)},
        **_EVERYWHERE,
        503: {"description": "a backend fails", "content": _json(_MAP)},
    },
    "openapi_extra": {
        "security": [{}, *_SECURED],
        "parameters": [
            {
                "name": "backends",
                "in": "query",
                "required": False,
                "schema": {"type": "string"},
                "description": "run a program through each backend; needs the token",
            }
        ],
    },
}
METRICS: dict[str, Any] = {
    "operation_id": "metrics",
    "summary": "Counts of runs, for Prometheus",
    "responses": {
        200: {"description": "metrics", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **_EVERYWHERE,
    },
    "openapi_extra": {"security": _SECURED},
}


def openapi(app: FastAPI) -> dict[str, Any]:
    """The description as OpenAPI 3.1."""
    document = get_openapi(
        title="Belljar",
        version=__version__,
        summary="Runs code you do not trust.",
        routes=app.routes,
    )
    model = RunRequest.model_json_schema(ref_template=_REF + "{model}")
    schemas = {
        **model.pop("$defs", {}),
        "RunRequest": model,
        "Result": _RESULT,
        "Problem": _PROBLEM,
    }
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer", "description": "belljar token create"}
        },
    }
    return document


PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    ),
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font-family:ui-monospace,monospace;font-size:.9em}pre{background:#8881;padding:.7rem;"
    "overflow:auto}td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}"
    ":root{color-scheme:light dark}"
)


def page(app: FastAPI) -> str:
    """The description as HTML: no script, nothing from another host."""
    document = openapi(app)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Belljar</title>",
        f"<style>{_STYLE}</style><h1>Belljar {_text(__version__)}</h1>",
        "<p>Runs code you do not trust. Every call but <code>GET /healthz</code> needs ",
        "<code>Authorization: Bearer TOKEN</code>; <code>belljar token create</code> prints one. ",
        "Machines read <a href=/openapi.json>/openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {_text(path)}</code></h2>")
            parts.append(f"<p>{_text(operation['summary'])}.</p>")
            if "description" in operation:
                parts.append(f"<p>{_text(operation['description'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                parts += _options(document)
                examples = body["content"]["application/json"]["examples"]
                parts += (_example(path, each) for each in examples.values())
            rows = "".join(
                f"<tr><td><code>{_text(status)}</code><td>{_text(answer['description'])}"
                for status, answer in operation["responses"].items()
            )
            parts.append(f"<table><tr><th>status<th>means{rows}</table>")
    return "".join(parts)


def _options(document: dict[str, Any]) -> list[str]:
    properties = document["components"]["schemas"]["RunRequest"]["properties"]
    rows = "".join(
        f"<tr><td><code>{_text(name)}</code><td>{_text(described['description'])}"
        for name, described in properties.items()
    )
    return [f"<table><tr><th>option<th>meaning{rows}</table>"]


def _example(path: str, example: dict[str, Any]) -> str:
    body = json.dumps(example["value"]).replace("'", "'\\''")
    command = (
        f"curl -H \"Authorization: Bearer $TOKEN\" -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}' http://127.0.0.1:8765{path}"
    )
    return f"<p>{_text(example['summary'])}:</p><pre>{_text(command)}</pre>"


def _text(value: object) -> str:
    return html.escape(str(value))

"""The front end: an ASGI app with every route of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sql
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from palestra.core.http.calls import error_body
from palestra.core.http.limits import AdmissionMiddleware, HttpLimits, RequestRejected
from palestra.core.http.origin_middleware import OriginPolicy
from palestra.service.server.answer_poller import AnswerPoller
from palestra.service.server.deps import BodyParser
from palestra.service.server.owner import QueueCounts
from palestra.service.server.routes import (
    archives,
    checkpoints,
    console,
    futures,
    mint,
    models,
    openai,
    sampling,
    sessions,
)
from palestra.service.server.state import ServiceContext
from palestra.service.storage.database import OUTAGE_ERRORS
from palestra.service.storage.weight_store import WeightsDamaged
from palestra.service.wire.schemas.wire_model import BadRequest

HTTP_LIMITS = HttpLimits(max_body_bytes=None, max_requests=4096)  # `deps.py` limits bodies as it reads them
RETRY_HEADERS = {"Retry-After": "1"}
UNSTORABLE = "a text or a number in the request cannot be stored: is there a NUL in it?"
NO_DATABASE = "the database is busy or gone: try again"
ROUTERS = [
    *((module.router, "/api/v1") for module in (sessions, models, sampling, futures, checkpoints, archives, mint)),
    (console.router, "/api/v1"),
    (openai.router, "/oai/api/v1"),
]


def create_app(
    context: ServiceContext, *, root_path: str = "", origins: OriginPolicy | None = None, with_metrics: bool = False
) -> FastAPI:
    """Builds the app, `with_metrics` at /metrics.

    Under `root_path` ("/train") it serves requests with the prefix and, behind a proxy that strips it, without.
    `origins` lists the web pages that may send requests.
    """
    origins = origins or OriginPolicy()
    app = FastAPI(title="palestra", docs_url=None, redoc_url=None)
    if with_metrics:
        _add_metrics(app, context)
    app.add_middleware(MountPrefix, prefix=root_path.rstrip("/"))
    if origins.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(AdmissionMiddleware, origins=origins, limits=HTTP_LIMITS)  # the last one added runs first
    app.state.context, app.state.queue, app.state.waiter = context, QueueCounts(context), AnswerPoller(context)
    for router, prefix in ROUTERS:
        app.include_router(router, prefix=prefix)
    app.add_exception_handler(BadRequest, _bad_request)
    # of a body that arrives too slowly: the rest of it is not read
    app.add_exception_handler(RequestRejected, _answer_with(None, headers={"Connection": "close"}))
    app.add_exception_handler(ClientDisconnect, _answer_with(499, "the client disconnected"))  # it reads no answer
    app.add_exception_handler(WeightsDamaged, _answer_with(410))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(sql.exc.DataError, _answer_with(400, UNSTORABLE))
    for error in OUTAGE_ERRORS:
        app.add_exception_handler(error, _answer_with(503, NO_DATABASE, RETRY_HEADERS))
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_metrics(app: FastAPI, context: ServiceContext) -> None:
    from palestra.service.server.metrics import MetricsMiddleware, ServiceMetrics, router

    app.state.metrics = ServiceMetrics(context.store)
    app.add_middleware(MetricsMiddleware, metrics=app.state.metrics)  # the innermost: it sees which function answers
    app.include_router(router)


class MountPrefix:
    """ASGI middleware that sets the app's `root_path`. uvicorn's own setting would add the prefix to paths that already
    have it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "root_path": self.prefix}, receive, send)


def _answer_with(status: int | None, detail: str = "", headers: dict[str, str] | None = None) -> Any:
    """Returns an error handler that answers with `status` and `detail`, or else with those of the error itself."""

    async def answer(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"detail": detail or str(error)}, status or error.status, headers)

    return answer


async def _bad_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BadRequest)
    body = {"detail": str(error)}
    if "/oai/" in request.url.path:
        body |= error_body(error.status, str(error))
    return JSONResponse(body, error.status, RETRY_HEADERS if error.status in (429, 503) else None)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Answers errors in path, query and header values; bodies are parsed by `deps.py`."""
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return JSONResponse({"detail": wrong}, 422)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if error.status_code in (404, 405):
        detail = f"this server has no {request.method} {request.url.path[:200]}: see docs/service.md for what it serves"
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI schema, including the bodies read through `Json`."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = [(f"{prefix}{path}", method, body) for r, prefix in ROUTERS for path, method, body in _bodies(r)]
        template = "#/components/schemas/{model}"
        _, models = models_json_schema([(body, "validation") for _, _, body in bodies], ref_template=template)
        schema["components"]["schemas"] |= models["$defs"]
        for path, method, body in bodies:
            content = {"application/json": {"schema": {"$ref": template.format(model=body.__name__)}}}
            schema["paths"][path][method]["requestBody"] = {"content": content, "required": True}
        app.openapi_schema = schema
    return app.openapi_schema


def _bodies(router: APIRouter) -> Iterator[tuple[str, str, Any]]:
    """Yields path, method and body model of each route that reads its body through `Json`."""
    for route in (route for route in router.routes if isinstance(route, APIRoute)):
        for read in (needed.call for needed in route.dependant.dependencies if isinstance(needed.call, BodyParser)):
            yield from ((route.path, method.lower(), read.model) for method in route.methods or ())

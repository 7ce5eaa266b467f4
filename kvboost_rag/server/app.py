"""The ASGI application."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost_rag.engine import KVBoost
from kvboost_rag.server import document_routes, generation_routes, page_routes, service_routes
from kvboost_rag.server.document_jobs import DocumentJobs
from kvboost_rag.server.errors import ApiError, as_api_error
from kvboost_rag.server.settings import ServerSettings
from kvboost_rag.server.state import Gate, ServerState
from kvboost_rag.server.telemetry import Telemetry


def create_app(engine: KVBoost, settings: ServerSettings, registry: Any = None) -> FastAPI:
    """The server of an engine, which stays the caller's to close.

    Args:
        registry: prometheus_client's registry that the engine reports to; None: a new one.
    """
    from prometheus_client import CollectorRegistry

    telemetry = Telemetry(registry if registry is not None else CollectorRegistry())
    jobs = DocumentJobs(engine, settings.chunk_tokens)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()

    # Its pages of documentation load scripts from other hosts.
    app = FastAPI(title="kvboost-rag", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.kvboost = ServerState(engine, settings, telemetry, jobs, Gate(settings.max_requests))
    for routes in (generation_routes, document_routes, service_routes):
        app.include_router(routes.router)
    app.include_router(page_routes.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _fault)
    app.add_middleware(_RequestId)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code="no_such_route")
    return JSONResponse(known.body, known.status, headers=error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=generation_routes.CLIENT_GONE)


async def _fault(request: Request, error: Exception) -> Response:
    known = as_api_error(error, begun=True)
    return JSONResponse(known.body, known.status)


class _RequestId:
    """Names each request, for logs: `x-request-id`, the client's where it sends a sane one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        known = given if given.isalnum() and len(given) <= 64 else uuid.uuid4().hex.encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", known)]
            await send(message)

        await self._app(scope, receive, named)

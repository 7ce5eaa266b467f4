"""Models, embeddings, health, metrics, the switch, and figures for the page."""

from __future__ import annotations

import asyncio
import base64
import os
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost_rag.indexing.similar_chunks import NoEmbedderError
from kvboost_rag.server import bodies
from kvboost_rag.server.errors import ApiError, refused
from kvboost_rag.server.reuse_choice import reuse_choice
from kvboost_rag.server.state import ServerState, admin_of, read_body, state_of, tenant_of

router = APIRouter()
_READY_PATIENCE_S = 5.0
DISABLE = "KVBOOST_DISABLE"


@router.get("/v1/models")
async def models(request: Request) -> Response:
    tenant_of(request)
    state = state_of(request)
    return JSONResponse(
        {"object": "list", "data": [_model(state, name) for name in (state.model_name, *state.adapter_names)]}
    )


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> Response:
    tenant_of(request)
    state_of(request).adapter_of(model_id)
    return JSONResponse(_model(state_of(request), model_id))


def _model(state: ServerState, name: str) -> dict[str, Any]:
    limit = state.engine.context_tokens
    about = {"id": name, "object": "model", "created": 0, "owned_by": "kvboost-rag", "max_model_len": limit}
    return about if name == state.model_name else about | {"parent": state.model_name}


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """By the embedder that chunks are chosen with."""
    state, tenant = state_of(request), tenant_of(request)
    body = bodies.read(bodies.EmbeddingsBody, await read_body(request))
    state.adapter_of(body.model)
    state.meter.admit(tenant)
    texts = [body.input] if isinstance(body.input, str) else body.input
    try:
        vectors = await asyncio.to_thread(state.engine.similar.embed, texts)
    except NoEmbedderError as error:
        raise ApiError(400, str(error), code="no_embedder") from error
    if body.dimensions not in (None, vectors.shape[1]):
        raise refused("dimensions", f"the embedder gives {vectors.shape[1]}", "invalid_value")
    plain = body.encoding_format != "base64"
    rows = [v.tolist() if plain else base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    num_tokens = sum(map(state.engine.tokens.count, texts))
    state.meter.spend(tenant, num_tokens)
    used = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": used})


@router.get("/health")
async def health() -> Response:
    """The process lives."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Requests can be served: 503 with the reason otherwise."""
    state = state_of(request)
    reason = "shutting down" if state.draining else await _fault(state)
    if reason is not None:
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)
    return JSONResponse({"status": "ready", "model": state.model_name})


async def _fault(state: ServerState) -> str | None:
    """What is wrong with the store or the worker, or None."""
    try:
        await asyncio.wait_for(asyncio.to_thread(len, state.engine.store.catalog), _READY_PATIENCE_S)
    except asyncio.TimeoutError:
        return f"the store's catalog does not answer within {_READY_PATIENCE_S:.0f} s"
    except Exception as error:
        return f"the store cannot be read: {type(error).__name__}"
    return None if state.engine.is_alive else "the engine's worker has ended"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    if not state_of(request).settings.open_metrics:
        admin_of(request)
    text = await asyncio.to_thread(state_of(request).telemetry.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/kvboost/switch")
async def switch(request: Request) -> Response:
    """Turn reuse off or on for every request from now on: sets `KVBOOST_DISABLE` in this process."""
    admin_of(request)
    body = bodies.read(bodies.SwitchBody, await read_body(request))
    os.environ[DISABLE] = "0" if body.enabled else "1"
    return JSONResponse({"enabled": reuse_choice({}, state_of(request).engine, state_of(request).settings).enabled})


@router.get("/kvboost/stats")
async def stats(request: Request) -> Response:
    """Figures of the whole server, for the page."""
    admin_of(request)
    state = state_of(request)
    counters = await asyncio.to_thread(state.engine.stats)
    return JSONResponse({"model": state.model_name, "requests_inside": state.gate.inside, **asdict(counters)})

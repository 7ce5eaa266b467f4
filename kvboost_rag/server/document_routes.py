"""`/v1/documents`: what the store is to hold, by source id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvboost_rag.server import bodies
from kvboost_rag.server.document_jobs import DocumentJob
from kvboost_rag.server.errors import ApiError, as_api_error
from kvboost_rag.server.state import ServerState, read_body, state_of, tenant_of

router = APIRouter()
_LOOK_S = 0.1
"""Between two looks at a job's progress."""


@router.post("/v1/documents")
async def upsert(request: Request) -> Response:
    """Queue documents: 202 and a job, its progress as events (`stream`), or its end (`wait`)."""
    state, tenant = state_of(request), tenant_of(request)
    body = bodies.read(bodies.DocumentsBody, await read_body(request))
    state.meter.admit(tenant)
    job = state.jobs.submit(body.documents, tenant.namespace)
    if body.stream:
        return StreamingResponse(_progress(job), media_type="text/event-stream")
    while body.wait and not job.finished.is_set():
        await asyncio.sleep(_LOOK_S)
    status = 202 if not job.finished.is_set() else 200 if job.error is None else 500 if _ours(job) else 400
    return JSONResponse(job.as_json() if job.error is None else {"error": job.error}, status)


def _ours(job: DocumentJob) -> bool:
    return job.error is not None and job.error["type"] == "server_error"


async def _progress(job: DocumentJob) -> AsyncIterator[bytes]:
    shown = None
    while True:
        over, now = job.finished.is_set(), job.as_json()
        if now != shown:
            yield f"data: {json.dumps(now)}\n\n".encode()
            shown = now
        if over:
            yield b"data: [DONE]\n\n"
            return
        await asyncio.sleep(_LOOK_S)


@router.get("/v1/jobs/{job_id}")
async def job(request: Request, job_id: str) -> Response:
    return JSONResponse(state_of(request).jobs.get(job_id, tenant_of(request).namespace).as_json())


@router.get("/v1/documents")
async def listing(request: Request) -> Response:
    tenant, index = tenant_of(request), state_of(request).engine.index
    names = await asyncio.to_thread(index.sources, namespace=tenant.namespace)
    return JSONResponse({"object": "list", "data": [{"id": name, "object": "document"} for name in names]})


@router.get("/v1/documents/{source_id:path}")
async def one(request: Request, source_id: str) -> Response:
    tenant = tenant_of(request)
    return JSONResponse(await asyncio.to_thread(_describe, state_of(request), source_id, tenant.namespace))


def _describe(state: ServerState, source_id: str, namespace: str) -> dict[str, Any]:
    index, store = state.engine.index, state.engine.store
    keys = index.chunks_of(source_id, namespace=namespace)
    if not keys and not index.has(source_id, namespace=namespace):
        raise ApiError(404, f"no document {source_id!r}", code="document_not_found")
    records = store.catalog.get_many(keys)
    chunks = [
        {"content_hash": k, "text": records[k].text, "num_tokens": len(records[k].token_ids), "stored": k in store}
        for k in keys
        if k in records
    ]
    return {"id": source_id, "object": "document", "chunks": chunks}


@router.delete("/v1/documents/{source_id:path}")
async def delete(request: Request, source_id: str) -> Response:
    state, tenant = state_of(request), tenant_of(request)
    try:
        forgotten = await asyncio.to_thread(state.engine.index.delete, source_id, namespace=tenant.namespace)
    except KeyError:
        raise ApiError(404, f"no document {source_id!r}", code="document_not_found") from None
    except Exception as error:
        raise as_api_error(error) from error
    return JSONResponse({"id": source_id, "object": "document", "deleted": True, "chunks_forgotten": forgotten})

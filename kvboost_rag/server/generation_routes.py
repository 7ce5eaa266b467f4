"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvboost_rag.server import bodies
from kvboost_rag.server.bodies import ChatBody, CompletionBody, Generation
from kvboost_rag.server.calls import Call, chat_calls, completion_calls
from kvboost_rag.server.choices import Piece, answers
from kvboost_rag.server.errors import ApiError, as_api_error, refused
from kvboost_rag.server.keys import Tenant
from kvboost_rag.server.reuse_choice import ReuseChoice, reuse_choice
from kvboost_rag.server.shapes import ChatShape, Shape, TextShape, usage
from kvboost_rag.server.state import ServerState, read_body, state_of, tenant_of
from kvboost_rag.server.telemetry import RequestWatch
from kvboost_rag.server.token_text import token_text

logger = logging.getLogger(__name__)
router = APIRouter()
REPORT, DEADLINE = "x-kvboost-report", "x-kvboost-deadline-ms"
CLIENT_GONE = 499
"""Status in metrics of a request whose client went away."""


@dataclass
class Exchange:
    """One request on its way to an answer."""

    state: ServerState
    tenant: Tenant
    choice: ReuseChoice
    body: Generation
    shape: Shape
    calls: Sequence[Call]
    watch: RequestWatch
    deadline: float

    @property
    def per_prompt(self) -> int:
        return self.body.n or 1

    def pieces(self) -> AsyncGenerator[Piece, None]:
        return answers(self.state.engine, self.calls, self.deadline)

    def settle(self, results: Sequence[Any]) -> dict[str, Any]:
        """Count what was used."""
        counts = usage(results, self.per_prompt)
        self.watch.count_tokens(counts)
        self.state.meter.spend(self.tenant, counts["total_tokens"])
        return counts


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _generate(request, ChatBody)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _generate(request, CompletionBody)


async def _generate(request: Request, kind: type[Any]) -> Response:
    exchange = await _exchange(request, kind)
    held = contextlib.ExitStack()
    held.enter_context(exchange.state.gate.enter(len(exchange.calls)))
    held.enter_context(exchange.watch)
    with held:
        try:
            if exchange.body.stream:
                return await _begin_stream(request, exchange, held)
            whole: Response = await unless_gone(request, _whole(exchange))
            return whole
        except (ClientDisconnect, asyncio.CancelledError):
            exchange.watch.status = CLIENT_GONE
            raise
        except Exception as error:
            known = as_api_error(error, begun=exchange.watch.begun)
            exchange.watch.status = known.status
            raise known from error


async def _exchange(request: Request, kind: type[Any]) -> Exchange:
    """Check everything that can be checked before any work starts.

    Raises:
        ApiError: the request is refused.
    """
    state, tenant = state_of(request), tenant_of(request)
    if state.draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)
    body = bodies.read(kind, await read_body(request))
    adapter = state.adapter_of(body.model)
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "only with stream: true", "invalid_value")
    choice = reuse_choice(request.headers, state.engine, state.settings)
    deadline = time.monotonic() + _seconds(request, state)
    state.meter.admit(tenant)
    options = {**choice.options, "namespace": tenant.namespace, "adapter": adapter}
    make = chat_calls if kind is ChatBody else completion_calls
    try:
        calls = await asyncio.to_thread(make, state.engine, body, options, state.settings.answer_tokens)
    except Exception as error:
        raise as_api_error(error) from error
    wanted_report = request.headers.get(REPORT, "").strip().lower()
    shape_of = ChatShape if kind is ChatBody else TextShape
    tokenizer = state.engine.tokenizer
    spell = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    shape = shape_of(body.model, wanted_report, partial(token_text, tokenizer), spell)
    watch = RequestWatch(state.telemetry, request.url.path, choice)
    return Exchange(state, tenant, choice, body, shape, calls, watch, deadline)


def _seconds(request: Request, state: ServerState) -> float:
    asked = request.headers.get(DEADLINE)
    if asked is None:
        return state.settings.deadline_s
    if not asked.isdecimal() or int(asked) < 1:
        raise refused(DEADLINE, "expected milliseconds, 1 or more", "invalid_value")
    return min(int(asked) / 1000, state.settings.deadline_s)


async def _whole(exchange: Exchange) -> Response:
    """All answers, then one JSON object."""
    by_index: dict[int, list[Piece]] = {i: [] for i in range(len(exchange.calls))}
    async with contextlib.aclosing(exchange.pieces()) as pieces:
        async for piece in pieces:
            exchange.watch.first_token()
            by_index[piece.index].append(piece)
    results = [group[-1].result for group in by_index.values()]
    whole = exchange.shape.whole([exchange.shape.choice(group) for group in by_index.values()])
    whole["usage"] = exchange.settle(results)
    return JSONResponse(exchange.shape.reported(whole, by_index[0][-1]), headers=exchange.choice.headers)


async def _begin_stream(request: Request, exchange: Exchange, held: contextlib.ExitStack) -> Response:
    """Wait for the first piece, so that what is wrong with a request is a status and not the middle of a stream."""
    pieces = exchange.pieces()
    try:
        first = await unless_gone(request, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    exchange.watch.first_token()
    body = _events(exchange, first, pieces, held.pop_all())
    headers = {**exchange.choice.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return _Stream(body, media_type="text/event-stream", headers=headers)


class _Stream(StreamingResponse):
    """Closes what it streams however it ends; a client that was gone before the first byte included."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


class _events:  # noqa: N801 - an async generator that also cleans up where it never began
    """Server-sent events of a stream: chunks, errors, usage, the end."""

    def __init__(
        self, exchange: Exchange, first: Piece, pieces: AsyncGenerator[Piece, None], held: contextlib.ExitStack
    ) -> None:
        self._exchange, self._pieces, self._held = exchange, pieces, held
        self._events = self._run(first)
        self._closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def aclose(self) -> None:
        """Stop the answers and count the request, once."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._events.aclose()
            await self._pieces.aclose()
        finally:
            self._held.close()

    async def _run(self, first: Piece) -> AsyncGenerator[bytes, None]:
        exchange, watch = self._exchange, self._exchange.watch
        results: dict[int, Any] = {}
        begun: set[int] = set()
        watch.status = CLIENT_GONE  # until it has ended otherwise
        try:
            piece: Piece | None = first
            while piece is not None:
                for chunk in exchange.shape.chunks(piece, piece.index not in begun):
                    yield _event(chunk | ({"usage": None} if self._with_usage else {}))
                begun.add(piece.index)
                if piece.result is not None:
                    results[piece.index] = piece.result
                piece = await anext(self._pieces, None)
        except Exception as error:
            known = as_api_error(error, begun=True)
            watch.status = known.status
            yield _event(known.body)
            return
        counts = exchange.settle([results[i] for i in sorted(results)])
        if self._with_usage:
            yield _event(exchange.shape.usage_chunk(counts))
        watch.status = 200
        yield b"data: [DONE]\n\n"

    @property
    def _with_usage(self) -> bool:
        options = self._exchange.body.stream_options
        return options is not None and options.include_usage


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def unless_gone(request: Request, work: Any) -> Any:
    """What `work` gives, unless the client goes away first: then it is cancelled.

    Raises:
        ClientDisconnect: it went away.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""One answer of the engine, piece by piece, as the shapes of the API need it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from kvboost_rag.adapters.aio import iterate
from kvboost_rag.adapters.tool_calls import AnswerStream, ToolCall
from kvboost_rag.datamodels import GenerationResult, StreamEvent
from kvboost_rag.engine import KVBoost
from kvboost_rag.server.calls import Call
from kvboost_rag.server.processors import TokenLogprob


@dataclass(frozen=True)
class Piece:
    """Part of answer `index`; the last one carries the result.

    Attributes:
        logprobs: of tokens that were chosen since the last piece (their text may still be held back).
    """

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    result: GenerationResult | None = None

    @property
    def finish_reason(self) -> str | None:
        if self.result is None:
            return None
        if self.calls:
            return "tool_calls"
        return "length" if self.result.finish_reason == "length" else "stop"


def call_id() -> str:
    """A fresh id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


async def answer(engine: KVBoost, call: Call, index: int, deadline: float) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer.

    Args:
        deadline: `time.monotonic()` when it has taken too long.

    Raises:
        TimeoutError: it did.
    """

    def start(cancelled: threading.Event) -> Any:
        return engine.stream(call.prompt, params=call.params, cancelled=cancelled, **call.options)

    text, seen = AnswerStream(call.tool_names), 0
    async with contextlib.aclosing(iterate(start)) as events:
        while True:
            event = await _next(events, deadline)
            entries = call.record.tokens[seen:] if call.record is not None else []
            seen += len(entries)
            kept = tuple(e for e in entries if e.token_id not in engine.eos_token_ids)
            if event.result is not None:
                rest, parsed = text.finish()
                calls = parsed.calls if call.parallel else parsed.calls[:1]
                yield Piece(index, rest, kept, calls, event.result)
                return
            delta = text.push(event.delta)
            if delta or kept:
                yield Piece(index, delta, kept)


async def _next(events: AsyncGenerator[StreamEvent, None], deadline: float) -> StreamEvent:
    try:
        with anyio.fail_after(max(0.0, deadline - time.monotonic())):
            return await anext(events)
    except StopAsyncIteration:
        raise RuntimeError("the engine was closed before the answer ended") from None


async def answers(engine: KVBoost, calls: Sequence[Call], deadline: float) -> AsyncGenerator[Piece, None]:
    """The pieces of several answers as they come. Closing it stops all of them."""
    if len(calls) == 1:
        async with contextlib.aclosing(answer(engine, calls[0], 0, deadline)) as pieces:
            async for piece in pieces:
                yield piece
        return
    ready: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def pump(call: Call, index: int) -> None:
        try:
            async with contextlib.aclosing(answer(engine, call, index, deadline)) as pieces:
                async for piece in pieces:
                    ready.put_nowait(piece)
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(call, i)) for i, call in enumerate(calls)]
    try:
        running = len(tasks)
        while running:
            item = await ready.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

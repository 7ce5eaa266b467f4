"""Streams under asyncio: the loop stays free, errors arrive, closing early stops the producer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvboost_rag.adapters.aio import iterate


async def test_items_arrive_while_the_loop_runs() -> None:
    gate = threading.Semaphore(0)
    ticks = 0

    def produce(cancelled: threading.Event) -> Iterator[int]:
        for i in range(5):
            gate.acquire(timeout=5)
            yield i

    async def tick() -> None:
        nonlocal ticks
        while ticks < 50:
            ticks += 1
            gate.release()
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    assert [item async for item in iterate(produce)] == [0, 1, 2, 3, 4]
    await ticking
    assert ticks == 50


async def test_errors_are_raised_where_the_items_are_awaited() -> None:
    def produce(cancelled: threading.Event) -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("in the thread")

    stream = iterate(produce)
    assert await anext(stream) == 1
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        await anext(stream)


async def test_closing_early_closes_the_iterator() -> None:
    closed = threading.Event()

    def produce(cancelled: threading.Event) -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    stream = iterate(produce)
    assert await stream.__anext__() == 1
    await stream.aclose()
    assert await asyncio.to_thread(closed.wait, 5)


async def test_cancelling_reaches_an_iterator_that_waits_for_its_first_item() -> None:
    ended = threading.Event()

    def produce(cancelled: threading.Event) -> Iterator[int]:
        assert cancelled.wait(5)
        ended.set()
        return
        yield

    async def consume() -> None:
        async for _ in iterate(produce):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 5)

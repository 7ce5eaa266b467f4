"""The async methods leave the event loop free, can be cancelled, and hand on errors."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.kvboost import KVBoostLLM
from llama_index_kvboost.helpers import USER, MakeLLM


async def ticks_during(work: Any) -> int:
    """How often the loop ran while `work` was awaited."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await work
    ticking.cancel()
    return ticks


async def _drain(stream: Any) -> None:
    async for _ in await stream:
        pass


@pytest.mark.parametrize("method", ["acomplete", "achat", "astream_complete", "astream_chat"])
async def test_the_event_loop_stays_free(make_llm: MakeLLM, method: str) -> None:
    llm = make_llm(max_new_tokens=16)
    prompt: Any = USER if "chat" in method else "The store holds"
    call = getattr(llm, method)(prompt)
    assert await ticks_during(_drain(call) if "stream" in method else call) >= 3


async def test_many_calls_at_once_give_the_answers_of_single_calls(make_llm: MakeLLM) -> None:
    llm = make_llm()
    questions = [[ChatMessage(content=f"Which store holds {n}?")] for n in range(5)]
    alone = [llm.chat(q).message.content for q in questions]
    together = await asyncio.gather(*(llm.achat(q) for q in questions))
    assert [r.message.content for r in together] == alone


def _wait_until_free(llm: KVBoostLLM) -> float:
    """Seconds until the engine takes the next job."""
    start = time.monotonic()
    llm.engine._parts.worker.submit(lambda: None).result(timeout=30)
    return time.monotonic() - start


class Slow:
    """A stopping criterion that never stops and makes each token take its time; counts the tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first = threading.Event()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        self.tokens += 1
        self.first.set()
        time.sleep(0.02)
        return torch.zeros(1, dtype=torch.bool)


async def test_cancelling_stops_the_model(make_llm: MakeLLM) -> None:
    llm, slow = make_llm(), Slow()
    task = asyncio.create_task(llm.achat(USER, max_new_tokens=1000, stopping_criteria=[slow]))
    await asyncio.to_thread(slow.first.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(_wait_until_free, llm)
    assert slow.tokens < 1000


async def _consume(llm: KVBoostLLM, method: str) -> None:
    call = getattr(llm, method)(USER if "chat" in method else "The store holds")
    await (_drain(call) if "stream" in method else call)


@pytest.mark.parametrize("method", ["acomplete", "achat", "astream_complete", "astream_chat"])
async def test_a_request_cancelled_in_the_queue_is_never_served(make_llm: MakeLLM, method: str) -> None:
    llm, gate = make_llm(), threading.Event()
    worker = llm.engine._parts.worker
    worker.submit(lambda: gate.wait(20))
    task = asyncio.create_task(_consume(llm, method))
    while worker._unfinished < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await asyncio.to_thread(_wait_until_free, llm)
    assert llm.engine.stats().requests == 0
    assert llm.complete("The store").text


async def test_leaving_a_stream_early_stops_the_model(make_llm: MakeLLM) -> None:
    llm, slow = make_llm(), Slow()
    stream = await llm.astream_chat(USER, max_new_tokens=1000, stopping_criteria=[slow])
    await stream.__anext__()
    await stream.aclose()
    del stream
    await asyncio.sleep(0)
    await asyncio.to_thread(_wait_until_free, llm)
    assert slow.tokens < 1000


def test_leaving_a_blocking_stream_early_stops_the_model(make_llm: MakeLLM) -> None:
    llm, slow = make_llm(), Slow()
    stream = llm.stream_complete("The store", max_new_tokens=1000, stopping_criteria=[slow])
    next(stream)
    stream.close()
    _wait_until_free(llm)
    assert slow.tokens < 1000


class Broken:
    """Fails at the third token."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.tokens += 1
        if self.tokens == 3:
            raise ZeroDivisionError("in the model's thread")
        return scores


async def test_an_error_in_the_models_thread_reaches_the_caller(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(ZeroDivisionError, match="in the model's thread"):
        list(llm.stream_complete("The store", logits_processor=[Broken()]))
    with pytest.raises(ZeroDivisionError):
        llm.chat(USER, logits_processor=[Broken()])
    with pytest.raises(ZeroDivisionError):
        await llm.achat(USER, logits_processor=[Broken()])
    with pytest.raises(ZeroDivisionError):
        await _drain(llm.astream_chat(USER, logits_processor=[Broken()]))
    assert llm.complete("The store").text

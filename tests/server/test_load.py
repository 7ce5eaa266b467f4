"""Many clients of all kinds at once: nobody gets an error that is not their own, every answer is right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from corpus_texts import document
from serving_helpers import LiveServer, wait_until

NUM_CLIENTS, ROUNDS = 64, 3
PROMPTS = [
    "Read.\n\n" + "\n\n".join(document((n + i) % 4, 2) for i in range(n % 4)) + f"\n\nQuestion {n}?" for n in range(8)
]


def body(number: int, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]
    return {"model": "tiny", "messages": messages, "max_tokens": 12, "stream": True} | more


@pytest.mark.slow
async def test_a_crowd(start_server: Callable[..., LiveServer]):
    server = start_server(max_requests=256)
    server.engine.warm([document(n, 2) for n in range(4)])
    url = f"{server.url}/v1/chat/completions"

    async def read(client: httpx.AsyncClient, number: int, pause_s: float = 0.0) -> str:
        text = ""
        async with client.stream("POST", url, json=body(number)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    text += chunk["choices"][0]["delta"].get("content") or ""
                    await asyncio.sleep(pause_s)
        return text

    async def one(client: httpx.AsyncClient, number: int) -> None:
        kind = number % 8
        if kind == 0:  # leaves in the middle
            async with client.stream("POST", url, json=body(number, max_tokens=500)) as response:
                await anext(response.aiter_lines())
        elif kind == 1:
            assert (await client.post(url, content=b"{no json")).status_code == 400
        elif kind == 2:
            giant = body(number, messages=[{"role": "user", "content": "word " * 5000}])
            assert (await client.post(url, json=giant)).status_code == 400
        else:
            assert await read(client, number, 0.05 if kind == 3 else 0.0) == alone[number % len(PROMPTS)]

    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        alone = [await read(client, n) for n in range(len(PROMPTS))]
        for _ in range(ROUNDS):
            await asyncio.gather(*(one(client, n) for n in range(NUM_CLIENTS)))
    wait_until(lambda: server.app.state.kvboost.gate.inside == 0)
    text = server.get("/metrics").text
    assert 'status="500"' not in text
    assert 'status="429"' not in text
    assert "kvboost_requests_waiting 0.0" in text
    assert "kvboost_requests_running 0.0" in text

"""Clients of every kind that a public server meets; each visit is one request.

A visit returns nothing where the server did what it must, and raises `Fault` where it did not.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvbench.server_client import stream

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Fault(Exception):
    """Something that the server should not have done."""


@dataclass(frozen=True)
class Ask:
    """A request whose answer is known.

    Attributes:
        answer: what it was answered when it was alone.
    """

    path: str
    body: dict[str, Any]
    answer: str = ""


@dataclass(frozen=True)
class Visit:
    """One client on its way in."""

    client: httpx.AsyncClient
    url: str
    ask: Ask
    draw: random.Random

    @property
    def address(self) -> str:
        return self.url + self.ask.path

    def compare(self, text: str) -> None:
        if text != self.ask.answer:
            raise Fault(f"{self.ask.path} answered {text!r}, alone it was {self.ask.answer!r}")


async def streams(visit: Visit) -> None:
    visit.compare((await stream(visit.client, visit.address, visit.ask.body)).text)


async def reads_slowly(visit: Visit) -> None:
    visit.compare((await stream(visit.client, visit.address, visit.ask.body, pause_s=0.1)).text)


async def takes_it_whole(visit: Visit) -> None:
    """Two answers at once, each as alone (a seed is the first one's)."""
    response = await visit.client.post(visit.address, json=visit.ask.body | {"n": 2})
    if response.status_code != 200:
        raise Fault(f"{response.status_code}: {response.text[:300]}")
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in response.json()["choices"]]
    for text in texts[:1] if "seed" in visit.ask.body else texts:
        visit.compare(text or "")


async def leaves_early(visit: Visit) -> None:
    """At any time: while it waits, or in the middle of the answer."""
    work = stream(visit.client, visit.address, visit.ask.body | {"max_tokens": 500})
    try:
        await asyncio.wait_for(work, visit.draw.uniform(0.001, 0.5))
    except asyncio.TimeoutError:
        return


async def never_reads(visit: Visit) -> None:
    """Asks for much, takes nothing, and is gone without a word."""
    body = json.dumps(visit.ask.body | {"max_tokens": 500, "stream": True, "n": 2}).encode()
    await _raw(visit, body, len(body), visit.draw.uniform(0.1, 2.0))


async def breaks_off_its_body(visit: Visit) -> None:
    body = json.dumps(visit.ask.body).encode()
    await _raw(visit, body[: len(body) // 2], len(body), 0.05)


async def speaks_no_http(visit: Visit) -> None:
    reader, writer = await asyncio.open_connection(urlsplit(visit.url).hostname, urlsplit(visit.url).port)
    writer.write(visit.draw.randbytes(200) + b"\r\n\r\n")
    await asyncio.wait_for(reader.read(), 60)
    writer.close()


async def sends_nonsense(visit: Visit) -> None:
    good = visit.ask.body
    wrong: list[tuple[int, bytes]] = [
        (400, b"{no json"),
        (400, b"\xff\xfe\x00"),
        (400, b"[" * 5000),
        (400, json.dumps(good | {"max_tokens": -1}).encode()),
        (400, json.dumps(good | {"temperature": "hot"}).encode()),
        (400, json.dumps(good | {"no_such_field": 1}).encode()),
        (400, json.dumps(good | {"logit_bias": {"99999999": 1}}).encode()),
        (400, json.dumps({"model": good["model"], "messages": []}).encode()),
        (400, json.dumps({"model": good["model"], "messages": [{"role": "nobody"}]}).encode()),
        (404, json.dumps(good | {"model": "another"}).encode()),
    ]
    status, body = visit.draw.choice(wrong)
    response = await visit.client.post(visit.address, content=body)
    if response.status_code != status or "error" not in response.json():
        raise Fault(f"{body[:100]!r} got {response.status_code}, not {status}: {response.text[:300]}")


async def sends_a_giant(visit: Visit) -> None:
    """More than the model can take, or more than the server reads."""
    size, status = visit.draw.choice([(60_000, 400), (9 * 2**20, 413)])
    word = "word " * (size // 5)
    said = {"messages": [{"role": "user", "content": word}]} if visit.ask.path == CHAT else {"prompt": word}
    body = {key: value for key, value in visit.ask.body.items() if key not in ("messages", "prompt")}
    try:
        response = await visit.client.post(visit.address, json=body | said)
    except (httpx.WriteError, httpx.ReadError):
        if status == 413:  # it hung up before all was sent
            return
        raise
    if response.status_code != status:
        raise Fault(f"a prompt of {size} characters got {response.status_code}, not {status}: {response.text[:300]}")


async def _raw(visit: Visit, body: bytes, declared: int, stay_s: float) -> None:
    """A request by hand; the connection is cut after a while, whatever has come."""
    _, writer = await asyncio.open_connection(urlsplit(visit.url).hostname, urlsplit(visit.url).port)
    head = f"POST {visit.ask.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {declared}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    await asyncio.sleep(stay_s)
    writer.transport.abort()


Guest = Callable[[Visit], Awaitable[None]]
GUESTS: dict[Guest, int] = {
    streams: 10,
    takes_it_whole: 2,
    reads_slowly: 2,
    leaves_early: 2,
    never_reads: 1,
    breaks_off_its_body: 1,
    speaks_no_http: 1,
    sends_nonsense: 2,
    sends_a_giant: 1,
}
"""Each kind, and how often it comes."""

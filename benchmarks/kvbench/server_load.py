"""Many streams at once for some time, and whether the server bore it."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from kvbench.server_client import Refused, stream
from kvbench.server_guests import CHAT, GUESTS, TEXT, Ask, Fault, Visit

WORDS = ("store", "key", "value", "token", "prompt", "chunk", "layer", "model", "answer", "question", "memory", "disk")
GROWTH, SLACK_BYTES = 0.05, 32 * 2**20
"""How much more memory a process may hold at the end than in the second quarter of the time."""
MEMORY_FROM_S = 60.0
"""Shorter loads say nothing about memory: allocators and caches still fill."""


class LoadError(Exception):
    """The server did something that it should not have done."""


def documents(count: int, num_characters: int = 1200) -> list[str]:
    """Texts that are long enough to be reused."""
    made = []
    for number in range(count):
        draw = random.Random(number)
        text = f"Document {number}."
        while len(text) < num_characters:
            text += " " + " ".join(draw.choices(WORDS, k=9)).capitalize() + "."
        made.append(text)
    return made


def asks(model: str, texts: Sequence[str], count: int) -> list[Ask]:
    """Chats and completions over none, one or two of the texts; some are sampled with a seed."""
    made = []
    for number in range(count):
        draw = random.Random(1000 + number)
        parts = ["Read.", *draw.sample(list(texts), number % 3), f"Question {number}?"]
        body: dict[str, Any] = {"model": model, "max_tokens": 8 + number % 17}
        if number % 4 == 3:
            body |= {"temperature": 0.9, "seed": number}
        said: dict[str, Any] = {"prompt": "\n\n".join(parts)}
        if number % 5 < 3:
            said = {"messages": [{"role": "user", "content": "\n\n".join(parts)}]}
        made.append(Ask(CHAT if "messages" in said else TEXT, body | said))
    return made


@dataclass
class Load:
    """One server under load.

    Attributes:
        least: visits of each stream, even if the time is over.
        visits: by kind of guest.
        faults: what went wrong, at most twenty.
        rss: (seconds since the start, bytes) of the server's process.
    """

    url: str
    model: str
    streams: int
    seed: int = 0
    least: int = 0
    visits: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)
    known: list[Ask] = field(default_factory=list)

    async def run(self, seconds: float, rss_bytes: Callable[[], int] | None = None) -> str:
        """Guests for so long; returns what to print.

        Raises:
            LoadError: an answer was wrong, something failed that was not a client's fault, requests were left behind,
                or memory grew.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.streams)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            await self.learn(client)
            start = time.monotonic()
            end = start + seconds
            watch = asyncio.ensure_future(self._watch(start, rss_bytes)) if rss_bytes is not None else None
            await asyncio.gather(*(self._one(client, number, end) for number in range(self.streams)))
            if watch is not None:
                watch.cancel()
            await self._all_left(client)
        if seconds >= MEMORY_FROM_S and self.rss:
            self.check_memory()
        if self.faults:
            raise LoadError("\n".join([self.summary(seconds), *self.faults]))
        return self.summary(seconds)

    async def learn(self, client: httpx.AsyncClient, count: int = 24) -> None:
        """Ask everything alone; the documents are sent first."""
        if self.known:
            return
        texts = documents(6)
        body = {"documents": [{"id": f"d{i}", "chunks": [text]} for i, text in enumerate(texts)], "wait": True}
        (await client.post(f"{self.url}/v1/documents", json=body)).raise_for_status()
        for ask in asks(self.model, texts, count):
            reply = await stream(client, self.url + ask.path, ask.body)
            self.known.append(replace(ask, answer=reply.text))

    def summary(self, seconds: float) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in self.visits.most_common())
        memory = f"; RSS {self._rss_at(0.25, 0.5):.0f} to {self._rss_at(0.8, 1.0):.0f} MiB" if self.rss else ""
        return f"{self.streams} streams, {seconds:.0f} s, {sum(self.visits.values())} visits ({kinds}){memory}"

    async def _one(self, client: httpx.AsyncClient, number: int, end: float) -> None:
        draw = random.Random(1000 * self.seed + number)
        done = 0
        while (time.monotonic() < end or done < self.least) and len(self.faults) < 20:
            done += 1
            (guest,) = draw.choices(list(GUESTS), list(GUESTS.values()))
            try:
                await guest(Visit(client, self.url, draw.choice(self.known), draw))
            except (Fault, Refused, httpx.TransportError, OSError, asyncio.TimeoutError) as error:
                self.faults.append(f"{guest.__name__}: {type(error).__name__}: {error}")
            self.visits[guest.__name__] += 1

    async def _watch(self, start: float, rss_bytes: Callable[[], int]) -> None:
        while True:
            self.rss.append((time.monotonic() - start, rss_bytes()))
            await asyncio.sleep(1.0)

    async def _all_left(self, client: httpx.AsyncClient) -> None:
        """Nobody is counted as being inside, and no request ended in a fault of the server."""
        empty = ("kvboost_requests_waiting 0.0", "kvboost_requests_running 0.0")
        deadline = time.monotonic() + 60
        while True:
            text = (await client.get(f"{self.url}/metrics")).text
            if all(line in text for line in empty):
                break
            if time.monotonic() > deadline:
                self.faults.append("requests are still counted as under way")
                break
            await asyncio.sleep(0.2)
        self.faults += [line for line in text.splitlines() if line.startswith("kvboost_requests_total") and _bad(line)]

    def check_memory(self) -> None:
        """Note a fault if the process holds more at the end than in the second quarter of the time."""
        before, after = self._rss_at(0.25, 0.5), self._rss_at(0.8, 1.0)
        if after > (1 + GROWTH) * before + SLACK_BYTES / 2**20:
            self.faults.append(f"memory grew from {before:.0f} to {after:.0f} MiB")

    def _rss_at(self, begin: float, end: float) -> float:
        """Median over a part of the time, MiB."""
        last = self.rss[-1][0]
        part = [size for at, size in self.rss if begin * last <= at <= end * last]
        return statistics.median(part or [self.rss[-1][1]]) / 2**20


def _bad(line: str) -> bool:
    return any(f'status="{status}"' in line for status in ("429", "500", "503", "504"))

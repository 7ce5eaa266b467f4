"""The same prompts from one, four and sixteen clients at once, and what each saw of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvbench.server_client import Reply, stream

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Round:
    """What `clients` clients saw, each of whom sends its next prompt when it has the answer to the last.

    Attributes:
        wall_s: from the first request to the last answer's end.
    """

    clients: int
    replies: Sequence[Reply]
    wall_s: float

    @property
    def ttft_s(self) -> tuple[float, float]:
        """(median, longest)."""
        times = [reply.ttft_s for reply in self.replies]
        return statistics.median(times), max(times)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the round's time, their prefill included."""
        return float(sum(reply.usage["completion_tokens"] for reply in self.replies) / self.wall_s)

    @property
    def prompt_tokens(self) -> float:
        return statistics.mean(reply.usage["prompt_tokens"] for reply in self.replies)

    @property
    def cached_tokens(self) -> float | None:
        """Mean of a request; None where the server does not say."""
        said = [reply.cached_tokens for reply in self.replies]
        return None if None in said else statistics.mean(n for n in said if n is not None)


@dataclass(frozen=True)
class Rounds:
    """What to ask a server for.

    Attributes:
        prompts: for each number of clients its prompts, none of which is asked twice of one server.
        options: of every request's body.
    """

    prompts: dict[int, list[Messages]]
    options: dict[str, Any]

    def run(self, url: str, model: str, warm_up: Messages) -> list[Round]:
        """All rounds, after one answer that is not counted (it allocates and compiles)."""
        return asyncio.run(self._run(f"{url}/v1/chat/completions", model, warm_up))

    async def _run(self, url: str, model: str, warm_up: Messages) -> list[Round]:
        limits = httpx.Limits(max_connections=max(self.prompts))
        async with httpx.AsyncClient(timeout=900, limits=limits) as client:

            def ask(messages: Messages) -> Any:
                return stream(client, url, {"model": model, "messages": messages, **self.options})

            await ask(warm_up)
            return [await _round(ask, clients, prompts) for clients, prompts in self.prompts.items()]


async def _round(ask: Any, clients: int, prompts: Sequence[Messages]) -> Round:
    async def one(number: int) -> list[Reply]:
        return [await ask(messages) for messages in prompts[number::clients]]

    start = time.perf_counter()
    answered = await asyncio.gather(*map(one, range(clients)))
    wall_s = time.perf_counter() - start
    by_prompt = [answered[i % clients][i // clients] for i in range(len(prompts))]
    return Round(clients, by_prompt, wall_s)


def table_rows(name: str, rounds: Sequence[Round], reference: Sequence[Round]) -> list[list[str]]:
    """One line a round; `reference`: the rounds whose answers these are compared with."""
    rows = []
    for seen, other in zip(rounds, reference, strict=True):
        median, longest = seen.ttft_s
        same = sum(a.text == b.text for a, b in zip(seen.replies, other.replies, strict=True))
        cached = "not said" if seen.cached_tokens is None else f"{seen.cached_tokens:.0f}"
        figures = [f"{median:.2f}", f"{longest:.2f}", f"{seen.tokens_per_s:.1f}", f"{seen.prompt_tokens:.0f}", cached]
        rows.append([name, str(seen.clients), *figures, f"{same}/{len(seen.replies)}"])
    return rows


HEADER = ["", "clients", "TTFT s", "longest", "tokens/s", "prompt", "cached", "same answer"]

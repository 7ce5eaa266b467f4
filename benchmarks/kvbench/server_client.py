"""A streaming client of any OpenAI-compatible server, with the times at which a user sees what."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx


class Refused(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP; 200 where the error came in the middle of a stream.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


@dataclass(frozen=True)
class Reply:
    """A streamed answer.

    Attributes:
        ttft_s: from the moment the request was sent to the first chunk that holds text.
        total_s: to the last byte.
        usage: as the server reports it.
    """

    text: str
    ttft_s: float
    total_s: float
    usage: dict[str, Any]

    @property
    def cached_tokens(self) -> int | None:
        """None where the server does not say."""
        details: dict[str, int] | None = self.usage.get("prompt_tokens_details")
        return None if details is None else details["cached_tokens"]


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any], pause_s: float = 0.0) -> Reply:
    """One streamed chat or text completion; the reader pauses before each line that it takes.

    Raises:
        Refused: the server answers with an error, or its stream ends in one or in nothing.
    """
    start = time.perf_counter()
    parts: list[str] = []
    ttft_s, usage, ended = 0.0, {}, False
    async with client.stream("POST", url, json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise Refused(response.status_code, (await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                ended = ended or line == "data: [DONE]"
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise Refused(200, line)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                ended = ended or choice.get("finish_reason") is not None
                if text and not any(parts):
                    ttft_s = time.perf_counter() - start
                parts.append(text or "")
            await asyncio.sleep(pause_s)
    if not ended:
        raise Refused(200, "the stream stopped before its end")
    return Reply("".join(parts), ttft_s, time.perf_counter() - start, usage)

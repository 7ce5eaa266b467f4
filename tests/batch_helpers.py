"""Requests that are under way together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from serving_helpers import wait_until
from transformers import LogitsProcessor

from kvboost_rag import GenerationParams, KVBoost


class Biased(LogitsProcessor):
    """No answer ends by itself: end tokens are ruled out."""

    def __init__(self, banned: tuple[int, ...]) -> None:
        self._banned = list(banned)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.index_fill(1, torch.tensor(self._banned), float("-inf"))


def params(engine: KVBoost, tokens: int, **options: Any) -> GenerationParams:
    extra = {"logits_processor": [Biased(engine.eos_token_ids)]}
    return GenerationParams(max_new_tokens=tokens, extra=extra, **options)


@contextmanager
def held_back(engine: KVBoost) -> Iterator[None]:
    """Whatever is asked inside is queued, and begins when the block ends."""
    held, gate = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(60)

    blocked = threading.Thread(target=lambda: engine._parts.worker.call(hold))
    blocked.start()
    assert held.wait(20)
    try:
        yield
    finally:
        gate.set()
        blocked.join()


def together(engine: KVBoost, calls: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """All at once: held back until everybody is queued."""
    with ThreadPoolExecutor(len(calls)) as pool:
        with held_back(engine):
            waiting = [pool.submit(lambda call=call: engine.generate(**call)) for call in calls]
            wait_until(lambda: len(engine._parts.service.batch._waiting) == len(calls))
        return [f.result(60).token_ids for f in waiting]

"""Requests that join are prepared in pieces, between which the others get their tokens; the answers stay the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from batch_helpers import held_back, params
from corpus_texts import document
from transformers import LogitsProcessor

from kvboost_rag import KVBoost
from kvboost_rag.forward.row_forward import decoder_layers
from kvboost_rag.serving import batch as batch_module
from kvboost_rag.serving import decode as decode_module

DOCUMENTS = [document(n, 2) for n in range(4)]
LONG = "Read.\n\n" + "\n\n".join([*DOCUMENTS, "What does it say about " + "very " * 30 + "long questions?"])
PIECE = 16
MakeEngine = Callable[..., KVBoost]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "ROWS_A_STEP", PIECE)
    monkeypatch.setattr(decode_module, "PREFILL_CHUNK", PIECE)


@contextmanager
def forwards(engine: KVBoost) -> Iterator[list[int]]:
    """Rows of each forward."""
    seen: list[int] = []
    handle = decoder_layers(engine.model)[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args or (kwargs["hidden_states"],))[0].shape[1]), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


def gaps(seen: list[int]) -> list[int]:
    """Rows between two steps of the stream that was there first (one row, or two with the other's)."""
    found = [0]
    for rows in seen:
        if rows > 2:
            found[-1] += rows
        else:
            found.append(0)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"reuse": "off"},
    "exact": {"reuse": "exact"},
    "full": {"repair": "full"},
    "none": {"repair": "none"},
    "query": {"repair": "query"},
    "cacheblend": {"repair": "cacheblend"},
}


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_long_prompt_does_not_stall_a_stream(make_engine: MakeEngine, way: str, warm: bool):
    alone_engine, engine = make_engine(), make_engine()
    call = {"prompt": LONG, "params": params(engine, 6), "documents": DOCUMENTS, **WAYS[way]}
    expected = alone_engine.generate(**call)
    if warm:
        engine.warm(DOCUMENTS)
    running = engine.stream("Once", params=params(engine, 1500))
    next(running)
    with forwards(engine) as seen:
        result = engine.generate(**call)
    assert result.token_ids == expected.token_ids
    assert result.repair == expected.repair
    assert len([n for n in gaps(seen) if n]) >= 2, "it was prepared in one go"
    assert max(gaps(seen)) <= PIECE - 1 + max(seen)
    if way in ("plain", "full", "none") and warm:
        assert max(seen) <= PIECE
    running.close()


def test_those_who_came_first_have_their_first_token_first(make_engine: MakeEngine):
    """One after the other: in turn, each would wait as long as the last."""
    engine, first = make_engine(), []

    class Note(LogitsProcessor):
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            if self.number not in first:
                first.append(self.number)
            return scores

    prompts = [LONG, "Hi", LONG[5:], "Hello"]
    alone = [engine.generate(p, params=params(engine, 4), reuse="off").token_ids for p in prompts]
    calls = [{"prompt": p, "params": params(engine, 4), "reuse": "off"} for p in prompts]
    for number, call in enumerate(calls):
        call["params"].extra["logits_processor"].append(Note(number))
    with held_back(engine):
        streams = [engine.stream(**call) for call in calls]
    assert [list(stream)[-1].result.token_ids for stream in streams] == alone
    assert first == [0, 1, 2, 3]


def test_other_jobs_find_no_request_half_prepared(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    """What they change (a document that is deleted, say) must not change under a request that has looked it up."""
    monkeypatch.setattr(batch_module, "STEPS_A_TURN", 1)
    engine = make_engine()
    batch, worker = engine._parts.service.batch, engine._parts.worker
    running = engine.stream("Once", params=params(engine, 1500))
    next(running)
    over, seen = threading.Event(), []

    def look() -> None:
        seen.append([lane.is_preparing for lane in batch._lanes])

    def jobs() -> None:
        while not over.is_set():
            worker.call(look)

    other = threading.Thread(target=jobs)
    other.start()
    for _ in range(3):
        engine.generate(LONG, params=params(engine, 3), reuse="off")
    over.set()
    other.join()
    running.close()
    assert seen
    assert not any(map(any, seen))

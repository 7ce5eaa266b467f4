"""Requests decoded together give what each gives alone, whoever comes and goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import REUSABLE
from batch_helpers import params, together
from corpus_texts import document
from serving_helpers import wait_until
from transformers import LogitsProcessor

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.forward.packed_forward import packed_forward
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.models.hf_cache import BufferCache, cache_argument
from kvboost_rag.serving import batch as batch_module

pytest.importorskip("greenlet")

DOCUMENTS = [document(n, 2) for n in range(4)]
MakeEngine = Callable[..., KVBoost]


def prompts(count: int) -> list[str]:
    """Of odd lengths, with documents in other orders, and some without."""
    made = []
    for n in range(count):
        texts = [DOCUMENTS[(n + i) % 4] for i in range(n % 4)]
        made.append("Read.\n\n" + "\n\n".join([*texts, f"Question {'very ' * n}number {n}?"]))
    return made


LATENT = {name for name in REUSABLE if "latent" in name}
"""Latent attention expands what the cache gives it: the engine notices, and decodes these one by one."""


@pytest.mark.parametrize("family", sorted(REUSABLE.keys() - LATENT))
def test_a_packed_step_gives_the_logits_of_single_ones(make_engine: MakeEngine, family: str):
    """The slow twin: one forward a request. Lengths 5, 1, 63 and 100."""
    engine = make_engine(family)
    model, layout = engine.model, engine.probe.require_layout
    name = cache_argument(model)
    draw = torch.Generator().manual_seed(0)
    caches, twins, tokens = [], [], torch.randint(5, 380, (4,), generator=draw)
    for length in (5, 1, 63, 100):
        ids = torch.randint(5, 380, (1, length), generator=draw)
        for group in (caches, twins):
            cache = BufferCache(KVBuffer(layout, length + 3))
            for tensor in (*cache.buffer.keys, *cache.buffer.values):
                tensor.fill_(float("nan"))
            with torch.no_grad():
                model(input_ids=ids, use_cache=True, **{name: cache})
            group.append(cache)
    for _ in range(3):
        packed = packed_forward(model, tokens, caches)
        with torch.no_grad():
            single = [
                model(
                    input_ids=t[None, None], position_ids=torch.tensor([[c.buffer.length]]), use_cache=True, **{name: c}
                ).logits[0, -1]
                for t, c in zip(tokens, twins, strict=True)
            ]
        torch.testing.assert_close(packed, torch.stack(single), atol=1e-4, rtol=0)
        tokens = packed.argmax(-1)
    assert [c.buffer.length for c in caches] == [8, 4, 66, 103]


@pytest.mark.parametrize("family", sorted(REUSABLE))
def test_answers_together_are_those_alone(make_engine: MakeEngine, family: str):
    engine = make_engine(family)
    engine.warm(DOCUMENTS)
    calls = [
        {"prompt": p, "params": params(engine, 5 + 3 * n), "reuse": "off" if n == 5 else None}
        for n, p in enumerate(prompts(6))
    ]
    calls = [{k: v for k, v in call.items() if v is not None} for call in calls]
    alone = [engine.generate(**call).token_ids for call in calls]
    assert together(engine, calls) == alone
    batch = engine._parts.service.batch
    assert (batch._packs, batch.num_packed_steps > 5) == (family not in LATENT, family not in LATENT)


def test_each_has_its_own_random_numbers_and_processors(make_engine: MakeEngine):
    engine = make_engine()
    calls = [
        {"prompt": "Once", "params": params(engine, 12, do_sample=True, temperature=1.5, seed=seed)}
        for seed in (1, 2, 1)
    ]
    alone = [engine.generate(**call).token_ids for call in calls]
    assert alone[0] != alone[1]
    assert together(engine, calls) == alone
    assert engine._parts.service.batch.num_packed_steps >= 10


def test_those_who_join_late_or_leave_change_nothing(make_engine: MakeEngine):
    engine = make_engine()
    texts = prompts(3)
    alone = [engine.generate(t, params=params(engine, 60)).token_ids for t in texts]
    first = engine.stream(texts[0], params=params(engine, 60))
    next(first)
    leaving = engine.stream(texts[1], params=params(engine, 1000))
    next(leaving)
    late = engine.generate(texts[2], params=params(engine, 60))
    leaving.close()
    assert late.token_ids == alone[2]
    assert [e.result for e in first][-1].token_ids == alone[0]
    wait_until(lambda: not engine._parts.service.batch._lanes)


def test_a_fault_of_one_is_its_own(make_engine: MakeEngine):
    class Failing(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            if input_ids.shape[1] > 12:
                raise OSError("mine")
            return scores

    engine = make_engine()
    calls = [{"prompt": t, "params": params(engine, 12)} for t in prompts(3)]
    alone = [engine.generate(**call).token_ids for call in calls]
    bad = {"prompt": "Hi", "params": GenerationParams(max_new_tokens=20, extra={"logits_processor": [Failing()]})}
    failing = engine.stream(**bad)
    next(failing)
    assert together(engine, calls) == alone
    with pytest.raises(OSError, match="mine"):
        list(failing)


def test_a_model_that_packs_wrongly_is_found_out(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    engine = make_engine()
    calls = [{"prompt": t, "params": params(engine, 6)} for t in prompts(3)]
    alone = [engine.generate(**call).token_ids for call in calls]
    real = batch_module.packed_forward
    monkeypatch.setattr(batch_module, "packed_forward", lambda *a: real(*a).roll(1, -1))
    assert together(engine, calls) == alone
    assert "one by one" in caplog.text
    assert engine._parts.service.batch.num_packed_steps <= 1


def test_memory_is_a_queue_and_not_a_limit(make_engine: MakeEngine):
    engine = make_engine()
    batch = engine._parts.service.batch
    calls = [{"prompt": t, "params": params(engine, 20)} for t in prompts(4)]
    alone = [engine.generate(**call).token_ids for call in calls]
    batch._max_tokens = 1  # room for one, whatever its length
    assert together(engine, calls) == alone
    assert batch.num_packed_steps == 0


def test_closing_lets_those_under_way_finish(make_engine: MakeEngine):
    engine = make_engine()
    running = [engine.stream(t, params=params(engine, 60)) for t in prompts(2)]
    for stream in running:
        next(stream)
    engine.close()
    assert [len(list(s)[-1].result.token_ids) for s in running] == [60, 60]


def test_other_work_has_its_turn(make_engine: MakeEngine):
    engine = make_engine()
    running = [engine.stream(t, params=params(engine, 1500)) for t in prompts(2)]
    for stream in running:
        next(stream)
    started = time.monotonic()
    assert engine.warm(DOCUMENTS[:1]).num_encoded == 1
    assert engine._parts.service.batch._lanes, f"still under way after {time.monotonic() - started:.1f} s"
    for stream in running:
        stream.close()

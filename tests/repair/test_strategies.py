"""Strategies: the rows they choose, within the bounds they are given, computed layer by layer as they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from corpus_texts import document, prompt

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import ConfigError, EncodingConfig, ReuseConfig
from kvboost_rag.datamodels import SegmentKind
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.repair import STRATEGIES, CacheBlendRepair, QueryRepair, RepairStrategy, SelectiveRepair
from kvboost_rag.repair.base import RepairContext, choose, top_mask
from kvboost_rag.repair.deviation import attention_kl, relative_deviation
from kvboost_rag.repair.selective import normalised_entropy

DOCUMENTS = [document(n, 2) for n in range(4)]
ONE = GenerationParams(max_new_tokens=1)


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny_model("llama"), encoding=EncodingConfig(sensitivity=True)) as engine:
        engine.warm(DOCUMENTS)
        yield engine


def counts(engine: KVBoost, **options: Any) -> tuple[int, int, tuple[int, ...]]:
    """(document tokens, fresh rows, rows per layer) of one request."""
    result = engine.generate(prompt(DOCUMENTS), params=ONE, strict=True, **options)
    documents = sum(s.num_tokens for s in result.segments if s.kind is SegmentKind.DOCUMENT)
    fresh = sum(s.num_tokens for s in result.segments if s.kind in (SegmentKind.TEXT, SegmentKind.SUFFIX))
    assert result.usage.recomputed_tokens == len(result.repair.rows) == result.repair.rows_per_layer[-1] - fresh
    return documents, fresh, result.repair.rows_per_layer


def test_full_computes_everything_everywhere(engine: KVBoost) -> None:
    documents, fresh, rows = counts(engine, repair="full")
    assert rows == (documents + fresh,) * 5


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.31])
def test_query_computes_its_share_everywhere(engine: KVBoost, ratio: float) -> None:
    documents, fresh, rows = counts(engine, repair="query", recompute_ratio=ratio)
    assert rows == (fresh + round(ratio * documents),) * 5


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("score", ["l2", "kl"])
def test_cacheblend_probes_on_all_rows_then_narrows(engine: KVBoost, layer: int, score: Any) -> None:
    strategy = CacheBlendRepair(probe_layer=layer, score=score)
    documents, fresh, rows = counts(engine, repair=strategy, recompute_ratio=0.15, tau_reuse=0.0, tau_recompute=99.0)
    chosen = fresh + round(0.15 * documents)
    assert rows == (documents + fresh,) * (layer + 1) + (chosen,) * (4 - layer)


def test_selective_starts_with_boundaries_and_drops_certain_ones(engine: KVBoost) -> None:
    _, fresh, rows = counts(engine, repair=SelectiveRepair(boundary_tokens=3, tau_entropy=0.0))
    assert rows == (fresh + 4 * 2 * 3,) * 5
    _, fresh, rows = counts(engine, repair=SelectiveRepair(boundary_tokens=3, tau_entropy=1.0))
    assert rows == (fresh + 4 * 2 * 3,) * 2 + (fresh,) * 3


def test_top_k_counts_per_chunk(engine: KVBoost) -> None:
    result = engine.generate(prompt(DOCUMENTS), repair="query", top_k=3, params=ONE, strict=True)
    per_document = [s.num_recomputed_tokens for s in result.segments if s.kind is SegmentKind.DOCUMENT]
    assert per_document == [3, 3, 3, 3]


def test_the_threshold_takes_all_rows_above_it_up_to_the_bound(engine: KVBoost) -> None:
    options: dict[str, Any] = {"repair": "cacheblend", "tau_reuse": 0.0, "tau_recompute": 99.0}
    documents, fresh, rows = counts(engine, deviation_threshold=0.0, max_recompute_ratio=0.25, **options)
    assert rows[-1] == fresh + int(0.25 * documents)
    _, fresh, rows = counts(engine, deviation_threshold=50.0, **options)
    assert rows[-1] == fresh


def test_chunk_deviation_decides_between_reuse_and_recompute(engine: KVBoost) -> None:
    text = prompt(DOCUMENTS)
    options: dict[str, Any] = {"repair": "cacheblend", "params": ONE, "strict": True}
    reused = engine.generate(text, tau_reuse=98.0, tau_recompute=99.0, **options)
    assert reused.repair.rows == ()
    deviations = reused.repair.deviation_per_chunk or ()
    assert len(deviations) == 4
    whole = engine.generate(text, tau_reuse=0.0, tau_recompute=0.0, max_recompute_ratio=1.0, **options)
    assert whole.repair.recompute_ratio == 1.0
    middle = sorted(deviations)[2]  # one chunk lies above: that one whole, nothing of the others
    some = engine.generate(
        text, tau_reuse=middle, tau_recompute=middle, recompute_ratio=0.0, max_recompute_ratio=1.0, **options
    )
    documents = [s for s in some.segments if s.kind is SegmentKind.DOCUMENT]
    expected = [s.num_tokens if d > middle else 0 for s, d in zip(documents, deviations, strict=True)]
    assert [s.num_recomputed_tokens for s in documents] == expected


def test_no_strategy_but_full_exceeds_the_bound(engine: KVBoost) -> None:
    for name in STRATEGIES:
        options: dict[str, Any] = {"repair": name, "recompute_ratio": 0.1, "max_recompute_ratio": 0.1}
        result = engine.generate(prompt(DOCUMENTS), params=ONE, strict=True, **options)
        assert name == "full" or result.repair.recompute_ratio <= 0.1


def test_query_weighted_by_deviation_probes_first(engine: KVBoost) -> None:
    strategy = QueryRepair(weight="deviation")
    result = engine.generate(prompt(DOCUMENTS), repair=strategy, recompute_ratio=0.2, params=ONE, strict=True)
    assert len(result.repair.deviation_per_chunk or ()) == 4
    assert result.repair.recompute_ratio == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("strategy", [CacheBlendRepair, QueryRepair])
def test_a_probe_at_layer_zero_is_refused(strategy: type[RepairStrategy]) -> None:
    with pytest.raises(ConfigError, match="probe_layer=0"):
        strategy(probe_layer=0)  # type: ignore[call-arg]


def make_context(spans: list[tuple[int, int]], **config: Any) -> RepairContext:
    empty = torch.empty(0, dtype=torch.long)
    fields: Any = {"model": None, "buffer": None, "token_ids": empty, "fresh_rows": empty, "question_rows": empty}
    return RepairContext(documents=tuple(spans), config=ReuseConfig(**config).resolve({}), **fields)


def test_choose_is_top_of_all_document_tokens() -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.2])
    assert choose(scores, make_context([(3, 6), (8, 10)], recompute_ratio=0.4)).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert not choose(scores, make_context([(3, 6), (8, 10)], recompute_ratio=0.0)).any()
    assert choose(scores, make_context([(3, 6), (8, 10)], recompute_ratio=1.0)).all()


def test_choose_without_tokens() -> None:
    assert choose(torch.empty(0), make_context([])).shape == (0,)


def test_top_mask_takes_exactly_as_many_as_asked_also_among_ties() -> None:
    assert int(top_mask(torch.zeros(9), 4).sum()) == 4
    assert int(top_mask(torch.zeros(3), 10).sum()) == 3


def test_relative_deviation_by_hand() -> None:
    stored = (torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    fresh = (stored[0].clone(), stored[1] * torch.tensor([1.0, 2.0, 0.0]).view(1, 1, 3, 1))
    torch.testing.assert_close(relative_deviation(fresh, stored), torch.tensor([0.0, 0.5**0.5, 0.5**0.5]))


def _call(rows: int, length: int) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 6, rows, 8, generator=generator)
    key = torch.randn(1, 2, length, 8, generator=generator)
    mask = torch.arange(length)[None] <= torch.arange(length - rows, length)[:, None]
    return AttentionCall(query, key, key, mask[None, None], scaling=0.3)


def test_attention_kl_by_hand() -> None:
    call, rows = _call(5, 11), torch.tensor([6, 7, 8, 9, 10])
    stored = torch.randn(1, 2, 5, 8)
    old = call.key.clone()
    old[:, :, rows] = stored
    p = torch.stack([_weights(call, call.key, h) for h in range(6)])
    q = torch.stack([_weights(call, old, h) for h in range(6)])
    expected = torch.where(p > 0, p * (p.clamp_min(1e-30) / q.clamp_min(1e-30)).log(), 0).sum(-1).mean(0)
    torch.testing.assert_close(attention_kl(call, stored, rows), expected)


def _weights(call: AttentionCall, key: torch.Tensor, head: int) -> torch.Tensor:
    """Attention weights of one head the obvious way."""
    scores = call.query[0, head] @ key[0, head // 3].T * call.scaling
    return scores.masked_fill(~call.mask[0, 0], float("-inf")).softmax(-1)


def test_entropy_is_one_where_attention_is_even() -> None:
    call = _call(5, 11)
    even = replace(call, query=torch.zeros_like(call.query))
    torch.testing.assert_close(normalised_entropy(even), torch.ones(5))
    assert float(normalised_entropy(call, block_rows=2).max()) < 1

"""Context sensitivity: measured when a chunk is encoded, kept with it, and what repair makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus_texts import document, prompt

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.chunks.fetched import SENSITIVITY, FetchedChunk
from kvboost_rag.config import ConfigError, EncodingConfig
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.encode.encoder import EncodingJob, context_sensitivity
from kvboost_rag.repair import QueryRepair, SensitivityRepair

DOCUMENTS = [document(n, 2) for n in range(4)]
BEHIND = [[DOCUMENTS[i - 1], DOCUMENTS[i - 2]] for i in range(4)]
ONE = GenerationParams(max_new_tokens=1)

MakeEngine = Callable[..., KVBoost]


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    def make(family: str = "llama", store: Any = None, **encoding: Any) -> KVBoost:
        return make_engine(family, store=store, encoding=EncodingConfig(**({"sensitivity": True} | encoding)))

    return make


def loaded(engine: KVBoost, text: str) -> FetchedChunk:
    record = engine.registry.given(text, "")
    chunk = engine.fetcher.load(record)
    assert chunk is not None
    return chunk


def by_hand(engine: KVBoost, text: str, context: tuple[int, ...], lesser: tuple[int, ...]) -> torch.Tensor:
    """The slow twin: layer by layer, token by token."""
    ids, encoder = engine.tokens.document_ids(text), engine.fetcher.encoder
    assert encoder is not None
    kv, alone = encoder.encode(EncodingJob(ids, context)), encoder.encode(EncodingJob(ids, lesser))
    per_token = []
    for token in range(len(ids)):
        per_layer = []
        for group in range(len(kv.keys)):
            for layer in range(len(kv.keys[group])):
                ratios = []
                for new, old in ((kv.keys, alone.keys), (kv.values, alone.values)):
                    a, b = new[group][layer, :, token], old[group][layer, :, token]
                    ratios.append(float((a - b).norm() / b.norm()) ** 2)
                per_layer.append((sum(ratios) / 2) ** 0.5)
        per_token.append(sum(per_layer) / len(per_layer))
    return torch.tensor(per_token)


@pytest.mark.parametrize("quantization", ["none", "k8v4"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_it_is_the_distance_to_encoding_behind_the_anchor_alone(
    make_engine: MakeEngine, family: str, quantization: str
) -> None:
    engine = make_engine(family, quantization=quantization)
    engine.warm(DOCUMENTS, neighbours=BEHIND)
    chunk = loaded(engine, DOCUMENTS[0])
    assert chunk.sensitivity is not None
    assert chunk.sensitivity.dtype == torch.float16
    context = engine.store.catalog.contexts(chunk.record)[0]
    expected = by_hand(engine, DOCUMENTS[0], context, chunk.record.anchor_ids)
    torch.testing.assert_close(chunk.sensitivity.float(), expected, atol=1e-3, rtol=2e-3)
    assert expected.max() > 0.01


def test_without_neighbours_it_is_the_distance_to_encoding_behind_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS[:1], neighbours=None)
    chunk = loaded(engine, DOCUMENTS[0])
    assert chunk.record.anchor_ids
    assert chunk.sensitivity is not None
    expected = by_hand(engine, DOCUMENTS[0], chunk.record.anchor_ids, ())
    torch.testing.assert_close(chunk.sensitivity.float(), expected, atol=1e-3, rtol=2e-3)


def test_a_chunk_that_stands_behind_nothing_depends_on_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(anchor="")
    report = engine.warm(DOCUMENTS[:1], neighbours=None)
    assert report.num_encoded == 1
    chunk = loaded(engine, DOCUMENTS[0])
    assert chunk.sensitivity is not None
    assert not chunk.sensitivity.any()


def test_large_distances_stay_finite() -> None:
    from kvboost_rag.datamodels import ChunkKV

    kv = ChunkKV((torch.full((2, 1, 3, 4), 1e9),), (torch.ones(2, 1, 3, 4),))
    alone = ChunkKV((torch.full((2, 1, 3, 4), 1e-3),), (torch.zeros(2, 1, 3, 4),))
    assert context_sensitivity(kv, alone).isfinite().all()


def test_it_leaves_kv_alone_and_is_counted(make_engine: MakeEngine) -> None:
    with_it, without = make_engine(quantization="k8v8"), make_engine(quantization="k8v8", sensitivity=False)
    tokens = [engine.warm(DOCUMENTS, neighbours=BEHIND).encoded_tokens for engine in (with_it, without)]
    anchor = len(with_it.registry.identity.anchor_ids)
    assert tokens[0] - tokens[1] == sum(anchor + len(with_it.tokens.document_ids(d)) for d in DOCUMENTS)
    ours, plain = loaded(with_it, DOCUMENTS[1]), loaded(without, DOCUMENTS[1])
    assert plain.sensitivity is None
    for a, b in zip((*ours.kv.keys, *ours.kv.values), (*plain.kv.keys, *plain.kv.values), strict=True):
        assert torch.equal(a, b)


def test_it_comes_back_from_disk_and_what_lacks_it_is_encoded_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    first = make_engine(store=tmp_path, sensitivity=False)
    first.warm(DOCUMENTS, neighbours=BEHIND)
    first.close()
    second = make_engine(store=tmp_path)
    assert second.warm(DOCUMENTS).num_encoded == 4
    kept = loaded(second, DOCUMENTS[2]).sensitivity
    second.close()
    third = make_engine(store=tmp_path)
    assert third.warm(DOCUMENTS).num_encoded == 0
    again = loaded(third, DOCUMENTS[2]).sensitivity
    assert kept is not None
    assert again is not None
    assert torch.equal(kept, again)


def test_the_strategy_takes_the_most_sensitive_tokens_in_one_forward(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS, neighbours=BEHIND)
    order = [DOCUMENTS[2], DOCUMENTS[0]]
    result = engine.generate(prompt(order), params=ONE, repair="sensitivity", recompute_ratio=0.2, strict=True)
    segments = [s for s in result.segments if s.kind is SegmentKind.DOCUMENT]
    scores = torch.cat([part.float() for d in order if (part := loaded(engine, d).sensitivity) is not None])
    positions = torch.cat([torch.arange(s.start, s.start + s.num_tokens) for s in segments])
    count = round(0.2 * len(scores))
    least = scores.topk(count).values.min()
    chosen = torch.isin(positions, torch.tensor(result.repair.rows))
    assert int(chosen.sum()) == len(result.repair.rows) == count
    assert scores[chosen].min() >= least >= scores[~chosen].max()
    fresh = sum(s.num_tokens for s in result.segments if s.kind in (SegmentKind.TEXT, SegmentKind.SUFFIX))
    assert set(result.repair.rows_per_layer) == {fresh + count}


def test_as_a_weight_it_changes_which_rows_the_question_gets(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS, neighbours=BEHIND)
    rows = [
        engine.generate(prompt(DOCUMENTS), params=ONE, repair=strategy, recompute_ratio=0.2, strict=True).repair.rows
        for strategy in (QueryRepair(), QueryRepair(weight="sensitivity"), SensitivityRepair())
    ]
    assert len({*rows}) == 3
    assert len({len(r) for r in rows}) == 1


@pytest.mark.parametrize("strategy", ["sensitivity", QueryRepair(weight="sensitivity")])
def test_where_it_is_missing_the_request_is_served_and_strict_mode_says_what_to_do(
    make_engine: MakeEngine, strategy: Any
) -> None:
    engine = make_engine(sensitivity=False)
    engine.warm(DOCUMENTS)
    with pytest.raises(ConfigError, match=r"EncodingConfig\(sensitivity=True\)"):
        engine.generate(prompt(DOCUMENTS), params=ONE, repair=strategy, strict=True)
    served = engine.generate(prompt(DOCUMENTS), params=ONE, repair=strategy)
    assert "sensitivity" in (served.fallback_reason or "")
    assert served.token_ids == engine.generate(prompt(DOCUMENTS), params=ONE, reuse="off").token_ids


def test_documents_new_to_the_engine_get_it_when_they_are_encoded(make_engine: MakeEngine) -> None:
    engine = make_engine()
    options: Any = {"params": ONE, "repair": "sensitivity", "recompute_ratio": 0.2, "strict": True}
    cold = engine.generate(prompt(DOCUMENTS), documents=DOCUMENTS, **options)
    warm = engine.generate(prompt(DOCUMENTS), documents=DOCUMENTS, **options)
    assert [s.hit for s in cold.segments].count(HitKind.ENCODED) == 4
    assert cold.repair.rows == warm.repair.rows != ()
    assert all(SENSITIVITY in loaded(engine, d).payload.tensors for d in DOCUMENTS)

"""Chunks encoded after several contexts: how they are combined, and that they come back bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.config import ConfigError, EncodingConfig
from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.encode.mixture import PLAIN, ContextWeights, combine
from kvboost_rag.forward.probe import probe

MakeEngine = Callable[..., KVBoost]
WORDS = ("tide", "apple", "clock")
TEXTS = [f"Report {n} on the {WORDS[n % 3]}: the {WORDS[n % 3]} was seen {n * 7} times. " * 2 for n in range(9)]
QUESTION = "\n\n".join(["Answer.", *(t.strip() for t in TEXTS[:3]), "How often was the tide seen?"])


def count_words(texts: Any) -> np.ndarray:
    return np.array([[text.count(word) + 0.01 for word in WORDS] for text in texts])


@pytest.fixture
def make_mixed(make_engine: MakeEngine) -> MakeEngine:
    def make(store: Any = None, family: str = "llama", **encoding: Any) -> KVBoost:
        settings = EncodingConfig(**({"embedder": count_words, "neighbours": 2, "contexts": 2} | encoding))
        return make_engine(family, store=store, encoding=settings)

    return make


def some_weights(engine: KVBoost, num_contexts: int = 2, alone: float = 0.2) -> ContextWeights:
    layout = probe(engine.model).require_layout
    heads = {layer: group.num_kv_heads for group in layout.groups for layer in group.layers}
    draw = np.random.default_rng(0)
    parts = [[[alone, *draw.uniform(0.2, 0.6, num_contexts)] for _ in range(heads[i])] for i in range(len(heads))]
    return ContextWeights(parts, parts)


def records_of(engine: KVBoost) -> list[Any]:
    return list(engine.store.catalog.get_many(engine.store.catalog.hashes()).values())


def bits_of(engine: KVBoost) -> dict[str, bytes]:
    found = {}
    for record in records_of(engine):
        kv = engine.fetcher.fetch(record).kv
        found[record.text] = b"".join(t.numpy().tobytes() for t in (*kv.keys, *kv.values))
    return found


def drop_all(engine: KVBoost) -> None:
    for key in list(engine.store.keys()):
        engine.store.delete(key)


def obvious(engine: KVBoost, record: Any, weights: ContextWeights | None) -> ChunkKV:
    """The mixture as a loop over layers and heads."""
    job = engine.registry.check(record)[0]
    parts = [engine.fetcher.encoder.encode(part) for part in job.parts]
    layout, halves = engine.fetcher.encoder.layout, []
    for kind in ("keys", "values"):
        made = []
        for index, group in enumerate(layout.groups):
            out = torch.zeros_like(getattr(parts[0], kind)[index])
            for place, layer in enumerate(group.layers):
                for head in range(group.num_kv_heads):
                    factors = (
                        getattr(weights, kind)[layer][head] if weights else [s / sum(job.shares) for s in job.shares]
                    )
                    out[place, head] = sum(
                        f * getattr(p, kind)[index][place, head] for f, p in zip(factors, parts, strict=True)
                    )
            made.append(out)
        halves.append(tuple(made))
    return ChunkKV(*halves)


def assert_close(ours: ChunkKV, wanted: ChunkKV) -> None:
    for a, b in zip((*ours.keys, *ours.values), (*wanted.keys, *wanted.values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_stored_kv_is_the_mixture(make_mixed: MakeEngine, family: str, weighted: bool) -> None:
    weights = some_weights(make_mixed(family=family)) if weighted else None
    engine = make_mixed(family=family, context_weights=weights)
    report = engine.warm(TEXTS)
    record = records_of(engine)[-1]
    assert record.splits == (2, 2)
    assert record.mixture == (weights.digest if weights else PLAIN)
    assert len(set(record.neighbours)) == 4
    job = engine.registry.check(record)[0]
    assert len(job.parts) == (3 if weighted else 2)
    assert report.encoded_tokens == sum(engine.registry.check(r)[0].num_tokens for r in records_of(engine))
    assert_close(engine.fetcher.load(record).kv, obvious(engine, record, weights))


def test_a_mixture_is_nearer_to_none_of_its_parts_only(make_mixed: MakeEngine) -> None:
    engine = make_mixed()
    engine.warm(TEXTS)
    job = engine.registry.check(records_of(engine)[-1])[0]
    one, two = (engine.fetcher.encoder.encode(part) for part in job.parts)
    assert not torch.equal(one.keys[0], two.keys[0])


@pytest.mark.parametrize("encoding", [{}, {"groups": True}, {"weighted": True, "sensitivity": True}])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_chunk_comes_back_with_the_same_bits(
    make_mixed: MakeEngine, tmp_path: Path, family: str, encoding: dict[str, Any]
) -> None:
    encoding = dict(encoding)
    if encoding.pop("weighted", False):
        encoding["context_weights"] = some_weights(make_mixed(family=family))
    engine = make_mixed(tmp_path, family=family, **encoding)
    engine.warm(TEXTS)
    before, asked = bits_of(engine), engine.logits(QUESTION)
    drop_all(engine)
    assert bits_of(engine) == before, "one by one"
    drop_all(engine)
    assert engine.warm(TEXTS).num_encoded == len(TEXTS)
    assert bits_of(engine) == before, "warmed again"
    drop_all(engine)
    assert torch.equal(engine.logits(QUESTION), asked), "cold"
    engine.close()
    again = make_mixed(tmp_path, family=family, **encoding)
    hits = again.store.stats.hits
    assert bits_of(again) == before, "from disk"
    assert again.store.stats.hits - hits == len(TEXTS) or again.store.stats.hits > hits


def test_a_lost_catalog_is_rebuilt_with_all_contexts(make_mixed: MakeEngine, tmp_path: Path) -> None:
    engine = make_mixed(tmp_path)
    engine.warm(TEXTS)
    engine.store.flush()
    before = {r.content_hash: r.contexts for r in records_of(engine)}
    engine.close()
    for file in tmp_path.rglob("*.sqlite*"):
        file.unlink()
    again = make_mixed(tmp_path)
    assert {r.content_hash: r.contexts for r in records_of(again)} == before
    assert again.warm(TEXTS, neighbours=None).num_already_stored == len(TEXTS)


def test_other_weights_are_another_encoding(make_mixed: MakeEngine, tmp_path: Path) -> None:
    first = make_mixed(tmp_path)
    first.warm(TEXTS)
    before = bits_of(first)
    first.close()
    weights = some_weights(first)
    second = make_mixed(tmp_path, context_weights=weights)
    assert second.fetcher.load(records_of(second)[0]) is None
    after = bits_of(second)
    assert all(after[text] != before[text] for text in before)
    assert {r.mixture for r in records_of(second)} == {weights.digest}
    second.close()
    assert bits_of(make_mixed(tmp_path)) == before


def test_fewer_contexts_than_the_weights_are_for_take_the_mean(make_mixed: MakeEngine) -> None:
    weights = some_weights(make_mixed(), num_contexts=3)
    engine = make_mixed(context_weights=weights)
    engine.warm(TEXTS)
    assert {r.mixture for r in records_of(engine)} == {PLAIN}


def test_a_small_corpus_has_one_context_or_none(make_mixed: MakeEngine) -> None:
    engine = make_mixed()
    engine.warm(TEXTS[:1])
    engine.warm(TEXTS[1:3])
    assert sorted(r.splits for r in records_of(engine)) == [(), (), ()]


def test_groups_are_forwarded_once_in_each_direction(make_mixed: MakeEngine) -> None:
    one = make_mixed(groups=True, neighbours=4, contexts=1).warm(TEXTS)
    engine = make_mixed(groups=True, neighbours=4)
    two = engine.warm(TEXTS)
    assert 1.8 * one.encoded_tokens <= two.encoded_tokens <= 2 * one.encoded_tokens
    record = next(r for r in records_of(engine) if r.splits == (2, 2))
    assert_close(engine.fetcher.load(record).kv, obvious(engine, record, None))


def test_deleting_a_chunk_takes_it_out_of_every_context(make_mixed: MakeEngine) -> None:
    engine = make_mixed()
    engine.warm(TEXTS)
    gone = engine.registry.describe(TEXTS[0], "").content_hash
    behind = [r for r in records_of(engine) if gone in r.neighbours]
    assert behind
    engine.evict(TEXTS[:1])
    for before in behind:
        record = engine.store.catalog.get(before.content_hash)
        wanted = [tuple(k for k in context if k != gone) for context in before.contexts]
        assert list(record.contexts) == wanted
        assert engine.fetcher.load(record) is None
    assert engine.generate(QUESTION).text is not None


def test_contexts_may_be_given(make_mixed: MakeEngine) -> None:
    engine = make_mixed(contexts=1)
    engine.warm(TEXTS[:1], neighbours=[[TEXTS[1:3], TEXTS[3:5]]])
    record = engine.store.catalog.get(engine.registry.describe(TEXTS[0], "").content_hash)
    texts = engine.store.catalog.get_many(record.neighbours)
    assert [[texts[k].text for k in c] for c in record.contexts] == [
        [t.strip() for t in TEXTS[1:3]],
        [t.strip() for t in TEXTS[3:5]],
    ]


def test_settings_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="contexts=0"):
        EncodingConfig(contexts=0)
    with pytest.raises(ConfigError, match="KVBOOST_CONTEXTS=0"):
        EncodingConfig().resolve({"KVBOOST_CONTEXTS": "0"})
    assert EncodingConfig().resolve({"KVBOOST_CONTEXTS": "2"}).contexts == 2
    assert EncodingConfig(contexts=1).resolve({"KVBOOST_CONTEXTS": "2"}).contexts == 1
    with pytest.raises(ValueError, match="weights of keys"):
        ContextWeights([[[1.0]]], [[[1.0, 1.0]]])
    with pytest.raises(ValueError, match="finite"):
        ContextWeights([[[1.0, float("nan")]]], [[[1.0, 1.0]]])
    with pytest.raises(ValueError, match="layers"):
        ContextWeights([[[1.0, 1.0]]], [[[1.0, 1.0]]] * 2)


def test_combining_rounds_once(make_mixed: MakeEngine) -> None:
    layout = replace(probe(make_mixed().model).require_layout, dtype=torch.bfloat16)
    shape = (len(layout.groups[0].layers), layout.groups[0].num_kv_heads, 5, layout.groups[0].key_head_dim)
    parts = [torch.randn(shape).bfloat16() for _ in range(3)]
    kvs = [ChunkKV((p,), (p,)) for p in parts]
    wanted = sum(p.float() * torch.tensor(s) for p, s in zip(parts, (0.25, 0.25, 0.5), strict=True)).bfloat16()
    assert torch.equal(combine(kvs, layout, (1, 1, 2), None).keys[0], wanted)

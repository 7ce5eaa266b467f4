"""Groups of similar chunks in one forward: cheaper, and yet each comes back bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.config import ConfigError, EncodingConfig
from kvboost_rag.encode.encoder import Encoder, EncodingJob
from kvboost_rag.forward.probe import probe
from kvboost_rag.indexing.warm import forwards

WORDS = ("tide", "apple", "clock")
TEXTS = [
    f"Report {n} on the {WORDS[n % 3]}: the {WORDS[n % 3]} was seen {n * 7} times. " * (1 + n % 4) for n in range(13)
]

MakeEngine = Callable[..., KVBoost]


def count_words(texts: Sequence[str]) -> np.ndarray:
    return np.array([[text.count(word) + 0.01 for word in WORDS] for text in texts])


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    def make(store: Any = None, family: str = "llama", **encoding: Any) -> KVBoost:
        settings = EncodingConfig(**({"embedder": count_words, "neighbours": 4, "groups": True} | encoding))
        return make_engine(family, store=store, encoding=settings)

    return make


def bits_of(engine: KVBoost) -> dict[str, bytes]:
    """KV of every chunk, by its text, loaded or else encoded alone."""
    found = {}
    for record in engine.store.catalog.get_many(engine.store.catalog.hashes()).values():
        kv = engine.fetcher.fetch(record).kv
        found[record.text] = b"".join(t.numpy().tobytes() for t in (*kv.keys, *kv.values))
    return found


def drop_all(engine: KVBoost) -> None:
    for key in list(engine.store.keys()):
        engine.store.delete(key)


def test_about_one_token_is_forwarded_per_document_token(make_engine: MakeEngine) -> None:
    grouped, default = make_engine().warm(TEXTS), make_engine(groups=False).warm(TEXTS)
    assert grouped.num_encoded == default.num_encoded == len(TEXTS)
    assert grouped.encoded_chunk_tokens == default.encoded_chunk_tokens == grouped.chunk_tokens
    assert grouped.encoded_tokens < 1.3 * grouped.chunk_tokens
    assert default.encoded_tokens > 3 * default.chunk_tokens


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window"])
def test_a_chunk_that_was_evicted_comes_back_alone_with_the_same_bits(make_engine: MakeEngine, family: str) -> None:
    engine = make_engine(family=family)
    engine.warm(TEXTS)
    groups = forwards(list(engine.store.catalog.get_many(engine.store.catalog.hashes()).values()))
    assert max(map(len, groups)) == 5
    before = bits_of(engine)
    drop_all(engine)
    assert bits_of(engine) == before, "one by one"
    drop_all(engine)
    assert engine.warm(TEXTS).num_encoded == len(TEXTS)
    assert bits_of(engine) == before, "in groups"
    for key in list(engine.store.keys())[::2]:
        engine.store.delete(key)
    engine.warm(TEXTS)
    assert bits_of(engine) == before, "groups of which some chunks are held"


def test_the_length_of_the_forward_survives_restarts_and_a_lost_catalog(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    first = make_engine(tmp_path)
    first.warm(TEXTS)
    before = bits_of(first)
    first.close()
    for path in tmp_path.glob("catalog.sqlite*"):
        path.unlink()
    second = make_engine(tmp_path)
    drop_all(second)
    assert bits_of(second) == before


def test_what_loses_its_group_is_encoded_by_itself(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(TEXTS)
    engine.evict(TEXTS[:3])
    for record in engine.store.catalog.get_many(engine.store.catalog.hashes()).values():
        if record.content_hash not in engine.store:
            assert record.forward_tokens == 0
    before = bits_of(engine)
    drop_all(engine)
    assert bits_of(engine) == before


def test_new_chunks_make_groups_of_their_own_and_old_ones_stay(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(TEXTS[:7])
    before = bits_of(engine)
    engine.warm(TEXTS)
    after = bits_of(engine)
    assert {text: after[text] for text in before} == before


def test_nested_jobs_are_what_encoding_each_gives(tiny_model: Any) -> None:
    model = tiny_model("llama").model
    encoder = Encoder(model, probe(model).require_layout)
    ids = tuple(range(5, 180))
    jobs = [EncodingJob(ids[a:b], ids[:a], 175) for a, b in ((3, 50), (52, 90), (92, 175))]
    for ours, job in zip(encoder.encode_nested(jobs), jobs, strict=True):
        alone = encoder.encode(job)
        assert all(
            torch.equal(a, b) for a, b in zip((*ours.keys, *ours.values), (*alone.keys, *alone.values), strict=True)
        )
    with pytest.raises(ValueError, match="context of the next"):
        encoder.encode_nested([jobs[0], EncodingJob(ids[:9], (7,), 175)])


def test_models_with_experts_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="experts"):
        make_engine(family="qwen3_moe")
    assert make_engine(family="qwen3_moe", groups=False).warm(TEXTS[:2]).num_encoded == 2

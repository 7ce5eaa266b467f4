"""Warming: idempotent, resumable, with progress; encoding contexts as the caller gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corpus_texts import document
from kv_helpers import kv_at

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.encode.encoder import EncodingJob
from kvboost_rag.indexing.warm import WarmProgress, warm
from kvboost_rag.kv.realign import PositionTables, position_free

DOCUMENTS = [document(n, 1 + n % 2) for n in range(5)]


def test_warming_twice_encodes_once(engine: KVBoost) -> None:
    first = engine.warm([*DOCUMENTS, DOCUMENTS[0], f"\n{DOCUMENTS[1]}  "])
    second = engine.warm(DOCUMENTS)
    assert (first.num_chunks, first.num_encoded, first.num_already_stored) == (5, 5, 0)
    assert (second.num_encoded, second.num_already_stored, second.encoded_tokens) == (0, 5, 0)
    assert first.num_bytes == engine.stats().bytes_held["memory"]


def test_an_interrupted_job_resumes(engine: KVBoost) -> None:
    records = [engine.registry.register(text, "") for text in DOCUMENTS]
    calls = iter([False, False, True])
    assert warm(engine.fetcher, records, stop=lambda: next(calls)).num_encoded == 2
    report = engine.warm(DOCUMENTS)
    assert (report.num_already_stored, report.num_encoded) == (2, 3)


def test_progress_counts_up_to_everything(engine: KVBoost) -> None:
    seen: list[WarmProgress] = []
    report = engine.warm(DOCUMENTS, progress=seen.append)
    assert [p.num_done for p in seen] == [1, 2, 3, 4, 5]
    assert seen[-1].tokens_done == seen[-1].num_tokens == report.chunk_tokens
    assert seen[-1].eta_seconds == 0
    assert seen[0].tokens_per_second > 0


def test_neighbours_are_the_encoding_context_nearest_last(engine: KVBoost) -> None:
    report = engine.warm(DOCUMENTS[:1], neighbours=[[DOCUMENTS[1], DOCUMENTS[2]]])
    record = engine.registry.register(DOCUMENTS[0], "")
    context = engine.store.catalog.contexts(record)[0]
    assert report.encoded_tokens == len(context) + len(record.token_ids)
    second = engine.tokens.document_ids(DOCUMENTS[2])
    separator = engine.tokens.document_ids("\n\n")
    assert context[-len(second) - len(separator) :] == (*second, *separator)


def test_other_neighbours_are_taken_up_and_the_same_ones_cost_nothing(engine: KVBoost) -> None:
    engine.warm(DOCUMENTS[:1])
    changed = engine.warm(DOCUMENTS[:1], neighbours=[[DOCUMENTS[1]]])
    same = engine.warm(DOCUMENTS[:1], neighbours=[[DOCUMENTS[1]]])
    assert (changed.num_encoded, same.num_encoded) == (1, 0)


def test_neighbours_that_do_not_fit_are_left_out_farthest_first(tiny_model: Any) -> None:
    with KVBoost(tiny_model("llama", max_position_embeddings=160)) as engine:
        engine.warm(DOCUMENTS[:1], neighbours=[DOCUMENTS[1:]])
        record = engine.registry.register(DOCUMENTS[0], "")
        kept = [engine.store.catalog.get(key) for key in record.neighbours]
        assert 0 < len(kept) < 4
        assert kept[-1] is not None
        assert kept[-1].text == DOCUMENTS[-1]


def test_as_many_neighbour_lists_as_documents(engine: KVBoost) -> None:
    with pytest.raises(ValueError, match="for 1 of 2 documents"):
        engine.warm(DOCUMENTS[:2], neighbours=[[]])


def test_encoding_is_the_plain_forward_with_the_context_cut_off(engine: KVBoost) -> None:
    """The slow twin of the encoder."""
    encoder, layout = engine.fetcher.encoder, engine.probe.require_layout
    assert encoder is not None
    job = EncodingJob((5, 9, 33, 7, 100, 8, 41), (3, 60, 70))
    whole = kv_at(engine.model, layout, torch.tensor([*job.context_ids, *job.token_ids]), 0)
    cut = type(whole)(tuple(k[:, :, 3:] for k in whole.keys), tuple(v[:, :, 3:] for v in whole.values))
    expected = position_free(cut, layout, 3, PositionTables.of(layout, 10))
    ours = encoder.encode(job)
    for a, b in zip((*ours.keys, *ours.values), (*expected.keys, *expected.values), strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip(ours.keys, encoder.encode(job).keys, strict=True))


def test_batched_encoding_is_close(engine: KVBoost) -> None:
    encoder = engine.fetcher.encoder
    assert encoder is not None
    jobs = [EncodingJob((5, 9, 33, 7, 100), (3, 60)), EncodingJob((8, 41), ()), EncodingJob((7,), (3, 60, 70, 80))]
    for job, batched in zip(jobs, encoder.encode_batch(jobs), strict=True):
        for a, b in zip(encoder.encode(job).keys, batched.keys, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_warming_in_batches_is_counted_the_same(tiny_model: Any) -> None:
    seen: list[WarmProgress] = []
    with KVBoost(tiny_model("llama"), encoding=EncodingConfig(batch_size=2)) as engine:
        report = engine.warm(DOCUMENTS, progress=seen.append)
        assert (report.num_encoded, len(engine.store)) == (5, 5)
    assert [p.num_done for p in seen] == [2, 4, 5]


def test_requests_are_served_while_a_job_runs(engine: KVBoost) -> None:
    answered: list[str] = []

    def ask(progress: WarmProgress) -> None:
        if progress.num_done == 1:
            answered.append(engine.generate("A question?", params=GenerationParams(max_new_tokens=2)).finish_reason)

    assert engine.warm(DOCUMENTS, progress=ask).num_encoded == 5
    assert answered == ["length"]


def test_forgetting_removes_text_and_kv_and_what_was_computed_from_them(engine: KVBoost) -> None:
    engine.warm(DOCUMENTS[:2], neighbours=[[DOCUMENTS[1]], []])
    assert engine.evict([DOCUMENTS[1]]) == 1
    assert engine.evict([DOCUMENTS[1]]) == 0
    assert len(engine.store) == 0  # the dependent's KV was computed from the removed text
    assert engine.registry.known_texts("").find(DOCUMENTS[1]) == []
    record = engine.registry.register(DOCUMENTS[0], "")
    assert record.neighbours == ()

"""A chunk made out of a donor against one encoded afresh: equal before a change, close behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import REUSABLE

from kvboost_rag import KVBoost
from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.encode.donor import encode_from_donor
from kvboost_rag.encode.encoder import Encoder, EncodingJob
from kvboost_rag.encode.similarity import DonorIndex, DonorPlan, DonorRules
from kvboost_rag.encode.token_diff import ReusedSpan, reusable_spans
from kvboost_rag.forward.probe import probe
from kvboost_rag.kv.assemble import PlacedChunk
from kvboost_rag.stores import MemoryStore

FAMILIES = ["llama", "llama-yarn", "gemma3", "mistral-window", "glm4-interleaved", "smollm3-nope"]
CONTEXT = tuple(range(10, 31))
DONOR = tuple(range(100, 180))
CHANGED = (*DONOR[:50], 7, *DONOR[51:])


def assert_close(ours: ChunkKV, theirs: ChunkKV, tolerance: float = 1e-4) -> None:
    for mine, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_before_the_change_is_as_good_as_new(tiny_model: Any, family: str) -> None:
    model_type, fields = REUSABLE[family]
    model = tiny_model(model_type, **fields).model
    layout = probe(model).require_layout
    encoder = Encoder(model, layout)
    plan = DonorPlan("donor", len(CHANGED), reusable_spans(DONOR, CHANGED))
    assert plan.spans == (ReusedSpan(0, 0, 50),)
    job = EncodingJob(CHANGED, CONTEXT)
    made = encode_from_donor(model, layout, job, plan, encoder.encode(EncodingJob(DONOR, CONTEXT)))
    assert_close(made.kv, encoder.encode(job))
    assert made.forwarded_tokens == len(CONTEXT) + 30


def test_spans_move_and_everything_else_is_computed(tiny_model: Any) -> None:
    """Behind a change the first layer is still exact: its keys and values see only their own token and position."""
    model = tiny_model().model
    layout = probe(model).require_layout
    encoder = Encoder(model, layout)
    wanted = (3, 4, 5, *DONOR)
    plan = DonorPlan("donor", len(wanted), reusable_spans(DONOR, wanted, settle_tokens=8))
    assert plan.spans == (ReusedSpan(11, 8, 72),)
    job = EncodingJob(wanted, CONTEXT)
    donor, fresh = encoder.encode(EncodingJob(DONOR, CONTEXT)), encoder.encode(job)
    made = encode_from_donor(model, layout, job, plan, donor)
    torch.testing.assert_close(made.kv.keys[0][0], fresh.keys[0][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.kv.values[0][:, :, :11], fresh.values[0][:, :, :11], atol=1e-4, rtol=1e-4)
    # The last row is always computed; all other reused rows are the donor's, bit for bit.
    assert torch.equal(made.kv.values[0][:, :, 11:-1], donor.values[0][:, :, 8:-1])
    assert made.forwarded_tokens == len(CONTEXT) + 11 + 1


def test_stored_context_is_taken_as_it_is(tiny_model: Any) -> None:
    model = tiny_model().model
    layout = probe(model).require_layout
    encoder = Encoder(model, layout)
    plan = DonorPlan("donor", len(CHANGED), reusable_spans(DONOR, CHANGED))
    job = EncodingJob(CHANGED, CONTEXT)
    donor = encoder.encode(EncodingJob(DONOR, CONTEXT))
    context = [PlacedChunk(encoder.encode(EncodingJob(CONTEXT, ())), 0)]
    made = encode_from_donor(model, layout, job, plan, donor, context)
    assert made.forwarded_tokens == 30
    assert_close(made.kv, encoder.encode(job))


def test_parts_that_do_not_belong_together(tiny_model: Any) -> None:
    model = tiny_model().model
    layout = probe(model).require_layout
    short = Encoder(model, layout).encode(EncodingJob(DONOR[:20], CONTEXT))
    plan = DonorPlan("donor", len(CHANGED), (ReusedSpan(0, 0, 50),))
    with pytest.raises(ValueError, match="up to 50 of a donor that has 20"):
        encode_from_donor(model, layout, EncodingJob(CHANGED, CONTEXT), plan, short)
    with pytest.raises(ValueError, match="plan is for 80 tokens, the chunk has 20"):
        encode_from_donor(model, layout, EncodingJob(DONOR[:20], CONTEXT), plan, short)


STATION = (
    "The Marlow station opened in 1874 and was rebuilt after a fire. It has 4 platforms and a covered hall.\n\n"
    "Its first director was Edith Carne, an engineer from Truro. She was trained in Leeds and was paid 320 pounds a "
    "year. The station does serve the coastal line, and trains run to Penzance every hour on working days.\n\n"
    "The clock in the hall was given by the town in 1901. It stopped in the flood of 1952 and was repaired by the "
    "watchmaker Tom Hale, who refused any payment for his work."
)
PARAGRAPHS = STATION.split("\n\n")
# Per kind of edit: the edited text, a question about it, and the answer, whose tokens are looked at one by one.
EDITS = {
    "a digit": (STATION.replace("320", "920"), "What was the director paid?", "She was paid 920 pounds a year."),
    "a not": (STATION.replace("does serve", "does not serve"), "Is the coast served?", "No, it does not serve it."),
    "a name": (STATION.replace("Tom Hale", "Ivo Brand"), "Who repaired the clock?", "The watchmaker Ivo Brand did."),
    "an insertion at the start": (f"Note of 2020, revised. {STATION}", "When did it open?", "It opened in 1874."),
    "a moved paragraph": (
        "\n\n".join([PARAGRAPHS[0], PARAGRAPHS[2], PARAGRAPHS[1]]),
        "Who repaired the clock?",
        "The watchmaker Tom Hale did.",
    ),
    "a deleted sentence": (
        STATION.replace(" It has 4 platforms and a covered hall.", ""),
        "Who was the first director?",
        "It was Edith Carne, an engineer.",
    ),
}


@pytest.fixture(scope="module")
def engine(smollm2: Any) -> Iterator[KVBoost]:
    with KVBoost(smollm2, store=MemoryStore(1 << 30)) as made:
        yield made


def job_of(engine: KVBoost, text: str) -> EncodingJob:
    return engine.registry.check(engine.registry.register(text, ""))[0].parts[0]


def answer_logits(engine: KVBoost, edit: str, kv: ChunkKV) -> torch.Tensor:
    """Log-probabilities `[num_answer_tokens + 1, vocab_size]` along the answer with `kv` stored for the edited text."""
    text, question, answer = EDITS[edit]
    record = engine.registry.register(text, "")
    job, check = engine.registry.check(record)
    engine.fetcher.keep(record, job, [kv], check)
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    return engine.logits(messages, engine.tokens.document_ids(answer), repair="none", strict=True).log_softmax(-1)


def divergence(reference: torch.Tensor, ours: torch.Tensor) -> float:
    """The largest KL(reference ‖ ours) of all answer tokens, in nats."""
    return float((reference.exp() * (reference - ours)).sum(-1).max())


def donor_kv(engine: KVBoost, edit: str, settle_tokens: int | None) -> ChunkKV | None:
    station, wanted = job_of(engine, STATION), job_of(engine, EDITS[edit][0])
    index = DonorIndex(DonorRules(settle_tokens=settle_tokens))
    index.add({"station": station.token_ids})
    plan = index.find(wanted.token_ids, {"station": station.token_ids}.get)
    if plan is None:
        return None
    encoder = engine.fetcher.encoder
    made = encode_from_donor(engine.model, encoder.layout, wanted, plan, encoder.encode(station))
    assert made.forwarded_tokens < wanted.num_tokens
    return made.kv


@pytest.mark.model
@pytest.mark.parametrize("edit", sorted(EDITS))
def test_answers_about_an_edit_are_those_of_a_fresh_encoding(engine: KVBoost, edit: str) -> None:
    fresh = answer_logits(engine, edit, engine.fetcher.encoder.encode(job_of(engine, EDITS[edit][0])))
    made = donor_kv(engine, edit, settle_tokens=None)
    assert (made is None) == (edit == "an insertion at the start"), "nothing stands before the first change there"
    if made is not None:
        assert divergence(fresh, answer_logits(engine, edit, made)) < 0.01
    settled = answer_logits(engine, edit, donor_kv(engine, edit, settle_tokens=32))
    assert divergence(fresh, settled) < 0.25, "approximate, but about the new text"


@pytest.mark.model
def test_a_stale_chunk_would_have_been_noticed(engine: KVBoost) -> None:
    stale, wanted = job_of(engine, STATION), job_of(engine, EDITS["a digit"][0])
    assert len(stale.token_ids) == len(wanted.token_ids)
    fresh = answer_logits(engine, "a digit", engine.fetcher.encoder.encode(wanted))
    assert divergence(fresh, answer_logits(engine, "a digit", engine.fetcher.encoder.encode(stale))) > 1

"""The promises on the bundled real model with real text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_helpers import located

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.indexing.corpus import pydoc_corpus

pytestmark = pytest.mark.model
QUESTION = "Which function gives the median, and what does it do with an even number of points?"


@pytest.fixture(scope="module")
def engine(smollm2: Any) -> Iterator[KVBoost]:
    with KVBoost(smollm2) as engine:
        yield engine


@pytest.fixture(scope="module")
def documents(engine: KVBoost) -> list[str]:
    """Ten pieces of the standard library's reference text, about 190 tokens each."""
    ids = engine.tokens.document_ids(pydoc_corpus(["statistics"]).texts[0].text)
    return [engine.tokens.decode(ids[i : i + 190]).strip() for i in range(0, 1900, 190)]


def messages(documents: list[str]) -> list[dict[str, str]]:
    content = "\n\n".join(["Answer from the documents.", *documents, QUESTION])
    return [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": content}]


def test_full_repair_is_full_prefill_on_two_thousand_tokens(engine: KVBoost, documents: list[str]) -> None:
    prompt = messages(documents)
    engine.warm(documents)
    full = engine.logits(prompt, repair="full", strict=True)
    plain = engine.logits(prompt, reuse="off")
    assert float((full - plain).abs().max()) < 1e-4
    found = located(engine, prompt)
    assert len(found.documents) == 10
    assert len(found.token_ids) > 1900


def test_cold_equals_warm_and_hits(engine: KVBoost, documents: list[str]) -> None:
    prompt, params = messages(documents[:4]), GenerationParams(max_new_tokens=12)
    engine.evict(documents)
    engine.register(documents[:4])
    cold = engine.generate(prompt, params=params, strict=True)
    warm = engine.generate(prompt, params=params, strict=True)
    assert {s.hit for s in cold.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.ENCODED}
    assert {s.hit for s in warm.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.APPROXIMATE}
    assert cold.token_ids == warm.token_ids
    options: dict[str, Any] = {"strict": True}
    first = engine.logits(prompt, warm.token_ids, **options)
    for key in list(engine.store.keys()):
        engine.store.delete(key)
    assert torch.equal(first, engine.logits(prompt, warm.token_ids, **options))


def test_exact_reuse_continues_a_conversation(engine: KVBoost, documents: list[str]) -> None:
    params = GenerationParams(max_new_tokens=8)
    turns = messages(documents[:4])
    first = engine.generate(turns, reuse="exact", params=params, strict=True)
    turns = [*turns, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And the mode?"}]
    second = engine.generate(turns, reuse="exact", params=params, strict=True)
    assert second.usage.cached_tokens >= first.usage.input_tokens - engine.encoding.block_tokens
    assert second.token_ids == engine.generate(turns, reuse="off", params=params).token_ids


def test_repair_brings_the_first_token_closer_to_full_prefill(engine: KVBoost, documents: list[str]) -> None:
    """Few rows help; measured on real text because random weights attend to nothing."""
    prompt = messages(documents)
    reference = engine.logits(prompt, reuse="off")[-1].log_softmax(-1)

    def kl(**options: Any) -> float:
        ours = engine.logits(prompt, strict=True, documents=documents, **options)[-1].log_softmax(-1)
        return float((reference.exp() * (reference - ours)).sum())

    assert kl(repair="query", recompute_ratio=0.15) < 0.7 * kl(repair="none")


def test_ten_turns_over_documents_prefill_what_is_new_and_do_not_drift(engine: KVBoost, documents: list[str]) -> None:
    """Each later turn starts from exact KV: documents, answers and all. The eighth brings two more documents."""
    engine.warm(documents[:6])
    asked = ["\n\n".join([*documents[:4], QUESTION])]
    asked += [f"What does sentence {n} of the {n}th text say?" for n in range(1, 10)]
    asked[7] = "\n\n".join([*documents[4:6], "And these?"])
    session = engine.session([{"role": "system", "content": "Answer from the documents."}])
    params, block, said = GenerationParams(max_new_tokens=12), engine.encoding.block_tokens, 0
    for turn, text in enumerate(asked):
        messages = [*session.messages, {"role": "user", "content": text}]
        usage = session.generate(text, params=params, strict=True).usage
        engine.finish_background()
        full = engine.logits(messages, reuse="off").log_softmax(-1)
        ours = engine.logits(messages, settle=True, strict=True).log_softmax(-1)
        kl = float((full.exp() * (full - ours)).sum())
        new = usage.input_tokens - said
        said = usage.input_tokens + usage.output_tokens
        if turn in (0, 7):
            assert usage.approximate_tokens > 100
            continue
        assert kl < 1e-4
        assert usage.prefilled_tokens <= new + block
        assert usage.approximate_tokens == 0


@pytest.mark.parametrize("separator", ["\n\n", "\n", "</doc>\n<doc>"])
def test_off_and_full_are_stock_transformers_on_the_same_text(
    engine: KVBoost, documents: list[str], separator: str
) -> None:
    """Ids of the tokenizer on the whole text, logits of the plain model, greedy tokens of its own `generate`."""
    chosen = documents[2:5]
    text = engine.tokens.render([{"role": "user", "content": separator.join([*chosen, QUESTION])}])
    engine.warm(chosen)
    stock = engine.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    assert located(engine, text).token_ids == tuple(stock.input_ids[0].tolist())
    answer = engine.model.generate(**stock, max_new_tokens=10, do_sample=False)[0, stock.input_ids.shape[1] :].tolist()
    with torch.no_grad():
        expected = engine.model(**stock).logits[0, -1].float()
    for options in ({"reuse": "off"}, {"repair": "full"}, {"reuse": "exact"}):
        torch.testing.assert_close(engine.logits(text, **options)[0], expected, atol=1e-4, rtol=1e-4)
        result = engine.generate(text, params=GenerationParams(max_new_tokens=10), **options)
        assert list(result.token_ids) == answer
    reused = engine.generate(text, params=GenerationParams(max_new_tokens=1), repair="none", full_below=0)
    assert reused.usage.approximate_tokens >= 0.98 * sum(len(engine.tokens.document_ids(d)) for d in chosen)

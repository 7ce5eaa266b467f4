"""Short documents are computed like the rest of the prompt; the longer they are, the less of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from corpus_texts import document, prompt

from kvboost_rag import KVBoost
from kvboost_rag.config import ConfigError, ReuseConfig

MakeEngine = Callable[..., KVBoost]
DOCUMENTS = [document(number) for number in range(3)]
PROMPT = prompt(DOCUMENTS)


def tokens_of(engine: KVBoost) -> int:
    return sum(len(engine.registry.describe(text, "").token_ids) for text in DOCUMENTS)


def test_documents_below_the_bound_give_what_full_prefill_gives(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS)
    full = engine.logits(PROMPT, reuse="off")
    torch.testing.assert_close(engine.logits(PROMPT, full_below=tokens_of(engine)), full, rtol=1e-4, atol=1e-4)
    result = engine.generate(PROMPT, full_below=tokens_of(engine))
    assert result.usage.approximate_tokens == result.usage.recomputed_tokens == 0
    assert not engine.stats().fallbacks
    assert not torch.allclose(engine.logits(PROMPT), full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["query", "cacheblend"])
def test_above_the_bound_the_share_falls_with_the_square_of_the_length(make_engine: MakeEngine, strategy: str) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS)
    total = tokens_of(engine)
    for part in (0.9, 0.5, 0.1):
        bound = int(part * total)
        usage = engine.generate(PROMPT, repair=strategy, full_below=bound, tau_recompute=1e9).usage
        assert usage.recomputed_tokens == round(max(0.05, (bound / total) ** 2) * total)


def test_the_bound_is_only_where_nobody_said_how_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBOOST_FULL_BELOW")
    assert ReuseConfig().resolve().full_below == ReuseConfig(repair="query").resolve().full_below == 256
    for said in ({"recompute_ratio": 0.05}, {"top_k": 3}, {"deviation_threshold": 0.1}, {"max_recompute_ratio": 0.2}):
        assert ReuseConfig(**said).resolve().full_below == 0
        assert ReuseConfig(**said, full_below=9).resolve().full_below == 9
    assert ReuseConfig(repair="none").resolve().full_below == 0
    assert ReuseConfig().resolve({"KVBOOST_FULL_BELOW": "77"}).full_below == 77
    with pytest.raises(ConfigError, match="full_below=-1"):
        ReuseConfig(full_below=-1)

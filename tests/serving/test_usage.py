"""Token counts of a call add up, and to what was forwarded, whatever way the prompt was served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from corpus_texts import document, prompt

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.datamodels import GenerationResult, HitKind
from kvboost_rag.forward.row_forward import decoder_layers

DOCUMENTS = [document(n) for n in range(3)]
TEXT = prompt(DOCUMENTS)
ONE = GenerationParams(max_new_tokens=1)
WAYS: list[dict[str, Any]] = [
    {"reuse": "off"},
    {"reuse": "exact"},
    {"repair": "none"},
    {"repair": "full"},
    {"repair": "selective", "recompute_ratio": 0.2},
    {"repair": "cacheblend", "recompute_ratio": 0.2},
    {"repair": "query", "recompute_ratio": 0.2},
    {"repair": "query", "full_below": 10_000},
]


@pytest.fixture
def engine(tiny_model: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny_model("llama"), encoding=EncodingConfig(block_tokens=32)) as engine:
        yield engine


@contextmanager
def forwarded(engine: KVBoost) -> Iterator[list[int]]:
    """Rows of every forward, at the last layer."""
    rows: list[int] = []
    last = decoder_layers(engine.model)[-1]
    hook = last.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[1]))
    try:
        yield rows
    finally:
        hook.remove()


def check(result: GenerationResult) -> None:
    usage = result.usage
    kinds = (usage.exact_tokens, usage.approximate_tokens, usage.recomputed_tokens, usage.prefilled_tokens)
    assert min(kinds) >= 0
    assert sum(kinds) == usage.input_tokens
    assert usage.cached_tokens == usage.exact_tokens + usage.approximate_tokens
    assert sum(segment.num_tokens for segment in result.segments) == usage.input_tokens
    assert sum(segment.num_recomputed_tokens for segment in result.segments) == usage.recomputed_tokens


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_counts_add_up_and_are_what_was_forwarded(engine: KVBoost, options: dict[str, Any]) -> None:
    cold = engine.generate(TEXT, documents=DOCUMENTS, params=ONE, strict=True, **options)
    check(cold)
    for text in (TEXT, TEXT, f"{TEXT} And the fourth one?"):
        with forwarded(engine) as rows:
            result = engine.generate(text, documents=DOCUMENTS, params=ONE, strict=True, **options)
        check(result)
        usage = result.usage
        assert sum(rows) == usage.prefilled_tokens + usage.recomputed_tokens + usage.probe_rows
    assert (usage.probe_rows > 0) == (options == WAYS[6])
    assert (usage.exact_tokens > 0) == (options.get("reuse") != "off")


def test_the_kinds_of_a_conversation(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """First turn from chunks, the next from exact KV and one new document's chunk, a fallback from nothing."""
    engine.warm([*DOCUMENTS, document(7)])
    chat = engine.session()
    first = chat.generate("\n\n".join([*DOCUMENTS, "Which store is full?"]), params=ONE, strict=True)
    check(first)
    assert first.usage.approximate_tokens > 0
    engine.finish_background()
    monkeypatch.setattr(engine._parts.service.settler, "note", lambda *_: None)  # its forwards are not the turn's
    with forwarded(engine) as rows:
        second = chat.generate("\n\n".join([document(7), "And this?"]), params=ONE, strict=True)
    usage = second.usage
    assert sum(rows) == usage.prefilled_tokens + usage.recomputed_tokens + usage.probe_rows
    check(second)
    assert usage.exact_tokens > first.usage.prefilled_tokens
    assert [s.hit for s in second.segments if s.hit is HitKind.APPROXIMATE]


def test_a_fallback_reuses_nothing(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.warm(DOCUMENTS)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine._parts.variants.resting.server.pipeline, "blend", broken)
    with forwarded(engine) as rows:
        result = engine.generate(TEXT, params=ONE)
    check(result)
    assert (result.usage.prefilled_tokens, sum(rows)) == (result.usage.input_tokens, result.usage.input_tokens)

"""Bad input gets a clear error before work starts, or is a counted miss; nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus_texts import document, prompt

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import ConfigError, ReuseConfig
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.serving.limits import ContextOverflowError
from kvboost_rag.stores import StoreError

DOCUMENTS = [document(n) for n in range(3)]
FOUR = GenerationParams(max_new_tokens=4)


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny_model("llama", max_position_embeddings=512)) as engine:
        engine.warm(DOCUMENTS)
        yield engine


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", ValueError, "empty"),
        (None, TypeError, "NoneType"),
        (7, TypeError, "int"),
        ([], ValueError, "message"),
        (["just text"], TypeError, "must be a mapping"),
        ("half \ud83d", ValueError, "not valid Unicode: half a character at 5"),
        ([{"role": "user", "content": "half \ud83d"}], ValueError, "not valid Unicode"),
    ],
)
def test_prompts_that_are_none(engine: KVBoost, text: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        engine.generate(text, params=FOUR)


@pytest.mark.parametrize(
    ("documents", "error", "says"),
    [
        ("one text", TypeError, r"write \[text\]"),
        ([7], TypeError, r"documents\[0\] is a int"),
        ([DOCUMENTS[0], None], TypeError, r"documents\[1\] is a NoneType"),
        ([DOCUMENTS[0], "\ud83d"], ValueError, r"documents\[1\] is not valid Unicode: half a character at 0"),
    ],
)
def test_documents_that_are_not_texts(engine: KVBoost, documents: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        engine.warm(documents)
    with pytest.raises(error, match=says):
        engine.generate("A question?", documents=documents, params=FOUR)


def test_an_empty_document_is_named_and_nothing_is_encoded(engine: KVBoost) -> None:
    before = len(engine.store)
    with pytest.raises(ValueError, match=r"documents\[1\]: a document without text"):
        engine.warm(["Something new and whole.", "  \n "])
    assert len(engine.store) == before


def test_an_empty_document_list_is_no_work(engine: KVBoost) -> None:
    report = engine.warm([])
    assert (report.num_chunks, report.num_encoded, report.num_failed) == (0, 0, 0)
    assert engine.generate(prompt(DOCUMENTS), documents=[], params=FOUR, strict=True).usage.cached_tokens > 0


def test_a_document_longer_than_the_context(engine: KVBoost) -> None:
    with pytest.raises(ValueError, match=r"documents\[0\] has \d+ tokens, the model's context has room for \d+"):
        engine.warm([document(1, sentences=60)])


def test_a_prompt_longer_than_the_context_is_an_error_with_the_numbers(engine: KVBoost) -> None:
    with pytest.raises(ContextOverflowError, match=r"has \d+ tokens and the model's context holds 512") as caught:
        engine.generate(prompt([document(1, sentences=60)]), params=FOUR)
    assert caught.value.prompt_tokens > caught.value.context_tokens == 512


@pytest.mark.parametrize("options", [{"repair": "magic"}, {"recompute_ratio": 1.01}, {"reuse": "maybe"}, {"top_k": -2}])
def test_bad_options_name_themselves(engine: KVBoost, options: dict[str, Any]) -> None:
    requests = engine.stats().requests
    with pytest.raises(ConfigError, match=next(iter(options))):
        engine.generate("A question?", params=FOUR, **options)
    assert engine.stats().requests == requests


def test_an_unknown_strategy_is_refused_wherever_it_is_named(
    engine: KVBoost, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the registry knows the names; a request is checked before it is queued, an engine before it is made."""
    known = "repair='magic' is not available; known: none, selective"
    with pytest.raises(ConfigError, match=known):
        KVBoost(tiny_model("llama"), config=ReuseConfig(repair="magic"))
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "magic")
    requests = engine.stats().requests
    with pytest.raises(ConfigError, match=known):
        engine.generate("A question?", params=FOUR)
    assert engine.generate("A question?", params=FOUR, repair="none").usage.output_tokens
    assert engine.stats().requests == requests + 1


@pytest.mark.parametrize("call", ["warm", "register", "prefetch", "evict"])
def test_a_namespace_that_is_no_name(engine: KVBoost, call: str) -> None:
    with pytest.raises(ConfigError, match="namespace=7"):
        getattr(engine, call)(DOCUMENTS, namespace=7)
    with pytest.raises(ConfigError, match="namespace=7"):
        engine.index.add("a", DOCUMENTS, namespace=7)  # type: ignore[arg-type]


def test_an_unknown_option_lists_the_known_ones(engine: KVBoost) -> None:
    with pytest.raises(ConfigError, match=r"recompute_ratoi.*recompute_ratio"):
        engine.generate("A question?", params=FOUR, recompute_ratoi=0.1)


def test_common_decoding_settings_may_be_named_in_a_call(engine: KVBoost) -> None:
    asked = prompt(DOCUMENTS)
    named = engine.generate(asked, max_new_tokens=2, params=GenerationParams(max_new_tokens=9))
    assert named.token_ids == engine.generate(asked, params=GenerationParams(max_new_tokens=2)).token_ids
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        engine.generate(asked, max_new_tokens=0)
    with pytest.raises(ConfigError, match=r"no_repeat_ngram_size.*params=GenerationParams"):
        engine.generate(asked, no_repeat_ngram_size=3)


def test_beam_search_is_refused(engine: KVBoost) -> None:
    with pytest.raises(ConfigError, match="num_beams"):
        engine.generate(prompt(DOCUMENTS), params=GenerationParams(extra={"num_beams": 4}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tiny_model: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match=str(tmp_path)):
        KVBoost(tiny_model("llama"), store=tmp_path / "store")


def test_a_folder_that_is_a_file(tiny_model: Any, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(StoreError, match="store"):
        KVBoost(tiny_model("llama"), store=tmp_path / "store")


def test_a_store_made_by_another_model_is_a_miss_and_stays_whole(tiny_model: Any, tmp_path: Path) -> None:
    with KVBoost(tiny_model("llama"), store=tmp_path) as first:
        first.warm(DOCUMENTS)
        expected = first.logits(prompt(DOCUMENTS), strict=True)
    with KVBoost(tiny_model("llama", rope_theta=20_000.0, initializer_range=0.2), store=tmp_path) as other:
        result = other.generate(prompt(DOCUMENTS), documents=DOCUMENTS, params=FOUR, strict=True)
        assert {s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT} == {HitKind.ENCODED}
    with KVBoost(tiny_model("llama"), store=tmp_path) as again:
        assert torch.equal(again.logits(prompt(DOCUMENTS), strict=True), expected)
        assert again.stats().store_misses == 0


def test_corrupt_files_are_counted_misses(tiny_model: Any, tmp_path: Path) -> None:
    with KVBoost(tiny_model("llama"), store=tmp_path) as first:
        first.warm(DOCUMENTS)
        expected = first.logits(prompt(DOCUMENTS), strict=True)
    damaged = 0
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(bytes(data))
        damaged += 1
    assert damaged >= 4  # three chunks and the prefix
    with KVBoost(tiny_model("llama"), store=tmp_path) as second:
        assert torch.equal(second.logits(prompt(DOCUMENTS), strict=True), expected)
        assert sum(second.stats().rejected.values()) == damaged
        assert second.stats().fallbacks == {}

"""A chunk's KV after the anchor alone, kept beside its KV after other chunks, for the document that stands first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.chunks.fetched import LEADING
from kvboost_rag.config import ConfigError, EncodingConfig
from kvboost_rag.observe.divergence import kl_per_token
from kvboost_rag.stores import MemoryStore

MakeEngine = Callable[..., KVBoost]
TEXTS = [
    f"The keeper of lighthouse number {n} is called Number{n}, and stands on a cliff by the sea." for n in range(6)
]
QUESTION = "Who keeps it?"


def contexts(texts: list[str]) -> list[list[str]]:
    return [[other for other in TEXTS if other != text][:3] for text in texts]


def ask(engine: KVBoost, texts: list[str], head: str = "", **options: object) -> torch.Tensor:
    prompt = [{"role": "user", "content": head + "\n\n".join([*texts, QUESTION])}]
    options = {"repair": "none", "strict": True} | options
    return engine.logits(prompt, (100, 200), documents=texts, **options)


def warmed(make_engine: MakeEngine, leading: bool = True, **encoding: object) -> KVBoost:
    engine = make_engine(store=encoding.pop("store", None), encoding=EncodingConfig(leading=leading, **encoding))
    engine.warm(TEXTS, neighbours=contexts(TEXTS))
    return engine


@pytest.mark.parametrize("quantization", ["none", "k8v4"])
def test_the_first_document_is_nearly_as_full_prefill_gives_it(make_engine: MakeEngine, quantization: str) -> None:
    found = []
    for leading in (True, False):
        engine = warmed(make_engine, leading, quantization=quantization)
        full = ask(engine, TEXTS[:1], reuse="off")
        found.append(float(kl_per_token(full, ask(engine, TEXTS[:1])).mean()))
    assert found[0] < 0.05 * found[1]


def test_cold_is_warm_is_after_eviction_is_from_disk(make_engine: MakeEngine, tmp_path: Path) -> None:
    first = warmed(make_engine, store=tmp_path)
    warm = ask(first, TEXTS[1:4])
    for key in list(first.store.keys()):
        first.store.delete(key)
    assert torch.equal(ask(first, TEXTS[1:4]), warm)
    first.close()
    second = make_engine(store=tmp_path, encoding=EncodingConfig(leading=True))
    assert torch.equal(ask(second, TEXTS[1:4]), warm)


def test_only_the_first_of_a_prompt_is_another(make_engine: MakeEngine) -> None:
    engine, plain = warmed(make_engine), warmed(make_engine, leading=False)
    assert not torch.equal(ask(engine, TEXTS[:3]), ask(plain, TEXTS[:3]))
    long_head = "Read what follows with care, word by word, and then answer. " * 6
    assert torch.equal(ask(engine, TEXTS[:3], long_head), ask(plain, TEXTS[:3], long_head))
    assert not torch.equal(ask(engine, TEXTS[:3], "Read this. "), ask(plain, TEXTS[:3], "Read this. "))


def test_twice_in_a_prompt_only_the_first_one_leads(make_engine: MakeEngine) -> None:
    engine = warmed(make_engine)
    placed: list[tuple[int, bool]] = []
    from kvboost_rag.chunks.fetched import FetchedChunk

    def spy(self, segment, low, high, leading=False, own=FetchedChunk.placed):
        placed.append((segment.start, leading))
        return own(self, segment, low, high, leading)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FetchedChunk, "placed", spy)
        ask(engine, [TEXTS[0], TEXTS[1], TEXTS[0]])
    assert [leads for _, leads in sorted(placed)] == [True, False, False]


def test_what_was_stored_without_is_a_miss(make_engine: MakeEngine, tmp_path: Path) -> None:
    plain = warmed(make_engine, leading=False, store=tmp_path)
    sizes = {info.key: info.num_bytes for info in plain.store.entries()}
    plain.close()
    engine = warmed(make_engine, store=tmp_path)
    assert engine.warm(TEXTS, neighbours=contexts(TEXTS)).num_encoded == 0
    for info in engine.store.entries():
        assert 1.1 * sizes[info.key] < info.num_bytes < 1.5 * sizes[info.key]
        assert any(name.startswith(LEADING) for name in info.meta)
    engine.close()
    again = make_engine(store=tmp_path, encoding=EncodingConfig())
    assert again.warm(TEXTS, neighbours=contexts(TEXTS)).num_encoded == 0  # more than is needed is no fault


def test_chunks_that_are_encoded_alone_keep_nothing_more(make_engine: MakeEngine) -> None:
    engine = make_engine(store=MemoryStore(1 << 26), encoding=EncodingConfig(leading=True))
    report = engine.warm(TEXTS, neighbours=None)
    alone = make_engine(encoding=EncodingConfig()).warm(TEXTS, neighbours=None)
    assert (report.encoded_tokens, report.num_bytes) == (alone.encoded_tokens, alone.num_bytes)
    with pytest.raises(ConfigError, match="leading"):
        EncodingConfig(leading="yes")  # type: ignore[arg-type]


def test_the_environment_can_ask_for_it(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_LEADING", "1")
    assert EncodingConfig().resolve().leading
    assert not EncodingConfig(leading=False).resolve().leading
    engine = make_engine(encoding=EncodingConfig())
    engine.warm(TEXTS[:2], neighbours=contexts(TEXTS[:2]))
    assert all(f"{LEADING}codec" in info.meta for info in engine.store.entries())


def test_what_it_costs_is_counted(make_engine: MakeEngine) -> None:
    reports = []
    for leading in (True, False):
        engine = make_engine(encoding=EncodingConfig(leading=leading))
        reports.append(engine.warm(TEXTS, neighbours=contexts(TEXTS)))
    anchors = len(TEXTS) * len(engine.registry.identity.anchor_ids)
    assert reports[0].encoded_tokens - reports[1].encoded_tokens == reports[0].chunk_tokens + anchors

"""Donors seen from the engine: what a near-duplicate stands in for, and that nothing stale or approximate stays."""

from __future__ import annotations

import logging
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import located
from prometheus_client import CollectorRegistry

from kvboost_rag import KVBoost
from kvboost_rag.adapters.result_summary import cache_read_tokens
from kvboost_rag.config import ConfigError, EncodingConfig, GenerationParams, ReuseConfig
from kvboost_rag.datamodels import GenerationResult, HitKind, SegmentKind, SegmentReport
from kvboost_rag.encode.similarity import DonorIndex, DonorRules
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.stores import MemoryStore

PARAMS = GenerationParams(max_new_tokens=2)
OLD = (
    "The Marlow station opened in 1874 and was rebuilt after a fire. It has 4 platforms and a covered hall. "
    "Its first director was Edith Carne, an engineer from Truro, who was paid 320 pounds a year."
)
NEW = OLD.replace("320", "920")
OTHER = "Evaporation of sea water leaves salt behind, which workers rake into heaps before the rain comes back."

MakeEngine = Callable[..., KVBoost]


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    def make(store: Any = None, metrics: Any = False, donors: bool = True, **encoding: Any) -> KVBoost:
        config = ReuseConfig(donors=donors)
        return make_engine(store=store, config=config, metrics=metrics, encoding=EncodingConfig(**encoding))

    return make


def ask(engine: KVBoost, text: str = NEW, **options: Any) -> GenerationResult:
    return engine.generate(f"{text}\n\nWho?", documents=[text], params=PARAMS, strict=True, **options)


def document(result: GenerationResult) -> SegmentReport:
    return next(s for s in result.segments if s.kind is SegmentKind.DOCUMENT)


def test_an_edited_document_takes_what_is_identical_and_then_gets_its_own_kv(make_engine: MakeEngine) -> None:
    metrics = Metrics("m", CollectorRegistry())
    engine = make_engine(metrics=metrics)
    engine.warm([OLD])
    result = ask(engine)
    seen = document(result)
    assert seen.hit is HitKind.DONOR
    before = len(engine.tokens.document_ids(NEW.split("920")[0])) - 1
    assert before - 2 <= seen.num_donor_tokens <= before + 2, "up to the changed number, which is computed"
    assert result.usage.created_tokens == seen.num_tokens - seen.num_donor_tokens
    assert cache_read_tokens(result) <= seen.num_donor_tokens
    assert metrics._families.hits.labels(model="m", strategy="query", kind="donor")._value.get() == 1
    assert metrics._families.reused._value.get() <= seen.num_donor_tokens
    engine.finish_background()
    key = engine.registry.describe(NEW, "").content_hash
    assert key in engine.store, "its own KV is computed afterwards"
    assert document(ask(engine)).hit is HitKind.APPROXIMATE
    clean = make_engine(donors=False)
    assert torch.equal(
        engine.logits(f"{NEW}\n\nWho?", documents=[NEW]), clean.logits(f"{NEW}\n\nWho?", documents=[NEW])
    )


def test_the_kv_of_a_donor_is_not_stored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm([OLD])
    engine.logits(f"{NEW}\n\nWho?", documents=[NEW])  # serves no request, so nothing is encoded later
    assert len(engine.store) == 1


def test_a_donor_gives_what_encoding_gives(make_engine: MakeEngine) -> None:
    engine, clean = make_engine(), make_engine(donors=False)
    engine.warm([OLD])
    prompt = f"{NEW}\n\nWho?"
    ours, theirs = (e.logits(prompt, documents=[NEW], repair="none") for e in (engine, clean))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context", ["computed", "stored"])
def test_a_new_document_takes_over_its_donors_context(make_engine: MakeEngine, context: str) -> None:
    engine = make_engine(donor_rules=DonorRules(context=context))
    engine.warm([OLD, OTHER], neighbours=[[OTHER], []])
    result = ask(engine)
    assert document(result).hit is HitKind.DONOR
    record = located(engine, f"{NEW}\n\nWho?", documents=[NEW]).documents[0].record
    assert record is not None
    assert record.neighbours == (engine.registry.describe(OTHER, "").content_hash,)


def test_a_chunk_keeps_the_context_it_has(make_engine: MakeEngine) -> None:
    """Evicted, then asked for again beside a donor with another context: its own KV, bit for bit."""
    engine = make_engine()
    engine.warm([NEW])
    prompt = f"{NEW}\n\nWho?"
    before = engine.logits(prompt)
    engine.warm([OLD, OTHER], neighbours=[[OTHER], []])
    engine.store.delete(engine.registry.describe(NEW, "").content_hash)
    assert torch.equal(engine.logits(prompt), before)
    assert document(ask(engine)).hit is HitKind.APPROXIMATE


def test_off_by_default_and_by_one_setting(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ReuseConfig().resolve().donors
    monkeypatch.setenv("KVBOOST_DONORS", "1")
    assert ReuseConfig().resolve().donors
    engine = make_engine(donors=False)
    engine.warm([OLD])
    assert document(ask(engine)).hit is HitKind.ENCODED
    with pytest.raises(ConfigError, match="donors='yes'"):
        ReuseConfig(donors="yes")  # type: ignore[arg-type]


def test_namespaces_share_no_donors(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm([OLD], namespace="a")
    assert document(ask(engine, namespace="b")).hit is HitKind.ENCODED
    assert document(ask(engine, namespace="a")).hit is HitKind.DONOR


def test_the_same_words_in_another_order_reuse_nothing(make_engine: MakeEngine) -> None:
    words = OLD.split()
    engine = make_engine(donor_rules=DonorRules(settle_tokens=0, threshold=0.05))
    engine.warm([OLD])
    assert document(ask(engine, " ".join(sorted(words)))).hit is HitKind.ENCODED
    assert document(ask(engine, OTHER)).hit is HitKind.ENCODED


def test_forgotten_and_evicted_chunks_are_no_donors(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm([OLD])
    ask(engine, OTHER)
    engine.store.delete(engine.registry.describe(OLD, "").content_hash)
    assert document(ask(engine)).hit is HitKind.ENCODED
    engine.evict([OLD, NEW])
    assert document(ask(engine)).hit is HitKind.ENCODED


@pytest.mark.parametrize("damage", [None, "row", "lost"])
def test_signatures_survive_a_restart_and_are_made_anew_when_damaged(
    make_engine: MakeEngine, tmp_path: Path, damage: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_engine(tmp_path)
    first.warm([OLD])
    first.close()
    change = {"row": "UPDATE arrays SET bytes = x'00112233'", "lost": "DELETE FROM arrays"}.get(damage or "")
    if change:
        with sqlite3.connect(tmp_path / "catalog.sqlite") as database:
            assert database.execute(f"{change} WHERE kind LIKE 'minhash%'").rowcount == 1
        database.close()
    signed: list[tuple[int, ...]] = []
    second = make_engine(tmp_path)
    sign = DonorIndex.signature
    monkeypatch.setattr(DonorIndex, "signature", lambda self, ids: signed.append(tuple(ids)) or sign(self, ids))
    assert document(ask(second)).hit is HitKind.DONOR
    again = tuple(second.tokens.document_ids(OLD)) in signed
    assert again == (damage is not None), "computed again only where it was lost"


def test_a_fault_with_donors_costs_an_encoding(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.warm([OLD])

    def fail(*_: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(engine.donors, "make", fail)
    with caplog.at_level(logging.WARNING):
        result = engine.generate(f"{NEW}\n\nWho?", documents=[NEW], params=PARAMS)
    assert document(result).hit is HitKind.ENCODED
    assert result.fallback_reason is None
    assert "encoded whole: gone" in caplog.text


def test_without_the_library_chunks_are_encoded_whole(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    engine = make_engine()
    with caplog.at_level(logging.WARNING):
        engine.warm([OLD])
        assert document(ask(engine)).hit is HitKind.ENCODED
    assert caplog.text.count("encoded whole") == 1


STATION = (
    "The Marlow station opened in 1874 and was rebuilt after a fire. It has 4 platforms and a covered hall.\n\n"
    "Its first director was Edith Carne, an engineer from Truro. She was trained in Leeds and was paid 320 pounds a "
    "year. The station does serve the coastal line, and trains run to Penzance every hour on working days.\n\n"
    "The clock in the hall was given by the town in 1901. It stopped in the flood of 1952 and was repaired by the "
    "watchmaker Tom Hale, who refused any payment for his work."
)
FIRST, SECOND, THIRD = STATION.split("\n\n")
RELATED = [
    "Truro is a city in Cornwall, whose railway station opened in 1859 and has three platforms.",
    "Penzance is the last station of the Cornish main line, and has stood by the sea since 1852.",
]
EDITS = {
    "a digit": (STATION.replace("320", "920"), "What was the director paid?", True),
    "a not": (STATION.replace("does serve", "does not serve"), "Is the coast served?", True),
    "a name": (STATION.replace("Tom Hale", "Ivo Brand"), "Who repaired the clock?", True),
    "an insertion at the start": (f"Note of 2020, revised. {STATION}", "When did it open?", False),
    "a moved paragraph": ("\n\n".join([FIRST, THIRD, SECOND]), "Who repaired the clock?", True),
    "a deleted sentence": (
        STATION.replace(" It has 4 platforms and a covered hall.", ""),
        "Who was the first director?",
        True,
    ),
}


@pytest.mark.model
@pytest.mark.parametrize("edit", sorted(EDITS))
def test_answers_about_an_edit_are_those_of_a_fresh_encoding(smollm2: Any, edit: str) -> None:
    text, question, has_donor = EDITS[edit]
    prompt = [{"role": "user", "content": f"{text}\n\n{question}"}]
    rules = DonorRules(min_saving=0)
    with KVBoost(smollm2, store=MemoryStore(1 << 30), encoding=EncodingConfig(donor_rules=rules)) as engine:
        engine.warm([STATION], neighbours=[RELATED])
        engine.warm(RELATED)
        made = engine.generate(prompt, documents=[text], params=PARAMS, repair="none", donors=True, strict=True)
        assert (document(made).hit is HitKind.DONOR) == has_donor
        engine.finish_background()
        engine.evict([text])
        ours = engine.logits(prompt, documents=[text], repair="none", donors=True, strict=True).log_softmax(-1)[0]
        record = located(engine, prompt, documents=[text], donors=True).documents[0].record
        assert record is not None
        assert record.content_hash not in engine.store or not has_donor
        engine.fetcher.encode(record)
        fresh = engine.logits(prompt, documents=[text], repair="none", donors=True, strict=True).log_softmax(-1)[0]
    assert float((fresh.exp() * (fresh - ours)).sum()) < 0.01

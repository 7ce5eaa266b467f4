"""The store behind an engine: namespaces, codecs and damage, seen from a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvboost_rag.config import EncodingConfig, GenerationParams, ReuseConfig
from kvboost_rag.datamodels import HitKind, SegmentKind
from kvboost_rag.engine import KVBoost
from kvboost_rag.stores import MemoryStore, open_store
from kvboost_rag.stores.maintenance import delete_namespace, delete_source, forget
from kvboost_rag.stores.verify import disk_of, verify

DOCUMENTS = [
    "The store holds keys and values of every document that was encoded when the index was built.",
    "A question is answered from the documents in front of it; the first token comes soon.",
    "Eviction removes what is worth least, and the catalog remembers how to compute it again.",
]
PROMPT = "\n\n".join([*DOCUMENTS, "What does the store hold?"])
PARAMS = GenerationParams(max_new_tokens=2)


def hits(engine: KVBoost, namespace: str = "", documents: list[str] | None = None) -> list[HitKind]:
    """Where the documents' KV came from."""
    result = engine.generate(PROMPT, documents=documents, namespace=namespace, params=PARAMS, strict=True)
    return [s.hit for s in result.segments if s.kind is SegmentKind.DOCUMENT]


@pytest.mark.parametrize("place", ["memory", "folder", "restarted"])
def test_a_namespace_sees_neither_anothers_texts_nor_its_kv(tiny_model, tmp_path: Path, place: str) -> None:
    store = MemoryStore(10_000_000) if place == "memory" else open_store(tmp_path, memory_bytes=10_000_000)
    engine = KVBoost(tiny_model("llama"), store=store)
    engine.warm(DOCUMENTS, namespace="mine")
    if place == "restarted":
        engine.close()
        engine = KVBoost(tiny_model("llama"), store=tmp_path)
    assert hits(engine, "theirs") == []
    assert hits(engine, "mine") == [HitKind.APPROXIMATE] * 3
    assert hits(engine, "theirs", DOCUMENTS) == [HitKind.ENCODED] * 3
    delete_namespace(engine.store, "mine")
    assert hits(engine, "mine") == []
    assert hits(engine, "theirs", DOCUMENTS) == [HitKind.APPROXIMATE] * 3
    engine.close()


@pytest.mark.parametrize("setting", ["none", "k8v8", "k8v4"])
def test_a_cold_answer_is_a_warm_one_with_every_codec(tiny_model, tmp_path: Path, setting: str) -> None:
    """Encoded now == from memory == from disk in another engine == after eviction, to the bit."""
    encoding = EncodingConfig(quantization=setting)
    engine = KVBoost(tiny_model("llama"), store=tmp_path, encoding=encoding)
    engine.register(DOCUMENTS)
    cold = engine.logits(PROMPT, repair="none", strict=True)
    assert hits(engine) == [HitKind.APPROXIMATE] * 3
    warm = engine.logits(PROMPT, repair="none", strict=True)
    engine.close()
    engine = KVBoost(tiny_model("llama"), store=tmp_path, encoding=encoding)
    from_disk = engine.logits(PROMPT, repair="none", strict=True)
    codecs = {info.meta["codec"] for info in engine.store.entries() if info.key in engine.store.catalog.hashes()}
    assert codecs == {setting}
    assert engine.store.stats.hits == 3
    for key in list(engine.store.keys()):
        engine.store.delete(key)
    evicted = engine.logits(PROMPT, repair="none", strict=True)
    engine.close()
    for other in (warm, from_disk, evicted):
        assert torch.equal(cold, other)


def test_the_codec_changes_the_answer_only_a_little(tiny_model) -> None:
    found = {}
    for setting in ("none", "k8v8", "k8v4"):
        with KVBoost(tiny_model("llama"), encoding=EncodingConfig(quantization=setting)) as engine:
            found[setting] = engine.logits(PROMPT, documents=DOCUMENTS, repair="none", strict=True)
    error = {s: float((found[s] - found["none"]).norm() / found["none"].norm()) for s in ("k8v8", "k8v4")}
    assert 0 < error["k8v8"] < error["k8v4"] < 0.1


def test_a_damaged_file_costs_an_encoding_and_nothing_else(tiny_model, tmp_path: Path) -> None:
    store = open_store(tmp_path, memory_bytes=0)
    engine = KVBoost(tiny_model("llama"), store=store, config=ReuseConfig(disk_load="always"))
    engine.register(DOCUMENTS)
    clean = engine.logits(PROMPT, strict=True)
    disk = disk_of(engine.store)
    keys = engine.store.catalog.hashes()
    path = disk.folder.path(keys[1])
    path.write_bytes(path.read_bytes()[:-50])
    disk.folder.path(keys[2]).unlink()
    assert torch.equal(engine.logits(PROMPT, strict=True), clean)
    assert engine.store.stats.rejected == {"truncated": 1, "vanished": 1}
    assert hits(engine) == [HitKind.APPROXIMATE] * 3
    assert verify(engine.store).problems == []
    engine.close()


def test_deleting_a_document_takes_exact_blocks_with_its_tokens_along(tiny_model, tmp_path: Path) -> None:
    engine = KVBoost(tiny_model("llama"), store=tmp_path, encoding=EncodingConfig(block_tokens=16))
    engine.warm(DOCUMENTS)
    engine.generate(PROMPT, reuse="exact", params=PARAMS, strict=True)
    engine.store.flush()
    assert len(engine.store) > 3
    key = engine.store.catalog.hashes()[0]
    forget(engine.store, [key])
    assert sorted(engine.store.keys()) == sorted(engine.store.catalog.hashes())
    assert len(engine.store) == 2
    engine.close()


def test_sources_through_an_engine(tiny_model, tmp_path: Path) -> None:
    engine = KVBoost(tiny_model("llama"), store=tmp_path)
    report = engine.warm(DOCUMENTS)
    catalog, fingerprint = engine.store.catalog, engine.registry.fingerprint
    catalog.sources.link(fingerprint, "", "a.md", report.content_hashes[:2])
    catalog.sources.link(fingerprint, "", "b.md", report.content_hashes[1:])
    assert delete_source(engine.store, "", "a.md").num_chunks == 1
    assert hits(engine) == [HitKind.APPROXIMATE] * 2
    engine.close()

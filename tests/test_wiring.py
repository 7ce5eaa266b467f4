"""What the engine asks of its store: deleting, loading or computing, pins, deviations, budgets; seen from a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import REUSABLE
from prometheus_client import CollectorRegistry

from kvboost_rag.config import EncodingConfig, GenerationParams, ReuseConfig
from kvboost_rag.datamodels import GenerationResult, HitKind, SegmentKind, SegmentReport, StoreEntry
from kvboost_rag.encode.encoder import Encoder, EncodingJob
from kvboost_rag.engine import KVBoost
from kvboost_rag.forward.probe import probe
from kvboost_rag.kv import quantization
from kvboost_rag.kv.assemble import PlacedChunk, PlacedEntry, assemble
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.realign import PositionTables
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.repair import STRATEGIES
from kvboost_rag.repair.cacheblend import CacheBlendRepair
from kvboost_rag.repair.query import QueryRepair
from kvboost_rag.stores import MemoryStore, open_store
from kvboost_rag.stores.cost import CostModel
from kvboost_rag.stores.verify import disk_of

DOCUMENTS = [
    "The store holds keys and values of every document that was encoded when the index was built.",
    "A question is answered from the documents in front of it; the first token comes soon.",
    "Eviction removes what is worth least, and the catalog remembers how to compute it again.",
]
PROMPT = "\n\n".join([*DOCUMENTS, "What does the store hold?"])
PARAMS = GenerationParams(max_new_tokens=2)

MakeEngine = Callable[..., KVBoost]


def ask(engine: KVBoost, **options: Any) -> GenerationResult:
    return engine.generate(PROMPT, params=PARAMS, strict=True, **options)


def documents_of(result: GenerationResult) -> list[SegmentReport]:
    return [s for s in result.segments if s.kind is SegmentKind.DOCUMENT]


def test_evicting_a_document_takes_exact_blocks_and_dependents_along(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(store=tmp_path, encoding=EncodingConfig(block_tokens=16))
    engine.warm(DOCUMENTS, neighbours=[[], DOCUMENTS[:1], []])
    ask(engine, reuse="exact")
    engine.store.flush()
    behind, alone = engine.store.catalog.hashes()[1:]
    assert len(engine.store) > 3
    assert engine.evict(DOCUMENTS[:1]) == 1
    assert list(engine.store.keys()) == [alone]
    assert engine.store.catalog.get(behind).neighbours == ()  # type: ignore[union-attr]
    assert engine.evict(DOCUMENTS[:1]) == 0
    files = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert DOCUMENTS[0].encode() not in files
    assert DOCUMENTS[2].encode() in files


def test_the_store_is_opened_for_the_models_device(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where that is a CUDA device, a tier on it comes first; the budgets are those of the store that is passed."""
    asked: list[tuple[Any, dict[str, Any]]] = []

    def record(spec: Any, **options: Any) -> Any:
        asked.append((spec, options))
        return open_store(spec)

    monkeypatch.setattr("kvboost_rag.parts.open_store", record)
    make_engine(store=tmp_path)
    assert asked == [(tmp_path, {"device": "cpu"})]

    class OnDevice(MemoryStore):
        tier = "device"

        def __init__(self, device: str, **options: Any) -> None:
            super().__init__(1_000_000, pin_memory=False)
            self.device = device

    monkeypatch.setattr("kvboost_rag.stores.opening.DeviceStore", OnDevice)
    store = open_store(tmp_path, memory_bytes=150_000, disk_bytes=160_000, device="cuda:0")
    assert list(store.bytes_held) == ["device", "memory", "disk"]
    engine = make_engine(store=store)
    assert engine.store is store
    engine.register(DOCUMENTS)
    cold = engine.logits(PROMPT, strict=True)
    assert torch.equal(cold, engine.logits(PROMPT, strict=True))
    assert engine.stats().store_hits == len(DOCUMENTS)
    engine.warm([f"{text} {n}" for n in range(8) for text in DOCUMENTS])
    held = engine.stats().bytes_held
    assert 0 < held["memory"] <= 150_000
    assert 0 < held["disk"] <= 160_000


FAST_DISK, SLOW_DISK = 1e12, 1.0
"""Bytes per second."""


def on_disk_only(make_engine: MakeEngine, folder: Path, **options: Any) -> KVBoost:
    """An engine whose chunks were warmed by another one that is closed: they lie on disk, and in no memory."""
    first = make_engine(store=folder, encoding=options.get("encoding"))
    first.warm(DOCUMENTS, neighbours=[DOCUMENTS[1:], [], []])
    first.close()
    return make_engine(store=folder, **options)


def believe(engine: KVBoost, bytes_per_second: float, tokens_per_second: float = 1000.0) -> None:
    """Make the engine's measurements what a test needs them to be."""
    engine.fetcher.costs = costs = CostModel()
    costs.observe_load(int(bytes_per_second), 1.0)
    costs.observe_encode(int(tokens_per_second), 1.0)


@pytest.mark.parametrize("codec", ["none", "k8v4"])
def test_a_chunk_computed_again_by_choice_has_the_bits_of_a_loaded_one(
    make_engine: MakeEngine, tmp_path: Path, codec: str
) -> None:
    encoding = EncodingConfig(quantization=codec)
    engine = on_disk_only(make_engine, tmp_path / "kv", encoding=encoding)
    believe(engine, FAST_DISK)
    loaded = engine.logits(PROMPT, (5, 6), strict=True)
    assert engine.stats().store_hits == 3
    engine.close()
    engine = make_engine(store=tmp_path / "kv", encoding=encoding)
    believe(engine, SLOW_DISK)
    assert torch.equal(engine.logits(PROMPT, (5, 6), strict=True), loaded)
    assert engine.stats().store_lookups == 0
    assert torch.equal(engine.logits(PROMPT, (5, 6), strict=True), loaded)
    assert engine.stats().store_hits == 3, "what was computed again is in memory now"


def test_the_choice_is_in_the_result_and_in_the_metrics(make_engine: MakeEngine, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    engine = on_disk_only(make_engine, tmp_path, metrics=Metrics("m", registry))

    def counted() -> tuple[float, ...]:
        name, labels = "kvboost_load_decisions_total", ("load", "recompute")
        return tuple(registry.get_sample_value(name, {"choice": choice}) or 0 for choice in labels)

    believe(engine, SLOW_DISK)
    written = {p: p.stat().st_mtime_ns for p in tmp_path.glob("chunks/*/*")}
    first = ask(engine)
    assert [(s.hit, s.disk_choice) for s in documents_of(first)] == [(HitKind.ENCODED, "recompute")] * 3
    assert first.usage.created_tokens >= sum(s.num_tokens for s in documents_of(first))
    assert counted() == (0, 3)
    engine.store.flush()
    assert {p: p.stat().st_mtime_ns for p in written} == written, "what is on disk is not written again"
    second = ask(engine)  # from memory: nothing to decide
    assert [(s.hit, s.disk_choice) for s in documents_of(second)] == [(HitKind.APPROXIMATE, None)] * 3
    assert counted() == (0, 3)
    assert (first.text, first.token_ids) == (second.text, second.token_ids)
    assert all(s.disk_choice is None for s in first.segments if s.kind is not SegmentKind.DOCUMENT)
    miss = "kvboost_cache_misses_total"
    assert registry.get_sample_value(miss, {"model": "m", "strategy": "query"}) == 3


def test_loads_and_encodings_are_measured(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = on_disk_only(make_engine, tmp_path)
    costs = engine.fetcher.costs
    assert (costs.load_bytes_per_second, costs.encode_tokens_per_second) == (None, None)
    result = ask(engine)
    assert [s.disk_choice for s in documents_of(result)] == ["load"] * 3
    assert costs.load_bytes_per_second is not None
    assert costs.encode_tokens_per_second is None
    loads = costs.load_bytes_per_second
    ask(engine)  # from memory, which is not measured
    assert costs.load_bytes_per_second == loads
    engine.warm(["Another document."])
    assert costs.encode_tokens_per_second is not None


@pytest.mark.parametrize("reason", ["always", "batch", "other machine", "kept from elsewhere"])
def test_what_would_give_other_bits_is_loaded(make_engine: MakeEngine, tmp_path: Path, reason: str) -> None:
    first = make_engine(store=tmp_path, encoding=EncodingConfig(batch_size=3 if reason == "batch" else 1))
    if reason == "other machine":
        first.fetcher.encoder.__class__ = type("Elsewhere", (Encoder,), {"signature": "another machine"})
    if reason == "kept from elsewhere":
        for text in DOCUMENTS:
            record = first.registry.register(text, "")
            job, check = first.registry.check(record)
            kv = first.fetcher.encoder.encode(job.parts[0])  # type: ignore[union-attr]
            first.fetcher.keep(record, job, [kv], check)
    first.warm(DOCUMENTS)
    first.close()
    config = ReuseConfig(disk_load="always") if reason == "always" else None
    engine = make_engine(store=tmp_path, config=config)
    believe(engine, SLOW_DISK)
    documents = documents_of(ask(engine))
    assert [(s.hit, s.disk_choice) for s in documents] == [(HitKind.APPROXIMATE, "load")] * 3


def test_a_damaged_file_that_was_to_be_loaded_is_a_miss(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = on_disk_only(make_engine, tmp_path)
    path = disk_of(engine.store).folder.path(engine.store.catalog.hashes()[1])
    path.write_bytes(path.read_bytes()[:-50])
    documents = documents_of(ask(engine))
    assert sorted((s.hit.value, s.disk_choice) for s in documents if s.disk_choice) == [("approximate", "load")] * 2
    assert [s.hit for s in documents if s.disk_choice is None] == [HitKind.ENCODED]


def test_the_requests_chunks_are_pinned_until_it_ends(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.warm(DOCUMENTS)
    keys = set(engine.store.catalog.hashes())
    pins = engine.store._pins
    seen: list[set[str]] = []
    plan = STRATEGIES["query"].plan

    def look(self: Any, context: Any) -> Any:
        seen.append(set(pins))
        return plan(self, context)

    monkeypatch.setattr(STRATEGIES["query"], "plan", look)
    ask(engine)
    engine.logits(PROMPT, strict=True)
    assert seen == [keys, keys]
    assert not pins

    def fail(self: Any, context: Any) -> Any:
        seen.append(set(pins))
        raise OSError("broken on purpose")

    monkeypatch.setattr(STRATEGIES["query"], "plan", fail)
    assert engine.generate(PROMPT, params=PARAMS).fallback_reason is not None
    with pytest.raises(OSError, match="on purpose"):
        ask(engine)
    assert seen[-1] == keys
    assert not pins


def test_chunks_of_one_request_do_not_push_each_other_out(make_engine: MakeEngine) -> None:
    """A budget for two of three: two stay, instead of each being evicted before it comes up again."""
    roomy = make_engine()
    roomy.warm(DOCUMENTS)
    sizes = [info.num_bytes for info in roomy.store.entries()]
    tight = make_engine(store=MemoryStore(sum(sizes) - 1, policy="lru"))
    for _ in range(3):
        result = ask(tight, documents=DOCUMENTS)
    assert [s.hit for s in documents_of(result)].count(HitKind.APPROXIMATE) == 2
    assert tight.store.stats.evictions == {}
    assert tight.store.stats.put_failures == {"pinned": 3}


@pytest.mark.parametrize("strategy", [CacheBlendRepair(), QueryRepair(weight="deviation"), "query"])
def test_eviction_learns_measured_deviations(make_engine: MakeEngine, tmp_path: Path, strategy: Any) -> None:
    engine = make_engine(store=tmp_path)
    engine.warm(DOCUMENTS)
    result = ask(engine, repair=strategy)
    memory, disk = engine.store.tiers
    known = [memory._policy.entries, disk.account._policy.entries]
    measured = {s.content_hash: s.deviation for s in documents_of(result)}
    for entries in known:
        assert {key: entries[key].deviation for key in measured} == measured
    assert (None in measured.values()) == (strategy == "query")
    again = ask(engine, repair=strategy)
    for segment in documents_of(again):
        if segment.deviation is not None:
            before = measured[segment.content_hash]
            expected = 0.75 * before + 0.25 * segment.deviation
            assert known[0][segment.content_hash].deviation == pytest.approx(expected)


@pytest.mark.parametrize("codec", ["k8v8", "k8v4"])
@pytest.mark.parametrize("family", ["llama", "smollm3-nope", "gemma3", "glm4-interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placing_quantised_chunks_in_the_buffer_equals_decoding_them_first(
    tiny_model: Any, family: str, codec: str, dtype: torch.dtype
) -> None:
    model_type, fields = REUSABLE[family]
    loaded = tiny_model(model_type, dtype=dtype, **fields)
    layout = probe(loaded.model).require_layout
    kv = Encoder(loaded.model, layout).encode(EncodingJob(tuple(range(3, 66)), (1, 2)))
    tensors, meta = quantization.encode(kv, codec)
    assert meta["codec"] == codec
    entry = StoreEntry("ab" * 32, "", "", tuple(range(3, 66)), "", tensors, meta)
    tables = PositionTables.of(layout, 200)
    buffers = [KVBuffer(layout, 200) for _ in range(2)]
    for buffer in buffers:
        for tensor in (*buffer.keys, *buffer.values):
            tensor.fill_(float("nan"))
    assemble(buffers[0], [PlacedEntry(entry, 101)], tables)
    assemble(buffers[1], [PlacedChunk(quantization.decode(tensors, meta), 101)], tables)
    for ours, twin in zip((*buffers[0].keys, *buffers[0].values), (*buffers[1].keys, *buffers[1].values), strict=True):
        assert torch.equal(ours.isnan(), twin.isnan())
        assert torch.equal(ours.nan_to_num(), twin.nan_to_num())
        assert not ours[:, :, 101:164].isnan().any()


def test_serving_quantised_chunks_decodes_none_into_a_copy(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(encoding=EncodingConfig(quantization="k8v4"))
    engine.warm(DOCUMENTS)
    expected = engine.logits(PROMPT, strict=True)

    def fail(*args: Any) -> Any:
        raise AssertionError("a chunk is decoded into tensors of its own")

    monkeypatch.setattr(quantization, "decode", fail)
    assert torch.equal(engine.logits(PROMPT, strict=True), expected)

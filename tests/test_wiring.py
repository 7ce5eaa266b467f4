"""What the engine asks of its store: deleting, loading or computing, pins, deviations, budgets; seen from a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag.config import EncodingConfig, GenerationParams
from kvboost_rag.datamodels import GenerationResult, SegmentKind, SegmentReport
from kvboost_rag.engine import KVBoost
from kvboost_rag.stores import MemoryStore, open_store

DOCUMENTS = [
    "The store holds keys and values of every document that was encoded when the index was built.",
    "A question is answered from the documents in front of it; the first token comes soon.",
    "Eviction removes what is worth least, and the catalog remembers how to compute it again.",
]
PROMPT = "\n\n".join([*DOCUMENTS, "What does the store hold?"])
PARAMS = GenerationParams(max_new_tokens=2)

MakeEngine = Callable[..., KVBoost]


@pytest.fixture
def make_engine(tiny_model: Any) -> Iterator[MakeEngine]:
    made: list[KVBoost] = []

    def make(**options: Any) -> KVBoost:
        made.append(KVBoost(tiny_model("llama"), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


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

    monkeypatch.setattr("kvboost_rag.engine.open_store", record)
    make_engine(store=tmp_path)
    assert asked == [(tmp_path, {"device": "cpu"})]

    class OnDevice(MemoryStore):
        tier = "device"

        def __init__(self, device: str, **options: Any) -> None:
            super().__init__(1_000_000, pin_memory=False)
            self.device = device

    monkeypatch.setattr("kvboost_rag.stores.opening.DeviceStore", OnDevice)
    store = open_store(tmp_path, memory_bytes=70_000, disk_bytes=80_000, device="cuda:0")
    assert list(store.bytes_held) == ["device", "memory", "disk"]
    engine = make_engine(store=store)
    assert engine.store is store
    cold = engine.logits(PROMPT, documents=DOCUMENTS, strict=True)
    assert torch.equal(cold, engine.logits(PROMPT, strict=True))
    assert engine.stats().store_hits == len(DOCUMENTS)
    engine.warm([f"{text} {n}" for n in range(8) for text in DOCUMENTS])
    held = engine.stats().bytes_held
    assert 0 < held["memory"] <= 70_000
    assert 0 < held["disk"] <= 80_000

"""What the engine asks of its store: deleting, loading or computing, pins, deviations, budgets; seen from a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvboost_rag.config import EncodingConfig, GenerationParams, ReuseConfig
from kvboost_rag.datamodels import GenerationResult, SegmentKind, SegmentReport
from kvboost_rag.engine import KVBoost

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
